"""What runs where: the line of Load INT8 DiT on the glyph model, whose 34 linears hold 21 that become INT8."""

from types import SimpleNamespace

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from safetensors.torch import load_file

from int8_dit.kernels.card.device import ComputePath
from int8_dit.nodes.linears.layer_selection import linears
from int8_dit.nodes.loading import summary
from int8_dit.nodes.loading.summary import Summary, runs_where
from support.file_formats import encoded, fp8_scaled
from support.tensors import relative_error

MODULATION = "joint_blocks.0.x_block.adaLN_modulation.1"
OTHERS = "13 fp32 (small or sensitive)"
INT8 = "linears INT8 in plain PyTorch (no GPU)"
ATTENTION = "attention as ComfyUI"
CHOSEN = "(bf16 was chosen)"


@pytest.fixture
def line(dit):
    """The summary of a MODEL, whose counts are those of its linears."""

    def line(model):
        summary = dit.summarize(model)
        assert sum(summary.linears.values()) == len(linears(model)) == 34
        return str(summary)

    return line


def native(dit, path):
    return dit.write(path, dit.native_int8())


def protected(dit, path):
    """A native file that has one layer in floats."""
    tensors = dit.native_int8()
    for name in ("weight_scale", "comfy_quant"):
        del tensors[f"{dit.LAYER}.{name}"]
    return dit.write(path, tensors | {f"{dit.LAYER}.weight": dit.tensors()[f"{dit.LAYER}.weight"]})


def sampled_with_a_lora(dit, path):
    model = dit.with_lora(dit.load(), dit.lora([dit.LAYER]))
    dit.sample(model)
    return model


AS_FP32 = "linears fp32 instead of the file's INT8"
MODELS = {
    "quantized while loading": (lambda dit, path: dit.load(), f"21 of 34 {INT8}, {OTHERS}"),
    "native": (lambda dit, path: dit.load(native(dit, path)), f"21 of 34 {INT8}, {OTHERS}"),
    "smoothed": (lambda dit, path: dit.load(dit.write(path, dit.smoothed_int8())), f"21 of 34 {INT8}, {OTHERS}"),
    "a LoRA changes nothing": (sampled_with_a_lora, f"21 of 34 {INT8}, {OTHERS}"),
    "protected": (lambda dit, path: dit.load(protected(dit, path)), f"20 of 34 {INT8}, 1 fp32 (protected), {OTHERS}"),
    "protected, bf16": (
        lambda dit, path: dit.load(protected(dit, path), "bf16"),
        f"20 of 34 {AS_FP32} {CHOSEN}, 1 fp32 (protected), {OTHERS}",
    ),
    "protected by the quantizer": (
        lambda dit, path: dit.quantize(dit.stock(), 2),
        f"19 of 34 {INT8}, 2 fp32 (protected), {OTHERS}",
    ),
    "an FP8 modulation stays": (
        lambda dit, path: dit.load(dit.write(path, fp8_scaled(dit.tensors(), [MODULATION]))),
        f"21 of 34 {INT8}, 1 FP8 as in the file, 12 fp32 (small or sensitive)",
    ),
    "held as floats": (lambda dit, path: dit.load(native(dit, path), "bf16"), f"21 of 34 {AS_FP32} {CHOSEN}, {OTHERS}"),
    "a reason": (
        lambda dit, path: dit.load(native(dit, path), "auto"),
        f"21 of 34 {AS_FP32} (the model runs on cpu, and INT8 tensor cores need a GPU), {OTHERS}",
    ),
    "a float file in bf16": (lambda dit, path: dit.load(kernel="bf16"), f"21 of 34 linears fp32 {CHOSEN}, {OTHERS}"),
    "ComfyUI's loader": (lambda dit, path: dit.stock(), f"21 of 34 linears fp32, {OTHERS}"),
    "ComfyUI's INT8": (
        lambda dit, path: dit.stock(native(dit, path)),
        f"21 of 34 linears ComfyUI's INT8 as in the file, {OTHERS}",
    ),
}


@pytest.mark.parametrize("make, expected", MODELS.values(), ids=MODELS)
def test_the_line(dit, line, tmp_path, make, expected):
    assert line(make(dit, tmp_path / "model.safetensors")) == f"{expected}, {ATTENTION}"


def test_int8_weights_that_are_computed_in_floats(dit, line, tmp_path, monkeypatch):
    """On a device in which no model fits in floats bf16 keeps INT8 weights."""
    monkeypatch.setattr("int8_dit.nodes.loading.load.fits_in_floats", lambda *_: False)
    expected = f"21 of 34 linears INT8 in memory but computed in fp32 {CHOSEN}, {OTHERS}, {ATTENTION}"
    assert line(dit.load(native(dit, tmp_path / "native.safetensors"), "bf16")) == expected


