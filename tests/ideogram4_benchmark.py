"""A full Ideogram 4 with random weights in ComfyUI: milliseconds per step and memory in bf16, native INT8 and this pack's.

    python tests/ideogram4_benchmark.py --comfyui PATH [--json FILE]

Needs an NVIDIA card with about 40 GB of memory; `--blocks 1 --pixels 64` tries the script out on a CPU. One step is one
conditional forward (256 text tokens) and one unconditional one, as DualModelGuider runs them. Every variant goes through
ComfyUI's own model loading, and all figures come from one process.
"""

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parents[1]
TEXT_TOKENS = 256
TEXT_FEATURES = 53248


def import_pack(comfyui: Path) -> None:
    """Make ComfyUI and this pack (as `int8_dit`) importable, on the CPU where there is no GPU."""
    sys.path.insert(0, str(comfyui))
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    spec = importlib.util.spec_from_file_location(
        "int8_dit", PROJECT / "__init__.py", submodule_search_locations=[str(PROJECT)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["int8_dit"] = module
    spec.loader.exec_module(module)


def random_state_dict(blocks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """bf16 tensors of an Ideogram 4 in host memory: norms are ones, the rest is scaled so that activations stay finite."""
    import comfy.ldm.ideogram4.model
    import comfy.ops

    skeleton = comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel(
        num_layers=blocks, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator(device).manual_seed(0)
    state_dict = {}
    for name, tensor in skeleton.state_dict().items():
        if tensor.ndim == 1 and "norm" in name:
            state_dict[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
            continue
        values = torch.randn(tensor.shape, generator=generator, device=device, dtype=torch.bfloat16)
        state_dict[name] = (values * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.01)).cpu()
    return state_dict


def native_int8(state_dict: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The same model in ComfyUI's native INT8 format, on the layers this pack quantizes."""
    from int8_dit.kernels import quantize_weight
    from int8_dit.nodes import file_format
    from int8_dit.nodes.layer_selection import is_quantizable

    native = dict(state_dict)
    for key, weight in state_dict.items():
        name = key.removesuffix(".weight")
        if key != name and is_quantizable(name, tuple(weight.shape)):
            q, scale = quantize_weight(weight.to(device))
            native[key], native[f"{name}.{file_format.SCALE}"] = q.cpu(), scale.cpu()[:, None]
            native[f"{name}.{file_format.MARK}"] = file_format.encode_mark(False, None)
    return native


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
        figures[f"ms_{pixels}"] = median_milliseconds(lambda: step.run(diffusion_model), device, repetitions)
        if device.type == "cuda":
            figures[f"peak_gb_{pixels}"] = torch.cuda.max_memory_allocated() / 1e9
        figures[f"error_{pixels}"] = float((output - expected[pixels]).norm() / expected[pixels].norm())
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()
    print(json.dumps(figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--pixels", type=int, nargs="+", default=[768, 1024])
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import_pack(arguments.comfyui)
    import comfy.model_management
    import comfy.sd
    from comfyui_version import __version__ as comfyui_version
    from int8_dit.kernels.benchmark import environment
    from int8_dit.kernels.benchmark_report import title
    from int8_dit.nodes.model_loading import load_int8_model
    from int8_dit.nodes.quantization import quantize_model
    from int8_dit.nodes.save_int8_dit import save_int8_model

    device = comfy.model_management.get_torch_device()
    state_dict = random_state_dict(arguments.blocks, device)
    bf16 = comfy.sd.load_diffusion_model_state_dict(dict(state_dict))
    dtype = bf16.model.get_dtype_inference()
    steps = {pixels: Step(pixels, device, dtype) for pixels in arguments.pixels}
    expected: dict[int, torch.Tensor] = {}
    results = [measure("bf16", bf16, steps, expected, arguments.repetitions)]

    native = comfy.sd.load_diffusion_model_state_dict(native_int8(state_dict, device))
    results.append(measure("native INT8", native, steps, expected, arguments.repetitions))
    del native, state_dict

    for protect in (0, 17 if arguments.blocks > 17 else 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        quantized = quantize_model(bf16, 0.5, protect, "fused int8", None)
        seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "ideogram4-int8.safetensors")
            save_int8_model(quantized, path, {})
            size = Path(path).stat().st_size / 1e9
            del quantized
            loaded = load_int8_model(path, "fused int8")
            figures = measure(f"fused INT8, {protect} protected", loaded, steps, expected, arguments.repetitions)
            del loaded
        results.append({**figures, "quantize_s": seconds, "quantize_peak_gb": peak, "file_gb": size})

    print(f"\n{title(environment(device))}, ComfyUI {comfyui_version}, {arguments.blocks} blocks\n")
    columns = [
        "variant",
        *(f"{p} px ms (vs bf16)" for p in steps),
        *(f"{p} px peak GB" for p in steps),
        "weights GB",
        "rel. error",
    ]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in results:
        times = [f"{row[f'ms_{p}']:.1f} ({results[0][f'ms_{p}'] / row[f'ms_{p}']:.2f} x)" for p in steps]
        peaks = [f"{row.get(f'peak_gb_{p}', 0):.1f}" for p in steps]
        error = f"{max(row[f'error_{p}'] for p in steps):.3f}"
        print("| " + " | ".join([row["variant"], *times, *peaks, f"{row['weights_gb']:.1f}", error]) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(device), "results": results}, indent=1))


if __name__ == "__main__":
    main()
