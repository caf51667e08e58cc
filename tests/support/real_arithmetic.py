"""A model without the rounding of its activations: what it computes but for INT8, the same on every CPU.

One value that lies halfway between two INT8 steps is rounded up by one CPU and down by another, and the layers behind
it carry that on. So a test that two models are the same model compares them here, up to float32's own rounding.
"""

from __future__ import annotations

import torch
from comfy.quant_ops import QuantizedTensor


def use_float_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Let every quantized linear, of this pack or of ComfyUI's own, multiply by the float weight that it stands for.

    In place; returns `module`.
    """
    replaced = 0
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, QuantizedTensor):
            layer.weight = torch.nn.Parameter(weight.dequantize().float(), requires_grad=False)
            layer.layout_type = layer.quant_format = None
            replaced += 1
    assert replaced, "no layer is quantized"
    return module
