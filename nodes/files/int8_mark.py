"""How an INT8 layer is marked in a file: the JSON that ComfyUI keeps per layer under `X.comfy_quant`.

A layer of name X is `X.weight` (int8 [N, K]), `X.weight_scale` (float32) and `X.comfy_quant` (the bytes of the JSON). A
layer that nothing has to be divided for carries ComfyUI's own format name, so stock loaders run it. A layer with
smoothing factors `X.weight_smooth` (float32 [K]) would come out wrong where they are unknown: it carries a name of its
own, which stock loaders refuse.
"""

import json

import torch

from ...kernels import UNCHANGED, ChannelTransform

NATIVE_FORMAT = "int8_tensorwise"
SMOOTHED_FORMAT = "int8_smoothquant"
INT8_FORMATS = (NATIVE_FORMAT, SMOOTHED_FORMAT)
DEFAULT_ROTATION_GROUP = 256

MARK = "comfy_quant"
SCALE = "weight_scale"
SMOOTH = "weight_smooth"


def encode_mark(transform: ChannelTransform = UNCHANGED) -> torch.Tensor:
    """The mark of an INT8 layer as uint8 bytes."""
    mark: dict[str, object] = {"format": NATIVE_FORMAT if transform.smooth is None else SMOOTHED_FORMAT}
    if transform.rotation_group is not None:
        mark.update(convrot=True, convrot_groupsize=transform.rotation_group)
    return torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)


def decode_mark(mark: torch.Tensor) -> dict:
    """The JSON object of a mark. Raises ValueError where it is none."""
    try:
        decoded = json.loads(bytes(mark.flatten().tolist()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not the bytes of a JSON object ({error})") from error
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded


def rotation_group(mark: dict) -> int | None:
    """Channels per Hadamard group of a decoded mark, or None. Older files keep the options under "params"."""
    nested = mark.get("params")
    options = {**(nested if isinstance(nested, dict) else {}), **mark}
    return int(options.get("convrot_groupsize", DEFAULT_ROTATION_GROUP)) if options.get("convrot") else None
