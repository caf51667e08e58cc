"""Lazy tensors: computed for each operation that reads them."""

import copy

import pytest
import torch

from kernels import LazyTensor
from support.tensors import DEVICE

VALUES = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)


@pytest.fixture
def lazy():
    """One whose numbers are computed on the device of the tests; how often is its `count`."""

    def compute():
        made.count += 1
        return VALUES.to(DEVICE)

    made = LazyTensor(VALUES.shape, VALUES.dtype, compute)
    made.count = 0
    return made


@pytest.mark.parametrize("inference", (False, True))
def test_what_is_not_read_is_not_computed(lazy, inference):
    with torch.inference_mode(inference):
        held = lazy.detach()
        assert (held.shape, held.dtype, held.device.type, held.nbytes) == ((4, 32), torch.int8, "cpu", VALUES.nbytes)
        same = held.to("cpu"), held.contiguous(), held.char(), held.to(device="cpu", dtype=torch.int8)
        assert all(isinstance(each, LazyTensor) for each in same) and not held.is_pinned()
        assert lazy.count == 0
        there = torch.empty(4, 32, dtype=torch.int8, device=DEVICE)
        for count, target in enumerate((there, torch.empty_like(VALUES), there), start=1):
            assert torch.equal(target.copy_(held).cpu(), VALUES) and lazy.count == count


@pytest.mark.parametrize("inference", (False, True))
def test_every_operation_reads_the_same_numbers(lazy, inference):
    with torch.inference_mode(inference):
        assert torch.equal(lazy, VALUES) and torch.equal(
            lazy[1:3].float().split(16, dim=1)[1], VALUES[1:3, 16:].float()
        )
        assert torch.equal(lazy.to(DEVICE).cpu(), VALUES) and torch.equal(lazy.clone(), VALUES)
        assert torch.equal(lazy.reshape(-1).view(torch.uint8), VALUES.reshape(-1).view(torch.uint8))
    assert type(lazy.clone()) is torch.Tensor and copy.deepcopy(lazy) is lazy


def test_nothing_writes_into_it_or_reads_its_address(lazy):
    for write in (lambda: lazy.copy_(VALUES), lambda: lazy.add_(1), lambda: torch.neg(VALUES, out=lazy)):
        with pytest.raises(RuntimeError, match="would write"):
            write()
    with pytest.raises(RuntimeError, match="no address"):
        lazy.data_ptr()
    assert torch.equal(lazy, VALUES)
