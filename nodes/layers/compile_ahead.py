"""What the INT8 linears of a MODEL launch, compiled before the MODEL is on its card."""

import torch

from ...kernels import LinearForm, compile_ahead, runs_fused
from .weight_form import weight_form


def compile_linears(root: torch.nn.Module, kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    """Have compiled, beside what the caller does next, what the INT8 linears of a module launch on a device with inputs
    of a dtype; the largest first. `kernel` is one of kernels.KERNEL_CHOICES."""
    forms = set()
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
            forms.add(LinearForm(n, k, module.bias is not None, one_scale, form.smoothed, group, bits))
    compile_ahead(sorted(forms, key=lambda form: -form.n * form.k), dtype, device)
