"""What a MODEL's attention computes with: ComfyUI's own, or comfy-kitchen's INT8 attention where that applies.

Where ComfyUI's layers have preferences of their own, a call that INT8 attention does not take is left to them.
"""

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..comfyui.attention import (
    OVERRIDE,
    Attention,
    any_chooses,
    comfyuis_attention,
    in_containers,
    kitchen_attention,
    kitchen_attention_runs,
    kitchen_halves,
    kitchen_takes_masks,
    kitchen_version,
    put_before_choices,
    without_override,
)
from ..comfyui.patcher import ModelPatcher, WrappersMP, options_of
from ..host import notices

AS_COMFYUI = "as ComfyUI"
INT8 = "INT8 (comfy-kitchen)"
ATTENTION_CHOICES = (AS_COMFYUI, INT8)

_KEY = "int8_dit_attention"
_VERSION = "0.2.29"  # the first with INT8 attention
_OLDEST_CAPABILITY = (7, 5)
_WIDEST_HEAD = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MASK_DTYPES = (torch.bool, *_DTYPES)
_MOST_HEADS = 65535  # of all samples together: what a grid of CUDA has room for
_KNOWN_KEYWORDS = {"scale", "enable_gqa", "low_precision_attention", "transformer_options", "_inside_attn_wrapper"}

Halves = tuple[Callable[..., Any], ...]

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
    outer = options.get(OVERRIDE)
    if choice == AS_COMFYUI or isinstance(outer, INT8Attention):
        return
    kernel = kitchen_attention()
    assert kernel is not None  # or check_attention has raised
    override = INT8Attention(kernel, model.load_device, outer, kitchen_halves())
    options[OVERRIDE] = override
    override.put_before_choices(model)
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, override.watch)


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
            head width]; with attn_mask=, broadcastable to [batch, heads, queries, keys], if it takes masks.
        device: where the kernel runs.
        outer: the override that was there before. It is called as ComfyUI calls it, with INT8 attention in place of
            ComfyUI's function: so what it does to its inputs is still done.
        halves: the same in two functions, of which the first takes what the kernel takes and keeps none of it; the
            second takes what the first returns.
    """

    def __init__(
        self,
        kernel: Attention,
        device: torch.device,
        outer: Attention | None = None,
        halves: Halves | None = None,
    ) -> None:
        self._kernel, self._device, self._outer, self._halves = kernel, device, outer, halves
        self._takes_masks = kitchen_takes_masks(kernel)
        self._before: tuple[str, ...] = ()
        self._noted: set[str | None] = set()
        if outer is None:  # else ComfyUI takes the tensors out of their containers, for the other override
            self.container_function = functools.partial(self._attend, comfyuis_attention)

    def __call__(self, func: Attention, *args, **kwargs) -> torch.Tensor:
        if self._outer is None:
            return self._attend(func, *args, **kwargs)
        return self._outer(functools.wraps(func)(functools.partial(self._attend, func)), *args, **kwargs)

    def put_before_choices(self, model: ModelPatcher) -> None:
        """Let the layers of a MODEL that may choose their attention have this one, and decline to their choice.

        ComfyUI does not tell an override which layer calls. Where a layer has a choice, this object therefore stands
        aside as an override, for calls of the MODEL that no other override is before.
        """
        if self._outer is None:
            self._before = put_before_choices(model, self._attend)

    def _attend(
        self,
        otherwise: Attention,
        q: Any,
        k: Any,
        v: Any,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The arguments are those of ComfyUI's attention functions, q, k and v in containers or not. `otherwise` takes
        the same."""
        contained = in_containers(q)
        flat = [tensor.peek() for tensor in (q, k, v)] if contained else [q, k, v]
        q4, k4, v4 = (_by_head(tensor, flat[0], heads, skip_reshape) for tensor in flat)
        full_mask = mask if mask is None or mask.ndim > 3 else mask[(None,) * (3 - mask.ndim)].unsqueeze(1)
        misfit = self._misfit(q4, k4, v4, heads, full_mask, attn_precision, kwargs)
        _note(misfit)
        if misfit is not None:
            return otherwise(
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
        dense = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q4, k4, v4)]
        options = {"scale": kwargs.get("scale")} | ({} if full_mask is None else {"attn_mask": full_mask})
        for container in (q, k, v) if contained else ():
            container.take()
        if contained and self._halves is not None and not torch.compiler.is_compiling():
            quantize, attend = self._halves
            quantized = quantize(*dense, **options)
            del flat, q4, k4, v4, dense  # the last that hold them
            output = attend(quantized)
        else:
            output = self._kernel(*dense, **options)
        return output if skip_output_reshape else output.transpose(1, 2).flatten(2)

    def _misfit(self, q, k, v, heads, mask, attn_precision, keywords) -> str | None:
        """Why INT8 attention does not take a call, in words for the user, or None where it does. q, k, v as `_by_head`
        gives them; `mask` of four axes."""
        if mask is not None and not self._takes_masks:
            return "it has a mask, which this comfy-kitchen does not take"
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
        if usual and mask is not None:
            full = (q.shape[0], heads, q.shape[2], k.shape[2])
            fits = mask.ndim == 4 and all(size in (1, most) for size, most in zip(mask.shape, full, strict=True))
            usual = fits and mask.dtype in _MASK_DTYPES and mask.device == q.device
        return None if usual else "its shapes or options are unusual"

    def watch(self, executor: Any, *args, **kwargs) -> Any:
        """A wrapper of ComfyUI's around each call of the model, which says where INT8 attention did not run.

        Where a layer has a choice of its own, the model is called without the override.
        """
        if self._before and any_chooses(executor, self._before):
            args = tuple(without_override(argument, self) for argument in args)
            kwargs = {name: without_override(argument, self) for name, argument in kwargs.items()}
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
