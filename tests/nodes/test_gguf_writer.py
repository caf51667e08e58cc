"""The writer of GGUF files alone, read back by the package gguf."""

from pathlib import Path

import gguf
import pytest
import torch


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fields(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float16": torch.tensor([1.0, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([[1.0], [3e38]], dtype=torch.bfloat16),
    "int64": torch.tensor([-(1 << 52)]),
    "int32": torch.tensor([1 << 30], dtype=torch.int32),
    "int8": torch.arange(-128, 128, dtype=torch.int8).reshape(2, 128),
    "0-dim": torch.tensor(0.25),
    "empty": torch.empty(0),
    "not contiguous": torch.arange(12.0).reshape(3, 4).t(),
    "5 dimensions": torch.arange(48.0).reshape(2, 3, 2, 2, 2),
    "a name with \u00e4": torch.ones(1),
    "n" * 127: torch.ones(2, 1, 1),
}


@pytest.fixture
def write(pack, tmp_path):
    """Write plain tensors and return the file's path."""
    from int8_dit.nodes.files.writing.tensor_files import PendingGGUF, plain_type, write_gguf

    def run(tensors, type=None):
        paths = (str(tmp_path / f"written_{number}.gguf") for number in (1, 2))
        pending = {
            name: PendingGGUF(tuple(t.shape), type or plain_type(t.dtype), lambda t=t: t) for name, t in tensors.items()
        }
        return Path(write_gguf(paths, pending, "test", "MOSTLY_Q8_0", {}))

    return run


def test_every_dtype_and_shape_is_read_back(write):
    path = write(TENSORS)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        raw = found[name].data.tobytes()
        assert raw == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), name
        assert found[name].data_offset % 32 == 0
        if tensor.ndim < 5:
            assert tuple(reversed(found[name].shape.tolist())) == tensor.shape, name
    assert found["5 dimensions"].shape.tolist() == [24, 2]
    assert fields(path)["comfy.gguf.orig_shape.5 dimensions"] == [2, 3, 2, 2, 2]
    assert path.stat().st_size % 32 == 0


def test_a_name_that_readers_cannot_hold(write, tmp_path):
    with pytest.raises(ValueError, match=r"has 128 bytes, and GGUF readers take 127"):
        write({"n" * 126 + "\u00e4": torch.ones(1)})
    assert not files(tmp_path)


def test_a_dtype_that_the_format_lacks(write):
    with pytest.raises(ValueError, match=r"it is torch.complex64, which GGUF files cannot hold"):
        write({"wave": torch.ones(1, dtype=torch.complex64)})


def test_rows_that_blocks_do_not_divide(write, tmp_path):
    with pytest.raises(ValueError, match=r"odd: rows of 48 weights do not divide into blocks of 32"):
        write({"odd": torch.ones(2, 48)}, type="Q8_0")
    assert not files(tmp_path)


def test_values_of_another_size_than_announced(write, tmp_path):
    with pytest.raises(ValueError, match=r"wrong has 256 bytes and was announced with 68"):
        write({"wrong": torch.ones(2, 32)}, type="Q8_0")
    assert not files(tmp_path)
