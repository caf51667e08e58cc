"""The operators of the pack. Each is a function and a kernel; schema, fake, dispatch and plans follow from these.

    @operator(kernel="fused_ops.fused_kernels", rounds=True)
    def norm_quantize(x: torch.Tensor, norm: Norm, ...) -> Operation[Quantized]:
        '''What it computes.'''
        check_tokens("x", x)
        yield [(shape, torch.int8), ((rows,), torch.float32)]
        yield q, scale

The function checks its arguments, yields shape and dtype of each result, and then the results in plain PyTorch: the
reference, which runs where no kernel does. The kernel's launch is `launch_norm_quantize` of fused_ops/fused_kernels.py:
the first call with arguments of a layout (shapes, strides, dtypes, devices) asks it for a launch, and later ones find
that in the cache. To a compiler the operator is opaque, `torch.ops.int8_dit.norm_quantize`, with the fields of a Norm,
a ChannelTransform or a LowRank as arguments of their own.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch

from .call_cache import CACHE, store
from .card.device import uses_triton
from .checks import check_same_device
from .compilers import is_dispatched

P = ParamSpec("P")
R = TypeVar("R")
Result = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a result."""
Operation = Iterator[list[Result] | R]
"""What an operator's function yields: shape and dtype of each result, and the results."""
Tensors = Sequence[Any]
"""The tensors of a call in the order of the operator's schema, None for a missing one."""
OperatorLaunch = Callable[[Tensors, Sequence[torch.Tensor]], None]
"""Launches a kernel on the tensors of a call to fill the results."""

NAMESPACE = "int8_dit"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # an operator lives as long as its library
_WORDS = {torch.Tensor: "Tensor", str: "str", int: "int", float: "float", bool: "bool", torch.dtype: "ScalarType"}


class OperatorCall(NamedTuple):
    """A call of an operator: its arguments, with shape and dtype in place of each tensor."""

    operator: "Operator"
    arguments: tuple[Any, ...]

    def with_tensors(self, new: Callable[..., Any]) -> list[Any]:
        """Return the function's arguments, with tensors that `new` makes of a shape and a dtype."""
        flat = [new(*each[0], dtype=each[1]) if isinstance(each, tuple) else each for each in self.arguments]
        return self.operator._structured(flat)


