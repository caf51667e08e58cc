"""What each part of the recipe is worth: images and block outputs in INT8, FP8, NF4, GGUF and ComfyUI's own INT8.

    python tests/studies/ablation.py --comfyui PATH [--subjects trained outliers blocks] [--out DIR]

Three subjects: the glyph model as it was trained; the same with outlier channels planted (tests/glyphs/outliers.py),
which change no result in bf16; and full-width Ideogram 4 blocks with random weights and outlier channels planted at the
inputs of some feed_forward.w2. All comparisons are paired, same seed and inputs, against bf16; intervals are 95 %
bootstrap intervals. Leaves ablation.json, ablation.md and glyphs.png in --out. `--pairs 4 --blocks 2 --pixels 64` tries
it out on a CPU. `--variants` takes some variants alone; "NAME, INT8 attention" is one of the
pack's with attention in INT8 too.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from studies.frame import Study, markdown, release
from studies.ideogram4_benchmark import TEXT_FEATURES, TEXT_TOKENS
from support.small_png import save_small_png
from support.tensors import relative_error

GLYPH_MODEL = TESTS / "data" / "glyph_dit.safetensors"
LADDER = (0, 4, 8, 17, 34)
STEPS = 12
PEERS = ("FP8", "FP8 scaled", "ComfyUI ConvRot INT8", "naive W8A8")
"""What variants are compared with, beside bf16."""
CALIBRATED = ("naive W8A8", "smoothing only", "recipe", "best per layer, protected")
"""Variants that are tried with calibrated rounding too."""
IN_BF16 = ", bf16 protection"
"""What a variant is called that is another one with its protected layers in bf16, not INT8 with 16-bit activations."""
ROUNDED = ", calibrated rounding"
"""What a variant is called that is another one with calibrated rounding, not nearest."""
INT8_ATTENTION = ", INT8 attention"
"""What a variant is called that is another one with attention in INT8 where a calibration does not keep it exact."""
DEFAULT = f"best per layer, protected{ROUNDED}"
"""What the quantize node does by itself."""
DIFFERENCES = ("bf16 protection", "nearest rounding", "exact attention")
PICTURED = ("bf16", "FP8", "naive W8A8", "recipe")
PICTURE_COLUMNS = 14
COLUMNS = {
    "trained": "glyph model as trained",
    "outliers": "glyph model, outlier channels planted",
    "blocks": "Ideogram 4 blocks, outliers planted at some w2",
}
NF4_BLOCK = 64
NF4_BITS = 4 + 32 / NF4_BLOCK  # a float32 scale for each block, as bitsandbytes has it by default
# The codes of NF4: quantiles of a normal distribution, scaled to -1..1 (Dettmers et al. 2023, appendix E).
NF4_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

TensorDict = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """What a variant brings, compared with bf16 item by item: pairs of images, or blocks."""

    errors: list[float]
    """Relative error of each item."""
    read: list[bool] | None = None
    """Whether each glyph can be read."""
    protected: list[str] = field(default_factory=list)
    images: np.ndarray | None = None


class Glyphs:
    """Sampled glyphs. An item is one image of a seed: the error is that of its latent."""

    def __init__(self, state_dict: TensorDict, pairs: int) -> None:
        from glyphs.alphabet import ALPHABET

        self.state_dict = state_dict
        self._text = (ALPHABET * (pairs // len(ALPHABET) + 1))[:pairs]
        self._expected: torch.Tensor | None = None

    def calibrate(self, model):
        from glyphs import latents
        from glyphs.alphabet import ALPHABET
        from glyphs.conditioning import encode

        context, pooled = encode(ALPHABET)
        empty = torch.zeros(len(ALPHABET), latents.CHANNELS, latents.SIDE, latents.SIDE)
        # Another seed than that of the pairs.
        return calibrated(model, [[context, {"pooled_output": pooled}]], empty, STEPS, seed=1000)

    def evaluate(self, model) -> Outcome:
        from glyphs import latents
        from glyphs.matching import recognise
        from support.glyph_dit import sample

        latent = latents.node_to_model(sample(model, self._text, STEPS).float().cpu())
        if self._expected is None:
            self._expected = latent
        errors = (latent - self._expected).flatten(1).norm(dim=1) / self._expected.flatten(1).norm(dim=1)
        images = latents.model_to_image(latent).clamp(0, 1)
        read = [seen == asked for seen, asked in zip(recognise(images), self._text, strict=True)]
        shown = (images[:PICTURE_COLUMNS] * 255).round().byte().numpy()
        return Outcome(errors.tolist(), read, images=shown)


class Blocks:
    """Full-width Ideogram 4 blocks. An item is a block, which every variant runs on the inputs it has in bf16."""

    def __init__(self, blocks: int, planted: int, pixels: int) -> None:
        import comfy.model_management

        self._device = comfy.model_management.get_torch_device()
        from support.random_models import FAMILIES, RandomModel

        random = RandomModel(FAMILIES["Ideogram 4"], self._device, {"num_layers": blocks})
        self.state_dict = {name: tensor.cpu() for name, tensor in random.tensors().items()}
        self.planted = [f"layers.{block}.feed_forward.w2" for block in range(0, blocks, max(1, blocks // planted))][
            :planted
        ]
        channels = torch.randperm(12288, generator=torch.Generator().manual_seed(0))[:16]
        factors = torch.logspace(0, 1, len(channels), base=5) * 20  # 20 to 100
        for layer in self.planted:
            rows = self.state_dict[layer.replace("w2", "w3") + ".weight"]
            rows[channels] = (rows[channels].float() * factors[:, None]).to(rows.dtype)
        self._side = pixels // 16
        self._calls: list[tuple[tuple, dict, torch.Tensor]] = []

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, 128, self._side, self._side, generator=generator)
        return latent, torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator)

    def calibrate(self, model):
        context = torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=torch.Generator().manual_seed(2))
        return calibrated(model, [[context, {}]], torch.zeros(1, 128, self._side, self._side), steps=4, seed=1000)

    def evaluate(self, model) -> Outcome:
        outputs = self.outputs(model)
        pairs = zip(outputs, (expected for _, _, expected in self._calls), strict=True)
        return Outcome([relative_error(output, expected) for output, expected in pairs])

    def outputs(self, model) -> list[torch.Tensor]:
        """What each block makes of the inputs it has in bf16."""
        import comfy.model_management

        comfy.model_management.load_models_gpu([model], force_full_load=True)
        diffusion_model = model.model.diffusion_model
        with torch.inference_mode():
            if not self._calls:
                self._record(diffusion_model, model.model.get_dtype_inference())
            blocks = zip(diffusion_model.layers, self._calls, strict=True)
            return [block(*args, **kwargs).float() for block, (args, kwargs, _) in blocks]

    def _record(self, diffusion_model: torch.nn.Module, dtype: torch.dtype) -> None:
        def keep(block, args, kwargs, output):
            self._calls.append((args, kwargs, output.float()))

        hooks = [block.register_forward_hook(keep, with_kwargs=True) for block in diffusion_model.layers]
        latent, context = (tensor.to(self._device, dtype) for tensor in self.inputs())
        diffusion_model(latent, torch.full((1,), 0.5, device=self._device), context=context)
        for hook in hooks:
            hook.remove()


def calibrated(model, condition: list, empty: torch.Tensor, steps: int, seed: int):
    """The calibration of a MODEL from one sampling of `condition`."""
    import comfy.samplers

    from int8_dit.nodes.quantization.recorder import CalibrationRun

    sampling = model.get_model_object("model_sampling")
    euler, sigmas = comfy.samplers.sampler_object("euler"), comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    return CalibrationRun([condition], None, 1.0, euler, sigmas, {"samples": empty}, seed).calibrate(model)


def stock(state_dict: TensorDict, **options: object):
    """ComfyUI's own loader."""
    import comfy.sd

    return comfy.sd.load_diffusion_model_state_dict(dict(state_dict), model_options=options)


