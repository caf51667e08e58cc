"""A full Ideogram 4 with random weights in ComfyUI: milliseconds per step and memory in bf16, native INT8 and this
pack's, and what it takes to calibrate and quantize it.

    python tests/studies/ideogram4_benchmark.py --comfyui PATH [--only steps|quantization] [--variants NAME ...]

Needs an NVIDIA card with about 60 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One step is one
conditional forward (256 text tokens) and one unconditional one, as DualModelGuider runs them. Every variant goes
through ComfyUI's own model loading, and all figures come from one process. The table of variants is variants.py's; the
first of them is what errors are relative to. A compiled one runs at the largest size alone.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import (
    PARTS,
    Row,
    Rows,
    Study,
    by_part,
    compiled_graphs,
    failures,
    graph_counts,
    kernel_times,
    markdown,
    median_milliseconds,
    number,
    ratio,
    row_of,
)

PROFILED = ["bf16", "kitchen-attention", "pack", "compiled-pack"]
TEXT_TOKENS = 256
TEXT_FEATURES = 53248


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """GB of the device and of the host that a block of code takes beyond what is taken when it begins."""
    process, done, on_gpu = psutil.Process(), threading.Event(), device.type == "cuda"
    peaks = {"device_peak_gb": 0.0, "host_peak_gb": 0.0}
    host, allocated = process.memory_info().rss, torch.cuda.memory_allocated() if on_gpu else 0

    def watch() -> None:
        while not done.wait(0.02):
            peaks["host_peak_gb"] = max(peaks["host_peak_gb"], (process.memory_info().rss - host) / 1e9)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()
    if on_gpu:
        peaks["device_peak_gb"] = (torch.cuda.max_memory_allocated() - allocated) / 1e9


def sampling_seconds(model, pixels: int, steps: int) -> float:
    """One conditional sampling."""
    import comfy.samplers

    generator = torch.Generator().manual_seed(2)
    guider = comfy.samplers.CFGGuider(model)
    guider.inner_set_conds({"positive": [[torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator), {}]]})
    empty = torch.zeros(1, 128, pixels // 16, pixels // 16)
    noise = torch.randn(empty.shape, generator=generator)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    begin = time.perf_counter()
    guider.sample(noise, empty, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True, seed=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure_quantization(bf16, pixels: int, steps: int, rounds: int = 3) -> dict[str, object]:
    """What recording costs the sampling it rides on, and time and memory of quantizing with and without calibration."""
    import comfy.model_management

    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
    from int8_dit.nodes.quantization.recorder import Recording, armed

    device = comfy.model_management.get_torch_device()
    comfy.model_management.load_models_gpu([bf16], force_full_load=True)
    sampling_seconds(bf16, pixels, 1)  # what is compiled or chosen once
    plain, recorded = [], []
    for _ in range(rounds):
        recording = Recording()
        plain.append(sampling_seconds(bf16, pixels, steps))
        recorded.append(sampling_seconds(armed(bf16, recording), pixels, steps))
    figures = {}
    searched = QuantizationSettings("best per layer", search_alpha=True)
    rounded = replace(searched, rounding="calibrated")
    calibration = recording.calibration()
    variants = {
        "uncalibrated": (searched, None),
        "smooth": (QuantizationSettings(), calibration),
        "smooth, alpha searched": (QuantizationSettings(search_alpha=True), calibration),
        "best per layer, alpha searched": (searched, calibration),
        "the same, calibrated rounding (the node's default)": (rounded, calibration),
        "weights of 4 bits, calibrated rounding": (replace(rounded, weight_bits=4), calibration),
    }
    for name, (settings, recorded_inputs) in variants.items():
        with peak_memory(device) as peaks:
            begin = time.perf_counter()
            quantized, report, _ = quantize_model(bf16, settings, "fused int8", recorded_inputs)
            seconds = time.perf_counter() - begin
        figures[name] = {
            "seconds": seconds,
            **peaks,
            "result_gb": comfy.model_management.module_size(quantized.model) / 1e9,
            "protected": len(report.protected),
        }
        print(name, json.dumps(figures[name]), flush=True)
        del quantized
    return {
        "sampling_s": plain,
        "recorded_sampling_s": recorded,
        "recording_adds": sorted(recorded)[rounds // 2] / sorted(plain)[rounds // 2] - 1,
        "bf16_weights_gb": comfy.model_management.module_size(bf16.model) / 1e9,
        "variants": figures,
    }


def quantization_table(figures: dict[str, dict]) -> str:
    """The table of `measure_quantization`'s variants."""
    columns = ["quantization", "seconds", "GPU memory beyond bf16, GB", "host memory, GB", "result, GB", "protected"]
    keys = ("seconds", "device_peak_gb", "host_peak_gb", "result_gb")
    rows = [
        [name, *(f"{figure[key]:.1f}" for key in keys), str(figure["protected"])] for name, figure in figures.items()
    ]
    return markdown(columns, rows)


