"""The node "Quantize to INT8"."""

from collections.abc import Set
from typing import Any, Literal

from comfy_api.latest import io
from comfy_execution.validation import validate_node_input

from ..kernels import METHODS, ROUNDINGS, Protection
from .attention.attention_kinds import AS_COMFYUI
from .attention.attention_override import check_attention, set_attention
from .host.notices import Badge, badges_output, show_load_warnings
from .loading.summary import runs_where, summarize
from .pictures.plot import check_matplotlib, plot_chart
from .quantization.quantize import WITHOUT_CALIBRATION, QuantizationSettings, quantize_model
from .quantization.recorder import CalibrationRun
from .quantization.report import BF16, PROTECTED_IN, QuantizationReport
from .sockets import CalibrationType, DecidedNode, attention_input, choice, kernel_input

_PROTECT: dict[str, tuple[Literal["share", "number", "error"], Any]] = {
    "share of all linears": (
        "share",
        io.Float.Input(
            "percent",
            display_name="protect %",
            default=8.0,
            min=0.0,
            max=100.0,
            step=0.5,
            round=0.1,
            tooltip="More is closer to the original, slower and larger. 8 % are 17 of Ideogram 4's 211 linears.",
        ),
    ),
    "number of layers": (
        "number",
        io.Int.Input(
            "layers",
            default=17,
            min=0,
            max=10000,
            tooltip="So many of the most fragile layers. More is closer to the original, slower and larger.",
        ),
    ),
    "error budget": (
        "error",
        io.Float.Input(
            "percent",
            display_name="max error %",
            default=3.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Protect each layer to whose output INT8 brings a larger relative error.",
        ),
    ),
}
"""What `protect` can be set to: the kind of a Protection, and the widget of its value."""
_NEEDED = ("sampler", "sigmas", "latent_image")  # of a calibration run
_OF_A_RUN = {*_NEEDED, "positive", "negative"}
_ABSMAX, _LEAST_ERROR = "absmax", "least error"
_EIGHT_BITS = "8 bits"
_WEIGHTS = {_EIGHT_BITS: 8, "4 bits": 4}


