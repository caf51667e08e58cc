"""Damaged GGUF files, one by one: what is said of each. test_mutants.py loads many at random."""

import struct
import tracemalloc
from dataclasses import replace
from importlib.metadata import version

import pytest

WAYS = (("fused int8", "INT8"), ("fused int8", "as stored"), ("bf16", "INT8"))


@pytest.fixture(scope="module")
def gguf_mutants(pack):
    """tests/support/gguf_mutants.py, which can be imported only once ComfyUI and the pack can."""
    from support import gguf_mutants

    return gguf_mutants


def test_mutants_are_made_of_a_file_that_is_read_as_it_was_written(gguf_mutants):
    """So that a rebuilt file differs from its base by the mutation alone."""
    for data in gguf_mutants.gguf_files().values():
        assert gguf_mutants.taken_apart(data).written() == data


def refused(gguf_mutants, path, data, way=WAYS[0]):
    """What is said of a damaged file."""
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        gguf_mutants.load(path, *way)
    assert str(error.value).startswith(f"{path.name}: ")
    return str(error.value)


def test_a_type_whose_values_are_shorter(gguf_mutants, tmp_path):
    """F32 that became F16: the file would load and be wrong."""
    file = gguf_mutants.taken_apart(gguf_mutants.gguf_files()["Q8_0"])
    data = bytearray(file.written())
    number = next(number for number, tensor in enumerate(file.tensors) if tensor.kind == "F32")
    at, _ = file.places["tensor type"][number]
    data[at] = 1
    behind = file.tensors[number + 1].name.decode()
    said = refused(gguf_mutants, tmp_path / "a.gguf", bytes(data))
    assert f"{behind} does not begin where {file.tensors[number].name.decode()} ends" in said


@pytest.mark.parametrize("kind", ("tensor", "value"))
def test_a_type_that_the_installed_gguf_does_not_know(gguf_mutants, tmp_path, kind):
    """A newer one, as a rule; the file need not be damaged."""
    file = gguf_mutants.taken_apart(gguf_mutants.gguf_files()["Q8_0"])
    data = bytearray(file.written())
    at, _ = file.places[f"{kind} type"][-1]
    struct.pack_into("<I", data, at, 99)
    said = refused(gguf_mutants, tmp_path / "a.gguf", bytes(data))
    assert f"it has a {kind} of type 99, which gguf {version('gguf')} does not know" in said
    assert "`pip install -U gguf`" in said and "use another file" in said
    assert "damaged" not in said


def test_bytes_behind_the_last_tensor(gguf_mutants, tmp_path):
    data = gguf_mutants.gguf_files()["Q8_0"]
    assert "32 bytes lie behind" in refused(gguf_mutants, tmp_path / "a.gguf", data + bytes(32))


def with_metadata(gguf_mutants, path, *values):
    file = gguf_mutants.taken_apart(gguf_mutants.gguf_files()["Q8_0"])
    file.values.extend(values)
    path.write_bytes(file.written())
    return path


def array(kind, number, data):
    return 9, struct.pack("<IQ", kind, number) + data


@pytest.mark.slow
def test_a_tokenizer(dit, gguf_mutants, tmp_path):
    """Of a model that has its text encoder's beside it: its arrays are passed over, and make no object of each item."""
    number = 1 << 20
    texts = array(8, number // 4, (struct.pack("<Q", 3) + b"abc") * (number // 4))
    path = tmp_path / "a.gguf"
    with_metadata(
        gguf_mutants, path, *((b"scores%d" % n, *array(6, number, bytes(4 * number))) for n in range(4)), (b"t", *texts)
    )
    tracemalloc.start()
    try:
        model = gguf_mutants.load(path, *WAYS[0])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 26
    path.write_bytes(gguf_mutants.gguf_files()["Q8_0"])
    assert dit.forward(model).equal(dit.forward(gguf_mutants.load(path, *WAYS[0])))


@pytest.mark.parametrize(
    "values, says",
    (
        ([(b"t", *array(8, 5 << 20, b""))], "arrays of 5242880 texts"),
        ([(b"t%d" % n, *array(8, 3 << 20, bytes(24 << 20))) for n in range(2)], "texts"),
        ([(b"t", *array(9, 50_000, struct.pack("<IQ", 0, 0) * 50_000))], "arrays of 50000 texts or arrays"),
        ([(b"t", *array(6, 1 << 40, b""))], "damaged or incomplete"),
        ([(b"%d" % n, 0, b"\0") for n in range(40_000)], "no model has 40003 entries of metadata"),
    ),
    ids=("texts", "texts in all", "arrays", "beyond the file", "entries"),
)
def test_metadata_of_more_than_any_file_has(gguf_mutants, tmp_path, values, says):
    path = with_metadata(gguf_mutants, tmp_path / "a.gguf", *values)
    assert says in refused(gguf_mutants, path, path.read_bytes())


def test_arrays_in_arrays(gguf_mutants, tmp_path):
    file = gguf_mutants.taken_apart(gguf_mutants.gguf_files()["Q8_0"])
    file.values.append((b"deep", 9, struct.pack("<IQ", 9, 1) * 10_000))
    assert "recursion" in refused(gguf_mutants, tmp_path / "a.gguf", file.written())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", ("Q8_0", "Q4_K", "IQ4_NL"))
def test_a_block_that_is_not_a_number(gguf_mutants, tmp_path, base, way):
    """However the weight is held, and whether its linear becomes INT8."""
    file = gguf_mutants.taken_apart(gguf_mutants.gguf_files()[base])
    for name in ("joint_blocks.1.x_block.mlp.fc2.weight", "t_embedder.mlp.0.weight"):
        number = file.index(name)
        whole = file.tensors[number]
        file.tensors[number] = replace(whole, data=struct.pack("<e", float("nan")) + whole.data[2:])
        assert "a NaN or Inf" in refused(gguf_mutants, tmp_path / "a.gguf", file.written(), way)
        file.tensors[number] = whole
