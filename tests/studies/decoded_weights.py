"""Weights rounded to other tools' formats and back: what a model computes whose loader dequantizes them.

Imported only once ComfyUI and the pack can be.
"""

from collections.abc import Callable

import torch

NF4_BLOCK = 64
NF4_BITS = 4 + 32 / NF4_BLOCK  # a float32 scale for each block, as bitsandbytes has it by default
# The codes of NF4: quantiles of a normal distribution, scaled to -1..1 (Dettmers et al. 2023, appendix E).
NF4_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

TensorDict = dict[str, torch.Tensor]


def nf4_decoded(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K], K a multiple of 64, rounded to NF4 and back, in its own dtype."""
    codes = torch.tensor(NF4_CODES, device=weight.device)
    blocks = weight.float().unflatten(1, (-1, NF4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True)
    nearest = torch.bucketize(blocks / scale.clamp(min=1e-30), (codes[1:] + codes[:-1]) / 2)
    return (codes[nearest] * scale).flatten(1).to(weight.dtype)


def gguf_decoded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """A weight in blocks of a GGUF format and back, in its own dtype; of Q8_0 where they do not divide its rows."""
    from int8_dit.kernels import GGUF_FORMATS, dequantize_gguf, quantize_gguf

    name = name if weight.shape[1] % GGUF_FORMATS[name].weights == 0 else "Q8_0"
    return dequantize_gguf(quantize_gguf(weight, name), name, weight.dtype)


def decoded(state_dict: TensorDict, through: Callable[[torch.Tensor], torch.Tensor]) -> TensorDict:
    """The file with its quantizable weights through a format and back."""
    import comfy.model_management

    device = comfy.model_management.get_torch_device()
    changed = {name: through(state_dict[name].to(device)).cpu() for name in quantizable(state_dict)}
    return {**state_dict, **changed}


def quantizable(state_dict: TensorDict) -> list[str]:
    """Names of the weights that variants quantize."""
    from int8_dit.nodes.linears.layer_selection import is_quantizable

    suffix = ".weight"
    names = [name for name in state_dict if name.endswith(suffix)]
    return [name for name in names if is_quantizable(name.removesuffix(suffix), tuple(state_dict[name].shape))]