def native(state_dict: TensorDict, quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]]):
    """ComfyUI's own loader on a file in a quantized format of its own."""
    import comfy.model_management

    device, quantized = comfy.model_management.get_torch_device(), dict(state_dict)
    for key in quantizable(state_dict):
        made = quantize(state_dict[key].to(device))
        quantized |= {f"{key.removesuffix('weight')}{part}": tensor.cpu() for part, tensor in made.items()}
    return stock(quantized)


def convrot_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """comfy-kitchen's ConvRot INT8."""
    from comfy.quant_ops import TensorWiseINT8Layout

    from int8_dit.kernels import ChannelTransform
    from int8_dit.kernels.quantization.groups import rotation_group_of
    from int8_dit.nodes.files.quant_config import encode_config

    group = rotation_group_of(weight.shape[1])
    options = {} if group is None else {"convrot": True, "convrot_groupsize": group}
    q, params = TensorWiseINT8Layout.quantize(weight, per_channel=True, **options)
    return {"weight": q, "weight_scale": params.scale, "comfy_quant": encode_config(ChannelTransform(None, group))}


def kitchen_codes(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """ComfyUI's W4A8 by comfy-kitchen's own quantizer, where the channels can be rotated; else its ConvRot INT8."""
    from comfy_kitchen.tensor.w4a8_int8 import quantize_w4a8_int8_weight

    from int8_dit.kernels import rotation_group_of

    group = rotation_group_of(weight.shape[1])
    if group is None:
        return convrot_int8(weight)
    codes, group_scale, scale, _, codebook = quantize_w4a8_int8_weight(weight, 16, group)
    mark = json.dumps({"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": group}).encode()
    return {
        "weight": codes,
        "weight_s_rel": group_scale,
        "weight_s_channel": scale,
        "weight_codebook": codebook,
        "comfy_quant": torch.tensor(list(mark), dtype=torch.uint8),
    }


def nf4_decoded(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K], K a multiple of 64, rounded to NF4 and back, in its own dtype."""
    codes = torch.tensor(NF4_CODES, device=weight.device)
    blocks = weight.float().unflatten(1, (-1, NF4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    nearest = torch.bucketize(blocks / scale.clamp(min=1e-30), (codes[1:] + codes[:-1]) / 2)
    return (codes[nearest] * scale).flatten(1).to(weight.dtype)


def gguf_decoded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """A weight in blocks of a GGUF format and back, in its own dtype; of Q8_0 where they do not divide its rows."""
    from int8_dit.kernels import GGUF_FORMATS, dequantize_gguf, quantize_gguf

    name = name if weight.shape[1] % GGUF_FORMATS[name].weights == 0 else "Q8_0"
    return dequantize_gguf(quantize_gguf(weight, name), name, weight.dtype)


def decoded(state_dict: TensorDict, through: Callable[[torch.Tensor], torch.Tensor]) -> TensorDict:
    """The file with its quantizable weights through a format and back."""
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    changed = {name: through(state_dict[name].to(device)).cpu() for name in quantizable(state_dict)}
    return {**state_dict, **changed}


def quantizable(state_dict: TensorDict) -> list[str]:
    """Names of the weights that variants quantize."""
    from int8_dit.nodes.linears.layer_selection import is_quantizable

    suffix = ".weight"
    names = [name for name in state_dict if name.endswith(suffix)]
    return [name for name in names if is_quantizable(name.removesuffix(suffix), tuple(state_dict[name].shape))]


def peers(state_dict: TensorDict, formats: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Makers of the MODELs that INT8 is compared with, in some of GGUF's formats among others."""
    from support.random_models import fp8_layer

    ways = {"NF4": nf4_decoded} | {name: partial(gguf_decoded, name=name) for name in formats}
    return {
        "FP8": partial(stock, state_dict, dtype=torch.float8_e4m3fn),
        "FP8 scaled": partial(native, state_dict, fp8_layer),
        "ComfyUI ConvRot INT8": partial(native, state_dict, convrot_int8),
        **{name: lambda through=through: stock(decoded(state_dict, through)) for name, through in ways.items()},
    }


def pack_variants(layers: int) -> dict[str, dict[str, object]]:
    """This pack's variants: quantization settings by name."""
    from int8_dit.kernels import Protection
    from int8_dit.nodes.quantization.report import BF16

    none, share = Protection("number", 0), Protection("share", 0.08)
    ladder = {f"smooth, {number} protected": number for number in LADDER if number < layers}
    variants: dict[str, dict[str, object]] = {
        "naive W8A8": {"method": "none", "protection": none},
        "smoothing only": {"protection": none},
        "protection only": {"method": "none", "protection": share},
        "recipe": {"protection": share},
        **{name: {"protection": Protection("number", number)} for name, number in ladder.items() if number},
        "rotation": {"method": "rotate", "protection": none},
        "rotation, protected": {"method": "rotate", "protection": share},
        "smooth + rotate": {"method": "smooth + rotate", "protection": none},
        "best per layer": {"method": "best per layer", "search_alpha": True, "protection": none},
        "best per layer, protected": {"method": "best per layer", "search_alpha": True, "protection": share},
        "searched alpha": {"search_alpha": True, "protection": share},
        "least error scales": {"clip": True, "protection": share},
        "only foldable smoothed": {"smooth_only_foldable": True, "protection": share},
    }
    again = [name for name in ("protection only", "recipe", "smooth, 17 protected") if name in variants]
    in_bf16 = {f"{name}{IN_BF16}": {**variants[name], "protected_in": BF16} for name in again}
    calibrated = {f"{name}{ROUNDED}": {**variants[name], "rounding": "calibrated"} for name in CALIBRATED}
    codes = {"weight_bits": 4, "rounding": "calibrated"}
    in_codes = {
        "W4A8": {**codes, "protection": none},
        "W4A8, nearest": {**codes, "protection": none, "rounding": "nearest"},
        "W4A8, protected": {**codes, "protection": share},
    }
    return variants | in_bf16 | calibrated | in_codes


def run(subject: Glyphs | Blocks, wanted: list[str] | None) -> dict[str, Outcome]:
    """Every variant of a subject, or the wanted ones."""
    from int8_dit.nodes.attention.attention_kinds import INT8
    from int8_dit.nodes.linears.layer_selection import quantizable_linears
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
    from support.random_models import attending

    base = stock(subject.state_dict)
    outcomes = {"bf16": subject.evaluate(base)}
    calibration = subject.calibrate(base)
    for name, make in peers(subject.state_dict, ("Q8_0", "Q4_K")).items():
        if wanted is None or name in wanted:
            outcomes[name] = _evaluated(name, subject, make())
    for name, settings in pack_variants(len(quantizable_linears(base))).items():
        in_int8 = f"{name}{INT8_ATTENTION}"
        attending_int8 = wanted is not None and in_int8 in wanted
        if wanted is not None and name not in wanted and not attending_int8:
            continue
        model, report, _ = quantize_model(base, QuantizationSettings(**settings), "fused int8", calibration)
        outcomes[name] = _evaluated(name, subject, model)
        outcomes[name].protected = list(report.protected)
        if attending_int8:
            outcomes[in_int8] = _evaluated(in_int8, subject, attending(model.clone(), INT8))
        del model
    return outcomes


def _evaluated(name: str, subject: Glyphs | Blocks, model) -> Outcome:
    outcome = subject.evaluate(model)
    del model
    release()
    print(f"  {name}: {np.mean(outcome.errors):.4f}", flush=True)
    return outcome


def interval(*samples: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean) -> list[float]:
    """A statistic of samples whose items belong together, and its 95 % bootstrap interval."""
    from int8_dit.nodes.pictures import comparison

    bounds = comparison.interval(*samples, statistic=statistic)
    if bounds is None:
        raise ValueError(f"{len(samples[0])} items have no interval; take two or more.")
    return [float(statistic(*samples, axis=-1)), *bounds]


def ratio_of_means(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    return a.mean(axis=axis) / b.mean(axis=axis)


def summary(outcomes: dict[str, Outcome]) -> dict[str, dict]:
    """Figures of all variants, each with its 95 % interval."""
    errors = {name: np.array(outcome.errors) for name, outcome in outcomes.items()}
    figures: dict[str, dict] = {}
    for name, outcome in outcomes.items():
        figures[name] = {"error": interval(errors[name]), "protected": len(outcome.protected)}
        if outcome.read is not None:
            figures[name]["read"] = sum(outcome.read)
        twins = {"bf16 protection": f"{name}{IN_BF16}", "nearest rounding": name.removesuffix(ROUNDED)}
        twins["exact attention"] = name.removesuffix(INT8_ATTENTION)
        for difference, twin in twins.items():
            if twin in errors and twin != name:
                ratio = interval(errors[name], errors[twin], statistic=ratio_of_means)
                figures[name][f"ratio to {difference}"] = ratio
        if name != "bf16" and set(PEERS) <= set(outcomes):
            for other in PEERS:
                figures[name][f"ratio to {other}"] = interval(errors[name], errors[other], statistic=ratio_of_means)
    return figures


def _percent(error: list[float]) -> str:
    return "{:.2f} % [{:.2f}, {:.2f}]".format(*(100 * value for value in error))


def overview(subjects: dict[str, dict[str, dict]]) -> str:
    """One table of all subjects' figures: the error of every variant."""
    rows = []
    names = dict.fromkeys(name for figures in subjects.values() for name in figures if name != "bf16")
    for name in names:
        cells = []
        for figures in subjects.values():
            figure = figures.get(name)
            text = "" if figure is None else _percent(figure["error"])
            cells.append(text if figure is None or "read" not in figure else f"{text}, {figure['read']} read")
        rows.append([name, *cells])
    return markdown(["variant", *(COLUMNS[key] for key in subjects)], rows)


def comparison(title: str, figures: dict[str, dict]) -> str:
    """One subject: the error of every variant relative to that of others."""
    rows = []
    for name, figure in figures.items():
        if name != "bf16":
            cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*figure[f"ratio to {other}"]) for other in PEERS]
            rows.append([name, str(figure["protected"]), *cells])
    return f"### {title}\n\n" + markdown(["error relative to that of", "protected", *PEERS], rows)


