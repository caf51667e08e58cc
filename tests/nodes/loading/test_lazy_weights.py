"""Weights that are computed where ComfyUI copies them, as with dynamic VRAM. On a CPU each operation is a copy."""

from pathlib import Path

import comfy.model_management as management
import pytest
import torch
from comfy.memory_management import interpret_gathered_like, vram_aligned_size

from int8_dit.kernels import LazyTensor, Operator
from int8_dit.nodes.comfyui.lazy_tensors import lazy_pieces
from int8_dit.nodes.comfyui.quantized import stored
from int8_dit.nodes.files.reading.gguf_file import read_gguf
from int8_dit.nodes.loading import lazy_weights, loaded_checks
from int8_dit.nodes.loading import load as loading
from int8_dit.nodes.loading.load import rebuild_int8_model

KINDS = pytest.mark.parametrize("kind", ("W4A8", "W6A8", "Q8_0", "Q4_0"))


@pytest.fixture
def load(dit, tmp_path, monkeypatch):
    """A MODEL of the glyph model's file of a kind, with lazy weights or without."""

    def make(kind, lazy=True, **options):
        monkeypatch.setattr(loading, "are_copied", lambda device: lazy)
        return dit.load(dit.write_as(tmp_path, kind), **options)

    return make


@KINDS
@pytest.mark.parametrize("inference", (False, True))
def test_nothing_is_computed_before_it_is_read_and_then_the_same(dit, load, monkeypatch, kind, inference):
    whole = load(kind, lazy=False)
    monkeypatch.setattr(loaded_checks, "_AT_ONCE", 0)  # all of the glyph model's tensors are large
    moved, own = [], lazy_weights.to_device
    monkeypatch.setattr(lazy_weights, "to_device", lambda *given: moved.append(1) or own(*given))
    with torch.inference_mode(inference):
        lazy = load(kind)
    held, weights = lazy_pieces(lazy.model.diffusion_model), dit.int8_weights(lazy)
    assert set(weights) == set(dit.int8_weights(whole)) == set(dit.LINEARS)
    assert {f"{layer}.weight" for layer in dit.LINEARS} <= set(held) and not lazy_pieces(whole.model.diffusion_model)
    assert lazy.model_size() == whole.model_size() and not moved
    assert all(part.is_meta == (key in held) for key, part in lazy.model.diffusion_model.state_dict().items())
    assert torch.equal(dit.output(lazy), dit.output(whole))


@KINDS
def test_a_copy_reads_the_stored_weight_once(dit, load, monkeypatch, kind):
    held, moved, own = dit.int8_weights(load(kind))[dit.LINEARS[3]], [], lazy_weights.to_device
    monkeypatch.setattr(lazy_weights, "to_device", lambda *given: moved.append(1) or own(*given))
    for count in (1, 2):
        buffer = torch.zeros(vram_aligned_size([held]), dtype=torch.uint8)
        management.cast_to_gathered([held], buffer)
        assert len(moved) == count


@KINDS
def test_what_computes_it_is_compiled_while_it_loads(dit, load, monkeypatch, kind):
    asked, ran, run = set(), set(), Operator.at_once
    monkeypatch.setattr(lazy_weights, "compile_ahead", lambda *given: asked.update(given[-1]))
    monkeypatch.setattr(Operator, "at_once", lambda op, *given: ran.add(op.called_with(*given)) or run(op, *given))
    model = load(kind)
    assert asked and not ran
    dit.output(model)
    assert asked == ran


@KINDS
def test_it_is_saved_quantized_and_copied_as_what_is_held_whole(dit, load, tmp_path, kind):
    lazy, whole = load(kind), load(kind, lazy=False)
    files = [Path(dit.save(model, tmp_path / f"{name}.safetensors")) for name, model in (("a", lazy), ("b", whole))]
    assert files[0].read_bytes() == files[1].read_bytes()
    files = [Path(dit.save(model, tmp_path / f"{name}.gguf")) for name, model in (("a", lazy), ("b", whole))]
    assert files[0].read_bytes() == files[1].read_bytes()
    copied = [dit.snapshot(rebuild_int8_model(model.model, "fused int8")) for model in (lazy, whole)]
    dit.assert_same_tensors(*copied)
    lora = dit.lora(dit.LINEARS[:1])
    assert torch.equal(*(dit.output(dit.with_lora(model, lora)) for model in (lazy, whole)))


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_floats_of_blocks_are_computed_as_late(dit, load, memory):
    """Of a linear that no kernel reads: each copy gets the bits that a load without dynamic VRAM decodes."""
    whole, lazy = load("Q4_0", lazy=False, memory=memory), load("Q4_0", memory=memory)
    named = {name: part for name, part in lazy.model.diffusion_model.named_parameters() if type(part) is LazyTensor}
    assert "t_embedder.mlp.0.weight" in named
    assert ("joint_blocks.0.x_block.adaLN_modulation.1.weight" in named) == (memory == "INT8")
    for name, part in named.items():
        held = whole.model.diffusion_model.get_parameter(name)
        buffer = torch.zeros(vram_aligned_size([part]), dtype=torch.uint8)
        management.cast_to_gathered([part], buffer)
        assert torch.equal(interpret_gathered_like([held], buffer)[0], held) and part.dtype == held.dtype
    assert torch.equal(dit.output(lazy), dit.output(whole)) and lazy.model_size() == whole.model_size()


NO_NUMBER = "layer joint_blocks.0.x_block.attn.qkv cannot be quantized: weight has a NaN or Inf in output channel 0"


@pytest.mark.parametrize(
    "layer, value, says",
    (
        ("joint_blocks.0.x_block.attn.qkv", 0x7C00, NO_NUMBER),
        ("joint_blocks.0.x_block.attn.qkv", 0x7BFF, None),
        ("t_embedder.mlp.0", 0x7C00, "t_embedder.mlp.0.weight holds a NaN or Inf"),
    ),
    ids=("inf", "largest", "floats"),
)
def test_a_row_that_is_no_number_is_refused_by_the_first_copy(dit, load, tmp_path, layer, value, says):
    """With file and layer, as by a load that reads it."""
    path = Path(dit.write_as(tmp_path, "Q8_0"))
    content, blocks = bytearray(path.read_bytes()), read_gguf(str(path))[0][f"{layer}.weight"]
    place = content.index(stored(blocks).numpy().tobytes())
    content[place : place + 2] = value.to_bytes(2, "little")  # the first block's size, a float16
    path.write_bytes(content)
    load("floats")
    model = dit.load(path)
    if says is None:
        assert dit.output(model).isfinite().all()
        return
    with pytest.raises(ValueError, match=f"^Q8_0.gguf: {says}"):
        dit.output(model)
