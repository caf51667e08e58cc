"""Damaged GGUF files: what is said of each, and many at random.

INT8_DIT_MUTANTS=10 tries ten times as many of these.
"""

import math
import os
import struct
import tracemalloc
from dataclasses import replace
from importlib.metadata import version

import pytest

from support.limits import no_hang, peak_memory
from support.pack import from_pack

NOISE = 1e-3  # of float32: whoever takes a value for another one is off by far more
SECONDS = 60  # for one file of 8 MB
MOST_MEMORY = 1 << 30
WAYS = (("fused int8", "INT8"), ("fused int8", "as stored"), ("bf16", "INT8"))
gguf_mutants = from_pack("support.gguf_mutants")


def test_mutants_are_made_of_a_file_that_is_read_as_it_was_written(gguf_mutants):
    """So that a rebuilt file differs from its base by the mutation alone."""
    for data in gguf_mutants.gguf_files().values():
        assert gguf_mutants.taken_apart(data).written() == data


@pytest.fixture
def file(gguf_mutants):
    """A whole file, taken apart."""
    return gguf_mutants.taken_apart(gguf_mutants.gguf_files()["Q8_0"])


def refused(gguf_mutants, path, data, way=WAYS[0]):
    """What is said of a damaged file."""
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        gguf_mutants.load(path, *way)
    assert str(error.value).startswith(f"{path.name}: ")
    return str(error.value)


def retyped(file, kind, number, type):
    """The file's bytes with another type of a tensor or a value."""
    data = bytearray(file.written())
    at, _ = file.places[f"{kind} type"][number]
    struct.pack_into("<I", data, at, type)
    return bytes(data)


def test_a_type_whose_values_are_shorter(gguf_mutants, file, tmp_path):
    """F32 that became F16: the file would load and be wrong."""
    number = next(number for number, tensor in enumerate(file.tensors) if tensor.kind == "F32")
    said = refused(gguf_mutants, tmp_path / "a.gguf", retyped(file, "tensor", number, 1))
    behind, own = (file.tensors[place].name.decode() for place in (number + 1, number))
    assert f"{behind} does not begin where {own} ends" in said


@pytest.mark.parametrize("kind", ("tensor", "value"))
def test_a_type_that_the_installed_gguf_does_not_know(gguf_mutants, file, tmp_path, kind):
    """A newer one, as a rule; the file need not be damaged."""
    said = refused(gguf_mutants, tmp_path / "a.gguf", retyped(file, kind, -1, 99))
    assert f"it has a {kind} of type 99, which gguf {version('gguf')} does not know" in said
    assert "`pip install -U gguf`" in said and "use another file" in said
    assert "damaged" not in said


def array(kind, number, data):
    return 9, struct.pack("<IQ", kind, number) + data


@pytest.mark.slow
def test_a_tokenizer(dit, gguf_mutants, file, tmp_path):
    """Of a model that has its text encoder's beside it: its arrays are passed over, and make no object of each item."""
    number = 1 << 20
    texts = array(8, number // 4, (struct.pack("<Q", 3) + b"abc") * (number // 4))
    path = tmp_path / "a.gguf"
    file.values += [*((b"scores%d" % n, *array(6, number, bytes(4 * number))) for n in range(4)), (b"t", *texts)]
    path.write_bytes(file.written())
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
        ([(b"%d" % n, 0, b"\0") for n in range(40_000)], "no model has 40001 entries of metadata"),
        ([(b"deep", 9, struct.pack("<IQ", 9, 1) * 10_000)], "recursion"),
    ),
    ids=("texts", "texts in all", "arrays", "beyond the file", "entries", "arrays in arrays"),
)
def test_metadata_of_more_than_any_file_has(gguf_mutants, file, tmp_path, values, says):
    file.values += values
    assert says in refused(gguf_mutants, tmp_path / "a.gguf", file.written())


def test_bytes_behind_the_last_tensor(gguf_mutants, file, tmp_path):
    assert "32 bytes lie behind" in refused(gguf_mutants, tmp_path / "a.gguf", file.written() + bytes(32))


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


@pytest.mark.slow
def test_mutants_are_refused_or_right(dit, gguf_mutants, tmp_path):
    """Each in one clear error, or it computes what the whole file does."""
    path, files, expected = tmp_path / "the mutant.gguf", gguf_mutants.gguf_files(), {}
    for base, data in files.items():
        path.write_bytes(data)
        expected |= {(base, way): dit.forward(gguf_mutants.load(path, *way)) for way in WAYS}
    before, wrong, seen = peak_memory(), [], set()
    count = 2 * len(gguf_mutants.MUTATIONS) * int(os.environ.get("INT8_DIT_MUTANTS", "1"))
    for number, mutant in enumerate(gguf_mutants.mutants(files, count)):
        way = WAYS[number % len(WAYS)]
        path.unlink()  # a tensor of the one before may still be mapped
        path.write_bytes(mutant.data)
        try:
            with no_hang(SECONDS):
                error = dit.relative_error(dit.forward(gguf_mutants.load(path, *way)), expected[mutant.base, way])
        except Exception as raised:
            clear, said = isinstance(raised, (ValueError, OSError)) and path.name in str(raised), repr(raised)[:300]
            ended = "refused" if clear else "unclear error"
        else:
            legitimate, said = mutant.free and math.isfinite(error), f"{error:.1e}"
            ended = "right" if error < NOISE else "legitimately another" if legitimate else "silently wrong"
        seen.add(ended)
        if ended in ("unclear error", "silently wrong"):
            wrong.append((ended, *mutant[:3], way, said))
    assert not wrong, "\n".join(map(str, wrong))
    assert seen == {"refused", "right", "legitimately another"}
    assert peak_memory() - before < MOST_MEMORY
