"""ComfyUI 0.36 and newer, as an imitation shows them: what the pack does around their linears."""

import comfy.ops
import pytest

from int8_dit.nodes.comfyui import assumptions
from int8_dit.nodes.linears.apply_kernel import apply_fused_kernel
from int8_dit.nodes.loading import memory_choice
from int8_dit.nodes.loading.memory_choice import AS_STORED, INT8


def test_a_rebuilt_model_does_not_lie_on_the_disk_of_the_other(of_today, dit):
    """ComfyUI reads weights again from a fast disk; what this pack made of them is in no file."""
    model = dit.stock()
    model.fast_disk = True
    assert model.clone().fast_disk and not dit.quantize(model).fast_disk
    native = dit.quantize(dit.stock())
    native.fast_disk = True
    assert apply_fused_kernel(native, "fused int8").fast_disk


@pytest.mark.parametrize(
    "kind, memory, fast",
    (("bf16", INT8, False), ("native", INT8, True), ("W4A8", INT8, False), ("W4A8", AS_STORED, True)),
)
def test_weights_that_are_made_lie_on_no_disk(of_today, dit, tmp_path, monkeypatch, kind, memory, fast):
    monkeypatch.setattr(memory_choice, "SMALLEST_STORED", 0)  # the glyph model's layers are small
    assert dit.load(dit.write_as(tmp_path, kind), memory=memory).fast_disk is fast


@pytest.fixture
def lacking(of_today, monkeypatch):
    """What is said of ComfyUI's linears when the pack is loaded beside 0.43."""
    monkeypatch.setattr(assumptions, "comfyui_version", lambda: "0.43.0")
    return lambda: [found.partition(" (")[0] for found in assumptions.check_comfyui() if "comfy.ops" in found]


def test_what_is_assumed_of_linears(lacking):
    assert lacking() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(comfy.ops, "INPUT_ACT_EAGER")
        assert lacking() == []
        patch.delattr(comfy.ops, "_eager_input_act")
        assert lacking() == ["comfy.ops._eager_input_act"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.ops.disable_weight_init.Linear, "forward", _of_a_later_version)
        assert lacking() == ["support for act_bias of comfy.ops.disable_weight_init.Linear.forward"]


def _of_a_later_version(self, input, input_act=None, act_weight=None, act_bias=None, residual=None): ...
