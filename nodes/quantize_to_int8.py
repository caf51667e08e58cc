"""The node "Quantize to INT8 (SmoothQuant)"."""

from comfy_api.latest import io

from ..kernels import KERNEL_CHOICES, check_alpha
from . import notices
from .calibration import calibrate
from .load_int8_dit import KERNEL_TOOLTIP
from .quantization import quantize_model

# A conditioning without text or image features: what ComfyUI runs an unconditional model on.
_NULL_CONDITIONING = [[None, {}]]


class QuantizeToINT8SmoothQuant(io.ComfyNode):
    """MODEL -> MODEL with INT8 linears, smoothed by what a calibration run of the user's own sampling showed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantizeToINT8SmoothQuant",
            display_name="Quantize to INT8 (SmoothQuant)",
            category="model/quantization",
            description=(
                "Quantizes a diffusion transformer to INT8: per-channel weights, per-token activations, SmoothQuant from a "
                "calibration run, the most fragile layers kept in high precision. Connect sampler, sigmas, latent_image and "
                "conditioning to calibrate; without them nothing is smoothed."
            ),
            inputs=[
                io.Model.Input("model"),
                io.Float.Input(
                    "alpha",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.01,
                    tooltip="How much of the activations' outliers moves into the weights. Used only when calibrated.",
                ),
                io.Int.Input(
                    "protect_layers",
                    default=17,
                    min=0,
                    max=10000,
                    tooltip="How many of the most fragile layers stay in high precision.",
                ),
                io.Combo.Input("kernel", options=list(KERNEL_CHOICES), default="auto", tooltip=KERNEL_TOOLTIP),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="Conditioning to calibrate with. Leave it out for an unconditional model.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="Calibrates with CFG when connected."),
                io.Sampler.Input("sampler", optional=True),
                io.Sigmas.Input("sigmas", optional=True),
                io.Latent.Input("latent_image", optional=True, tooltip="An empty latent of the size you generate."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    optional=True,
                    tooltip="CFG of the calibration run; used only with negative.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    optional=True,
                    tooltip="Noise seed of the calibration run.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model,
        alpha,
        protect_layers,
        kernel,
        positive=None,
        negative=None,
        sampler=None,
        sigmas=None,
        latent_image=None,
        cfg=1.0,
        seed=0,
    ) -> io.NodeOutput:
        check_alpha(alpha)
        needed = {"sampler": sampler, "sigmas": sigmas, "latent_image": latent_image}
        missing = [name for name, value in needed.items() if value is None]
        statistics = None
        if not missing:
            if len(sigmas) < 2:
                raise ValueError("sigmas holds no step to calibrate with: give the scheduler at least one step")
            statistics = calibrate(
                model, positive or _NULL_CONDITIONING, negative, cfg, sampler, sigmas, latent_image, seed
            )
        elif len(missing) < len(needed) or positive is not None or negative is not None:
            raise ValueError(
                f"calibration also needs {' and '.join(missing)}: connect {'it' if len(missing) == 1 else 'them'}, or "
                "disconnect all calibration inputs to quantize without smoothing"
            )
        else:
            notices.warn(
                "Quantized to INT8 without smoothing",
                "no calibration inputs are connected. Connect sampler, sigmas, latent_image and conditioning to Quantize to "
                "INT8 for SmoothQuant.",
            )
        return io.NodeOutput(quantize_model(model, alpha, protect_layers, kernel, statistics))
