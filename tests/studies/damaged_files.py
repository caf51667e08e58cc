"""What becomes of damaged files: thousands of mutants of small model files, with this pack's loader and the stock one.

    python tests/studies/damaged_files.py --comfyui PATH [--gguf] [--mutants 4000] [--seed 1] [--out DIR]

Each mutant is loaded and, if that works, run once on the CPU; its output is compared with the base file's. With --gguf
they are GGUF files, which the stock loader does not read. Leaves damaged_files.md, or damaged_gguf_files.md, in --out.
Fails if one was silently wrong or ended in an unclear error in this pack.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from support.mutants import Mutant

KERNELS = ("fused int8", "auto", "bf16")
LOADERS = ("this pack", "stock")
NOT_BY_STOCK = ("this pack's", "older pack's")
"""Whole files that the stock loader refuses, or draws other images of."""

GGUF_WAYS = (("fused int8", "INT8"), ("fused int8", "as stored"), ("bf16", "INT8"))
"""The loader's kernel and memory."""
_CLEAR = (
    "An error is clear where it is a ValueError or OSError that names the file. An output differs legitimately where "
    "only plain values were changed"
)
HOW = (
    "In each cell: this pack / the stock loader. The stock loader got no mutants of {bases} files, which it does not "
    f"read. {_CLEAR}. {{gap}} of the silently wrong ones of this pack are files of others in which one mark lost or "
    "got its rotation. Nothing tells them from whole ones: files that mix both are legitimate."
)
GGUF_HOW = (
    "Files of the glyph model in Q8_0, in Q4_K, in IQ4_NL and in F16, which the package gguf wrote; loaded in turns as "
    f"INT8, with memory as stored, and in bf16. {_CLEAR}, or where a type became another one with equally long values."
)

Load = Callable[[], "ModelPatcher"]
Counts = Counter[tuple[str, str, str]]
"""(loader, kind of mutation, outcome) -> how many."""


def table(counts: Counts, kinds: Iterable[str], outcomes: tuple[str, ...], loaders: tuple[str, ...]) -> str:
    """A row a kind of mutation; in each cell the number of each loader."""
    from int8_dit.kernels.benchmark import markdown

    def cell(kind: str | None, outcome: str) -> str:
        numbers = (
            sum(n for (who, what, end), n in counts.items() if (who, end) == (loader, outcome) and kind in (None, what))
            for loader in loaders
        )
        return " / ".join(map(str, numbers))

    rows = [[kind, *(cell(kind, outcome) for outcome in outcomes)] for kind in kinds]
    rows.append(["all", *(cell(None, outcome) for outcome in outcomes)])
    return markdown(["mutation", *outcomes], rows)


def tried(
    files: Mapping[str, bytes],
    all_mutants: Iterable[Mutant],
    loads: Sequence[Mapping[str, Load]],
    path: Path,
    skipped: Callable[[str, str], bool] = lambda *_: False,
) -> tuple[Counts, list[tuple[Mutant, str]]]:
    """What became of each mutant, and those that ended badly in this pack.

    Args:
        files: the whole files.
        all_mutants: damaged copies of them.
        loads: loaders by name, which mutants get in turns.
        path: where a file is put to be loaded.
        skipped: whether (whole file, loader) is left out.
    """
    from support import glyph_dit, mutants

    expected = {}
    for base, data in files.items():
        path.write_bytes(data)
        for load in {load for turn in loads for who, load in turn.items() if not skipped(base, who)}:
            expected[base, load] = glyph_dit.forward(load())
    counts: Counts = Counter()
    wrong = []
    for number, mutant in enumerate(all_mutants):
        for who, load in loads[number % len(loads)].items():
            if skipped(mutant.base, who):
                continue
            path.unlink()  # a tensor of the one before may still be mapped
            path.write_bytes(mutant.data)
            ended, said = mutants.outcome(mutant, load, expected[mutant.base, load], path.name)
            counts[who, mutant.kind, ended] += 1
            if who == LOADERS[0] and ended in ("unclear error", "silently wrong"):
                wrong.append((mutant, f"{ended} ({number}): {mutant.base}, {mutant.kind}, {mutant.where}: {said}"))
        if number % 200 == 199:
            print(f"{number + 1} mutants", flush=True)
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=4000)
    parser.add_argument("--gguf", action="store_true", help="of GGUF files instead of safetensors files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=TESTS / "studies" / "results")
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=True)
    import_pack()
    logging.disable(logging.CRITICAL)  # the stock loader's warnings, thousands of them
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support import gguf_mutants, glyph_dit, mutants
    from support.small_files import base_files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"the mutant.{'gguf' if arguments.gguf else 'safetensors'}")
        loads: list[dict[str, Load]]
        if arguments.gguf:
            kinds, loaders, files = gguf_mutants.MUTATIONS, LOADERS[:1], gguf_mutants.gguf_files()
            made = gguf_mutants.mutants(files, arguments.mutants, arguments.seed)
            loads = [{LOADERS[0]: partial(gguf_mutants.load, path, *way)} for way in GGUF_WAYS]
            counts, wrong = tried(files, made, loads, path)
        else:
            kinds, loaders, files = mutants.MUTATIONS, LOADERS, base_files()
            made = mutants.mutants(files, arguments.mutants, arguments.seed)
            stock = partial(glyph_dit.stock, path)
            loads = [{LOADERS[0]: partial(glyph_dit.load, path, kernel), LOADERS[1]: stock} for kernel in KERNELS]
            counts, wrong = tried(
                files, made, loads, path, lambda base, who: who != LOADERS[0] and base in NOT_BY_STOCK
            )
    ours_wrong = [said for mutant, said in wrong if arguments.gguf or not mutants.is_known_gap(mutant)]
    heading = f"{title(describe_machine(torch.device('cpu')))}, ComfyUI {comfyui_version}"
    name = "damaged_gguf_files" if arguments.gguf else "damaged_files"
    options = f"{'--gguf ' if arguments.gguf else ''}--mutants {arguments.mutants} --seed {arguments.seed}"
    command = f"`python tests/studies/damaged_files.py --comfyui PATH {options}`"
    how = GGUF_HOW if arguments.gguf else HOW.format(gap=len(wrong) - len(ours_wrong), bases=" and ".join(NOT_BY_STOCK))
    result = table(counts, kinds, mutants.OUTCOMES, loaders)
    subject = "Damaged GGUF files" if arguments.gguf else "Damaged files"
    text = f"# {subject}\n\n{heading}, {command}\n\n{how}\n\n{result}\n"
    (arguments.out / f"{name}.md").write_text(text)
    print(text)
    print("\n".join(ours_wrong))
    return 1 if ours_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
