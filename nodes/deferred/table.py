"""All that functions of PyTorch's and of comfy-kitchen's do to deferred operands: the rooms that fill the tables."""

import torch
import torch.nn.functional as F

from . import arithmetic, in_place, rotary, views  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .mode import TRACKED
from .reading import T

TRACKED.update(
    (
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.dropout, torch.tanh, T.tanh, torch.nan_to_num, T.clone),
        *(torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, torch.sub, T.sub, T.__sub__, T.to, T.type_as),
        *(T.float, T.bfloat16, T.half),
        *(torch.mul, T.mul, T.__mul__, T.__rmul__, torch.addcmul, T.addcmul, torch.cat, torch.concat, T.contiguous),
        *(T.view, T.reshape, T.unflatten, T.transpose, T.permute, T.movedim, T.swapaxes, T.unsqueeze, T.squeeze),
        *(torch.reshape, torch.unflatten, torch.transpose, torch.permute, torch.movedim, torch.unsqueeze),
        *(torch.squeeze, torch.flatten, T.flatten, T.expand, T.__getitem__, T.select, T.narrow, torch.narrow),
        *(torch.chunk, T.chunk, torch.split, T.split, T.split_with_sizes, torch.unbind, T.unbind),
    )
)