class QuantizeToINT8SmoothQuant(DecidedNode):
    """MODEL -> MODEL with INT8 linears, smoothed and protected by what a calibration showed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="QuantizeToINT8SmoothQuant",
            display_name="Quantize to INT8 (SmoothQuant)",
            category="model/quantization",
            search_aliases=["int8", "quantize model", "convert model", "w8a8", "smoothquant", "convrot", "fp8"],
            description=(
                "Quantizes a diffusion transformer to INT8: per-channel weights, per-token activations, SmoothQuant "
                "from a calibration, the most fragile layers protected. Connect a calibration, or "
                "sampler, sigmas, latent_image and prompts to calibrate here; without them nothing is smoothed."
            ),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="A diffusion transformer. It is left alone; its LoRAs are baked into the result.",
                ),
                choice(
                    "method",
                    METHODS,
                    "What is done against outlier channels. 'rotate' is ComfyUI's ConvRot. 'best per layer' "
                    "tries none, smooth, rotate and both on the recorded inputs.",
                    optional=False,
                ),
                io.Float.Input(
                    "alpha",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.01,
                    advanced=True,
                    tooltip="How much of the activations' outliers moves into the weights. Larger spares the "
                    "activations and costs the weights; 0.5 suits most models.",
                ),
                io.Boolean.Input(
                    "search_alpha",
                    default=True,
                    advanced=True,
                    tooltip="Try alphas from 0 to 1 for each layer and take the best; never worse than alpha.",
                ),
                io.DynamicCombo.Input(
                    "protect",
                    options=[io.DynamicCombo.Option(name, [widget]) for name, (_, widget) in _PROTECT.items()],
                    tooltip="How many of the most fragile layers are protected; protected_in says how. More is closer "
                    "to the original, slower and larger.",
                ),
                choice(
                    "weight_scales",
                    [_ABSMAX, _LEAST_ERROR],
                    "'least error' clips a channel's largest weights where that rounds the others better.",
                    optional=False,
                    advanced=True,
                ),
                io.Boolean.Input(
                    "smooth_only_foldable",
                    default=False,
                    advanced=True,
                    tooltip="Smooth only where the factors fold into the layer before, so that Save INT8 DiT can write "
                    "a file for every loader.",
                ),
                kernel_input(),
                CalibrationType.Input(
                    "calibration",
                    optional=True,
                    tooltip="From Collect, Load or Merge Calibration. Then nothing is sampled here.",
                ),
                io.Autogrow.Input(
                    "positive",
                    template=io.Autogrow.TemplatePrefix(
                        io.Conditioning.Input(
                            "positive",
                            tooltip="A prompt to calibrate with; each is sampled once. None for an unconditional "
                            "model.",
                        ),
                        prefix="positive_",
                        min=0,
                        max=32,
                    ),
                    optional=True,
                    tooltip="Prompts like those you generate with.",
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="Calibrates on what the model does with this conditioning too."
                ),
                io.Sampler.Input(
                    "sampler", optional=True, tooltip="The sampler you generate with, for the calibration run."
                ),
                io.Sigmas.Input(
                    "sigmas", optional=True, tooltip="The scheduler's steps you generate with, for the calibration run."
                ),
                io.Latent.Input("latent_image", optional=True, tooltip="An empty latent of the size you generate."),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="CFG of the calibration run: what you sample with; used only with negative.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    optional=True,
                    advanced=True,
                    tooltip="Noise seed of the calibration run; the next prompt takes the next seed.",
                ),
                # At the end, where workflows that were saved without it have no value of another widget.
                choice(
                    "protected_in",
                    PROTECTED_IN,
                    "What protected layers are held in. 16-bit activations stay on INT8 tensor cores, and only "
                    "this pack reads the file; with 'weights' at 4 bits they are plain INT8, which every loader "
                    "reads. bf16 is slower and larger. Without calibration it is bf16 where 'weights' is 8 bits.",
                ),
                choice(
                    "rounding",
                    ROUNDINGS,
                    "'calibrated' rounds weights so that outputs on the recorded inputs stay (GPTQ), in layers "
                    "where that is better on inputs held out. It takes longer. Without calibration it is 'nearest'.",
                    advanced=True,
                ),
                attention_input(advanced=True),
                choice(
                    "weights",
                    _WEIGHTS,
                    "'4 bits' halves the file and the memory once more (W4A8) and loses more. Every layer is "
                    "rotated, the most fragile keep 8 bits, and stock ComfyUI loads the file too.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The model with INT8 layers."),
                io.Image.Output(display_name="report", tooltip="What INT8 costs each layer, drawn."),
                io.String.Output(display_name="table", tooltip="The same as a table."),
                CalibrationType.Output(
                    display_name="calibration",
                    tooltip="What was recorded here, for Save Calibration or another Quantize node.",
                ),
            ],
            has_intermediate_output=True,  # what is on the node comes back where the MODEL comes out of the cache
        )

    @classmethod
    def validate_inputs(cls, input_types: dict[str, str], *, positive=None, protect=None) -> bool | str:
        """Refuse calibration inputs that do not make a calibration, before anything runs.

        ComfyUI tells which inputs are linked only by their types, with names such as `positive.positive_0`, and leaves
        the check of types to the node that asks for them. It always passes inputs that grow or have choices, and would
        call each wrong as a positional argument.
        """
        expected = {entry.id: entry.get_io_type() for entry in cls.define_schema().inputs}
        expected["positive"] = io.Conditioning.io_type
        for name, received in input_types.items():
            wanted = expected.get(name.partition(".")[0], received)
            if "." not in name.removeprefix("positive.") and not validate_node_input(received, wanted):
                return f"{name} is linked to {received}, but it takes {wanted}: link it to another output"
        return _wrong_calibration_inputs({name.partition(".")[0] for name in input_types}) or True

    @classmethod
    def execute(
        cls,
        model,
        method,
        alpha,
        search_alpha,
        weight_scales,
        smooth_only_foldable,
        kernel,
        protect=None,
        positive=None,
        cfg=1.0,
        seed=0,
        protected_in=PROTECTED_IN[0],
        rounding=ROUNDINGS[0],
        attention=AS_COMFYUI,
        weights=_EIGHT_BITS,
        **given,  # of what calibrates
    ) -> io.NodeOutput:
        show_load_warnings()
        protection = _protection(protect)
        check_attention(attention, model.load_device)
        check_matplotlib()  # before the work whose report it draws
        prompts = list((positive or {}).values())
        given = {name: value for name, value in {**given, "positive": prompts or None}.items() if value is not None}
        if wrong := _wrong_calibration_inputs(given.keys()):  # a node before this one gave nothing
            raise ValueError(wrong)
        calibration = given.get("calibration")
        if "sampler" in given:
            sampler, sigmas, latent = (given[name] for name in _NEEDED)
            if len(sigmas) < 2:
                raise ValueError("sigmas holds no step to calibrate with: give the scheduler at least one step")
            calibration = CalibrationRun(prompts or [None], given.get("negative"), cfg, sampler, sigmas, latent, seed)
        if calibration is None:  # fragile are then the layers whose weights round worst, which 16 bits do not change
            rounding, protected_in = "nearest", BF16 if weights == _EIGHT_BITS else protected_in
        least_error, bits = weight_scales == _LEAST_ERROR, _WEIGHTS[weights]
        how = (alpha, search_alpha, protection, least_error, smooth_only_foldable, protected_in, rounding, bits)
        settings = QuantizationSettings(method, *how)
        quantized, report, calibration = quantize_model(model, settings, kernel, calibration)
        set_attention(quantized, attention)
        badges = badges_output(_badge(report, method), runs_where(quantized, summarize(quantized), kernel))
        chart = report.chart()
        ui = badges | {"int8_quantization_report": [chart]}
        return io.NodeOutput(quantized, plot_chart(chart), report.markdown(), calibration, ui=ui)


def _wrong_calibration_inputs(given: Set[str]) -> str:
    """Return why a node with these inputs cannot calibrate, and what to do; "" if it can, or need not."""
    if not given & _OF_A_RUN:
        return ""
    if "calibration" in given:
        return (
            "a calibration is connected, and so are inputs of a calibration run: disconnect the calibration, or "
            "positive, negative, sampler, sigmas and latent_image"
        )
    missing = [name for name in _NEEDED if name not in given]
    needs = f"calibration also needs {' and '.join(missing)}: connect {'it' if len(missing) == 1 else 'them'}"
    return f"{needs}, or disconnect all calibration inputs" if missing else ""


def _badge(report: QuantizationReport, method: str) -> Badge:
    """Say whether a calibration stands behind a quantization."""
    protected = f"{len(report.protected)} of {report.linears} linears are protected"
    if report.calibration is not None:
        return Badge("good", "calibrated", f"{protected}, the most fragile on recorded inputs.")
    detail = f"{protected}, those whose weights round worst."
    if method in WITHOUT_CALIBRATION:
        return Badge("note", "uncalibrated", detail)
    return Badge("warn", "uncalibrated: nothing is smoothed", f"{detail} Connect a calibration.", "uncalibrated")


def _protection(protect: dict | None) -> Protection:
    """Return the rule of the widget `protect` and the one below it."""
    if protect is None:  # for a value of an API request that the widget lacks
        raise ValueError(f"protect must be one of {', '.join(_PROTECT)}")
    kind, widget = _PROTECT[protect["protect"]]
    value = protect[widget.id]
    return Protection(kind, value if kind == "number" else value / 100)