def test_attention_of_another_node(dit, line):
    model = dit.load()
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *a, **k: func(*a, **k)
    assert line(model).endswith("attention as another node set it")


def on(device):
    """A text encoder without linears on a device."""
    return SimpleNamespace(load_device=torch.device(device), is_clip=True, model=torch.nn.Module())


@pytest.mark.parametrize(
    "linears, int8, device, kernel, expected",
    (
        ({"fused INT8": 5, "fused INT8 with 16-bit activations": 2, "bf16": 1}, 7, "cuda", "auto", ("good", "7 of 8")),
        ({"bf16 (a reason)": 8}, 0, "cpu", "auto", ("warn", "bf16: no GPU")),
        ({"bf16 (bf16 was chosen)": 8}, 0, "cpu", "bf16", ("note", "bf16, as chosen")),
        ({"FP8 as in the file": 8}, 0, "cpu", "fused int8", ("note", "no INT8: 0 of 8")),
    ),
)
def test_the_short_line(linears, int8, device, kernel, expected):
    model = on(device)
    badge = runs_where(model, Summary(linears, "as ComfyUI", int8), kernel, "bf16")
    severity, text = expected
    assert badge.severity == severity and text in badge.text and badge.detail.endswith("attention as ComfyUI")


@pytest.mark.parametrize("obstacle, expected", ((None, "bf16: not an RTX 30"), ("no", "bf16: the kernel cannot run")))
def test_the_short_line_says_why_a_gpu_does_not_run_int8(monkeypatch, obstacle, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("int8_dit.kernels.card.device.fused_obstacle", lambda _: obstacle)
    model = on("cuda")
    assert runs_where(model, Summary({"bf16 (why)": 8}, "as ComfyUI"), "auto", "bf16").text == expected


@pytest.mark.parametrize("native, expected", ((7, "ComfyUI's INT8, faster here: 7 of 8"), (0, "bf16: faster here")))
def test_the_short_line_says_what_was_measured_to_be_faster(monkeypatch, native, expected):
    path = ComputePath("bf16", "measured to be the fastest")
    monkeypatch.setattr(summary, "choose_model_path", lambda device, kernel, shapes: path)
    model = on("cuda")
    badge = summary.runs_where(model, summary.Summary({"": 8}, "as ComfyUI", 0, native), "auto", "bf16")
    assert (badge.severity, badge.text) == ("good", expected)


@pytest.mark.parametrize("others", ("tensors", "native_int8"))
@pytest.mark.parametrize("backend, said", (("cuda", ""), ("eager", " (slow: comfy-kitchen has no kernel for it here)")))
def test_w4a4_is_comfyuis_own(dit, line, tmp_path, monkeypatch, others, backend, said):
    """Alone and beside INT8: in the file, computed, with a LoRA, and saved."""
    tensors, floats, layers = getattr(dit, others)(), dit.tensors(), dit.LINEARS[:3]
    for layer in layers:
        weight = floats[f"{layer}.weight"].float()
        held = QuantizedTensor.from_float(weight, "TensorCoreConvRotW4A4Layout", convrot_groupsize=64)
        tensors |= held.state_dict(f"{layer}.weight")
        tensors[f"{layer}.comfy_quant"] = encoded({"format": "convrot_w4a4", "convrot_groupsize": 64})
    path = dit.write(tmp_path / "w4a4.safetensors", tensors)
    model, stock = dit.load(path), dit.stock(path)
    monkeypatch.setattr(summary, "kitchen_backend", {"convrot_w4a4_linear": backend}.get)
    kept = 21 - len(layers)
    w4a4 = f"ComfyUI's W4A4 as in the file{said}"
    whole = f"{kept} of 34 {INT8}, 3 {w4a4}" if others == "native_int8" else f"3 of 34 linears {w4a4}, {kept} fp32"
    assert line(model) == f"{whole}, {OTHERS}, {ATTENTION}"
    assert relative_error(dit.output(model), dit.output(stock)) < 0.02
    lora = dit.lora(layers)
    assert relative_error(dit.output(dit.with_lora(model, lora)), dit.output(dit.with_lora(stock, lora))) < 0.02
    if others == "tensors":  # nothing that Save INT8 DiT is for
        return
    saved = load_file(dit.save(model, tmp_path / "saved.safetensors"))
    assert all(torch.equal(saved[f"{layer}.{part}"], tensors[f"{layer}.{part}"]) for layer in layers for part in PARTS)


PARTS = ("weight", "weight_scale", "comfy_quant")
