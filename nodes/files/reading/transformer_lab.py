"""Transformer Lab's INT8 file of Ideogram 4: the linears of its two models, and nothing else.

Behind `conditional.` or `unconditional.` a linear X is `X.wq` (int8 [N, K]), `X.ws` (float, one scale per output
channel), optionally `X.smooth` (float [K], what its input is divided by) and `X.bias`; a protected one is `X.weight`.
The other tensors of the model come from a base checkpoint.
"""

from dataclasses import replace

import torch

from ....kernels import ChannelTransform
from ...comfyui.architecture import ideogram4_shapes
from .. import quant_config
from .contents import BRANCHES, Checkpoint

_PARTS = ("wq", "ws", "smooth")


def holds_branches(checkpoint: Checkpoint) -> bool:
    """Whether this is such a file, by its tensors."""
    prefixes = tuple(f"{branch}." for branch in BRANCHES)
    return any(key.startswith(prefixes) and key.endswith(".wq") for key in checkpoint.tensors)


def one_branch(checkpoint: Checkpoint) -> Checkpoint:
    """The chosen model in ComfyUI's own conventions, completed by the base checkpoint.

    Raises ValueError naming the file, or the base file, and the tensor or the widget.
    """
    name, linears = checkpoint.name, _linears(checkpoint)
    shapes = ideogram4_shapes(linears)
    strange = _strange(linears, shapes)
    if strange is not None:
        raise ValueError(f"{name}: {checkpoint.branch}.{strange} is no layer of Ideogram 4")
    missing = [key for key in shapes if key not in linears]
    if not missing:
        return replace(checkpoint, tensors=_checked(name, linears, shapes))
    if checkpoint.base is None:
        raise ValueError(
            f"{name} is a Transformer Lab INT8 file, which holds only linear layers of Ideogram 4: {len(missing)} "
            f"tensors of its {checkpoint.branch} model are missing, the first is {missing[0]}. Set base_checkpoint to "
            f"a file with the whole {checkpoint.branch} model (bf16, FP8 or INT8)"
        )

    base = checkpoint.base()
    lacking = [key for key in missing if key not in base.tensors]
    if lacking:
        raise ValueError(
            f"base_checkpoint {base.name} lacks {len(lacking)} of the tensors that {name} needs, the first is "
            f"{lacking[0]}. Name a file with the whole {checkpoint.branch} model of Ideogram 4"
        )
    strange = _strange(base.tensors, shapes)
    if strange is not None:
        raise ValueError(f"base_checkpoint {base.name} is another model than {name}, which has no {strange}")
    _check_branch(checkpoint, base)
    # Of a quantized layer a weight is nothing without its quant config and its scales, so that it is taken with all of
    # them.
    layers = {key.removesuffix(".weight") for key in missing if key.endswith(".weight")}
    taken = {key: t for key, t in base.tensors.items() if key in missing or key.rpartition(".")[0] in layers}
    _checked(f"base_checkpoint {base.name}", taken, shapes)
    return replace(checkpoint, tensors=taken | _checked(name, linears, shapes))


def _linears(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """What the file holds of the chosen model, in ComfyUI's own conventions."""
    prefix = f"{checkpoint.branch}."
    stored = {key.removeprefix(prefix): t for key, t in checkpoint.tensors.items() if key.startswith(prefix)}
    if not stored:
        raise ValueError(f"{checkpoint.name} holds no {checkpoint.branch} model. Set branch to the other one")
    parts = {key for key in stored if key.rpartition(".")[2] in _PARTS}
    linears = {key: tensor for key, tensor in stored.items() if key not in parts}
    for layer in sorted({key.rpartition(".")[0] for key in parts}):
        if f"{layer}.weight" in stored:
            continue  # protected
        for part in ("wq", "ws"):
            if f"{layer}.{part}" not in stored:
                raise ValueError(f"{checkpoint.name}: {prefix}{layer}.{part} is missing")
        smooth = stored.get(f"{layer}.smooth")
        linears[f"{layer}.weight"] = stored[f"{layer}.wq"]
        linears[f"{layer}.{quant_config.SCALE}"] = _float32(stored[f"{layer}.ws"])
        linears[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(ChannelTransform(smooth, None))
        if smooth is not None:
            linears[f"{layer}.{quant_config.SMOOTH}"] = _float32(smooth)
    return linears


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    """What is not floating point stays, and is refused where all quant configs are checked."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _strange(tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> str | None:
    """The first weight that the model has no place for."""
    return next((key for key in tensors if key.endswith(".weight") and key not in shapes), None)


def _checked(owner: str, tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """These tensors, all of the shapes that the model needs."""
    for key, tensor in tensors.items():
        # Of the formats that pack several values into one byte, the shape says nothing.
        if key in shapes and tensor.dtype != torch.uint8 and tensor.shape != shapes[key]:
            raise ValueError(f"{owner}: {key} has shape {list(tensor.shape)}, but the model needs {list(shapes[key])}")
    return tensors


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
