"""A test model made hard to quantize: outlier channels, as large diffusion transformers have, that change no result.

A channel of a linear's input is multiplied where it is made and divided in the linear's weight. That is exact for what
a modulation feeds, x (1 + scale) + shift, and for what attention passes on from v. The trained model's own activations
are mild: plain INT8 loses so little on them that no recipe could tell.
"""

import torch

FACTORS = (20.0, 30.0, 45.0, 67.0, 100.0)  # arXiv 2606.12280 found channels of 20 to 100 times the median
STREAMS = ("context_block", "x_block")


def plant(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The glyph or word model's tensors with outlier channels at the inputs of qkv, fc1 and proj, in their dtype."""
    planted = {name: tensor.to(torch.float32, copy=True) for name, tensor in state_dict.items()}
    for block in range(sum(name.endswith("x_block.attn.proj.weight") for name in state_dict)):
        prefix = f"joint_blocks.{block}"
        # Attention mixes the tokens of both streams, so both get the same factors.
        shared = _factors(planted[f"{prefix}.x_block.attn.proj.weight"].shape[1], seed=100 + block)
        for stream_number, stream in enumerate(STREAMS):
            layer = f"{prefix}.{stream}"
            _multiply_rows(planted, f"{layer}.attn.qkv", 2, shared)
            _divide_columns(planted, f"{layer}.attn.proj", shared)
            for number, (shift, scale, reader) in enumerate(((0, 1, "attn.qkv"), (3, 4, "mlp.fc1"))):
                if f"{layer}.{reader}.weight" not in planted:
                    continue
                factors = _factors(len(shared), seed=10 * block + 2 * stream_number + number)
                modulation = f"{layer}.adaLN_modulation.1"
                planted[f"{modulation}.bias"][_part(scale, factors)] += 1.0  # to be multiplied with the scale
                for part in (shift, scale):
                    _multiply_rows(planted, modulation, part, factors)
                planted[f"{modulation}.bias"][_part(scale, factors)] -= 1.0
                _divide_columns(planted, f"{layer}.{reader}", factors)
    return {name: tensor.to(state_dict[name].dtype) for name, tensor in planted.items()}


def _factors(channels: int, seed: int) -> torch.Tensor:
    """Ones, but for one channel of each of FACTORS."""
    places = torch.randperm(channels, generator=torch.Generator().manual_seed(seed))[: len(FACTORS)]
    factors = torch.ones(channels)
    factors[places] = torch.tensor(FACTORS)
    return factors


def _part(number: int, factors: torch.Tensor) -> slice:
    return slice(number * len(factors), (number + 1) * len(factors))


def _multiply_rows(tensors: dict[str, torch.Tensor], layer: str, part: int, factors: torch.Tensor) -> None:
    rows = _part(part, factors)
    tensors[f"{layer}.weight"][rows] *= factors[:, None]
    if f"{layer}.bias" in tensors:
        tensors[f"{layer}.bias"][rows] *= factors


def _divide_columns(tensors: dict[str, torch.Tensor], layer: str, factors: torch.Tensor) -> None:
    if f"{layer}.weight" in tensors:
        tensors[f"{layer}.weight"] /= factors
