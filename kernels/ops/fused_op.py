"""What a fused op is: one function in plain PyTorch, a check and a kernel's launch. All else follows from these.

    @fused_op("norms", check=..., rounds=True)
    def norm_quantize(x: torch.Tensor, norm: Norm, ...) -> Quantized:
        '''What it computes.'''
        return ...

The function's signature is the op's, and its body the reference, which runs where no kernel does. A call goes to the
kernel or to the reference; what was found out about arguments of one layout is not asked again. It is an operator too
(operators.py), whose schema follows from the signature.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import torch

from ..card.device import uses_triton
from ..operators import Operator, Result

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor | None]
Launch = Callable[[Tensors, Sequence[torch.Tensor]], None]
"""Launches a kernel on the tensors of a call, in the order of the operator's schema, to fill the results."""
_Plan = tuple[Launch | None, Sequence[Result]]

FUSED_OPS: dict[str, "FusedOp"] = {}
"""All of them, by name."""

# Layouts of many models and prompts would otherwise add up.
MOST_KEPT = 512


def _differentiated(values: Iterable[Any]) -> bool:
    """Whether a gradient is asked of a tensor among them."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _write_zeros(_: Tensors, results: Sequence[torch.Tensor]) -> None:
    for result in results:
        result.zero_()


class FusedOp(Operator[P, R]):
    """A fused op; see above.

    Args:
        reference: the op in plain PyTorch. A last parameter `out` is where the results are written.
        check: as an operator's.
        kernel: the file of triton_kernels/ whose `launch_...` is of the op's name.
        rounds: whether results are rounded. They have no gradient then, and are zeros where there are no rows.

    Where the tensor `x` is, or the first one, the op runs.
    """

    def __init__(
        self, reference: Callable[P, R], check: Callable[..., Sequence[Result]], kernel: str, rounds: bool
    ) -> None:
        super().__init__(reference, check)
        self.reference, self.rounds, self._kernel = self.function, rounds, kernel
        self._tensors, self._options = (
            itemgetter(*[place for place, word in enumerate(self._words) if word.startswith("Tensor") == wanted])
            for wanted in (True, False)
        )
        # By all of a call but its data: the launch, None for the reference, and the results' shapes and dtypes.
        self._plans: dict[tuple, _Plan] = {}
        FUSED_OPS[self.name] = self

    def launch(self, *flat: Any) -> Launch | None:
        """What launches the kernel on tensors like these, the operator's arguments, and `out` where the op has it; None
        where no kernel can."""
        module = import_module(f"..triton_kernels.{self._kernel}", __package__)
        return getattr(module, f"launch_{self.name}")(*flat)

    def _dispatched(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        out = arguments[-1] if self._has_out else None
        if not self.rounds and _differentiated(flat):
            self.check(*arguments)
            return self.reference(*arguments)
        results = self.operator(*flat)
        if out is None:
            return results
        for target, result in zip(out, (results,) if self._single else results, strict=True):
            target.copy_(result)
        return out[0] if self._single else out

    def _run(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        """The kernel, or the reference. RuntimeError where a gradient is asked to pass the rounding."""
        x, out = flat[self._x], arguments[-1] if self._has_out else None
        tensors = self._tensors(flat)
        layouts = [
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
            for tensor in (tensors if out is None else (*tensors, *out))
        ]
        key = (uses_triton(x), self._options(flat), *layouts)
        launch, results = self._plans.get(key) or self._planned(key, arguments, flat)
        if _differentiated(tensors if out is None else (*tensors, *out)):
            if self.rounds:
                raise RuntimeError(f"{self.name} has no gradient, as it rounds: run it under torch.no_grad()")
            return self.reference(*arguments)
        if launch is None:
            with torch.no_grad() if self.rounds else nullcontext():
                return self.reference(*arguments)
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in results] if out is None else out
        launch(tensors, made)
        return made[0] if self._single else tuple(made)

    def _planned(self, key: tuple, arguments: Sequence[Any], flat: Sequence[Any]) -> _Plan:
        results, launch = self.check(*arguments), None
        if not flat[self._x].numel():
            launch = _write_zeros if self.rounds else None
        elif key[0]:
            launch = self.launch(*flat, *arguments[len(self._parameters) :])
        if len(self._plans) >= MOST_KEPT:
            self._plans.clear()
        plan = self._plans[key] = launch, results
        return plan

    def _operator(self, *flat: Any) -> Any:
        """What the operator computes: rows side by side, whatever the strides of the reference's."""
        results = super()._operator(*flat)
        return results.contiguous() if self._single else tuple([result.contiguous() for result in results])


def fused_op(
    kernel: str, check: Callable[..., Sequence[Result]], rounds: bool = False
) -> Callable[[Callable[P, R]], FusedOp[P, R]]:
    """Make a fused op of its reference; see above and FusedOp."""
    return lambda reference: FusedOp(reference, check, kernel, rounds)
