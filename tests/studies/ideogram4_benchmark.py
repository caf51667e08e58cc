"""A full Ideogram 4 with random weights in ComfyUI: milliseconds per step and memory in bf16, native INT8 and this
pack's, and what it takes to calibrate and quantize it.

    python tests/studies/ideogram4_benchmark.py --comfyui PATH [--only steps|quantization] [--variants NAME ...]

Needs an NVIDIA card with about 60 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One step is one
conditional forward (256 text tokens) and one unconditional one, as DualModelGuider runs them. Every variant goes
through ComfyUI's own model loading, and all figures come from one process. The table of variants is
ideogram4_steps.py's; the first of them is what errors are relative to.
"""

import argparse
import json
import logging
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results" / "ideogram4"
PROFILED = ["bf16", "kitchen", "protected-16", "pack", "smoothed", "rotated", "compiled-pack"]
TEXT_TOKENS = 256
TEXT_FEATURES = 53248


def quantization_table(figures: dict[str, dict]) -> str:
    """The table of `measure_quantization`'s variants."""
    from int8_dit.kernels.benchmark import markdown

    columns = ["quantization", "seconds", "GPU memory beyond bf16, GB", "host memory, GB", "result, GB", "protected"]
    rows = [
        [
            name,
            f"{figure['seconds']:.1f}",
            *(f"{figure[key]:.1f}" for key in ("device_peak_gb", "host_peak_gb", "result_gb")),
            str(figure["protected"]),
        ]
        for name, figure in figures.items()
    ]
    return markdown(columns, rows)


class PeakMemory:
    """Device and host memory that a block of code takes beyond what is taken when it begins, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self.host = self.device = 0

    def __enter__(self) -> "PeakMemory":
        self._host_before = self._process.memory_info().rss
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._device_before = torch.cuda.memory_allocated()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.host = max(self.host, self._process.memory_info().rss - self._host_before)

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._watcher.join()
        if self._device.type == "cuda":
            self.device = torch.cuda.max_memory_allocated() - self._device_before


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


def measure_quantization(bf16, pixels: int, steps: int, wanted: str, rounds: int = 3) -> dict[str, object]:
    """What recording costs the sampling it rides on, and time and memory of quantizing with and without calibration, in
    the ways whose names have `wanted` in them."""
    import comfy.model_management

    from int8_dit.nodes.calibration.recorder import Recording, armed
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model

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
        "weights of 4 bits, calibrated rounding": (
            replace(searched, rounding="calibrated", weight_bits=4),
            calibration,
        ),
    }
    for name, (settings, recorded_inputs) in variants.items():
        if wanted not in name:
            continue
        with PeakMemory(device) as peak:
            begin = time.perf_counter()
            quantized, report = quantize_model(bf16, settings, "fused int8", recorded_inputs)
            seconds = time.perf_counter() - begin
        figures[name] = {
            "seconds": seconds,
            "device_peak_gb": peak.device / 1e9,
            "host_peak_gb": peak.host / 1e9,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--pixels", type=int, nargs="+", default=[768, 1024])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of the samplings that are recorded")
    parser.add_argument("--only", choices=("steps", "quantization"))
    parser.add_argument("--quantizations", default="", help="those alone with this in their names")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="of the steps; all of ideogram4_steps.py's")
    parser.add_argument("--profile", nargs="*", default=PROFILED, metavar="NAME", help="by kernel")
    parser.add_argument("--row-seconds", type=float, default=90.0, help="the most for a variant; twice if it compiles")
    parser.add_argument("--tuning-seconds", type=float, default=2.0, help="for a shape of the GEMM; 0 for no tuning")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for ideogram4.md and ideogram4.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("int8_dit").setLevel(logging.INFO)  # says where a block does not run fused
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    import comfy.sd
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from studies.ideogram4_steps import VARIANTS, measure_steps, parts_table, steps_table
    from support.measuring import limit_tuning, write_results
    from support.random_models import FAMILIES, RandomModel

    names = arguments.variants or list(VARIANTS)
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"no variants: {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    limit_tuning(arguments.tuning_seconds)
    device = comfy.model_management.get_torch_device()
    machine = describe_machine(device)
    parts = [f"{title(machine)}, ComfyUI {comfyui_version}, {arguments.blocks} blocks with random weights."]
    results: dict[str, object] = {}
    if arguments.only != "steps":
        random = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": arguments.blocks})
        bf16 = comfy.sd.load_diffusion_model_state_dict({name: random.tensor(name).cpu() for name in random.shapes})
        results["quantization"] = measured = measure_quantization(
            bf16, max(arguments.pixels), arguments.steps, arguments.quantizations
        )
        added = 100 * measured["recording_adds"]
        parts.append(
            f"Recording adds {added:.1f} % to a sampling of {arguments.steps} steps, {max(arguments.pixels)} px."
        )
        parts.append(quantization_table(measured["variants"]))
        comfy.model_management.unload_all_models()
        del bf16
    if arguments.only != "quantization":
        often, profiled, seconds = arguments.repetitions, arguments.profile, arguments.row_seconds
        rows = measure_steps(arguments.blocks, arguments.pixels, often, names, profiled, seconds)
        results["steps"] = rows
        parts.append(
            f"A step is one conditional and one unconditional forward. Errors are relative to {rows[0]['variant']}'s "
            "outputs."
        )
        parts += [table for table in (steps_table(rows, arguments.pixels), parts_table(rows)) if table]
    data = {"environment": machine, "comfyui": comfyui_version, **results}
    write_results(arguments.out, "ideogram4", "\n\n".join(parts) + "\n", data)


if __name__ == "__main__":
    main()
