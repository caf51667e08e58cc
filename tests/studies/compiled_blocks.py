"""Full-width blocks eager and compiled, in bf16 and in INT8 with the quantizer opaque or folded into its producers.

    python tests/studies/compiled_blocks.py --comfyui PATH [--out DIR]

Needs an NVIDIA card with 8 GB of memory; `--tokens 32 --repetitions 1` tries the script out on a CPU. Random weights,
one run. Beside the table it writes the Triton code of the kernels that quantize.
"""

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack
from support.tensors import relative_error

RESULTS = Path(__file__).resolve().parent / "results" / "compiled_blocks"


@dataclass(frozen=True)
class Block:
    """A kind of block: how it is made, given ComfyUI's operations, and its inputs, given their maker and the tokens."""

    title: str
    make: Callable[[dict], torch.nn.Module]
    inputs: Callable[[Callable[..., torch.Tensor], int], tuple]
    options: dict
    tokens: int


def blocks() -> list[Block]:
    """Those of the three models, as wide as they are."""
    from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock
    from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock
    from comfy.ldm.modules.diffusionmodules.mmdit import JointBlock

    def rope(randn: Callable[..., torch.Tensor], tokens: int, half: int) -> torch.Tensor:
        return randn(1, 1, tokens, half, 2, 2).float()

    flux = {"hidden_size": 3072, "num_heads": 24, "mlp_ratio": 4.0}
    return [
        Block(
            "Ideogram 4",
            lambda made: Ideogram4TransformerBlock(4608, 12288, 18, 1e-5, 512, **made),
            lambda randn, t: (randn(1, t, 4608), None, rope(randn, t, 128).transpose(1, 2), randn(1, 1, 512)),
            {},
            4352,
        ),
        Block(
            "Flux.1 double",
            lambda made: DoubleStreamBlock(**flux, qkv_bias=True, **made),
            lambda randn, t: (
                randn(1, t - t // 9, 3072), randn(1, t // 9, 3072), randn(1, 3072), rope(randn, t, 64)
            ),
            {},
            4608,
        ),
        Block(
            "Flux.1 single",
            lambda made: SingleStreamBlock(**flux, **made),
            lambda randn, t: (randn(1, t, 3072), randn(1, 3072), rope(randn, t, 64)),
            {},
            4608,
        ),
        Block(
            "SD3.5 Large",
            lambda made: JointBlock(2432, 38, qkv_bias=True, qk_norm="rms", pre_only=False, **made),
            lambda randn, t: (randn(1, t // 28, 2432), randn(1, t - t // 28, 2432)),
            {"use_checkpoint": False, "c": (1, 2432)},
            4250,
        ),
    ]  # fmt: skip


def build(block: Block, tensors: dict[str, torch.Tensor], int8: bool, device: torch.device) -> torch.nn.Module:
    """The block with these weights, all linears but those of the modulation in INT8 if asked for."""
    import comfy.ops

    from int8_dit.kernels import quantize_weight
    from int8_dit.nodes.layers.input_groups import group_inputs
    from int8_dit.nodes.layers.int8_weight import int8_weight
    from int8_dit.nodes.loading.load_plan import LoadPlan
    from int8_dit.nodes.loading.operations import int8_operations

    def convert(name: str, weight: torch.Tensor, _: object) -> torch.Tensor | None:
        if re.search("mod|adaLN", name):
            return None
        return int8_weight(*quantize_weight(weight), torch.bfloat16)

    kernel = "fused int8" if int8 else "bf16"
    operations = int8_operations(LoadPlan(kernel, torch.bfloat16, convert)) if int8 else comfy.ops.disable_weight_init
    made = block.make({"dtype": torch.bfloat16, "device": device, "operations": operations})
    made.load_state_dict(tensors)
    if int8:
        group_inputs(made)
    return made.to(device).eval()


@contextmanager
def opaque_quantizer() -> Iterator[None]:
    """As if Inductor did not know what the quantizer is."""
    from torch._inductor.lowering import fallback_handler, lowerings

    from int8_dit.kernels import compilers

    compilers._teach_inductor()
    operator = torch.ops.int8_dit.quantize_activations.default
    known = lowerings[operator]
    lowerings[operator] = fallback_handler(operator, add_to_fallback_set=False)
    try:
        yield
    finally:
        lowerings[operator] = known


def timed(run: Callable[[], object], device: torch.device, repetitions: int) -> dict[str, float]:
    """Milliseconds of wall clock per call, back to back, and of all kernels of one call, and how many these are."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return {"wall": (time.perf_counter() - begin) * 1e3}
    walls = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) * 1e3 / repetitions)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.self_device_time_total for event in kernels) / 1e3 / repetitions
    top = sorted(kernels, key=lambda event: -event.self_device_time_total)
    return {
        "wall": sorted(walls)[len(walls) // 2],
        "busy": busy,
        "kernels": sum(event.count for event in kernels) / repetitions,
        "by_kernel_us": {e.key[:90]: round(e.self_device_time_total / repetitions, 1) for e in top[:25]},
    }


def compiled_code(run: Callable[[], object]) -> str:
    """What Inductor writes while `run` compiles."""
    from torch._inductor.utils import run_and_get_code

    return "\n".join(run_and_get_code(run)[1])


def quantizing_kernels(code: str) -> str:
    """Of a generated module the Triton kernels that round to int8."""
    kernels = re.findall(r"@triton\.jit\ndef (\w+)(.*?)\n'''", code, re.S)
    return "\n\n".join(f"@triton.jit\ndef {name}{body}" for name, body in kernels if ".to(tl.int8)" in body)


def measure(block: Block, device: torch.device, tokens: int | None, repetitions: int, out: Path) -> list[dict]:
    """Every variant of one block."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    import comfy.ops

    meta = {"dtype": torch.bfloat16, "device": "meta", "operations": comfy.ops.disable_weight_init}
    tensors = {
        name: randn(*tensor.shape) * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 1 + 0.1 * randn(*tensor.shape)
        for name, tensor in block.make(meta).state_dict().items()
    }
    arguments = block.inputs(randn, tokens or block.tokens)
    options = {name: randn(*value) if isinstance(value, tuple) else value for name, value in block.options.items()}
    rows, expected = [], None

    def fresh() -> list:
        """Some blocks change their inputs."""
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]

    def row(variant: str, module: Callable, code: str = "") -> None:
        nonlocal expected

        result = module(*fresh(), **options)
        flat = torch.cat([part.flatten().float() for part in (result if isinstance(result, tuple) else (result,))])
        expected = flat if expected is None else expected
        figures = {"block": block.title, "variant": variant, "error": relative_error(flat, expected)}
        inputs = fresh()
        figures |= timed(lambda: module(*inputs, **options), device, repetitions)
        rows.append(figures | {"quantizing": code.count("@triton.jit\ndef ")})
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "by_kernel_us"}), flush=True)

    def compiled(variant: str, module: torch.nn.Module) -> None:
        torch._dynamo.reset()
        function = torch.compile(module, fullgraph=True, dynamic=False)
        code = quantizing_kernels(compiled_code(lambda: function(*fresh(), **options)))
        if code:
            (out / re.sub(r"[^\w.]+", "_", f"{block.title} {variant}.txt")).write_text(code)
        row(variant, function, code)

    bf16 = build(block, tensors, int8=False, device=device)
    row("bf16", bf16)
    compiled("bf16, compiled", bf16)
    del bf16
    int8 = build(block, tensors, int8=True, device=device)
    row("INT8", int8)
    with opaque_quantizer():
        compiled("INT8, compiled, opaque quantizer", int8)
    compiled("INT8, compiled", int8)
    return rows


