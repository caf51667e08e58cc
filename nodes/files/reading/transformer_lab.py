"""Transformer Lab's INT8 file of Ideogram 4: the linears of its two models, and nothing else.

Behind `conditional.` or `unconditional.` a linear X is `X.wq` (int8 [N, K]), `X.ws` (float, one scale per output
channel), optionally `X.smooth` (float [K], what its input is divided by) and `X.bias`; a protected one is `X.weight`.
The other tensors of the model come from a base checkpoint.
"""

from collections.abc import Iterable
from dataclasses import replace

import comfy.model_detection
import comfy.ops
import comfy.supported_models
import torch

from ....kernels import ChannelTransform
from .. import quant_config
from .contents import BRANCHES, Checkpoint

_PARTS = ("wq", "ws", "smooth")


def one_branch(checkpoint: Checkpoint) -> Checkpoint:
    """Of such a file the chosen model in ComfyUI's own conventions, completed by the base checkpoint.

    Raises ValueError naming the tensor, the base file or the widget.
    """
    prefixes = tuple(f"{branch}." for branch in BRANCHES)
    if not any(key.startswith(prefixes) and key.endswith(".wq") for key in checkpoint.tensors):
        return checkpoint
    branch, linears = checkpoint.branch, _linears(checkpoint)
    shapes = _shapes(linears)
    _check_shapes(f"{branch}.", linears, shapes)
    missing = [key for key in shapes if key not in linears]
    if not missing:
        return replace(checkpoint, tensors=linears)
    if checkpoint.base is None:
        raise ValueError(
            f"{checkpoint.name} is a Transformer Lab INT8 file, which holds only linear layers of Ideogram 4: "
            f"{len(missing)} tensors of its {branch} model are missing, the first is {missing[0]}. Set base_checkpoint "
            f"to a file with the whole {branch} model (bf16, FP8 or INT8)"
        )

    base = checkpoint.base()
    lacking = [key for key in missing if key not in base.tensors]
    if lacking:
        raise ValueError(
            f"base_checkpoint {base.name} lacks {len(lacking)} of the tensors that {checkpoint.name} needs, the first "
            f"is {lacking[0]}. Name a file with the whole {branch} model of Ideogram 4"
        )
    others = {key: tensor for key, tensor in base.tensors.items() if key not in linears}
    _check_shapes(f"base_checkpoint {base.name}: ", others, shapes)
    _check_branch(checkpoint, base)
    # Of a quantized layer a weight is nothing without its quant config and its scales, so that it is taken with all of
    # them.
    layers = {key.removesuffix(".weight") for key in missing if key.endswith(".weight")}
    taken = {key: t for key, t in others.items() if key in missing or key.rpartition(".")[0] in layers}
    return replace(checkpoint, tensors=taken | linears)


def _linears(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """What the file holds of the chosen model, in ComfyUI's own conventions."""
    prefix = f"{checkpoint.branch}."
    stored = {key.removeprefix(prefix): t for key, t in checkpoint.tensors.items() if key.startswith(prefix)}
    if not stored:
        raise ValueError(f"{checkpoint.name} holds no {checkpoint.branch} model. Set branch to the other one")
    linears = {key: tensor for key, tensor in stored.items() if key.rpartition(".")[2] not in _PARTS}
    for layer in sorted({key.rpartition(".")[0] for key in stored.keys() - linears.keys()}):
        if f"{layer}.weight" in stored:
            continue  # protected
        weight, scale, smooth = (stored.get(f"{layer}.{part}") for part in _PARTS)
        if weight is None or scale is None:
            raise ValueError(f"{prefix}{layer}.{'wq' if weight is None else 'ws'} is missing")
        linears[f"{layer}.weight"] = weight
        linears[f"{layer}.{quant_config.SCALE}"] = _float32(scale)
        linears[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(ChannelTransform(smooth, None))
        if smooth is not None:
            linears[f"{layer}.{quant_config.SMOOTH}"] = _float32(smooth)
    return linears


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    """What is not floating point stays, and is refused where all layers are checked."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _check_shapes(before: str, tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> None:
    """Raise ValueError for a weight that the model has no place for, and for a tensor of another shape."""
    for key, tensor in tensors.items():
        if key.endswith(".weight") and key not in shapes:
            raise ValueError(f"{before}{key} is no layer of this Ideogram 4")
        # Of the formats that pack several values into one byte, the shape says nothing.
        if key in shapes and tensor.dtype != torch.uint8 and tensor.shape != shapes[key]:
            raise ValueError(f"{before}{key} has shape {list(tensor.shape)}, but the model needs {list(shapes[key])}")


def _check_branch(checkpoint: Checkpoint, base: Checkpoint) -> None:
    """Both models have the same names and shapes: what tells the base's apart is whose biases it has."""
    distance: dict[str, float] = dict.fromkeys(BRANCHES, 0.0)
    for key in [key for key in base.tensors if key.endswith(".bias")]:
        pairs = {b: (checkpoint.tensors.get(f"{b}.{key}", torch.empty(0)), base.tensors[key]) for b in BRANCHES}
        if all(own.shape == other.shape for own, other in pairs.values()):
            for branch, (own, other) in pairs.items():
                distance[branch] += float((own.float() - other.float()).square().sum())
    nearest = min(BRANCHES, key=lambda branch: distance[branch])
    if distance[nearest] < distance[checkpoint.branch]:
        raise ValueError(
            f"base_checkpoint {base.name} is the {nearest} model, by its biases. Name the file of the "
            f"{checkpoint.branch} one, or set branch to {nearest}"
        )


def _shapes(names: Iterable[str]) -> dict[str, torch.Size]:
    """The shapes of all tensors of an Ideogram 4 with as many blocks as tensors with these names are of."""
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    model = Ideogram4Transformer2DModel(
        num_layers=comfy.model_detection.count_blocks(list(names), "layers.{}."),
        **comfy.supported_models.Ideogram4.unet_extra_config,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    return {key: tensor.shape for key, tensor in model.state_dict().items()}
