"""comfy-kitchen's operators: rotary positions, and norms with modulations."""

from typing import Any, Literal, cast

import torch

from ...kernels import Norm
from ..comfyui.kitchen_operators import KITCHEN
from . import takers
from .mode import HANDLERS, Deferring
from .notes import called_on_values, valued
from .operands import Joined, Normed, Turned
from .reading import (
    Args,
    Kwargs,
    as_it_is,
    as_noted,
    is_rows,
    modulation_of,
    operand_of,
    rows_of,
)
from .tracked import MEMORY

Pairs = Literal["neighbours", "halves"]


def _norm_then(kind: Literal["rms", "layer"]) -> Any:
    def handler(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
        x, scale, shift, *eps = args
        if not is_rows(x) or kwargs:
            return NotImplemented
        scaled, shifted = modulation_of(scale, x), modulation_of(shift, x)
        if scaled is None or shifted is None or scaled[1] != shifted[1]:
            return NotImplemented
        rows = rows_of(mode, scaled[1], x.device)
        operand = Normed(x, Norm(kind, eps[0] if eps else 1e-6), 1 + scaled[0], shifted[0], rows)
        return mode.note(x.shape, x, operand, func, tuple(map(as_noted, args)))

    return handler


def _rope(pairs: Pairs, normed: bool) -> Any:
    def handler(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if kwargs or not all(isinstance(x, torch.Tensor) for x in args[:3]):
            return NotImplemented
        q, k, freqs, *rest = args
        norms = None, None
        if normed:
            q_scale, *others = rest
            named: Any = dict(zip(("k_scale", "eps", "rotated"), others, strict=False))
            k_scale, eps, rotated = named.get("k_scale"), named.get("eps", 1e-6), named.get("rotated", 0)
            if rotated:
                return NotImplemented
            norms = Norm("rms", eps, q_scale), Norm("rms", eps, q_scale if k_scale is None else k_scale)
        return _turned(mode, func, args, takers.rotated(q, k, valued(freqs), pairs, norms))

    return handler


def _turned(mode: Deferring, func: Any, args: Args, result: Any) -> Any:
    if result is None:
        return NotImplemented
    if mode.checking:
        for fused, plain in zip(result, called_on_values(func, args, {}), strict=True):
            mode.compare(fused, plain)
    return mode.tracked(result)


def _rope_of_one(pairs: Pairs) -> Any:
    """Queries wait for the keys at the same positions, so that both are one launch."""

    def handler(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
        x, freqs = args
        if kwargs or type(freqs) not in MEMORY or not isinstance(x, torch.Tensor) or len(x.shape) != 4:
            return NotImplemented
        waiting = mode.waiting()
        if waiting is not None and waiting.operand is not None:
            turned = waiting.operand
            if turned.freqs is freqs and turned.pairs == pairs and waiting.shape[:1] == x.shape[:1]:
                both = takers.rotated(turned.heads, x, freqs, pairs)
                if both is not None:
                    if mode.checking:
                        mode.compare(both[0], cast(torch.Tensor, waiting.expected))
                        mode.compare(both[1], called_on_values(func, args, {}))
                    waiting.known_value(both[0])
                    return both[1]
        if operand_of(x, Normed, Joined) is None and not is_rows(x):
            return NotImplemented
        turned = mode.note(x.shape, x, Turned(as_it_is(x), freqs, pairs), func, (as_noted(x), freqs))
        mode.waits(turned.note)
        return turned

    return handler


for _name, _handler in {
    "adaln": _norm_then("layer"),
    "rms_adaln": _norm_then("rms"),
    "apply_rope": _rope("neighbours", False),
    "apply_rope_split_half": _rope("halves", False),
    "rms_rope": _rope("neighbours", True),
    "rms_rope_split_half": _rope("halves", True),
    "apply_rope1": _rope_of_one("neighbours"),
    "apply_rope_split_half1": _rope_of_one("halves"),
}.items():
    HANDLERS.update(dict.fromkeys(KITCHEN.get(_name, ()), _handler))
