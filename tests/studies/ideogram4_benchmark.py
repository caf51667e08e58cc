"""A full Ideogram 4 with random weights in ComfyUI: milliseconds per step and memory in bf16, native INT8 and this
pack's, and what it takes to calibrate and quantize it.

    python tests/studies/ideogram4_benchmark.py --comfyui PATH [--only steps|quantization] [--out DIR]

Needs an NVIDIA card with about 40 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One step is one
conditional forward (256 text tokens) and one unconditional one, as DualModelGuider runs them. Every variant goes
through ComfyUI's own model loading, and all figures come from one process.
"""

import argparse
import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack
from support.tensors import relative_error

RESULTS = Path(__file__).resolve().parent / "results" / "ideogram4"
TEXT_TOKENS = 256
TEXT_FEATURES = 53248


def random_state_dict(blocks: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """bf16 tensors of an Ideogram 4 in host memory: norms are ones, the rest keeps activations finite."""
    import comfy.ldm.ideogram4.model
    import comfy.ops

    skeleton = comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel(
        num_layers=blocks, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator(device).manual_seed(seed)
    state_dict = {}
    for name, tensor in skeleton.state_dict().items():
        if tensor.ndim == 1 and "norm" in name:
            state_dict[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
            continue
        values = torch.randn(tensor.shape, generator=generator, device=device, dtype=torch.bfloat16)
        state_dict[name] = (values * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.01)).cpu()
    return state_dict


def quantized_natively(
    state_dict: dict[str, torch.Tensor],
    device: torch.device,
    quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The same model with the layers that this pack quantizes in a quantized format of ComfyUI's: `quantize` makes of a
    weight the tensors that its layer has then."""
    from int8_dit.nodes.model.layer_selection import is_quantizable

    quantized = dict(state_dict)
    for key, weight in state_dict.items():
        name = key.removesuffix(".weight")
        if key != name and is_quantizable(name, tuple(weight.shape)):
            quantized |= {f"{name}.{part}": tensor.cpu() for part, tensor in quantize(weight.to(device)).items()}
    return quantized


def plain_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """ComfyUI's native INT8, one scale per output channel."""
    from int8_dit.kernels import quantize_weight
    from int8_dit.nodes.files import int8_mark

    q, scale = quantize_weight(weight)
    return {"weight": q, int8_mark.SCALE: scale[:, None], int8_mark.MARK: int8_mark.encode_mark()}


class Step:
    """One conditional and one unconditional forward at a resolution, with fixed random inputs."""

    def __init__(self, pixels: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(1)
        side = pixels // 16
        self.latent = torch.randn(1, 128, side, side, generator=generator, device=device).to(dtype)
        self.context = torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator, device=device).to(dtype)
        self.timestep = torch.full((1,), 0.5, device=device)

    @torch.inference_mode()
    def run(self, diffusion_model: torch.nn.Module) -> torch.Tensor:
        """Both outputs, stacked."""
        conditional = diffusion_model(self.latent, self.timestep, context=self.context)
        return torch.cat([conditional, diffusion_model(self.latent, self.timestep, context=None)])


def measure(name: str, model, steps: dict[int, Step], expected: dict[int, torch.Tensor], repetitions: int) -> dict:
    """Load a MODEL onto the device, time it at each resolution, unload it."""
    import comfy.model_management

    from int8_dit.kernels.timing import median_milliseconds

    device = comfy.model_management.get_torch_device()
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    figures = {"variant": name, "weights_gb": comfy.model_management.module_size(model.model) / 1e9}
    for pixels, step in steps.items():
        diffusion_model = model.model.diffusion_model
        output = step.run(diffusion_model).float()
        expected.setdefault(pixels, output)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = partial(step.run, diffusion_model)
        figures[f"ms_{pixels}"] = median_milliseconds(run, device, repetitions)
        if device.type == "cuda":
            figures[f"peak_gb_{pixels}"] = torch.cuda.max_memory_allocated() / 1e9
        figures[f"error_{pixels}"] = relative_error(output, expected[pixels])
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()
    print(json.dumps(figures), flush=True)
    return figures


def measure_steps(bf16, state_dict: dict[str, torch.Tensor], pixels: list[int], repetitions: int) -> list[dict]:
    """Every variant, loaded as a user loads it, at each resolution."""
    import comfy.model_management
    import comfy.sd

    from int8_dit.kernels import Protection
    from int8_dit.nodes.model.load import load_int8_model
    from int8_dit.nodes.model.save import save_int8_model
    from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model

    device = comfy.model_management.get_torch_device()
    steps = {side: Step(side, device, bf16.model.get_dtype_inference()) for side in pixels}
    expected: dict[int, torch.Tensor] = {}
    results = [measure("bf16", bf16, steps, expected, repetitions)]
    native = comfy.sd.load_diffusion_model_state_dict(quantized_natively(state_dict, device, plain_int8))
    results.append(measure("native INT8", native, steps, expected, repetitions))
    del native
    for settings in (QuantizationSettings(protection=Protection("number", 0)), QuantizationSettings()):
        quantized, report = quantize_model(bf16, settings, "fused int8", None)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "ideogram4-int8.safetensors")
            save_int8_model(quantized, path, {})
            size = Path(path).stat().st_size / 1e9
            del quantized
            loaded = load_int8_model(path, "fused int8")
            name = f"fused INT8, {len(report.protected)} protected"
            results.append({**measure(name, loaded, steps, expected, repetitions), "file_gb": size})
            del loaded
    return results


def steps_table(results: list[dict], pixels: list[int]) -> str:
    """The table of `measure_steps`."""
    from int8_dit.kernels.benchmark import markdown

    columns = [
        "variant",
        *(f"{p} px ms (vs bf16)" for p in pixels),
        *(f"{p} px peak GB" for p in pixels),
        "weights GB",
        "rel. error",
    ]
    rows = []
    for row in results:
        times = [f"{row[f'ms_{p}']:.1f} ({results[0][f'ms_{p}'] / row[f'ms_{p}']:.2f} x)" for p in pixels]
        peaks = [f"{row.get(f'peak_gb_{p}', 0):.1f}" for p in pixels]
        error = f"{max(row[f'error_{p}'] for p in pixels):.3f}"
        rows.append([row["variant"], *times, *peaks, f"{row['weights_gb']:.1f}", error])
    return markdown(columns, rows)


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


def measure_quantization(bf16, pixels: int, steps: int, rounds: int = 3) -> dict[str, object]:
    """What recording costs the sampling it rides on, and time and memory of quantizing with and without calibration."""
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
    variants = {
        "uncalibrated": (QuantizationSettings(), None),
        "calibrated": (QuantizationSettings(), recording.calibration()),
        "calibrated, alpha searched": (QuantizationSettings(search_alpha=True), recording.calibration()),
    }
    for name, (settings, calibration) in variants.items():
        with PeakMemory(device) as peak:
            begin = time.perf_counter()
            quantized, report = quantize_model(bf16, settings, "fused int8", calibration)
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
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20, help="of the samplings that are recorded")
    parser.add_argument("--only", choices=("steps", "quantization"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for ideogram4.md and ideogram4.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    import comfy.sd
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title

    device = comfy.model_management.get_torch_device()
    state_dict = random_state_dict(arguments.blocks, device)
    bf16 = comfy.sd.load_diffusion_model_state_dict(dict(state_dict))
    machine = describe_machine(device)
    parts = [f"{title(machine)}, ComfyUI {comfyui_version}, {arguments.blocks} blocks with random weights."]
    results: dict[str, object] = {}
    if arguments.only != "steps":
        results["quantization"] = measured = measure_quantization(bf16, max(arguments.pixels), arguments.steps)
        added = 100 * measured["recording_adds"]
        parts.append(
            f"Recording adds {added:.1f} % to a sampling of {arguments.steps} steps, {max(arguments.pixels)} px."
        )
        parts.append(quantization_table(measured["variants"]))
        comfy.model_management.unload_all_models()
    if arguments.only != "quantization":
        results["steps"] = measured = measure_steps(bf16, state_dict, arguments.pixels, arguments.repetitions)
        parts.append("A step is one conditional and one unconditional forward. Errors are relative to bf16's outputs.")
        parts.append(steps_table(measured, arguments.pixels))
    text = "\n\n".join(parts) + "\n"
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ideogram4.md").write_text(text)
    data = {"environment": machine, "comfyui": comfyui_version, **results}
    (arguments.out / "ideogram4.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
