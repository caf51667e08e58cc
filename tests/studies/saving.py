"""Saving under one prefix from two ComfyUI servers at once, and in processes that are killed while they save.

    python tests/studies/saving.py --comfyui PATH [--rounds 200] [--kills 100]

Needs a system with fork. Leaves the table in tests/studies/results/saving.md, and fails if a file is damaged, lost or
left over.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kernels.benchmark import markdown
from support import workflows
from support.environment import Environment
from support.forks import ended, fork
from support.pack import import_comfyui, import_pack
from support.server import serve
from support.workflows import Prompt

RESULT = TESTS / "studies" / "results" / "saving.md"


def is_good(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether a file can be read and holds these tensors, bit by bit."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return False
    same = (torch.equal(tensors[key], expected[key]) for key in tensors.keys() & expected.keys())
    return tensors.keys() == expected.keys() and all(same)


def others(folder: Path) -> int:
    """How many files there are that are no safetensors files: what was left over."""
    return sum(not path.name.endswith(".safetensors") for path in folder.iterdir())


def saving(protect_layers: int, prefix: str) -> tuple[Prompt, str]:
    """A prompt that saves the glyph model, quantized with so many protected layers, and its saving node."""
    prompt = Prompt()
    model = workflows.uncalibrated_model(prompt, workflows.stock_model(prompt), protect_layers=protect_layers)
    return prompt, workflows.save_model(prompt, model, prefix)


def race(comfyui: Path, rounds: int) -> dict[str, int]:
    """Let two servers with one output folder save two different models under one prefix at the same time."""
    protected = (0, workflows.GLYPH_PROTECT_LAYERS)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        output = Path(temporary, "output")
        output.mkdir()
        servers = []
        for name in "ab":
            base = Path(temporary, name)
            base.mkdir()
            (base / "output").symlink_to(output)
            servers.append(stack.enter_context(serve(Environment(Path(sys.executable), comfyui), base)))

        def save(side: int, prefix: str) -> str:
            prompt, node = saving(protected[side], prefix)
            together.wait()
            return servers[side].saved_path(servers[side].queue(prompt)[node]).name

        together = threading.Barrier(2)
        named: list[tuple[int, str]] = []
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(save, (0, 1), ("own/a", "own/b")))
            for number in range(1, rounds + 1):
                # More slashes make another prompt, which ComfyUI runs, of the same prefix.
                named += enumerate(threads.map(save, (0, 1), [f"race{'/' * number}INT8"] * 2))
        expected = [load_file(output / "own" / f"{name}_00001_.safetensors") for name in "ab"]
        folder = output / "race"
        return {
            "saves": len(named),
            "files": len(list(folder.glob("*.safetensors"))),
            "names given twice": len(named) - len({name for _, name in named}),
            "damaged, or another's": sum(not is_good(folder / name, expected[side]) for side, name in named),
            "files left over": others(folder),
        }


def kill(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill processes at random moments while they save the glyph model, each followed by a save that is not."""
    import folder_paths

    from int8_dit.kernels import Protection
    from int8_dit.nodes.host.output_files import output_paths
    from int8_dit.nodes.loading.load import load_int8_model
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
    from int8_dit.nodes.saving.save import save_int8_model

    loaded = load_int8_model(str(TESTS / "data" / workflows.GLYPH_MODEL), "fused int8")
    model, _ = quantize_model(loaded, QuantizationSettings(protection=Protection("number", 0)), "fused int8", None)
    chance = random.Random(seed)

    def save(on_begin: Callable[[], object] = lambda: None) -> str:
        def paths() -> Iterator[str]:
            on_begin()  # the writer asks for the first path when the model is prepared
            yield from output_paths("kills/INT8")

        return save_int8_model(model, paths(), {})

    with tempfile.TemporaryDirectory() as output:
        folder_paths.output_directory = output
        expected = load_file(save())
        folder = Path(output, "kills")
        took = []
        for _ in range(20):
            save(lambda: took.append(-time.perf_counter()))
            took[-1] += time.perf_counter()
        longest = 1.2 * statistics.median(took)
        counts = dict.fromkeys(("killed", "with a temporary file", "after the file had its name", "too late"), 0)
        good, left_over = len(took) + 1, 0
        while counts["killed"] < kills:
            began = os.pipe()
            process = fork(lambda began=began: save(lambda: os.write(began[1], b".")))
            os.read(began[0], 1)
            time.sleep(chance.uniform(0, longest))
            os.kill(process, signal.SIGKILL)
            killed = ended(process) != 0
            for end in began:
                os.close(end)
            appeared = len(list(folder.glob("*.safetensors"))) - good
            counts["killed"] += killed
            counts["with a temporary file"] += others(folder) > 0
            counts["after the file had its name"] += killed and appeared
            counts["too late"] += not killed
            good += appeared
            save()
            good += 1
            left_over += others(folder)
        files = list(folder.glob("*.safetensors"))
        return counts | {
            "files": len(files),
            "files lost": good - len(files),
            "files damaged": sum(not is_good(path, expected) for path in files),
            "files left over after the next save": left_over,
        }


def document(raced: dict[str, int], killed: dict[str, int]) -> str:
    """The page of results."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "safetensors", "filelock"))
    run = f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}"
    day = datetime.date.today().isoformat()
    tables = [markdown(list(counts), [[str(count) for count in counts.values()]]) for counts in (raced, killed)]
    return f"""# Saving at the same time, and killed while saving

{run}, {packages}, {day}, `python tests/studies/saving.py --comfyui PATH`

Two ComfyUI servers with one output folder save two different INT8 models under one prefix. In each round both get
their prompt at the same moment. A file is good if it holds, bit by bit, what the server that named it has saved alone.

{tables[0]}

Processes save an INT8 model and are killed (`SIGKILL`) at random moments while they write it. A save that is not killed
follows each. Where a kill came too late another was made.

{tables[1]}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="a ComfyUI checkout")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    comfyui = arguments.comfyui.resolve()
    torch.set_num_threads(1)  # copies of this process have no others
    raced = race(comfyui, arguments.rounds)
    print(raced, flush=True)
    import_comfyui(comfyui, cpu=True)
    import_pack()
    killed = kill(arguments.kills)
    RESULT.write_text(document(raced, killed))
    print(RESULT.read_text())
    bad = [raced[name] for name in ("names given twice", "damaged, or another's", "files left over")]
    bad += [killed[name] for name in ("files lost", "files damaged", "files left over after the next save")]
    return 1 if any(bad) or raced["files"] != raced["saves"] else 0


if __name__ == "__main__":
    sys.exit(main())
