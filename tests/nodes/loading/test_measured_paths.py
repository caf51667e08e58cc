"""MODELs whose linears run what a card's benchmark found to be the fastest."""

import pytest
import torch

from int8_dit import kernels
from int8_dit.kernels.card.device import ComputePath
from int8_dit.nodes.files.reading.checkpoint import read_checkpoint
from int8_dit.nodes.loading import load, load_plan, memory_choice, summary
from support.tensors import relative_error

SHAPES = {(576, 192): "bf16", (192, 192): "native int8"}  # qkv and proj; the MLP's stay fused


def answer(monkeypatch, int8_path):
    """Let this say how each linear computes."""
    for place in ("kernels.card.device", "nodes.loading.operations"):
        monkeypatch.setattr(f"int8_dit.{place}.int8_path", int8_path)


@pytest.fixture
def measured(monkeypatch):
    """Let a choice decide, as on a GPU with one; here all ways run on the CPU."""

    def choose_path(device, kernel="auto", shape=None, ways=kernels.WAYS):
        way = SHAPES.get(shape, "fused int8")
        return ComputePath(way if way in ways else "fused int8", "measured to be the fastest")

    def int8_path(device, kernel, n, k, native):
        return choose_path(device, kernel, (n, k), (kernels.FUSED, kernels.NATIVE) if native else (kernels.FUSED,)).kind

    for module in (load, load_plan, summary):
        monkeypatch.setattr(module, "choose_path", choose_path)
    answer(monkeypatch, int8_path)


@pytest.mark.parametrize("source", ["float", "native", "rotated"])
def test_each_linear_runs_its_fastest_way(dit, measured, tmp_path, source):
    path = dit.FILE
    if source != "float":
        tensors = dit.native_int8(rotation_group=64 if source == "rotated" else None)
        path = dit.write(tmp_path / "native.safetensors", tensors)
    model = dit.load(path, kernel="auto")
    held = {name: type(model.get_model_object(f"diffusion_model.{name}").weight).__name__ for name in dit.LINEARS}
    assert {name.rpartition(".")[2] for name, kind in held.items() if kind != "QuantizedTensor"} == {"qkv"}
    assert relative_error(dit.output(model), dit.output(dit.stock())) < 0.06
    summary = dit.summarize(model)
    line = str(summary)
    assert "10 of" in line and "ComfyUI's INT8 (measured to be the fastest)" in line
    assert summary.int8 == 10 and summary.native > 0 and summary.int8 + summary.native < len(dit.LINEARS)


def test_what_the_file_has_in_int8_is_not_saved_in_floats(dit, measured, tmp_path):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(rotation_group=64))
    with pytest.raises(
        ValueError, match=r"holds 6 layers.*joint_blocks.0.context_block.attn.qkv, in floats.*fused int8"
    ):
        dit.save(dit.load(path, kernel="auto"), tmp_path / "saved.safetensors")
    assert not (tmp_path / "saved.safetensors").exists()


def test_auto_counts_layers_that_stay_floats(dit, measured, tmp_path, monkeypatch):
    path = dit.write_as(tmp_path, "Q4_0")
    in_floats = load_plan.floats_where_faster("auto", [torch.device("cpu")], True)
    needed, _ = memory_choice.held_bytes(read_checkpoint(str(path)), torch.float32, in_floats)
    for card in (needed - 1, needed):
        monkeypatch.setattr(memory_choice, "free_for_weights", lambda *_, card=card: card)
        model = dit.load(path, kernel="auto", memory="auto")
        assert memory_choice.memory_choice(model).as_stored == (card < needed)
    assert model.model_size() == pytest.approx(needed, rel=0.01)


def test_comfyui_s_own_int8_is_what_the_stock_loader_computes(dit, tmp_path, monkeypatch):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(rotation_group=64))
    answer(monkeypatch, lambda *question: "native int8")
    native, stock = dit.output(dit.load(path)), dit.output(dit.stock(path))
    assert relative_error(native, stock) < 1e-3


def test_a_lora_reaches_a_linear_that_comfyui_computes(dit, lora, monkeypatch):
    answer(monkeypatch, lambda *question: "native int8")
    patched = dit.output(dit.with_lora(dit.load(), lora))
    assert relative_error(patched, dit.output(dit.with_lora(dit.stock(), lora))) < 0.06
    assert relative_error(patched, dit.output(dit.load())) > 0.2


def test_a_smoothed_layer_is_never_given_to_comfyui(dit, smoothed, monkeypatch):
    asked = []
    answer(monkeypatch, lambda *question: asked.append(question[-1]) or "fused int8")
    dit.output(smoothed)
    assert len(asked) >= len(dit.LINEARS) and not any(asked)
