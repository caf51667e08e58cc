"""What becomes of small models of many families with one tensor damaged, or one block taken out.

    python tests/studies/damaged_models.py --comfyui PATH [--families SD3 Flux] [--out DIR]

Each kind of damage is done to each tensor of six models; of every family in which ComfyUI counts the blocks, each block
of each list is taken out, and each list is numbered from 1. Of those that diffusers names otherwise each tensor is
taken out under these names too. Files are loaded with the kernels in turns and, if that
works, run once on the CPU. Leaves damaged_models.md in --out. Fails if one was silently wrong or ended in an unclear
error, or took more than 5 s or 200 MiB beyond its file.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))  # as a script, only this folder is there

from support.architectures import ARCHITECTURES
from support.pack import import_comfyui, import_pack

if TYPE_CHECKING:
    from support.damaged_models import Damaged, Family

KERNELS = ("fused int8", "bf16")
PART = "missing under diffusers' names"
MOST_SECONDS = 5
MOST_MEMORY = 200 << 20  # bytes beyond the file
HOW = (
    "Clear is a ValueError that names the file. Without the last block of a list a file is that of a shorter model, "
    "and no check tells it from one. A file took at most {seconds:.1f} s, with a forward if it loads, and "
    "{memory:.0f} MiB beyond the file."
)


@dataclass
class Tally:
    """What became of the files so far: (kind, outcome) -> how many, the most that one took, and what ended badly."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: int = 0
    wrong: list[str] = field(default_factory=list)


def peak_from_now() -> int:
    """Bytes that this process has; `peak` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes that this process has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def try_all(name: str, whole: Family, damages: Iterable[Damaged], path: Path, tally: Tally) -> None:
    """Load damaged files of a family, and count what becomes of them."""
    from support import damaged_models

    expected = {}
    for kernel in KERNELS:
        damaged_models.write(whole.tensors, path)
        expected[kernel] = whole.output(whole.load(path, kernel))
    for number, damage in enumerate(damages):
        kernel = KERNELS[number % len(KERNELS)]
        before, started = peak_from_now(), time.perf_counter()
        ended, said = damaged_models.outcome(whole, damage, path, kernel, expected[kernel])
        seconds, memory = time.perf_counter() - started, peak() - before - path.stat().st_size
        tally.counts[damage.kind, ended] += 1
        tally.seconds, tally.memory = max(tally.seconds, seconds), max(tally.memory, memory)
        if ended in damaged_models.OUTCOMES[-2:] or seconds > MOST_SECONDS or memory > MOST_MEMORY:
            tally.wrong.append(
                f"{name}, {damage.kind}, {damage.where}: {ended}, {seconds:.1f} s, {memory}: {said[:200]}"
            )


def table(counts: Counter[tuple[str, str]], outcomes: tuple[str, ...]) -> str:
    """A row a kind of damage."""
    from int8_dit.kernels.benchmark import markdown

    kinds = dict.fromkeys(kind for kind, _ in counts)
    rows = [[kind, *(str(counts[kind, outcome]) for outcome in outcomes)] for kind in kinds]
    rows.append(["all", *(str(sum(counts[kind, outcome] for kind in kinds)) for outcome in outcomes)])
    return markdown(["damage", *outcomes], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--families", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--out", type=Path, default=TESTS / "studies" / "results")
    arguments = parser.parse_args()
    import_comfyui(arguments.comfyui, cpu=True)
    import_pack()
    logging.disable(logging.CRITICAL)  # ComfyUI's warnings, thousands of them
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support import damaged_models

    tally, damaged, counted, renamed = Tally(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "the damaged.safetensors")
        for name in arguments.families:
            if name in damaged_models.FAMILIES:
                whole = damaged_models.family(name)
                try_all(name, whole, damaged_models.damaged(whole.tensors), path, tally)
                damaged.append(name)
            if name not in damaged_models.BY_WIDTH and (whole := damaged_models.longer(name)).counted:
                try_all(name, whole, damaged_models.without_blocks(whole.tensors), path, tally)
                counted.append(name)
            if ARCHITECTURES[name].diffusers:
                whole = damaged_models.named_by_diffusers(damaged_models.family(name))
                missing = damaged_models.damaged(whole.tensors, kinds=("missing",))
                try_all(name, whole, (replace(one, kind=PART) for one in missing), path, tally)
                renamed.append(name)
            print(f"{name}: {sum(tally.counts.values())} files so far", flush=True)
    heading = f"{title(describe_machine(torch.device('cpu')))}, ComfyUI {comfyui_version}"
    chosen = "" if arguments.families == list(ARCHITECTURES) else f" --families {' '.join(arguments.families)}"
    command = f"`python tests/studies/damaged_models.py --comfyui PATH{chosen}`"
    parts = f"; under diffusers' names {', '.join(renamed)}" if renamed else ""
    of = f"Tensors of {', '.join(damaged)}{parts}; blocks of {', '.join(counted)}."
    how = HOW.format(seconds=tally.seconds, memory=tally.memory / (1 << 20))
    result = table(tally.counts, damaged_models.OUTCOMES)
    text = f"# Damaged models\n\n{heading}, {command}\n\n{of} {how}\n\n{result}\n"
    (arguments.out / "damaged_models.md").write_text(text)
    print(text)
    print("\n".join(tally.wrong))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