def streamed_lora(block: Block, device: torch.device, tokens: int | None) -> dict[str, object]:
    """Graph breaks of an INT8 block whose weights lie in host memory and have a LoRA, and its error to eager."""
    import comfy.ops
    from comfy.model_patcher import LowVramPatch
    from comfy.weight_adapter.lora import LoRAAdapter

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(torch.bfloat16)

    meta = {"dtype": torch.bfloat16, "device": "meta", "operations": comfy.ops.disable_weight_init}
    shapes = {name: tensor.shape for name, tensor in block.make(meta).state_dict().items()}
    tensors = {name: randn(*shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    module = build(block, tensors, int8=True, device=device)
    for layer in module.modules():
        if getattr(layer, "layout_type", None) is not None:
            layer.weight = torch.nn.Parameter(layer.weight.to("cpu"), requires_grad=False)
            (n, k), key = layer.weight.shape, "diffusion_model.layer.weight"
            lora = LoRAAdapter(set(), (randn(n, 16).cpu() / 4, randn(16, k).cpu() / k**0.5, None, None, None, None))
            layer.weight_function = [LowVramPatch(key, {key: [(1.0, lora, 1.0, None, None)]})]
    inputs = block.inputs(randn, tokens or block.tokens)
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(module)(*inputs).graph_break_count
    torch._dynamo.reset()
    error = relative_error(torch.compile(module)(*inputs).float(), module(*inputs).float())
    return {"block": block.title, "graph breaks with a streamed LoRA": breaks, "error to eager": error}


def table(rows: list[dict]) -> str:
    """All variants, each beside eager bf16."""
    from int8_dit.kernels.benchmark import markdown

    lines = []
    for row in rows:
        base = next(r for r in rows if r["block"] == row["block"])
        times = [f"{row[k]:.3f} ({base[k] / row[k]:.2f} ×)" if k in row else "-" for k in ("wall", "busy")]
        counts = [f"{row.get('kernels', 0):.0f}", str(row["quantizing"])]
        lines.append([row["block"], row["variant"], *times, *counts, f"{row['error']:.4f}"])
    columns = ["block", "variant", "wall, ms", "GPU busy, ms", "kernels", "of Inductor's, quantizing", "error to bf16"]
    return markdown(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="instead of those of 1024 px")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--only", help="a part of the blocks' titles")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for compiled_blocks.md, .json and the code")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support.inductor_kernels import plain_attention

    torch._inductor.config.force_disable_caches = True  # the variants are one graph to its cache
    device = comfy.model_management.get_torch_device()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with torch.inference_mode(), plain_attention():
        for block in blocks():
            if (arguments.only or "") in block.title:
                rows += measure(block, device, arguments.tokens, arguments.repetitions, arguments.out)
        streamed = streamed_lora(blocks()[0], device, arguments.tokens)
    machine = describe_machine(device)
    text = f"{title(machine)}, ComfyUI {comfyui_version}, random weights, 1024 px.\n\n{table(rows)}\n\n{streamed}\n"
    print(text)
    (arguments.out / "compiled_blocks.md").write_text(text)
    data = {"environment": machine, "comfyui": comfyui_version, "rows": rows, "streamed": streamed}
    (arguments.out / "compiled_blocks.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
