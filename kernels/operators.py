"""What an operator of the pack is: a function and a check. All else follows from these.

    @operator("int8_gemm(Tensor q, Tensor q_scale, ...) -> Tensor", check=...)
    def int8_gemm(q: torch.Tensor, q_scale: torch.Tensor, ...) -> torch.Tensor:
        '''What it computes.'''
        return ...

A call is checked and computed. To a compiler it is an opaque operator, `torch.ops.int8_dit.int8_gemm`, with the fields
of a ChannelTransform and of a LowRank as arguments of their own; the check says what its results look like.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from .compilers import is_dispatched

P = ParamSpec("P")
R = TypeVar("R")
Result = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a result."""

NAMESPACE = "int8_dit"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # an operator lives as long as its library
_WORDS = {torch.Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}


class _Parameter(NamedTuple):
    """A parameter of an op; `fields` and `absent`, the values that stand for None, if its value has fields."""

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
    names: tuple[str, ...] = tuple(getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ()))
    if not names:
        return _Parameter(kind, optional, (f"{_WORDS[kind]}{'?' if optional else ''} {name}",))
    # The fields of `q_norm` are q_kind, q_eps and so on; those of `norm` have no prefix.
    head, joint, _ = name.rpartition("_")
    hints = get_type_hints(kind)
    kinds = [_kind(hints[field]) for field in names]
    # A value that is None has None as its first field.
    nullable = [may or place == 0 for place, (_, may) in enumerate(kinds)]
    words = [f"{_WORDS[of]}{'?' if may else ''}" for (of, _), may in zip(kinds, nullable, strict=True)]
    schema = tuple(f"{word} {head}{joint}{field}" for word, field in zip(words, names, strict=True))
    absent = tuple(None if may else of() for (of, _), may in zip(kinds, nullable, strict=True))
    return _Parameter(kind, optional, schema, names, absent)


class Operator(Generic[P, R]):
    """An operator; see above.

    The pack can be imported twice in one process under different names (as ComfyUI's custom node and as plain
    `kernels`), but operators belong to the process: the first import defines them, and the second uses those.

    Args:
        function: what is computed of arguments that have passed the check: tensors, plain values, and dataclasses and
            named tuples of these.
        check: takes the same. It raises TypeError or ValueError for bad ones, RuntimeError where a gradient is asked
            that the results cannot have, and returns shape and dtype of each result. None for an operator that is
            composed of others: a compiler sees those.
        schema: of the operator; None for what follows from the signature. A last parameter `out` is none of the
            operator's.

    The results are made where the tensor `x` is, or the first one.
    """

    def __init__(
        self, function: Callable[P, R], check: Callable[..., Sequence[Result]] | None, schema: str | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = cast("Callable[..., R]", function)
        self.check = check or (lambda *_: ())
        hints, signature = get_type_hints(function), inspect.signature(function)
        self._names = tuple(signature.parameters)
        self._defaults = tuple(parameter.default for parameter in signature.parameters.values())
        self._required = self._defaults.count(inspect.Parameter.empty)
        self._has_out = "out" in signature.parameters
        self._parameters = [_parameter(name, hints[name]) for name in self._names if name != "out"]
        self._fields = [parameter.fields for parameter in self._parameters]
        self._absent = [parameter.absent for parameter in self._parameters]
        self._words = [word for parameter in self._parameters for word in parameter.schema]
        self._x = self._words.index("Tensor x") if "Tensor x" in self._words else 0
        self._single = hints["return"] is torch.Tensor
        if schema is None:
            results = "Tensor" if self._single else "(Tensor, Tensor)"
            schema = f"{function.__name__}({', '.join(self._words)}) -> {results}"
        self.name = schema.partition("(")[0]
        self._define(schema, composed=check is None)
        self.operator = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self._schema_defaults = [argument.default_value for argument in self.operator._schema.arguments]

    def _define(self, schema: str, composed: bool) -> None:
        """It is opaque, and refuses gradients itself, where that costs least."""
        if hasattr(getattr(torch.ops, NAMESPACE), self.name):
            return
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        if composed:
            _library.impl(self.name, self._operator, "CompositeImplicitAutograd")
            return
        _library.impl(self.name, self._operator, "CompositeExplicitAutograd")
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake, lib=_library)

    def __call__(self, *given: P.args, **named: P.kwargs) -> R:
        """What the function computes. Raises what the check does."""
        if named or not self._required <= len(given) <= len(self._names):
            arguments = self._bound(given, named)
        else:
            arguments = cast(Any, given) + self._defaults[len(given) :]
        flat = self.flat(arguments)
        return (self._dispatched if is_dispatched(flat[self._x]) else self._run)(arguments, flat)

    def _dispatched(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        """A call through the dispatcher."""
        return self.operator(*flat)

    def _run(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        """A call that goes straight to the function."""
        self.check(*arguments)
        return self.function(*arguments)

    def flat(self, arguments: Sequence[Any]) -> list[Any]:
        """The operator's arguments for the function's."""
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
        """The function's arguments for the operator's, of which those at the end may be missing."""
        values, arguments = iter([*flat, *self._schema_defaults[len(flat) :]]), []
        for parameter in self._parameters:
            own = [next(values) for _ in parameter.schema]
            if not parameter.fields:
                arguments += own
            else:
                absent = parameter.optional and own[0] is None
                arguments.append(None if absent else parameter.kind(*own))
        return [*arguments, None] if self._has_out else arguments

    def _bound(self, given: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments by their places; raises TypeError for those that the function does not have, or lacks."""
        rest = list(zip(self._names, self._defaults, strict=True))[len(given) :]
        arguments = [*given, *[named.get(name, default) for name, default in rest]]
        known = [name for name, _ in rest if name in named]
        wrong = len(arguments) > len(self._names) or len(known) < len(named)
        if wrong or any(argument is inspect.Parameter.empty for argument in arguments):
            inspect.signature(self.function).bind(*given, **named)  # which says what is wrong
        return arguments

    def _operator(self, *flat: Any) -> Any:
        """What the operator computes."""
        return self._run(self._structured(flat), flat)

    def _fake(self, *flat: Any) -> Any:
        """What its results look like."""
        x = flat[self._x]
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in self.check(*self._structured(flat))]
        return made[0] if self._single else tuple(made)


def operator(schema: str, check: Callable[..., Sequence[Result]] | None) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of a function; see above and Operator."""
    return lambda function: Operator(function, check, schema)
