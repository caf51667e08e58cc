"""What studies of models in ComfyUI share: arguments, rows printed as they come, times by the clock and by kernel."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from support.limits import no_hang
from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, object]

# What a kernel's name says, the first that matches.
_PARTS = {
    "attention": r"flash|fmha|sdpa|attention|attn",
    "qk-norm and rope": r"rope",
    "GEMM": r"gemm|gemv|nvjet|cutlass|xmma|splitk",
    "norms, activations, quantizer": r"quant|norm|rms|silu|swiglu|gelu|activat|residual|modul|convrot|hadamard",
    "other elementwise passes": r"elementwise|reduce|cat|copy|memcpy|memset|triton_|fill",
}
PARTS = (*_PARTS, "else")


# Larger than any card's L2: reading it before each run leaves no operand in cache and nothing to write back, and keeps
# the device busy while the host queues the run, so that launch latency stays out of the figure.
_FLUSH_BYTES = 256 << 20


class Study:
    """A command: its arguments, ComfyUI and the pack once it has started, and the files that it leaves.

    Args:
        doc: of its module, whose first paragraph describes it.
        name: of its files.
        folder: where they go unless --out says another place; one of that name in results/ if it is not given.
    """

    def __init__(self, doc: str, name: str, folder: Path | None = None) -> None:
        self.name, self.indent = name, 1
        self.parser = argparse.ArgumentParser(description=doc.partition("\n\n")[0])
        self.option = self.parser.add_argument
        self.option("--comfyui", type=Path, required=True)
        self.option("--out", type=Path, default=folder or RESULTS / name, help=f"folder for {name}.md and {name}.json")

    def tuning(self, seconds: float) -> None:
        """Add the option that limits tuning, which `start` obeys."""
        help_ = "before a measurement; 0 for no tuning"
        self.option("--tuning-seconds", type=float, default=seconds, help=help_)

    def start(self, arguments: argparse.Namespace | None = None) -> argparse.Namespace:
        """The arguments, parsed unless they are given. From here on ComfyUI and the pack can be imported."""
        arguments = arguments or self.parser.parse_args()
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("int8_dit").setLevel(logging.INFO)  # says where a block does not run fused
        import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
        import_pack()
        import comfy.model_management
        from comfyui_version import __version__ as comfyui_version

        from int8_dit.kernels.benchmark import describe_machine, title

        self.out = arguments.out
        self.device = comfy.model_management.get_torch_device()
        self.about = {"environment": describe_machine(self.device), "comfyui": comfyui_version}
        self.heading = f"{title(self.about['environment'])}, ComfyUI {comfyui_version}"
        if seconds := getattr(arguments, "tuning_seconds", 0.0):
            from int8_dit.kernels.linear import tuning

            tuning._SECONDS_TO_SETTLE = seconds
        elif "tuning_seconds" in arguments:
            os.environ["INT8_DIT_TUNING"] = "off"
        return arguments

    def known(self, names: Sequence[str], table: Mapping[str, object]) -> Sequence[str]:
        """The names. The command ends with an error where one of them is not in the table."""
        if unknown := set(names) - table.keys():
            self.parser.error(f"no {', '.join(unknown)}; there are {', '.join(table)}")
        return names

    def write(self, *parts: str, **data: object) -> None:
        """Leave the paragraphs behind the heading, and as JSON what they were made of; show them on the screen. An
        empty one is left out."""
        text = "\n\n".join(filter(None, (self.heading + parts[0], *parts[1:]))) + "\n"
        print(text, flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.name}.md").write_text(text)
        (self.out / f"{self.name}.json").write_text(
            json.dumps({**self.about, **data}, indent=self.indent, default=str) + "\n"
        )


class Rows(list):
    """Rows of a table. Each is printed when it is there, and one that fails says why and stops no other."""

    def measure(self, labels: Mapping[str, object], run: Callable[[], Mapping[str, object]], seconds: float) -> Row:
        """Append `labels` and what `run` returns; `seconds` is the most that it may take. Then all memory is given
        back."""
        row = self.attempt(labels, run, seconds)
        release()
        return row

    def attempt(self, labels: Mapping[str, object], run: Callable[[], Mapping[str, object]], seconds: float) -> Row:
        """The same with MODELs that stay loaded."""
        row, begin = dict(labels), time.perf_counter()
        try:
            with no_hang(seconds):
                row |= run()
        except Exception as error:  # whatever it is, the next row can be measured
            traceback.print_exc(limit=-4)
            row["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        row["took_s"] = round(time.perf_counter() - begin, 1)
        print(json.dumps({key: value for key, value in row.items() if key != "kernels"}, default=str), flush=True)
        self.append(row)
        return row


def release() -> None:
    """Give back all memory of MODELs that nobody holds any more, and what was compiled for them."""
    import comfy.model_management

    end_node()
    comfy.model_management.unload_all_models()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def end_node() -> None:
    """Do what ComfyUI's executor does behind each node with dynamic VRAM: what a sampling's casts hold is given back.

    Without it the last module that was cast keeps its MODEL's weights on the card, also after the MODEL is gone.
    """
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_prefetch

    if comfy.memory_management.aimdo_enabled:
        import comfy_aimdo.model_vbar

        comfy.model_management.reset_cast_buffers()
        comfy.model_prefetch.cleanup_prefetch_queues()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_and_host(run: Callable[[], object], device: torch.device, repetitions: int) -> dict[str, float]:
    """Median milliseconds of one `run()` on an idle device: until all is done, and until the last launch returns."""
    return walls_and_hosts({"": run}, device, repetitions)[""]


def walls_and_hosts(
    runs: Mapping[str, Callable[[], object]], device: torch.device, repetitions: int
) -> dict[str, dict[str, float]]:
    """The same of several, which take turns: a host that is slow for a while is so for all."""
    from int8_dit.kernels import settle

    walls: dict[str, list[float]] = {name: [] for name in runs}
    hosts: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        settle(run, device)
    for round_ in range(-2, repetitions):
        for name, run in runs.items():
            synchronize(device)
            begin = time.perf_counter()
            run()
            issued = (time.perf_counter() - begin) * 1e3
            synchronize(device)
            if round_ >= 0:
                hosts[name].append(issued)
                walls[name].append((time.perf_counter() - begin) * 1e3)
    middle = repetitions // 2
    return {
        name: {
            "ms": sorted(walls[name])[middle],
            "fastest_ms": min(walls[name]),
            "host_ms": sorted(hosts[name])[middle],
        }
        for name in runs
    }


def median_milliseconds(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median time of one `run()` in milliseconds, after one call that compiles and warms up; each run starts with a
    cold L2."""
    from int8_dit.kernels import settle
    from int8_dit.kernels.card.timing import Stopwatch

    settle(run, device)
    run()
    watch, spans = Stopwatch(device), []
    flush = torch.zeros(_FLUSH_BYTES // 4 if device.type == "cuda" else 0, dtype=torch.float32, device=device)
    for _ in range(repetitions):
        flush.sum()
        spans.append(watch.begin())
        run()
        watch.end(spans[-1])
    return sorted(map(watch.milliseconds, spans))[repetitions // 2]


def kernel_times(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of every kernel in one `run()` by its name; on a CPU of PyTorch's operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
        synchronize(device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            times[event.name] += spent / 1e3
    return dict(times.most_common())


def by_part(times: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by PARTS of a step."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name, milliseconds in times.items():
        part = next((part for part, said in _PARTS.items() if re.search(said, name, re.IGNORECASE)), "else")
        parts[part] += milliseconds
    return parts


def graph_counts() -> dict[str, int]:
    """How many graphs were compiled since the last release, and how many breaks there were."""
    from torch._dynamo.utils import counters

    counts = {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
    counters.clear()
    return counts


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    from int8_dit.kernels.benchmark import markdown

    return markdown(columns, rows)


def number(row: Mapping[str, object], key: str, form: str) -> str:
    """A cell of a table; a dash where the row has no such value."""
    value = row.get(key)
    return "-" if value is None else f"{value:{form}}"


def ratio(row: Mapping[str, object], base: Mapping[str, object] | None, key: str) -> str:
    """How many times as fast a row is as `base`."""
    mine, other = row.get(key), None if base is None else base.get(key)
    return "-" if mine is None or other is None else f"{other / mine:.2f} x"


def failures(rows: Sequence[Mapping[str, object]], *names: str) -> str:
    """A list of the rows that failed, each by its values of `names`; empty where none did."""
    lines = [f"- {', '.join(str(row[name]) for name in names)}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join(lines)


def compiled_graphs(rows: Sequence[Mapping[str, object]], *names: str) -> str:
    """A list of the rows whose MODELs were compiled, each by its values of `names`, with graphs and seconds."""
    lines = [
        f"- {', '.join(str(row[name]) for name in names)}: {row['graphs']} graphs, {row['graph_breaks']} graph breaks, "
        f"{row['took_s']:.0f} s with compilation"
        for row in rows
        if "graphs" in row
    ]
    return "\n".join(lines)


def row_of(rows: Sequence[Mapping[str, object]], **labels: object) -> Mapping[str, object] | None:
    """The first row with these labels."""
    return next((row for row in rows if all(row.get(key) == value for key, value in labels.items())), None)
