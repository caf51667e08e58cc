"""The node "Kernel Benchmark"."""

import comfy.model_management
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..kernels.benchmark import (
    IDEOGRAM4_SHAPES,
    SHOWN,
    LinearShape,
    benchmark_shape,
    describe_machine,
    markdown,
    notes,
    table,
    title,
    working_memory,
)
from .host.work import Progress, make_room
from .model.layer_selection import quantizable_linears
from .pictures.benchmark_plot import plot

_METHODS_NOTE = (
    "Median times on a busy device, weights not in cache; the quantization of the activations is included except in "
    "'GEMM alone'. fake-quant: quantize, dequantize, multiply in bf16. unfused: torch._int_mm, then dequantize. "
    "comfy-kitchen cuda: what ComfyUI's own INT8 computes with."
)
_CPU_NOTE = "No GPU: float32 stands in for _int_mm, and the times are this CPU's."


class INT8KernelBenchmark(io.ComfyNode):
    """Times the linears of a MODEL, or of Ideogram 4, in bf16 and in the INT8 variants on this machine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="INT8KernelBenchmark",
            display_name="Kernel Benchmark",
            category="model/quantization",
            search_aliases=["speed test"],
            description="Times each linear shape of the connected model (Ideogram 4 without one) in bf16 and in INT8 "
            "on this card.",
            inputs=[
                io.Model.Input("model", optional=True, tooltip="Its linears are timed; Ideogram 4's without one."),
                io.Int.Input(
                    "tokens",
                    default=4352,
                    min=1,
                    max=1 << 20,
                    tooltip="Rows of the activations: image tokens + text tokens. 4352 is Ideogram 4 at 1024 px.",
                ),
            ],
            outputs=[
                io.Image.Output(tooltip="The times, drawn."),
                io.String.Output(display_name="table", tooltip="The same as a table."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, tokens, model=None) -> io.NodeOutput:
        device = comfy.model_management.get_torch_device() if model is None else model.load_device
        shapes = IDEOGRAM4_SHAPES if model is None else linear_shapes(model)
        progress = Progress(len(shapes))
        make_room(device, max(working_memory(shape, tokens) for shape in shapes))
        results = []
        check = comfy.model_management.throw_exception_if_processing_interrupted
        with comfy.model_management.cuda_device_context(device):
            for shape in shapes:
                results.append(benchmark_shape(shape, tokens, device, SHOWN, check=check))
                progress.step()
        heading = title(describe_machine(device))
        columns, rows = table(results, SHOWN)
        remarks = [_METHODS_NOTE, *([] if device.type == "cuda" else [_CPU_NOTE]), *notes(results)]
        text = "\n\n".join([heading, markdown(columns, rows), *remarks])
        ui = {"int8_benchmark": [{"title": heading, "columns": columns, "rows": rows, "notes": remarks}]}
        return io.NodeOutput(plot(results, heading), text, ui=ui)


def linear_shapes(model: ModelPatcher) -> list[LinearShape]:
    """The distinct shapes of a MODEL's quantizable linears, each named after the first layer that has it.

    Raises ValueError for a model without such layers.
    """
    shapes: dict[tuple[int, ...], LinearShape] = {}
    for name, module in quantizable_linears(model).items():
        n, k = module.weight.shape
        label = ".".join(part for part in name.split(".")[1:] if not part.isdigit()) or name
        shapes.setdefault((n, k), LinearShape(label, n, k))
    if not shapes:
        raise ValueError("this MODEL has no linear layers in repeated blocks: disconnect it to benchmark Ideogram 4's")
    return list(shapes.values())
