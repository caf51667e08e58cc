"""One real forward of a MODEL, timed and split into linears, attention and the rest."""

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ...kernels import BF16
from ...kernels.benchmark import AttentionCall, Calls, ForwardSplit, Product, Stopwatch
from ..comfyui.attention import OVERRIDE
from ..comfyui.patcher import ModelPatcher, WrappersMP, options_of
from ..comfyui.sampling import empty_latent, euler, latent_of, sample, simple_sigmas
from ..layers.layer_selection import quantizable_linears
from .attention import attention_call
from .blocks import block_lists

_NULL_CONDITIONING = [[None, {}]]
_KEY = "int8_dit_benchmark"
_PIXELS = 1024
# A forward is compared, five find out whether deferring is faster. Then some are timed as they are, one with a clock at
# each block, one with a clock at each linear.
_PLAIN, _BLOCKS, _LINEARS = (7, 8, 9), 10, 11
_WORTH_TIMING, _MOST_ATTENTION_CALLS = 0.98, 4
# A model of more weights keeps a CPU for minutes.
_MOST_WEIGHTS_ON_CPU = 100e6


class NoForward(Exception):
    """No forward of this MODEL can be measured here; the message says why, and what to do."""


def measure_forward(
    model: ModelPatcher, positive: list | None, latent: dict | None, check: Callable[[], None]
) -> ForwardSplit:
    """Sample a few steps of a MODEL and time the last ones; nothing of it stays in `model`.

    Without `positive` the model runs without text, without `latent` at 1024 px. Raises NoForward where that fails,
    what `check` raises between steps.
    """
    if model.load_device.type == "cpu" and _weights(model) > _MOST_WEIGHTS_ON_CPU:
        raise NoForward("a forward of a model of this size takes too long on a CPU")
    watched = model.clone()
    clock = _Clock(watched, check)
    watched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, clock.call)
    samples = latent_of(watched, empty_latent(watched, _PIXELS) if latent is None else latent)
    sigmas = simple_sigmas(watched, _LINEARS)
    try:
        prompt = positive or _NULL_CONDITIONING
        sample(watched, prompt, None, 1.0, euler(), sigmas, samples, 0, lambda *_: check())
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        if positive is not None and latent is not None:
            raise
        raise NoForward(f"connect positive and latent_image to measure a forward of this model ({error})") from error
    return clock.split()


def _weights(model: ModelPatcher) -> float:
    return sum(parameter.numel() for parameter in model.model.diffusion_model.parameters())


class _Clock:
    """Times calls of a MODEL: one undisturbed, one with every block watched, one with every linear and attention."""

    def __init__(self, model: ModelPatcher, check: Callable[[], None]) -> None:
        self._linears = quantizable_linears(model)
        self._lists = block_lists(model.model.diffusion_model)
        self._device, self._check = model.load_device, check
        self._watch = Stopwatch(model.load_device)
        self._calls = 0
        self._whole: dict[int, Any] = {}
        self._spans: dict[Product, list[Any]] = {}
        self._names: dict[Product, str] = {}
        self._attention: list[tuple[AttentionCall | None, Any]] = []
        self._watches_attention = False
        self._blocks: list[Any] = []
        options = options_of(model)
        options[OVERRIDE] = partial(self._attend, options.get(OVERRIDE))

    def call(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        with ExitStack() as undo:
            if self._calls == _BLOCKS:
                for blocks in self._lists:
                    for remove in blocks.watch(self._watch):
                        undo.callback(remove)
            elif self._calls == _LINEARS:
                self._watches_attention = True
                for name, module in self._linears.items():
                    begin, end = self._watching(name)
                    undo.callback(module.register_forward_pre_hook(begin).remove)
                    undo.callback(module.register_forward_hook(end).remove)
            span = self._whole[self._calls] = self._watch.begin()
            output = executor(*args, **kwargs)
            self._watch.end(span)
        if self._calls == _LINEARS:
            self._watches_attention = False
            found = (blocks.measured(self._watch, self._device, self._check) for blocks in self._lists)
            self._blocks = [blocks for blocks in found if blocks is not None]
        return output

    def _watching(self, name: str) -> tuple[Callable, Callable]:
        begun: list[Any] = []

        def begin(module: torch.nn.Module, inputs: tuple) -> None:
            begun.append(self._watch.begin())

        def end(module: Any, inputs: tuple, output: torch.Tensor) -> None:
            span = begun.pop()
            self._watch.end(span)
            n = output.shape[-1]
            product = Product(output.numel() // n, n, module.in_features)  # its input may be wider, and activated by it
            self._names.setdefault(product, label(name))
            self._spans.setdefault(product, []).append(span)

        return begin, end

    def _attend(self, earlier: Callable | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
        attend = function if earlier is None else partial(earlier, function)
        if not self._watches_attention:
            return attend(*args, **kwargs)
        span = self._watch.begin()
        output = attend(*args, **kwargs)
        self._watch.end(span)
        self._attention.append((attention_call(*args, **kwargs), span))
        return output

    def _attention_calls(self) -> tuple[AttentionCall, ...]:
        """The kinds of attention calls that together take nearly all of its time, the longest first."""
        found: dict[AttentionCall | None, list[float]] = {}
        for call, span in self._attention:
            found.setdefault(call, []).append(self._watch.milliseconds(span))
        ordered = sorted(found, key=lambda call: -sum(found[call]))
        total, chosen, covered = sum(map(sum, found.values())), [], 0.0
        for call in ordered[:_MOST_ATTENTION_CALLS]:
            if call is not None and covered < _WORTH_TIMING * total:
                chosen.append(dataclasses.replace(call, count=len(found[call])))
            covered += sum(found[call])
        return tuple(chosen)

    def split(self) -> ForwardSplit:
        """What was found. Raises NoForward where the sampling called no linear."""
        if not self._spans:
            raise NoForward("no linear of this model was called")
        times = {product: sum(map(self._watch.milliseconds, spans)) for product, spans in self._spans.items()}
        calls = {p: Calls(self._names[p], len(spans), times[p]) for p, spans in self._spans.items()}
        in_floats = all(type(module.weight) is torch.nn.Parameter for module in self._linears.values())
        whole = {number: self._watch.milliseconds(span) for number, span in self._whole.items()}
        return ForwardSplit(
            statistics.median(whole[number] for number in _PLAIN),
            whole[_LINEARS],
            calls,
            sum(self._watch.milliseconds(span) for _, span in self._attention),
            BF16 if in_floats else None,
            whole[_BLOCKS],
            self._blocks,
            self._attention_calls(),
        )


def label(name: str) -> str:
    """A module path without the block's number."""
    return ".".join(part for part in name.split(".")[1:] if not part.isdigit()) or name
