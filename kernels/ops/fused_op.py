"""What a fused op is: one function in plain PyTorch, a check and a kernel's launch. All else follows from these.

    @fused_op(check=..., launch=..., rounds=True)
    def norm_quantize(x: torch.Tensor, norm: Norm, ...) -> Quantized:
        '''What it computes.'''
        return ...

The function's signature is the op's, and its body the reference, which runs where no kernel does. A call goes to the
kernel or to the reference; what was found out about arguments of one layout is not asked again. To a compiler the op is
an opaque operator, `torch.ops.int8_dit.norm_quantize`, with the fields of a Norm and of a ChannelTransform as arguments
of their own.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from ..card.device import uses_triton
from ..compilers import NAMESPACE, define_operators, watched

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor | None]
Launch = Callable[[Tensors, Sequence[torch.Tensor]], None]
"""Launches a kernel on the tensors of a call, in the order of the operator's schema, to fill the results."""
_Plan = tuple[Launch | None, list[tuple[torch.Size, torch.dtype]]]

FUSED_OPS: dict[str, "FusedOp"] = {}
"""All of them, by name."""

# Layouts of many models and prompts would otherwise add up.
MOST_KEPT = 512
_WORDS = {torch.Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool"}


class _Parameter(NamedTuple):
    """A parameter of an op; `fields` and `absent`, the values that stand for None, if its value is a dataclass."""

    kind: type
    optional: bool
    schema: tuple[str, ...]
    fields: tuple[str, ...] = ()
    absent: tuple = ()


def _kind(hint: Any) -> tuple[type, bool]:
    """The type that an annotation names, and whether it may be None."""
    given = get_args(hint)
    if type(None) in given:
        return given[0], True
    return (type(given[0]) if get_origin(hint) is Literal else hint), False


def _parameter(name: str, hint: Any) -> _Parameter:
    kind, optional = _kind(hint)
    if not is_dataclass(kind):
        return _Parameter(kind, optional, (f"{_WORDS[kind]}{'?' if optional else ''} {name}",))
    # The fields of `q_norm` are q_kind, q_eps and so on; those of `norm` have no prefix.
    head, joint, _ = name.rpartition("_")
    hints, names = get_type_hints(kind), tuple(field.name for field in fields(kind))
    kinds = [_kind(hints[field]) for field in names]
    # A value that is None has None as its first field.
    nullable = [may or place == 0 for place, (_, may) in enumerate(kinds)]
    words = [f"{_WORDS[of]}{'?' if may else ''}" for (of, _), may in zip(kinds, nullable, strict=True)]
    schema = tuple(f"{word} {head}{joint}{field}" for word, field in zip(words, names, strict=True))
    absent = tuple(None if may else of() for (of, _), may in zip(kinds, nullable, strict=True))
    return _Parameter(kind, optional, schema, names, absent)


def _picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


def _differentiated(values: Iterable[Any]) -> bool:
    """Whether a gradient is asked of a tensor among them."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _write_zeros(_: Tensors, results: Sequence[torch.Tensor]) -> None:
    for result in results:
        result.zero_()


class FusedOp(Generic[P, R]):
    """A fused op; see above.

    Args:
        reference: the op in plain PyTorch. Its parameters are tensors, plain values and dataclasses of these. A last
            parameter `out` is where the results are written; the operator has none.
        check: takes the op's arguments. It raises TypeError or ValueError for bad ones, and returns new results.
        launch: takes the operator's arguments, and `out` where the op has it. It returns what launches the kernel on
            tensors of these layouts, or None where no kernel can.
        rounds: whether results are rounded. They have no gradient then, and are zeros where there are no rows.

    The rows are the tensor `x`, or the first one. Where they are, the op runs.
    """

    def __init__(
        self, reference: Callable[P, R], check: Callable[..., Any], launch: Callable[..., Launch | None], rounds: bool
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name, self.reference, self.check = reference.__name__, cast("Callable[..., R]", reference), check
        self.launch, self.rounds = launch, rounds
        hints, signature = get_type_hints(reference), inspect.signature(reference)
        self._names = tuple(signature.parameters)
        self._defaults = tuple(parameter.default for parameter in signature.parameters.values())
        self._required = self._defaults.count(inspect.Parameter.empty)
        self._has_out = "out" in signature.parameters
        names = [name for name in signature.parameters if name != "out"]
        self._rows = names.index("x") if "x" in names else 0
        self._parameters = [_parameter(name, hints[name]) for name in names]
        self._fields = [parameter.fields for parameter in self._parameters]
        self._absent = [parameter.absent for parameter in self._parameters]
        words = [word for parameter in self._parameters for word in parameter.schema]
        self._tensors, self._options = (
            _picker([place for place, word in enumerate(words) if word.startswith("Tensor") == wanted])
            for wanted in (True, False)
        )
        # By all of a call but its data: the launch, None for the reference, and the results' shapes and dtypes.
        self._plans: dict[tuple, _Plan] = {}

        self._single = hints["return"] is torch.Tensor
        schema = f"{self.name}({', '.join(words)}) -> {'Tensor' if self._single else '(Tensor, Tensor)'}"
        define_operators({schema: (self._operator, self._fake)})
        self.operator = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        FUSED_OPS[self.name] = self

    def __call__(self, *given: P.args, **named: P.kwargs) -> R:
        """The op. Raises what the check does, and RuntimeError where a gradient is asked to pass the rounding."""
        if named or not self._required <= len(given) <= len(self._names):
            arguments = self._bound(given, named)
        else:
            arguments = cast(Any, given) + self._defaults[len(given) :]
        flat = self.flat(arguments)
        if not watched(arguments[self._rows]):
            return self._run(arguments, flat)
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

    def flat(self, arguments: Sequence[Any]) -> list[Any]:
        """The operator's arguments for the op's."""
        flat = []
        for value, names, absent in zip(arguments, self._fields, self._absent, strict=False):
            if not names:
                flat.append(value)
            elif value is None:
                flat += absent
            else:
                flat += [getattr(value, name) for name in names]
        return flat

    def _structured(self, flat: Sequence[Any]) -> list[Any]:
        """The op's arguments for the operator's."""
        values, arguments = iter(flat), []
        for parameter in self._parameters:
            own = [next(values) for _ in parameter.schema]
            if not parameter.fields:
                arguments += own
            else:
                absent = parameter.optional and own[0] is None
                arguments.append(None if absent else parameter.kind(*own))
        return [*arguments, None] if self._has_out else arguments

    def _bound(self, given: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments by their places; raises TypeError for those that the op does not have, or lacks."""
        rest = list(zip(self._names, self._defaults, strict=True))[len(given) :]
        arguments = [*given, *[named.get(name, default) for name, default in rest]]
        known = [name for name, _ in rest if name in named]
        wrong = len(arguments) > len(self._names) or len(known) < len(named)
        if wrong or any(argument is inspect.Parameter.empty for argument in arguments):
            inspect.signature(self.reference).bind(*given, **named)  # which says what is wrong
        return arguments

    def _run(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        """The kernel, or the reference."""
        rows, out = arguments[self._rows], arguments[-1] if self._has_out else None
        tensors = self._tensors(flat)
        layouts = [
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
            for tensor in (tensors if out is None else (*tensors, *out))
        ]
        key = (uses_triton(rows), self._options(flat), *layouts)
        launch, results = self._plans.get(key) or self._planned(key, arguments, flat)
        if _differentiated(tensors if out is None else (*tensors, *out)):
            if self.rounds:
                raise RuntimeError(f"{self.name} has no gradient, as it rounds: run it under torch.no_grad()")
            return self.reference(*arguments)
        if launch is None:
            with torch.no_grad() if self.rounds else nullcontext():
                return self.reference(*arguments)
        made = [rows.new_empty(shape, dtype=dtype) for shape, dtype in results] if out is None else out
        launch(tensors, made)
        return made[0] if self._single else tuple(made)

    def _planned(self, key: tuple, arguments: Sequence[Any], flat: Sequence[Any]) -> "_Plan":
        results = self.check(*arguments)
        results = (results,) if self._single else results
        if not arguments[self._rows].numel():
            launch = _write_zeros if self.rounds else None
        else:
            launch = self.launch(*flat, *arguments[len(self._parameters) :]) if key[0] else None
        if len(self._plans) >= MOST_KEPT:
            self._plans.clear()
        plan = self._plans[key] = launch, [(result.shape, result.dtype) for result in results]
        return plan

    def _operator(self, *flat: Any) -> Any:
        """What the operator computes: rows side by side, whatever the strides of the reference's."""
        results = self._run(self._structured(flat), flat)
        return results.contiguous() if self._single else tuple([result.contiguous() for result in results])

    def _fake(self, *flat: Any) -> Any:
        """What its results look like."""
        return self.check(*self._structured(flat))


def fused_op(
    check: Callable[..., Any], launch: Callable[..., Launch | None], rounds: bool = False
) -> Callable[[Callable[P, R]], FusedOp[P, R]]:
    """Make a fused op of its reference; see above and FusedOp."""
    return lambda reference: FusedOp(reference, check, launch, rounds)
