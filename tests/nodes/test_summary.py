"""What runs where: the line of Load INT8 DiT on the glyph model, whose 34 linears hold 21 that become INT8."""

import json
from types import SimpleNamespace

import pytest
import torch

from support import workflows
from support.workflows import Prompt, link

MODULATION = "joint_blocks.0.x_block.adaLN_modulation.1"
OTHERS = "13 fp32 (small or sensitive)"
INT8 = "linears INT8 in plain PyTorch (no GPU)"
ATTENTION = "attention as ComfyUI"
CHOSEN = "(bf16 was chosen)"


@pytest.fixture
def line(dit):
    """The summary of a MODEL, whose counts are those of its linears."""
    from int8_dit.nodes.layers.layer_selection import linears
    from int8_dit.nodes.loading.summary import summarize

    def line(model):
        summary = summarize(model)
        assert sum(summary.linears.values()) == len(linears(model)) == 34
        return str(summary)

    return line


@pytest.fixture
def no_room(pack, monkeypatch):
    """A device in which no model fits in floats: bf16 keeps INT8 weights."""
    monkeypatch.setattr("int8_dit.nodes.loading.load.fits_in_floats", lambda *_: False)


@pytest.fixture
def native(dit, tmp_path):
    return dit.write(tmp_path / "native.safetensors", dit.native_int8())


def fp8(state_dict, layer):
    weight = state_dict[f"{layer}.weight"].float()
    scale = weight.abs().max() / 448
    mark = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    weights = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "comfy_quant": mark}
    return state_dict | {f"{layer}.{name}": tensor for name, tensor in weights.items()}


def test_quantized_while_loading(dit, line):
    assert line(dit.load()) == f"21 of 34 {INT8}, {OTHERS}, {ATTENTION}"


@pytest.mark.parametrize("form", ("native_int8", "smoothed_int8"))
def test_int8_files(dit, line, tmp_path, form):
    model = dit.load(dit.write(tmp_path / "int8.safetensors", getattr(dit, form)()))
    assert line(model) == f"21 of 34 {INT8}, {OTHERS}, {ATTENTION}"


@pytest.mark.parametrize(
    "kernel, int8", (("fused int8", INT8), ("bf16", f"linears fp32 instead of the file's INT8 {CHOSEN}"))
)
def test_layers_that_an_int8_file_has_in_floats_are_protected(dit, line, tmp_path, kernel, int8):
    weights = dit.native_int8()
    for name in ("weight_scale", "comfy_quant"):
        del weights[f"{dit.LAYER}.{name}"]
    weights[f"{dit.LAYER}.weight"] = dit.tensors()[f"{dit.LAYER}.weight"]
    model = dit.load(dit.write(tmp_path / "mixed.safetensors", weights), kernel)
    assert line(model) == f"20 of 34 {int8}, 1 fp32 (protected), {OTHERS}, {ATTENTION}"


def test_protected_by_the_quantizer(dit, line):
    assert line(dit.quantize(dit.stock(), 2)) == f"19 of 34 {INT8}, 2 fp32 (protected), {OTHERS}, {ATTENTION}"


def test_an_fp8_modulation_stays(dit, line, tmp_path):
    model = dit.load(dit.write(tmp_path / "fp8.safetensors", fp8(dit.tensors(), MODULATION)))
    assert line(model) == f"21 of 34 {INT8}, 1 FP8 as in the file, 12 fp32 (small or sensitive), {ATTENTION}"


def test_int8_weights_that_are_held_as_floats(dit, line, native):
    expected = f"21 of 34 linears fp32 instead of the file's INT8 {CHOSEN}, {OTHERS}, {ATTENTION}"
    assert line(dit.load(native, "bf16")) == expected


def test_int8_weights_that_are_computed_in_floats(dit, line, native, no_room):
    expected = f"21 of 34 linears INT8 in memory but computed in fp32 {CHOSEN}, {OTHERS}, {ATTENTION}"
    assert line(dit.load(native, "bf16")) == expected


def test_a_fallback_says_its_reason(dit, line, native):
    assert "(the model runs on cpu, and INT8 tensor cores need a GPU)" in line(dit.load(native, "auto"))


def test_a_float_file_in_bf16(dit, line):
    assert line(dit.load(dit.FILE, "bf16")) == f"21 of 34 linears fp32 {CHOSEN}, {OTHERS}, {ATTENTION}"


def test_a_model_of_comfyuis_loader(dit, line, native):
    assert line(dit.stock()) == f"21 of 34 linears fp32, {OTHERS}, {ATTENTION}"
    expected = f"21 of 34 linears ComfyUI's INT8 as in the file, {OTHERS}, {ATTENTION}"
    assert line(dit.stock(native)) == expected


