"""Background compilation of what a MODEL launches, before the MODEL is on its card."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels import BlockForm, LinearForm, OperatorCall, compile_ahead, native_computes, runs_fused
from ..files.holding import stored_kind
from .weight_form import weight_form

_QUERIES_AND_KEYS = {"q", "k", "query", "key"}  # words in the names of their norms


def compile_linears(root: torch.nn.Module, kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Start background compilation of everything that a module launches on a device, with inputs of a dtype.

    The kernels that expand stored weights come first, then those of the linears, the largest first, then the fused ops
    of its blocks. `kernel` is one of kernels.KERNEL_CHOICES.
    """
    forms: Counter[LinearForm] = Counter()
    norms: list[tuple[str, int]] = []
    expansions: set[OperatorCall] = set()
    for name, module in root.named_modules() if device.type == "cuda" else ():
        weight: Any = getattr(module, "weight", None)
        if weight is None:
            continue
        if any("RMSNorm" in kind.__name__ for kind in type(module).__mro__):
            norms.append((name, weight.numel()))
        form, kind, shape = weight_form(weight, module), stored_kind(weight), weight.shape
        runs = form is not None and runs_fused(device, kernel, shape[0], shape[1], form.native)
        if form is not None and runs:
            one_scale = kind is None and weight.params.scale.numel() == 1
            group, bits = form.unsmoothed.transform.rotation_group, form.unsmoothed.activation_bits
            forms[LinearForm(shape[0], shape[1], module.bias is not None, one_scale, form.smoothed, group, bits)] += 1
        if kind is not None and (runs or (form is None and kind.held is not None)):  # to INT8 a product, or to floats
            expansions.update(kind.calls(weight))
    largest_first = sorted(forms, key=lambda form: -form.n * form.k)
    compile_ahead(largest_first, block_form(norms, forms), dtype, device, expansions)


def compile_planned(
    tensors: Mapping[str, Any], layers: Iterable[str], kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Start background compilation for a module that is not built yet, whose linears in `layers` (module paths) become
    INT8, stored or for each product.

    `tensors` are those of a checked file, in the names of ComfyUI's modules. Other names are compiled in vain.
    """
    if device.type != "cuda":
        return
    forms: Counter[LinearForm] = Counter()
    for layer in layers:
        weight = tensors[f"{layer}.weight"]
        if not weight.is_floating_point():  # several values in a byte: its shape is not the linear's
            continue
        kind, (n, k) = stored_kind(weight), weight.shape
        group, bits = (None, 8) if kind is None else (kind.rotation_group(weight), kind.activation_bits(weight))
        if runs_fused(device, kernel, n, k, native_computes(None, bits)):
            has_bias = f"{layer}.bias" in tensors
            forms[LinearForm(n, k, has_bias, rotation_group=group, activation_bits=bits)] += 1
    sizes = {name.removesuffix(".weight"): tensor.numel() for name, tensor in tensors.items() if tensor.ndim == 1}
    without_bias = [(name, size) for name, size in sizes.items() if f"{name}.bias" not in tensors]
    norms = [(name, size) for name, size in without_bias if f"{name}.weight" in tensors]
    largest_first = sorted(forms, key=lambda form: -form.n * form.k)
    compile_ahead(largest_first, block_form(norms, forms), dtype, device, ())


def block_form(norms: Iterable[tuple[str, int]], forms: Counter[LinearForm]) -> BlockForm | None:
    """Guess the form of a module's blocks from its RMS norms (names and channels) and the forms of its linears; None
    where they do not tell.

    Most of ComfyUI's models are of one of these kinds. Others compile what they launch with their first call.
    """
    inputs = Counter[int]()
    for form, count in forms.items():
        inputs[form.k] += count
    width = max(inputs, key=inputs.__getitem__, default=0)
    enters = [form for form in forms if form.k == width]
    leaves = [form for form in forms if form.n == width < form.k]
    if not leaves:
        return None
    last = max(leaves, key=forms.__getitem__)
    ups = sum(forms[form] * form.n // last.k for form in enters if form.n in (last.k, 2 * last.k))
    of_stream, of_heads = Counter[int](), Counter[int]()
    for name, channels in norms:
        words = name.rpartition(".")[2].split("_")
        (of_stream if _QUERIES_AND_KEYS.isdisjoint(words) else of_heads)[channels] += 1
    head = max((size for size in of_heads if size < width), key=of_heads.__getitem__, default=0)
    gated = ups >= 2 * sum(forms[form] for form in leaves if form.k == last.k)
    return BlockForm(width, max(enters, key=forms.__getitem__), last, head, width in of_stream, gated)
