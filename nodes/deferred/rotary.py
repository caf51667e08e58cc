"""Handlers of comfy-kitchen's operators: rotary positions, and norms with modulations."""

import weakref
from functools import partial
from typing import Any, Literal

import comfy_kitchen  # noqa: F401  # pyright: ignore[reportUnusedImport]  # defines its operators
import torch

from ...kernels import Norm
from . import consumers
from .mode import Deferring
from .notes import MEMORY, values_of
from .operands import Joined, Normed, Pairs, Turned
from .reading import Args, Kwargs, as_it_is, is_rows, modulation_of, on, operand_of


def _norm_then(kind: Literal["rms", "layer"], mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, scale, shift, *eps = args
    if not is_rows(x) or kwargs:
        return NotImplemented
    scaled, shifted = modulation_of(mode, scale, x), modulation_of(mode, shift, x)
    if scaled is None or shifted is None or scaled[1] is not shifted[1]:
        return NotImplemented
    operand = Normed(x, Norm(kind, eps[0] if eps else 1e-6), 1 + scaled[0], shifted[0], scaled[1])
    return mode.note(x, operand, func, args)


def _rope(pairs: Pairs, normed: bool, mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if kwargs or not all(isinstance(x, torch.Tensor) for x in args[:3]):
        return NotImplemented
    q, k, freqs, *rest = args
    norms = None, None
    if normed:
        q_scale, *others = rest
        named: Any = dict(zip(("k_scale", "eps", "rotated"), others, strict=False))
        k_scale, eps = named.get("k_scale"), named.get("eps", 1e-6)
        if named.get("rotated"):
            return NotImplemented
        norms = Norm("rms", eps, q_scale), Norm("rms", eps, q_scale if k_scale is None else k_scale)
    result = consumers.rotated(q, k, values_of(freqs), pairs, norms)
    if result is None:
        return NotImplemented
    mode.compare(result, func, args, kwargs)
    return mode.tracked(result)


def _rope_of_one(pairs: Pairs, mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let queries wait for the keys at the same positions, so that both are one launch."""
    x, freqs = args
    if kwargs or type(freqs) not in MEMORY or not isinstance(x, torch.Tensor) or len(x.shape) != 4:
        return NotImplemented
    waiting = mode.turned and mode.turned()
    if waiting is not None and waiting.operand is not None:
        turned = waiting.operand
        if turned.freqs is freqs and turned.pairs == pairs and waiting.shape[:1] == x.shape[:1]:
            both = consumers.rotated(turned.heads, x, freqs, pairs)
            if both is not None:
                if waiting.check is not None:
                    waiting.check(both[0], waiting.plain())
                mode.compare(both[1:], func, args, kwargs)
                waiting.resolve(both[0])
                return both[1]
    if operand_of(x, Normed, Joined) is None and not is_rows(x):
        return NotImplemented
    turned = mode.note(x, Turned(as_it_is(x), freqs, pairs), func, args)
    mode.turned = weakref.ref(turned.note)
    return turned


for _name, _handler in {
    "adaln": partial(_norm_then, "layer"),
    "rms_adaln": partial(_norm_then, "rms"),
    "apply_rope": partial(_rope, "neighbours", False),
    "apply_rope_split_half": partial(_rope, "halves", False),
    "rms_rope": partial(_rope, "neighbours", True),
    "rms_rope_split_half": partial(_rope, "halves", True),
    "apply_rope1": partial(_rope_of_one, "neighbours"),
    "apply_rope_split_half1": partial(_rope_of_one, "halves"),
}.items():
    _operator = getattr(torch.ops.comfy_kitchen, _name, None)
    if _operator is not None:  # or the installed one lacks it
        on(_operator, _operator.default)(_handler)