def test_a_lora_changes_nothing(dit, line):
    model = dit.with_lora(dit.load(), dit.lora([dit.LAYER]))
    dit.sample(model)
    assert line(model) == f"21 of 34 {INT8}, {OTHERS}, {ATTENTION}"


def test_attention_of_another_node(dit, line):
    model = dit.load()
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda func, *a, **k: func(*a, **k)
    assert line(model).endswith("attention as another node set it")


def test_int8_attention(dit, line, monkeypatch):
    import comfy_kitchen

    from int8_dit.nodes.patching.attention import set_attention

    monkeypatch.setattr(comfy_kitchen, "int8_attention", print, raising=False)
    monkeypatch.setattr(comfy_kitchen, "int8_attention_is_available", lambda device: True, raising=False)
    model = dit.load()
    set_attention(model, "INT8 (comfy-kitchen)")
    assert line(model).endswith("attention INT8 (comfy-kitchen) where it fits")


def test_a_model_without_linears(pack):
    from int8_dit.nodes.loading.summary import Summary

    assert str(Summary({}, "as ComfyUI")) == f"0 of 0 linears in this model, {ATTENTION}"


@pytest.mark.parametrize(
    "linears, int8, device, kernel, expected",
    (
        ({"fused INT8": 5, "fused INT8 with 16-bit activations": 2, "bf16": 1}, 7, "cuda", "auto", ("good", "7 of 8")),
        ({"bf16 (a reason)": 8}, 0, "cpu", "auto", ("warn", "bf16: no GPU")),
        ({"bf16 (bf16 was chosen)": 8}, 0, "cpu", "bf16", ("note", "bf16, as chosen")),
        ({"FP8 as in the file": 8}, 0, "cpu", "fused int8", ("note", "no INT8: 0 of 8")),
    ),
)
def test_the_short_line(pack, linears, int8, device, kernel, expected):
    from int8_dit.nodes.loading.summary import Summary, runs_where

    model = SimpleNamespace(load_device=torch.device(device))
    badge = runs_where(model, Summary(linears, "as ComfyUI", int8), kernel, "bf16")
    severity, text = expected
    assert badge.severity == severity and text in badge.text and badge.detail.endswith("attention as ComfyUI")


@pytest.mark.parametrize("obstacle, expected", ((None, "bf16: not an RTX 30"), ("no", "bf16: the kernel cannot run")))
def test_the_short_line_says_why_a_gpu_does_not_run_int8(pack, monkeypatch, obstacle, expected):
    from int8_dit.kernels.card import device
    from int8_dit.nodes.loading.summary import Summary, runs_where

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(device, "fused_obstacle", lambda _: obstacle)
    model = SimpleNamespace(load_device=torch.device("cuda"))
    assert runs_where(model, Summary({"bf16 (why)": 8}, "as ComfyUI"), "auto", "bf16").text == expected


@pytest.mark.parametrize("native, expected", ((7, "ComfyUI's INT8, faster here: 7 of 8"), (0, "bf16: faster here")))
def test_the_short_line_says_what_was_measured_to_be_faster(pack, monkeypatch, native, expected):
    from int8_dit.nodes.loading import summary

    monkeypatch.setattr(summary.AUTO_CHOICES, "stored", lambda device: object())
    model = SimpleNamespace(load_device=torch.device("cuda"))
    badge = summary.runs_where(model, summary.Summary({"": 8}, "as ComfyUI", 0, native), "auto", "bf16")
    assert (badge.severity, badge.text) == ("good", expected)


def test_the_node_shows_it_and_puts_it_out(server):
    """Also when the loader's result comes out of the cache."""
    prompt = Prompt()
    load = prompt.add("LoadINT8DiT", model_name=workflows.GLYPH_MODEL, kernel="fused int8", attention="as ComfyUI")
    text = prompt.add("PreviewAny", source=link(load, 1))
    expected = f"21 of 34 {INT8}, {OTHERS}, {ATTENTION}"
    for _ in range(2):
        results = server.queue(prompt)
        assert results[text]["text"] == [expected]
        (badge,) = results[load]["int8_dit_badges"]
        assert badge == {"severity": "note", "text": "INT8 without a GPU: 21 of 34", "detail": expected, "reason": ""}


def test_int8_attention_on_a_cpu_is_refused_by_the_server(server):
    from support.server import ExecutionFailed

    prompt = Prompt()
    load = prompt.add(
        "LoadINT8DiT", model_name=workflows.GLYPH_MODEL, kernel="fused int8", attention="INT8 (comfy-kitchen)"
    )
    prompt.add("PreviewAny", source=link(load, 1))
    with pytest.raises(ExecutionFailed, match="attention is set to INT8") as error:
        server.queue(prompt)
    assert error.value.node_type == "LoadINT8DiT"