def twins(subjects: dict[str, dict[str, dict]], difference: str) -> str:
    """The error of variants relative to that of others with one of DIFFERENCES: "bf16 protection" instead of 16-bit
    activations, "nearest rounding" instead of calibrated, "exact attention" instead of INT8. Empty without such
    variants."""
    ratio = f"ratio to {difference}"
    rows = [
        [COLUMNS.get(key, key), name, str(figure["protected"]), "{:.2f} [{:.2f}, {:.2f}]".format(*figure[ratio])]
        for key, figures in subjects.items()
        for name, figure in figures.items()
        if ratio in figure
    ]
    columns = ["subject", "variant", "protected", f"error relative to that with {difference}"]
    return markdown(columns, rows) if rows else ""


def report(results: dict[str, dict]) -> list[str]:
    """All tables."""
    subjects = {key: result["figures"] for key, result in results.items()}
    tables = [comparison(COLUMNS[key], figures) for key, figures in subjects.items() if "FP8" in figures]
    note = "Errors relative to bf16, and in brackets 95 % bootstrap intervals."
    return [note, overview(subjects), *(twins(subjects, difference) for difference in DIFFERENCES), *tables]


def save_picture(rows: dict[str, np.ndarray], path: Path) -> None:
    """The same seeds in several variants, a row each with its label: uint8 [images, height, width]."""
    from PIL import Image, ImageDraw, ImageFont

    label, (_, height, width) = 150, next(iter(rows.values())).shape
    size = label + width * max(map(len, rows.values())), (height + 4) * len(rows)
    picture = Image.new("L", size, 255)
    for index, (name, images) in enumerate(rows.items()):
        top, draw = index * (height + 4), ImageDraw.Draw(picture)
        draw.text((8, top + height / 2), name, fill=0, font=ImageFont.load_default(16), anchor="lm")
        for column, image in enumerate(images):
            picture.paste(Image.fromarray(image), (label + column * width, top))
    save_small_png(picture, path)


