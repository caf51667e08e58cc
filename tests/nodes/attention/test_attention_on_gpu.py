"""INT8 attention on this GPU, of both makers, against ComfyUI's attention in float."""

import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch

from int8_dit.nodes.attention import attention_override as attention
from int8_dit.nodes.attention.attention_kinds import ATTENTION_KINDS
from int8_dit.nodes.attention.attention_override import AttentionOverride
from support import comfyui_today
from support.attention_calls import overridden, random_qkv
from support.tensors import relative_error

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

GPU = torch.device("cuda")

HEADS = 18
# batch, heads of keys and values, queries, keys, width of a head
SHAPES = {
    "Ideogram 4 at 1024 px": (1, HEADS, 4352, 4352, 256),
    "two samples": (2, HEADS, 1100, 1100, 256),
    "GQA": (1, 6, 1100, 1100, 128),
    "narrow heads": (2, HEADS, 300, 300, 64),
    "padded heads": (1, HEADS, 300, 300, 72),
    "text": (1, HEADS, 1100, 77, 128),
}


@pytest.fixture(params=("INT8", "INT8 (comfy-kitchen)"))
def override(request):
    """The attention override of a kind."""
    kind = ATTENTION_KINDS[request.param]
    if obstacle := kind.obstacle(GPU):
        pytest.skip(obstacle)
    return AttentionOverride(kind, GPU)


def tensors(batch, kv_heads, queries, keys, width, dtype, by_head):
    return random_qkv((HEADS, kv_heads), (queries, keys), width, batch, dtype, by_head, GPU)


def both(override, qkv, **options):
    """ComfyUI's attention, and the same with the override, by INT8 attention and no other."""
    notes = set()
    token = attention._model_call.set((False, notes))
    with torch.inference_mode():
        expected = attention_pytorch(*qkv, HEADS, **options)
        actual = overridden(attention_pytorch, override, qkv, HEADS, **options)
    attention._model_call.reset(token)
    assert notes == {None}
    return expected, actual


@pytest.mark.parametrize("by_head", (True, False))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_attention_is_near_comfyuis(override, shape, dtype, by_head):
    qkv = tensors(*SHAPES[shape], dtype, by_head)
    options = {"skip_reshape": by_head, **({"enable_gqa": True} if SHAPES[shape][1] != HEADS else {})}
    expected, actual = both(override, qkv, **options)
    assert actual.shape == expected.shape and actual.dtype == dtype
    assert 0 < relative_error(actual.float(), expected.float()) < 0.05


def causal(*shape):
    return torch.ones(shape, dtype=torch.bool, device=GPU).tril()


def padded(*shape, dtype):
    """The last tenth of the keys is padding; of floats as Ideogram 4's."""
    keys = torch.arange(shape[-1], device=GPU) < 0.9 * shape[-1]
    return torch.zeros(shape, dtype=dtype, device=GPU).masked_fill(~keys, torch.finfo(dtype).min)


@pytest.mark.parametrize("shape", ("narrow heads", "GQA", "Ideogram 4 at 1024 px"))
@pytest.mark.parametrize("kind", ("bool", "float", "of keys"))
def test_masked_calls_are_near_comfyuis(override, kind, shape):
    batch, kv_heads, queries, keys, _ = SHAPES[shape]
    qkv = tensors(*SHAPES[shape], torch.bfloat16, True)
    options = {"skip_reshape": True, "enable_gqa": kv_heads != HEADS}
    mask = {
        "bool": lambda: causal(queries, keys),
        "float": lambda: padded(batch, queries, keys, dtype=torch.bfloat16),
        "of keys": lambda: padded(batch, 1, 1, keys, dtype=torch.bfloat16),
    }[kind]()
    expected, actual = both(override, qkv, mask=mask, **options)
    unmasked = both(override, qkv, **options)[1]
    assert relative_error(actual.float(), expected.float()) < 0.05
    assert relative_error(unmasked.float(), expected.float()) > 0.1


def test_containers_get_the_same(override):
    """From comfy-kitchen by its two halves, as ComfyUI's own function does."""
    qkv = tensors(*SHAPES["GQA"], torch.bfloat16, True)
    with comfyui_today.today() as core, torch.inference_mode():
        held = [core.AttentionTensorContainer(tensor) for tensor in qkv]
        options = {"skip_reshape": True, "enable_gqa": True}
        expected = core.attention_pytorch(*qkv, HEADS, **options)
        actual = overridden(core.attention_pytorch, override, held, HEADS, **options)
    assert 0 < relative_error(actual.float(), expected.float()) < 0.05
