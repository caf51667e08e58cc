"""What the widget `attention` can be set to, under models of every family: who computes a call, and that images stay.

A card's fastest exact attention is a function here that counts its calls; INT8 is the pack's own, as a CPU runs it.
"""

import inspect
from functools import partial

import comfy.ldm.modules.attention
import pytest
import torch

from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
from int8_dit.nodes.attention import attention_kinds
from int8_dit.nodes.attention.attention_kinds import ATTENTION_KINDS
from int8_dit.nodes.attention.attention_override import AttentionOverride, set_attention
from int8_dit.nodes.load_int8_dit import LoadINT8DiT
from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant
from support.architectures import ARCHITECTURES
from support.attention_calls import OVERRIDE, overridden, random_qkv
from support.inductor_kernels import plain_attention
from support.tensors import relative_error

AUTO, AS_COMFYUI, INT8 = "auto", "as ComfyUI", "INT8"
HEADS, WIDTH, TOKENS = 4, 64, 12
# With masks and without, with text beside the image and in it.
FAMILIES = ("Ideogram 4", "Flux", "Qwen-Image", "SD3", "Z-Image", "Lumina 2", "Wan t2v", "Wan i2v")


@pytest.fixture
def core():
    """comfy.ldm.modules.attention where PyTorch's attention was chosen, as on a GPU."""
    with plain_attention():
        yield comfy.ldm.modules.attention


def auto():
    """The override of the choice `auto`."""
    return AttentionOverride(ATTENTION_KINDS[AUTO], torch.device("cpu"))


def tensors(kv_heads=HEADS, dtype=torch.float32):
    return random_qkv((HEADS, kv_heads), (TOKENS, TOKENS), WIDTH, dtype=dtype)


run = partial(overridden, heads=HEADS)


TAKEN = {
    "plain": {},
    "masked": {"mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()},
    "grouped": {"enable_gqa": True},
    "full precision": {"low_precision_attention": False},
    "float32 logits": {"attn_precision": torch.float32},
    "scaled": {"scale": 0.3},
    "by head": {"skip_output_reshape": True},
    "with what it does not use": {"of_a_later_version": None},
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("call", TAKEN)
def test_auto_computes_what_pytorch_would(core, exact, call, dtype):
    qkv = tensors(2 if call == "grouped" else HEADS, dtype)
    actual = run(core.attention_pytorch, auto(), qkv, **TAKEN[call])
    assert torch.equal(actual, core.attention_pytorch(*qkv, HEADS, **TAKEN[call])) and exact.calls == 1


STAYS = {
    "nothing is faster": ("attention_pytorch", None, {}),
    "an option that nobody knows": ("attention_pytorch", "cuDNN", {"of_a_later_version": 1}),
    # whoever calls it: a model, or a pack that put it in the place of ComfyUI's
    **{f"attention_{name}": (f"attention_{name}", "cuDNN", {}) for name in ("sub_quad", "split", "basic")},
}


@pytest.mark.parametrize("function, fastest, options", STAYS.values(), ids=STAYS)
def test_what_stays_comfyuis(core, exact, function, fastest, options):
    exact.fastest, qkv, function = fastest, tensors(), getattr(core, function)
    assert torch.equal(run(function, auto(), qkv, **options), function(*qkv, HEADS)) and exact.calls == 0


def test_on_a_cpu_auto_is_as_comfyui(dit):
    model = dit.stock()
    set_attention(model, AUTO)
    assert OVERRIDE not in model.model_options["transformer_options"] and dit.described(model) == AS_COMFYUI


@pytest.mark.parametrize("flag", ("attention_sub_quad", "attention_split"))
def test_a_launch_flags_attention_stays(core, dit, monkeypatch, flag):
    gpu = torch.device("cuda")
    assert attention_kinds._chooses_exact(gpu)
    for name in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(core, name, getattr(core, flag))
    assert not attention_kinds._chooses_exact(gpu)


def test_a_comfyui_without_the_function_keeps_its_attention(monkeypatch):
    monkeypatch.delattr("comfy.ldm.modules.attention.attention_pytorch")
    assert not attention_kinds._chooses_exact(torch.device("cuda"))


def test_the_fastest_exact_way_gives_way_to_int8_and_not_the_other_way_round(dit, core, exact):
    first, second = dit.stock(), dit.stock()
    for model, kinds in ((first, (AUTO, INT8)), (second, (INT8, AUTO))):
        for kind in kinds:
            set_attention(model, kind)
        assert dit.described(model) == "INT8 where it fits"
        assert model.model_options["transformer_options"][OVERRIDE].outer is None


def test_what_int8_does_not_take_the_fastest_exact_way_does(core, exact):
    override, qkv = AttentionOverride(ATTENTION_KINDS[INT8], torch.device("cpu")), tensors()
    expected = core.attention_pytorch(*qkv, HEADS)
    assert not torch.equal(run(core.attention_pytorch, override, qkv), expected) and exact.calls == 0
    assert torch.equal(run(core.attention_pytorch, override, qkv, low_precision_attention=False), expected)
    assert exact.calls == 1


def test_it_is_the_default_of_new_nodes_and_not_of_old_workflows():
    for node in (LoadINT8DiT, ApplyFusedINT8Kernel, QuantizeToINT8SmoothQuant):
        (widget,) = (widget for widget in node.define_schema().inputs if widget.id == "attention")
        assert widget.default == AUTO and widget.options == [AUTO, AS_COMFYUI, INT8, "INT8 (comfy-kitchen)"]
        assert inspect.signature(node.execute).parameters["attention"].default == AS_COMFYUI


@pytest.mark.parametrize("name", FAMILIES)
def test_models_keep_their_output_and_int8_moves_it_a_little(dit, small, core, exact, name):
    architecture = ARCHITECTURES[name]
    model = small.stock_of(architecture)
    expected = small.output_of(architecture, model)
    set_attention(model, AUTO)
    assert dit.described(model) == "the fastest exact way"
    torch.testing.assert_close(small.output_of(architecture, model), expected)
    assert exact.calls > 1
    set_attention(model, INT8)
    assert dit.described(model) == "INT8 where it fits"
    assert 0 < relative_error(small.output_of(architecture, model), expected) < 0.05