def main() -> None:
    study = Study(__doc__, "ablation")
    study.indent = None
    study.option("--subjects", nargs="+", default=["trained", "outliers", "blocks"])
    study.option("--pairs", type=int, default=300)
    study.option("--blocks", type=int, default=12)
    study.option("--planted", type=int, default=4)
    study.option("--pixels", type=int, default=512)
    study.option("--variants", nargs="+")
    arguments = study.start()
    if min(arguments.pairs, arguments.blocks) < 2:
        study.parser.error("take two pairs and two blocks at least: one has no interval")
    logging.getLogger("int8_dit").setLevel(logging.ERROR)
    from safetensors.torch import load_file

    from glyphs.outliers import plant

    trained = load_file(GLYPH_MODEL)
    makers = {
        "trained": lambda: Glyphs(trained, arguments.pairs),
        "outliers": lambda: Glyphs(plant(trained), arguments.pairs),
        "blocks": lambda: Blocks(arguments.blocks, arguments.planted, arguments.pixels),
    }
    results: dict[str, dict] = {}
    for key in arguments.subjects:
        print(COLUMNS[key], flush=True)
        subject = makers[key]()
        outcomes = run(subject, arguments.variants)
        results[key] = {
            "figures": summary(outcomes),
            "errors": {variant: [float(f"{e:.4g}") for e in outcome.errors] for variant, outcome in outcomes.items()},
        }
        if key == "blocks" and "recipe" in outcomes:
            found = set(outcomes["recipe"].protected)
            results[key]["planted"] = {layer: layer in found for layer in subject.planted}
        elif key != "blocks":
            results[key]["read"] = {v: "".join("01"[r] for r in outcome.read) for v, outcome in outcomes.items()}
        study.write("", *report(results), subjects=results)  # now: a later subject that fails takes nothing along
        if key == "outliers" and set(PICTURED) <= set(outcomes):
            save_picture({name: outcomes[name].images for name in PICTURED}, study.out / "glyphs.png")
        del subject, outcomes


if __name__ == "__main__":
    main()
