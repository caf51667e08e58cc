"""Lazy tensors: tensors of the host that hold no numbers, and are computed for each operation that reads them."""

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_map_only

from ..memory_plan import unplanned_memory

_COPIES, _ALIASES = ("aten::copy_", "aten::_to_copy", "aten::to"), ("aten::detach", "aten::contiguous", "aten::to")


class LazyTensor(torch.Tensor):
    """A tensor of the host whose numbers `compute` returns, on any device, for each operation that reads them.

    Raises RuntimeError where an operation would write into it, or reads its address.
    """

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, compute: Callable[[], torch.Tensor]) -> "LazyTensor":
        lazy = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        lazy.compute = compute
        return lazy

    compute: Callable[[], torch.Tensor]
    # Called with a tensor that should get the numbers, and why they could not be computed.
    left_unfilled: Callable[[torch.Tensor, Exception], None] = staticmethod(lambda copy, error: None)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs, name, arguments = kwargs or {}, function._schema.name, function._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        if any(argument.is_write and isinstance(given.get(argument.name), LazyTensor) for argument in arguments):
            raise RuntimeError(f"{function} would write into a weight that is computed where it is copied")
        device, lazy = given.get("device"), args[0]
        stays = name in _ALIASES and not given.get("copy") and given.get("dtype") in (None, lazy.dtype)
        if stays and (device is None or torch.device(device).type == "cpu"):
            with torch.inference_mode(False):  # what shares numbers with it is of its kind
                return LazyTensor(lazy.shape, lazy.dtype, lazy.compute)
        copies = name in _COPIES and (device is not None or not isinstance(lazy, LazyTensor))

        def numbers(lazy: LazyTensor) -> torch.Tensor:
            with unplanned_memory():  # another call computes nothing
                computed = lazy.compute()
            if copies:
                return computed
            with torch.inference_mode(False):  # so are views
                return computed.to("cpu", copy=True)

        try:
            args, kwargs = tree_map_only(LazyTensor, numbers, (args, kwargs))
        except Exception as error:
            if name == "aten::copy_":
                cls.left_unfilled(args[0], error)
            raise
        if name == "aten::copy_" and args[0].device.type == "cpu":
            return args[0].copy_(args[1])  # who reads the host's memory next does not wait for a stream
        return function(*args, **kwargs)

    def is_pinned(self, device: torch.device | None = None) -> bool:
        return False

    def data_ptr(self) -> int:
        raise RuntimeError("a weight that is computed where it is copied has no address")

    def __deepcopy__(self, _: dict) -> "LazyTensor":
        return self  # nothing changes it
