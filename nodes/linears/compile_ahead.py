"""What a MODEL launches, compiled before the MODEL is on its card."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ...kernels import BlockForm, LinearForm, OperatorCall, compile_ahead, native_computes, runs_fused
from ..files.holding import is_stored, stored_kind
from .weight_form import weight_form

_QUERIES_AND_KEYS = {"q", "k", "query", "key"}  # words in the names of their norms


def compile_linears(root: torch.nn.Module, kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Start background compilation of everything that a module launches.

    The kernels that expand stored weights come first, then those of the linears, the largest first, then the fused ops
    of its blocks.

    Args:
        kernel: one of kernels.KERNEL_CHOICES.
        dtype: of the linears' inputs.
        device: where they compute.
    """
    forms: Counter[LinearForm] = Counter()
    expansions: set[OperatorCall] = set()
    for module in root.modules() if device.type == "cuda" else ():
        weight = getattr(module, "weight", None)
        form = weight_form(weight, module)
        if form is None or weight is None:
            if is_stored(weight):
                expansions.add(_expansion(weight))
            continue
        n, k = weight.shape
        if runs_fused(device, kernel, n, k, form.native):
            one_scale = form.kind is None and weight.params.scale.numel() == 1
            transform, bits = form.unsmoothed
            group = transform.rotation_group
            forms[LinearForm(n, k, module.bias is not None, one_scale, form.smoothed, group, bits)] += 1
            if form.kind is not None:
                expansions.add(_expansion(weight))
    weights = {name: getattr(module, "weight", None) for name, module in root.named_modules() if _is_rms_norm(module)}
    norms = [(name, weight.numel()) for name, weight in weights.items() if weight is not None]
    _compile(forms, norms, dtype, device, expansions)


def _expansion(weight: Any) -> OperatorCall:
    """What makes INT8 of a stored weight for each product, or its floats."""
    kind: Any = stored_kind(weight)
    expand, arguments = kind.expansion(weight, kind.scale(weight), None)
    return expand.called_with(*arguments)


def compile_planned(
    tensors: Mapping[str, Any], layers: Iterable[str], kernel: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Start background compilation before there is a module, from its tensors: of what linears launch whose weights are
    to become INT8, now or in front of each product.

    Args:
        tensors: of a checked file, in the names of ComfyUI's modules. What it names otherwise is compiled in vain.
        layers: module paths of the linears.
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
    vectors = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if tensor.ndim == 1}
    norms = [
        (name, vector.numel())
        for name, vector in vectors.items()
        if f"{name}.weight" in tensors and f"{name}.bias" not in tensors
    ]
    _compile(forms, norms, dtype, device)


def _is_rms_norm(module: torch.nn.Module) -> bool:
    return any("RMSNorm" in kind.__name__ for kind in type(module).__mro__)


def _compile(
    forms: Counter[LinearForm],
    norms: Iterable[tuple[str, int]],
    dtype: torch.dtype,
    device: torch.device,
    expansions: Collection[OperatorCall] = (),
) -> None:
    largest_first = sorted(forms, key=lambda form: -form.n * form.k)
    compile_ahead(largest_first, block_form(norms, forms), dtype, device, expansions)


def block_form(norms: Iterable[tuple[str, int]], forms: Counter[LinearForm]) -> BlockForm | None:
    """What the RMS norms of a module (their names and channels) and the forms of its linears say of its blocks; None
    where they say nothing.

    Most of ComfyUI's models are of one of these kinds. A model that is not compiles for itself what it launches.
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
