"""Damaged copies of small files: each is refused in one clear error, or computes what the whole file does."""

import pytest

from support.limits import no_hang, peak_memory

MUTANTS = 400
SECONDS = 60  # for one file of 8 MB
MOST_MEMORY = 1 << 30


@pytest.fixture(scope="module")
def mutants(pack):
    """tests/support/mutants.py, which can be imported only once ComfyUI and the pack can."""
    from support import mutants

    return mutants


@pytest.mark.slow
def test_mutants_are_refused_or_right(dit, mutants, tmp_path):
    from support.small_files import base_files

    files = base_files()
    path = tmp_path / "the mutant.safetensors"
    kernels = ("fused int8", "auto", "bf16")
    expected = {}
    for base, data in files.items():
        path.write_bytes(data)
        expected |= {(base, kernel): dit.forward(dit.load(path, kernel)) for kernel in kernels}
    before = peak_memory()
    wrong, seen = [], set()
    for number, mutant in enumerate(mutants.mutants(files, MUTANTS)):
        kernel = kernels[number % len(kernels)]
        path.unlink()  # a tensor of the one before may still be mapped
        path.write_bytes(mutant.data)
        with no_hang(SECONDS):
            outcome, said = mutants.outcome(
                mutant, lambda kernel=kernel: dit.load(path, kernel), expected[mutant.base, kernel], path.name
            )
        seen.add(outcome)
        if outcome in ("unclear error", "silently wrong") and not mutants.is_known_gap(mutant):
            wrong.append((outcome, mutant.base, mutant.kind, mutant.where, kernel, said[:300]))
    assert not wrong, "\n".join(map(str, wrong))
    assert {"refused clearly", "loads right", "differs legitimately"} <= seen
    assert peak_memory() - before < MOST_MEMORY