def measure_steps(
    random, pixels: Sequence[int], repetitions: int, names: Sequence[str], profiled: Sequence[str]
) -> Rows:
    """A row for each variant in `names`, of one process; those in `profiled` with the times of their kernels."""
    import comfy.model_management

    from studies.variants import VARIANTS, Step, inputs_of
    from support.random_models import weights_on_device
    from support.tensors import relative_error

    on_gpu = random.device.type == "cuda"
    inputs = {side: inputs_of(random, side) for side in pixels}
    expected: dict[int, torch.Tensor] = {}

    def measure(name: str) -> Row:
        variant = VARIANTS[name]
        with weights_on_device():
            model = variant.build(random)
            figures: Row = {"weights_gb": comfy.model_management.module_size(model.model) / 1e9}
            for side in (max(pixels),) if variant.compiles else pixels:
                step = Step(model, inputs[side])
                output = step.velocities()
                figures[f"error_{side}"] = relative_error(output, expected.setdefault(side, output))
                del output
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                figures[f"ms_{side}"] = median_milliseconds(step.run, random.device, repetitions)
                if on_gpu:
                    figures[f"peak_gb_{side}"] = torch.cuda.max_memory_allocated() / 1e9
            if variant.compiles:
                figures |= graph_counts()
            if name in profiled:
                figures["kernels"] = kernel_times(step.run, random.device)
        return figures

    rows = Rows()
    for name in names:
        variant = VARIANTS[name]
        labels = {"name": name, "variant": variant.title}
        rows.measure(labels, partial(measure, name), 90.0 * (1 + variant.compiles))
    return rows


def steps_table(rows: Sequence[Row], pixels: Sequence[int]) -> str:
    """Times, and how many times as fast as bf16 and as native INT8; memory; errors."""
    bf16, native = row_of(rows, name="bf16"), row_of(rows, name="native")
    columns = ["variant"]
    for side in pixels:
        columns += [f"{side} px ms (vs bf16)", f"{side} px vs native INT8"]
    columns += [*(f"{side} px peak GB" for side in pixels), "weights GB", "rel. error"]
    cells = []
    for row in rows:
        cell = [str(row["variant"])]
        for side in pixels:
            milliseconds = number(row, f"ms_{side}", ".1f")
            cell.append("-" if milliseconds == "-" else f"{milliseconds} ({ratio(row, bf16, f'ms_{side}')})")
            cell.append(ratio(row, native, f"ms_{side}"))
        cell += [number(row, f"peak_gb_{side}", ".1f") for side in pixels]
        errors = [row[f"error_{side}"] for side in pixels if f"error_{side}" in row]
        cell += [number(row, "weights_gb", ".1f"), f"{max(errors):.3f}" if errors else "-"]
        cells.append(cell)
    lists = (("Compiled:", compiled_graphs(rows, "variant")), ("Not measured:", failures(rows, "variant")))
    return "\n\n".join([markdown(columns, cells), *(f"{head}\n\n{lines}" for head, lines in lists if lines)])


def parts_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a step's kernels by part, a column a profiled variant; empty where there is none."""
    profiled = [row for row in rows if "kernels" in row]
    parts = [by_part(row["kernels"]) for row in profiled]
    if not parts:
        return ""
    lines = [[part, *(f"{each[part]:.1f}" for each in parts)] for part in PARTS]
    lines.append(["all kernels", *(f"{sum(each.values()):.1f}" for each in parts)])
    return markdown(["GPU time, ms", *(str(row["variant"]) for row in profiled)], lines)


def main() -> None:
    study = Study(__doc__, "ideogram4")
    study.option("--blocks", type=int, default=34)
    study.option("--pixels", type=int, nargs="+", default=[768, 1024])
    study.option("--repetitions", type=int, default=15)
    study.option("--steps", type=int, default=20, help="of the samplings that are recorded")
    study.option("--only", choices=("steps", "quantization"))
    study.option("--variants", nargs="+", metavar="NAME", help="of the steps; all of variants.py's")
    study.option("--profile", nargs="*", default=PROFILED, metavar="NAME", help="by kernel")
    study.tuning(2.0)
    arguments = study.start()
    import comfy.model_management
    import comfy.sd

    from studies.variants import VARIANTS
    from support.random_models import FAMILIES, RandomModel

    names = study.known(arguments.variants or list(VARIANTS), VARIANTS)
    random = RandomModel(FAMILIES["Ideogram 4"], study.device, {"num_layers": arguments.blocks})
    parts, results, pixels = [f", {arguments.blocks} blocks with random weights."], {}, arguments.pixels
    if arguments.only != "steps":
        bf16 = comfy.sd.load_diffusion_model_state_dict({name: random.tensor(name).cpu() for name in random.shapes})
        measured = measure_quantization(bf16, max(pixels), arguments.steps)
        results["quantization"], added = measured, 100 * measured["recording_adds"]
        parts.append(f"Recording adds {added:.1f} % to a sampling of {arguments.steps} steps, {max(pixels)} px.")
        parts.append(quantization_table(measured["variants"]))
        comfy.model_management.unload_all_models()
        del bf16
    if arguments.only != "quantization":
        rows = measure_steps(random, pixels, arguments.repetitions, names, arguments.profile)
        results["steps"], first = rows, rows[0]["variant"]
        parts.append(f"A step is a conditional and an unconditional forward. Errors are relative to {first}'s outputs.")
        parts += [steps_table(rows, pixels), parts_table(rows)]
    study.write(*parts, **results)


if __name__ == "__main__":
    main()
