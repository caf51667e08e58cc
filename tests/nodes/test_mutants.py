"""Damaged copies of small files: each is refused in one clear error, or computes what the whole file does.

INT8_DIT_MUTANTS=10 tries ten times as many.
"""

import os

import pytest

from support.limits import no_hang, peak_memory

KERNELS = ("fused int8", "auto", "bf16")
WAYS = (("fused int8", "INT8"), ("fused int8", "as stored"), ("bf16", "INT8"))  # kernel and memory, of GGUF files
TIMES = int(os.environ.get("INT8_DIT_MUTANTS", "1"))
SECONDS = 60  # for one file of 8 MB
MOST_MEMORY = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("safetensors", "gguf"))
def test_mutants_are_refused_or_right(dit, tmp_path, kind):
    from support import gguf_mutants, mutants

    path = tmp_path / f"the mutant.{kind}"
    if kind == "gguf":
        ways, files = WAYS, gguf_mutants.gguf_files()
        kinds, rounds = gguf_mutants.MUTATIONS, 2 * TIMES
    else:
        ways, files = [(kernel,) for kernel in KERNELS], mutants.base_files()
        kinds, rounds = mutants.MUTATIONS, len(files) * TIMES

    def load(way):
        return gguf_mutants.load(path, *way) if kind == "gguf" else dit.load(path, *way)

    expected = {}
    for base, data in files.items():
        path.write_bytes(data)
        expected |= {(base, way): dit.forward(load(way)) for way in ways}
    before = peak_memory()
    wrong, seen = [], set()
    for number, mutant in enumerate(mutants.mutants(files, rounds * len(kinds), mutations=kinds)):
        way = ways[number % len(ways)]
        path.unlink()  # a tensor of the one before may still be mapped
        path.write_bytes(mutant.data)
        with no_hang(SECONDS):
            ended, said = mutants.outcome(mutant, lambda way=way: load(way), expected[mutant.base, way], path.name)
        seen.add(ended)
        if ended in ("unclear error", "silently wrong") and not mutants.is_known_gap(mutant):
            wrong.append((ended, mutant.base, mutant.kind, mutant.where, way, said[:300]))
    assert not wrong, "\n".join(map(str, wrong))
    assert {"refused clearly", "loads right", "differs legitimately"} <= seen
    assert peak_memory() - before < MOST_MEMORY
