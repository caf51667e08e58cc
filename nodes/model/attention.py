"""What a MODEL's attention computes with: ComfyUI's own, or comfy-kitchen's INT8 attention where that applies."""

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..comfyui.attention import OVERRIDE, kitchen_attention, kitchen_attention_runs, kitchen_version
from ..comfyui.patcher import ModelPatcher, WrappersMP, options_of
from ..host import notices

AS_COMFYUI = "as ComfyUI"
INT8 = "INT8 (comfy-kitchen)"
ATTENTION_CHOICES = (AS_COMFYUI, INT8)

_KEY = "int8_dit_attention"
# What comfy-kitchen 0.2.40, the first version known here to have INT8 attention, takes.
_VERSION = "0.2.40"
_OLDEST_CAPABILITY = (7, 5)
_WIDEST_HEAD = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEADS = 65535  # of all samples together: what a grid of CUDA has room for
_KNOWN_KEYWORDS = {"scale", "enable_gqa", "low_precision_attention", "transformer_options", "_inside_attn_wrapper"}

Attention = Callable[..., torch.Tensor]

logger = logging.getLogger(__name__)


def check_attention(choice: str, device: torch.device) -> None:
    """Raise ValueError for what is none of ATTENTION_CHOICES, RuntimeError where `device` cannot do what it says."""
    if choice not in ATTENTION_CHOICES:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION_CHOICES)}; got {choice!r}")
    obstacle = _obstacle(device) if choice == INT8 else None
    if obstacle is not None:
        raise RuntimeError(
            f"attention is set to {INT8}, but {obstacle}. The alternative is attention set to {AS_COMFYUI}"
        )


def _obstacle(device: torch.device) -> str | None:
    """Why INT8 attention cannot run on a device, in words and with what to do, or None where it can."""
    if kitchen_attention() is None:
        return (
            f"comfy-kitchen {kitchen_version()} is installed, which has no INT8 attention. {_VERSION} has it: run "
            f'`pip install "comfy-kitchen>={_VERSION}"` with the Python of ComfyUI'
        )
    if kitchen_attention_runs(device):
        return None
    if device.type != "cuda":
        return f"the model runs on {device.type}, and INT8 attention needs a GPU"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_CAPABILITY:
        return f"{name} (sm_{capability[0]}{capability[1]}) is too old for it: it needs an RTX 20 card (sm_75) or newer"
    return (
        f"comfy-kitchen has no GPU code that runs here ({name}, PyTorch {torch.__version__}). On an NVIDIA card "
        "install a PyTorch for CUDA 13 (cu130)"
    )


def set_attention(model: ModelPatcher, choice: str) -> None:
    """Let a MODEL's attention compute as the choice says. ComfyUI's own leaves the MODEL as it is.

    An override that another node gave the MODEL stays: INT8 attention then takes the place of the function which that
    override calls. Raises what `check_attention` raises.
    """
    check_attention(choice, model.load_device)
    options = options_of(model)
    if choice == AS_COMFYUI or isinstance(options.get(OVERRIDE), INT8Attention):
        return
    kernel = kitchen_attention()
    assert kernel is not None  # or check_attention has raised
    override = INT8Attention(kernel, model.load_device, options.get(OVERRIDE))
    options[OVERRIDE] = override
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, override.watch)


def describe_attention(model: ModelPatcher) -> str:
    """What a MODEL's attention computes with, in words for the user."""
    override = options_of(model).get(OVERRIDE)
    if override is None:
        return AS_COMFYUI
    return f"{INT8} where it fits" if isinstance(override, INT8Attention) else "as another node set it"


# What the attention calls of the model call that runs now did: a reason for each kind that INT8 attention did not take,
# None for those that it took.
_notes: ContextVar[set[str | None] | None] = ContextVar("int8_dit_attention_notes", default=None)


@torch.compiler.assume_constant_result
def _note(misfit: str | None) -> bool:
    """Note what an attention call does; in a compiled model only while that is traced."""
    notes = _notes.get()
    if notes is not None:
        notes.add(misfit)
    return True


