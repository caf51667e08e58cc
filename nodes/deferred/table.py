"""All that functions of PyTorch's and of comfy-kitchen's do to deferred operands: the rooms that fill the tables."""

import torch
import torch.nn.functional as F

from . import arithmetic, in_place, rotary, views  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .mode import TRACKED
from .reading import T

TRACKED.update(
    (
        *(torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, torch.sub, T.sub, T.__sub__, torch.addcmul),
        *(T.addcmul, torch.mul, T.mul, T.__mul__, T.__rmul__, torch.nan_to_num, T.clone, T.contiguous, T.to, T.type_as),
        *(T.view, T.reshape, T.unflatten, T.transpose, T.permute, T.movedim, T.swapaxes, T.unsqueeze, T.squeeze),
        *(
            torch.reshape,
            torch.transpose,
            torch.permute,
            torch.movedim,
            torch.unsqueeze,
            torch.squeeze,
            torch.unflatten,
        ),
        *(T.__getitem__, torch.chunk, T.chunk, torch.split, T.split, torch.unbind, T.unbind, T.expand, T.flatten),
        *(
            torch.cat,
            torch.concat,
            torch.flatten,
            F.dropout,
            torch.tanh,
            T.tanh,
            T.select,
            T.narrow,
            torch.narrow,
            T.split_with_sizes,
        ),
    )
)
