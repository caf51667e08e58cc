"""What becomes of damaged files: thousands of mutants of small model files, with this pack's loader and the stock one.

    python tests/studies/damaged_files.py --comfyui PATH [--mutants 4000] [--seed 1] [--out DIR]

Each mutant is loaded and, if that works, run once on the CPU; its output is compared with the base file's. Leaves
damaged_files.md in --out. Fails if one was silently wrong or ended in an unclear error in this pack.
"""

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

KERNELS = ("fused int8", "auto", "bf16")
LOADERS = ("this pack", "stock")
NOT_BY_STOCK = ("this pack's", "older pack's")
"""Whole files that the stock loader refuses, or draws other images of."""

Counts = Counter[tuple[str, str, str]]
"""(loader, kind of mutation, outcome) -> how many."""


def table(counts: Counts, kinds: Iterable[str], outcomes: tuple[str, ...]) -> str:
    """A row a kind of mutation; in each cell this pack's number, and the stock loader's."""
    from int8_dit.kernels.benchmark import markdown

    def cell(kind: str | None, outcome: str) -> str:
        numbers = (
            sum(n for (who, what, end), n in counts.items() if (who, end) == (loader, outcome) and kind in (None, what))
            for loader in LOADERS
        )
        return " / ".join(map(str, numbers))

    rows = [[kind, *(cell(kind, outcome) for outcome in outcomes)] for kind in kinds]
    rows.append(["all", *(cell(None, outcome) for outcome in outcomes)])
    return markdown(["mutation", *outcomes], rows)


def document(heading: str, gap: int, result: str) -> str:
    """The table, and how to read it."""
    return (
        f"# Damaged files\n\n{heading}\n\nIn each cell: this pack / the stock loader. The stock loader got no mutants "
        f"of {' and '.join(NOT_BY_STOCK)} files, which it does not read. An error is clear where it is a ValueError or "
        "OSError that names the file. An output differs legitimately where only plain values were changed. "
        f"{gap} of the silently wrong ones of this pack are files of others in which one mark lost or got its "
        f"rotation. Nothing tells them from whole ones: files that mix both are legitimate.\n\n{result}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=TESTS / "studies" / "results")
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=True)
    import_pack()
    logging.disable(logging.CRITICAL)  # the stock loader's warnings, thousands of them
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support import glyph_dit, mutants
    from support.small_files import base_files

    counts: Counts = Counter()
    gap, ours_wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "the mutant.safetensors")

        def load(kernel: str):
            return glyph_dit.stock(path) if kernel == "stock" else glyph_dit.load(path, kernel)

        files = base_files()
        expected = {}
        for base, data in files.items():
            path.write_bytes(data)
            for kernel in (*KERNELS, *(() if base in NOT_BY_STOCK else ("stock",))):
                expected[base, kernel] = glyph_dit.forward(load(kernel))
        for number, mutant in enumerate(mutants.mutants(files, arguments.mutants, arguments.seed)):
            for loader, kernel in zip(LOADERS, (KERNELS[number % len(KERNELS)], "stock"), strict=True):
                if (mutant.base, kernel) not in expected:
                    continue
                path.unlink()  # a tensor of the one before may still be mapped
                path.write_bytes(mutant.data)
                ended, said = mutants.outcome(
                    mutant, lambda kernel=kernel: load(kernel), expected[mutant.base, kernel], path.name
                )
                counts[loader, mutant.kind, ended] += 1
                if loader == "this pack" and ended in ("unclear error", "silently wrong"):
                    if mutants.is_known_gap(mutant):
                        gap += 1
                    else:
                        where = f"{mutant.base}, {mutant.kind}, {mutant.where}"
                        ours_wrong.append(f"{ended} ({kernel}): {where}: {said}")
            if number % 200 == 199:
                print(f"{number + 1} of {arguments.mutants}", flush=True)

    heading = f"{title(describe_machine(torch.device('cpu')))}, ComfyUI {comfyui_version}"
    command = f"`python tests/studies/damaged_files.py --comfyui PATH --mutants {arguments.mutants}`"
    text = document(f"{heading}, {command}", gap, table(counts, mutants.MUTATIONS, mutants.OUTCOMES))
    (arguments.out / "damaged_files.md").write_text(text)
    print(text)
    print("\n".join(ours_wrong))
    return 1 if ours_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