class INT8Attention:
    """An attention override of ComfyUI's: comfy-kitchen's INT8 attention for the calls that it can take.

    Args:
        kernel: comfy_kitchen.int8_attention, or what computes the same: (q, k, v, scale=) over [batch, heads, tokens,
            head width].
        device: where the kernel runs.
        outer: the override that was there before. It is called as ComfyUI calls it, with INT8 attention in place of
            ComfyUI's function: so what it does to its inputs is still done.
    """

    def __init__(self, kernel: Attention, device: torch.device, outer: Attention | None = None) -> None:
        self._kernel, self._device, self._outer = kernel, device, outer
        self._noted: set[str | None] = set()

    def __call__(self, func: Attention, *args, **kwargs) -> torch.Tensor:
        if self._outer is None:
            return self._attend(func, *args, **kwargs)
        return self._outer(functools.wraps(func)(functools.partial(self._attend, func)), *args, **kwargs)

    def _attend(
        self,
        func: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The arguments are those of ComfyUI's attention functions."""
        q4, k4, v4 = (_by_head(tensor, q, heads, skip_reshape) for tensor in (q, k, v))
        misfit = self._misfit(q4, k4, v4, heads, mask, attn_precision, kwargs)
        _note(misfit)
        if misfit is not None:
            return func(
                q,
                k,
                v,
                heads,
                mask=mask,
                attn_precision=attn_precision,
                skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape,
                **kwargs,
            )
        dense = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q4, k4, v4))
        output = self._kernel(*dense, scale=kwargs.get("scale"))
        return output if skip_output_reshape else output.transpose(1, 2).flatten(2)

    def _misfit(self, q, k, v, heads, mask, attn_precision, keywords) -> str | None:
        """Why INT8 attention does not take a call, in words for the user, or None where it does. q, k, v as `_by_head`
        gives them."""
        if mask is not None:
            return "it has a mask"
        if attn_precision == torch.float32 != q.dtype or not keywords.get("low_precision_attention", True):
            return "the model asks for more precision"
        if q.device.type != self._device.type:
            return f"it runs on {q.device.type}"
        if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
            return "its tensors are not all of float16, of bfloat16 or of float32"
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return "gradients are asked for"
        if q.shape[-1] > _WIDEST_HEAD:
            return f"its heads are wider than {_WIDEST_HEAD}"
        usual = (
            q.ndim == k.ndim == 4
            and k.shape == v.shape
            and (q.shape[0], q.shape[1], q.shape[3]) == (k.shape[0], heads, k.shape[3])
            and 0 not in (*q.shape, *k.shape)
            and (heads % k.shape[1] == 0 if keywords.get("enable_gqa") else heads == k.shape[1])
            and q.shape[0] * heads <= _MOST_HEADS
            and keywords.keys() <= _KNOWN_KEYWORDS
        )
        return None if usual else "its shapes or options are unusual"

    def watch(self, executor: Callable[..., Any], *args, **kwargs) -> Any:
        """A wrapper of ComfyUI's around each call of the model, which says where INT8 attention did not run."""
        notes: set[str | None] = set()
        token = _notes.set(notes)
        try:
            output = executor(*args, **kwargs)
        finally:
            _notes.reset(token)
        if None in notes and len(notes) > 1 and notes != self._noted:
            logger.info("INT8 attention runs, and ComfyUI's for the calls that do not fit: %s", _reasons(notes))
        # A compiled model that is not traced any more does what it did then.
        self._noted = notes or self._noted
        if None not in self._noted:
            why = _reasons(self._noted) or "no call reached it: the model, or another node's override, bypasses it"
            notices.warn(
                "attention",
                "INT8 attention did not run",
                f"a call of the model ran with ComfyUI's attention alone: {why}.",
            )
        return output


def _by_head(tensor: torch.Tensor, q: torch.Tensor, heads: int, skip_reshape: bool) -> torch.Tensor:
    """[b, heads, n, width] of what ComfyUI's attention takes: that already (`skip_reshape`), [b, n, heads * width] or
    (keys and values) [b, n, heads, width]; anything else unchanged."""
    if skip_reshape:
        return tensor
    width = q.shape[-1] // heads
    if tensor.ndim == 3 and width > 0 and tensor.shape[-1] % width == 0:
        tensor = tensor.unflatten(-1, (-1, width))
    return tensor.transpose(1, 2) if tensor.ndim == 4 else tensor


def _reasons(notes: set[str | None]) -> str:
    return "; ".join(sorted(note for note in notes if note is not None))
