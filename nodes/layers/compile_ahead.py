"""What a MODEL launches, compiled before the MODEL is on its card."""

from collections import Counter

import torch

from ...kernels import BlockForm, LinearForm, compile_ahead, runs_fused
from .weight_form import weight_form

_QUERIES_AND_KEYS = {"q", "k", "query", "key"}  # words in the names of their norms


def compile_linears(root: torch.nn.Module, kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Have compiled, beside what the caller does next, what the INT8 linears of a module launch on a device with inputs
    of a dtype, the largest first, and then what its blocks may launch between them. `kernel` is one of
    kernels.KERNEL_CHOICES."""
    forms: Counter[LinearForm] = Counter()
    for module in root.modules() if device.type == "cuda" else ():
        weight = getattr(module, "weight", None)
        form = weight_form(weight, module)
        if form is None or weight is None:
            continue
        n, k = weight.shape
        if runs_fused(device, kernel, n, k, form.native):
            one_scale = form.kind is None and weight.params.scale.numel() == 1
            transform, bits = form.unsmoothed
            group = transform.rotation_group
            forms[LinearForm(n, k, module.bias is not None, one_scale, form.smoothed, group, bits)] += 1
    compile_ahead(sorted(forms, key=lambda form: -form.n * form.k), block_form(root, forms), dtype, device)


def block_form(root: torch.nn.Module, forms: Counter[LinearForm]) -> BlockForm | None:
    """What the norms of a module and the forms of its linears say of its blocks; None where they say nothing.

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
    for name, module in root.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and any("RMSNorm" in kind.__name__ for kind in type(module).__mro__):
            words = name.rpartition(".")[2].split("_")
            (of_stream if _QUERIES_AND_KEYS.isdisjoint(words) else of_heads)[weight.numel()] += 1
    head = max((size for size in of_heads if size < width), key=of_heads.__getitem__, default=0)
    gated = ups >= 2 * sum(forms[form] for form in leaves if form.k == last.k)
    return BlockForm(width, max(enters, key=forms.__getitem__), last, head, width in of_stream, gated)