class _Parameter(NamedTuple):
    kind: type
    schema: list[str]  # such as `int? rotation_group`
    fields: tuple[str, ...] = ()  # of a dataclass or named tuple: the schema has q_norm_kind, q_norm_eps, ...
    absent: tuple = ()  # the fields of a value that is None, where it may be


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type that an annotation names, and whether it may be None."""
    given = get_args(hint)
    if type(None) in given:
        return given[0], True
    return (type(given[0]) if get_origin(hint) is Literal else hint), False


def _parameter(name: str, hint: Any) -> _Parameter:
    kind, optional = _kind(hint)
    fields: tuple[str, ...] = tuple(getattr(kind, "_fields", ()) or getattr(kind, "__dataclass_fields__", ()))
    if not fields:
        return _Parameter(kind, [f"{_WORDS[kind]}{'?' if optional else ''} {name}"])
    hints, schema, absent = get_type_hints(kind), [], []
    for field in fields:
        of, may = _kind(hints[field])
        # A value that is None has None as its first field, and no tensors.
        may = may or (optional and (not absent or of is torch.Tensor))
        schema.append(f"{_WORDS[of]}{'?' if may else ''} {name}_{field}")
        absent.append(of() if optional and not may else None)
    return _Parameter(kind, schema, fields, tuple(absent) if optional else ())


def _differentiated(values: Iterable[Any]) -> bool:
    """Whether a tensor among them requires a gradient."""
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


class Operator(Generic[P, R]):
    """An operator; see above. Its results are allocated where the tensor `x` is, or the first one.

    The pack can be imported twice in one process under different names (as ComfyUI's custom node and as plain
    `kernels`), but operators belong to the process: the first import defines them, and the second uses those.

    Args:
        function: takes tensors, plain values, and dataclasses and named tuples of these. It raises TypeError or
            ValueError for bad ones, but does not check that all tensors are on one device. A last parameter `out`, none
            of the operator's, is where the results are written.
        kernel: the module under kernels/ whose `launch_...` is of the op's name. It takes the tensors of a call in the
            order of the schema, what else the schema has, and `out` if there is one.
        rounds: whether results are rounded, so that they have no gradient; or the names of the tensors that would need
            one, as the others are constants.
    """

    def __init__(
        self, function: Callable[P, Operation[R]], kernel: str, rounds: bool | tuple[str, ...] = False
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = cast("Callable[..., Iterator[Any]]", function)
        hints, self._signature = get_type_hints(function), inspect.signature(function)
        names = tuple(self._signature.parameters)
        self._defaults = tuple(parameter.default for parameter in self._signature.parameters.values())
        self._required = self._defaults.count(inspect.Parameter.empty)
        self._has_out = "out" in names
        self._parameters = [_parameter(name, hints[name]) for name in names if name != "out"]
        self._fields = [parameter.fields for parameter in self._parameters]
        self._absent = [parameter.absent for parameter in self._parameters]
        self._words = words = [word for parameter in self._parameters for word in parameter.schema]
        self._x = words.index("Tensor x") if "Tensor x" in words else 0
        self._single = torch.Tensor in get_args(*get_args(hints["return"]))
        self.name = function.__name__.removeprefix("_")
        self._define(f"{self.name}({', '.join(words)}) -> {'Tensor' if self._single else '(Tensor, Tensor)'}")
        self.operator = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        self.kernel, self.rounds = kernel, rounds is not False
        places = [place for place, word in enumerate(words) if word.startswith("Tensor")]
        self._others = [place for place in range(len(words)) if place not in places]
        self._options = itemgetter(*self._others)
        self._tensors = itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
        self._tensor_names = [*[words[place].split()[1] for place in places], "out", "out of k"]
        self._refused = range(len(words)) if rounds is True else [words.index(f"Tensor {of}") for of in rounds or ()]

    def _define(self, schema: str) -> None:
        # It is opaque, and refuses gradients itself, where that costs least.
        if hasattr(getattr(torch.ops, NAMESPACE), self.name):
            return
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(self.name, self._operator, "CompositeExplicitAutograd")
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake, lib=_library)

    def __call__(self, *given: P.args, **named: P.kwargs) -> R:
        """Return the results. Raises what the function does; RuntimeError where a gradient would pass a rounding."""
        if named or not self._required <= len(given) <= len(self._defaults):
            arguments = self._bound(given, named)
        else:
            arguments = cast(Any, given) + self._defaults[len(given) :]
        flat = self.flat(arguments)
        if is_dispatched(flat[self._x]):
            return self._dispatched(arguments, flat)
        return self._run(arguments, flat)

    def reference(self, *arguments: Any) -> R:
        """Return the results in plain PyTorch."""
        _, results = self.function(*arguments)
        return cast(R, results)

    def _bound(self, given: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in order; raise TypeError for those that the function does not have, or lacks."""
        bound = self._signature.bind(*given, **named)
        bound.apply_defaults()
        return bound.args

    def flat(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the operator's arguments for the function's."""
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
        """Return the function's arguments for the operator's: the inverse of `flat`."""
        values, arguments = iter(flat), []
        for parameter in self._parameters:
            own = [next(values) for _ in parameter.schema]
            if not parameter.fields:
                arguments += own
            else:
                arguments.append(None if parameter.absent and own[0] is None else parameter.kind(*own))
        return [*arguments, None] if self._has_out else arguments

    def _dispatched(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        out = arguments[-1] if self._has_out else None
        if not self.rounds and _differentiated(flat):
            return self.reference(*arguments)
        results = self.operator(*flat)
        if out is None:
            return results
        for target, result in zip(out, (results,) if self._single else results, strict=True):
            target.copy_(result)
        return out[0] if self._single else out

    def _run(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        """Launch the kernel, or compute the reference."""
        out, tensors = arguments[-1] if self._has_out else None, self._tensors(flat)
        launch, results = self._plan(arguments, flat, tensors if out is None else (*tensors, *out))
        if torch.is_grad_enabled():
            self._refuse_gradient(flat)
            if not self.rounds and _differentiated(tensors if out is None else (*tensors, *out)):
                return self.reference(*arguments)
        if launch is None:
            with torch.no_grad() if self.rounds else nullcontext():
                return self.reference(*arguments)
        x = flat[self._x]
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in results] if out is None else out
        launch(tensors, made)
        return made[0] if self._single else tuple(made)

    def _refuse_gradient(self, flat: Sequence[Any]) -> None:
        if _differentiated([flat[place] for place in self._refused]):
            raise RuntimeError(f"{self.name} has no gradient, as it rounds: run it under torch.no_grad()")

    def _plan(
        self, arguments: Sequence[Any], flat: Sequence[Any], tensors: Tensors
    ) -> tuple[OperatorLaunch | None, Sequence[Result]]:
        """Return the cached launch for arguments of such layouts, None for the reference, and the results' layouts.

        Raises what the function does.
        """
        launches = uses_triton(flat[self._x])
        layouts: list[Any] = []
        for tensor in tensors:
            if tensor is None:
                layouts.append(None)
            else:
                layouts += tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
        key = (self, launches, self._options(flat), *layouts)
        known = CACHE.get(key)
        if known is not None:
            return known
        results, launch = self._results(arguments, tensors), None
        if launches and all(tensor is None or tensor.numel() for tensor in tensors):
            launch = self.launch(*flat, *arguments[len(self._parameters) :])
        return store(key, (launch, results))

    def _results(self, arguments: Sequence[Any], tensors: Tensors) -> Sequence[Result]:
        """Return the results' layouts. Raises what the function does, and ValueError for tensors on two devices."""
        results = next(self.function(*arguments))
        check_same_device(**dict(zip(self._tensor_names, tensors, strict=False)))
        return results

    def called_with(self, *arguments: Any) -> OperatorCall:
        """Return the description of a call with arguments like these."""
        flat = self.flat(self._bound(arguments, {}))
        return OperatorCall(self, tuple([(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in flat]))

    def compile_by(self, threads: Any, rank: float, *arguments: Any) -> None:
        """Let background threads compile the kernel for arguments like these, whose tensors are StandIns."""
        arguments = self._bound(arguments, {})
        flat = self.flat(arguments)
        tensors, x = self._tensors(flat), flat[self._x]
        made = [type(x)(shape, dtype, x.device) for shape, dtype in self._results(arguments, tensors)]
        compile_by = getattr(self.launch(*flat, *arguments[len(self._parameters) :]), "compile_by", None)
        if compile_by is not None:
            compile_by(threads, rank, tensors, made)

    def at_once(self, *given: P.args, **named: P.kwargs) -> R:
        """Return the results, by the reference while background threads compile the kernel."""
        arguments = self._bound(given, named)
        flat = self.flat(arguments)
        tensors = self._tensors(flat)
        launch, results = self._plan(arguments, flat, tensors)
        need_not_wait = getattr(launch, "need_not_wait", None)
        if need_not_wait is None or need_not_wait(tensors, results):
            return self(*given, **named)
        return self.reference(*arguments)

    def launch_of(self, *arguments: Any) -> Any:
        """Return the cached launch for arguments of such layouts; None for the reference."""
        flat = self.flat(arguments)
        return self._plan(arguments, flat, self._tensors(flat))[0]

    def launch(self, *flat: Any) -> OperatorLaunch | None:
        """Return the kernel's launch on tensors like those of the operator's arguments, and on `out`; None where no
        kernel can."""
        module = import_module(f".{self.kernel}", __package__)
        options, out = [flat[place] for place in self._others], flat[len(self._words) :]
        return getattr(module, f"launch_{self.name}")(self._tensors(flat), *options, *out)

    def _operator(self, *flat: Any) -> Any:
        """Implement the operator: contiguous results, whatever the strides of the reference's."""
        results = self._run(self._structured(flat), flat)
        return results.contiguous() if self._single else tuple([result.contiguous() for result in results])

    def _fake(self, *flat: Any) -> Any:
        """Return empty results, as the operator's fake."""
        self._refuse_gradient(flat)
        x, results = flat[self._x], self._results(self._structured(flat), self._tensors(flat))
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in results]
        return made[0] if self._single else tuple(made)


def operator(
    kernel: str, rounds: bool | tuple[str, ...] = False
) -> Callable[[Callable[P, Operation[R]]], Operator[P, R]]:
    """Decorate a function as an Operator."""
    return lambda function: Operator(function, kernel, rounds)
