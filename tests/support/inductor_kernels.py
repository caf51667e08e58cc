"""Which kernels Inductor makes of the quantizers of a compiled model on a GPU, as its scheduler decides.

No GPU is needed: the CPU's graph is moved to a fake one, scheduled there, and never compiled.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.scheduler
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from support.architectures import Architecture
from support.tensors import relative_error

QUANTIZER = torch.ops.int8_dit.quantize_activations.default
GEMM = torch.ops.int8_dit.int8_gemm.default
_aten = torch.ops.aten
_SAME_VALUES = {
    overload
    for packet in ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand",
                   "clone", "slice", "select", "split", "split_with_sizes", "alias", "_to_copy", "unbind")
    for overload in (getattr(getattr(_aten, packet), name) for name in getattr(_aten, packet).overloads())
}  # fmt: skip


@dataclass
class Quantizers:
    """Of the quantizers seen so far, by what computes their input: how many there are, and how many are folded.

    Attributes:
        total: "attention"; "product", of another linear; "graph input"; or "producer", which they can be folded into.
        folded: those that are in one kernel with their producer.
        graphs, kernels: how many graphs there were, and kernels that Inductor writes for them.
    """

    total: Counter[str] = field(default_factory=Counter)
    folded: int = 0
    graphs: int = 0
    kernels: int = 0

    def compiler(self) -> Callable:
        """A backend of torch.compile that counts, and runs the graph as it is."""
        return aot_autograd(fw_compiler=self._schedule, decompositions=select_decomp_table())

    def _schedule(self, graph_module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        fake_mode = torch._guards.detect_fake_mode(example_inputs)
        moved, inputs = _on_gpu(graph_module, fake_mode)
        with _a_gpu(), V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
            graph = GraphLowering(moved, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=True)
            with V.set_graph_handler(graph):
                graph.run(*inputs)
                graph._update_scheduler()
                self._count(graph)
        self.graphs += 1
        return make_boxed_func(graph_module.forward)

    def _count(self, graph: GraphLowering) -> None:
        kernels = [
            set().union(*(part.node.get_origins() for part in kernel.get_nodes()))
            for kernel in graph.scheduler.nodes
            if isinstance(kernel, SchedulerNode | FusedSchedulerNode)
        ]
        self.kernels += len(kernels)
        for quantizer in graph.module.graph.find_nodes(op="call_function", target=QUANTIZER):
            kind, source = _source(quantizer.args[0])
            self.total[kind] += 1
            fused = any(quantizer in origins and source in origins for origins in kernels)
            self.folded += kind == "producer" and fused


def _source(node: torch.fx.Node) -> tuple[str, torch.fx.Node]:
    """What computed these values, and of which kind it is."""
    while node.op == "call_function":
        if node.target in _SAME_VALUES or getattr(node.target, "__name__", "") == "getitem":
            node = node.args[0]
            continue
        name = str(node.target)
        if "scaled_dot_product" in name or "attention" in name:
            return "attention", node
        if node.target is GEMM or name.split(".")[1] in ("mm", "addmm", "bmm", "convolution"):
            return "product", node
        return "producer", node
    return "graph input", node


def _on_gpu(graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, list]:
    """A copy of a CPU's graph for a GPU, and its inputs, all fake."""
    graph, inputs = copy.deepcopy(graph_module.graph), []
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        if node.op in ("placeholder", "get_attr"):
            value = node.meta["val"] if node.op == "placeholder" else getattr(graph_module, node.target)
            if isinstance(value, torch.Tensor):
                with fake_mode:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
            inputs.append(value)
            node.op, node.target = "placeholder", node.name
    moved = torch.fx.GraphModule({}, graph)
    FakeTensorProp(moved, fake_mode).propagate_dont_convert_inputs(*inputs)
    return moved, inputs


@contextmanager
def _a_gpu() -> Iterator[None]:
    """An H200 as far as Inductor's scheduler asks."""
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        name="NVIDIA H200",
        total_memory=140 << 30,
        shared_memory_per_block_optin=227 << 10,
    )
    with ExitStack() as stack:
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            stack.enter_context(mock.patch.object(owner, "get_device_properties", lambda *_: properties))
            stack.enter_context(mock.patch.object(owner, "current_device", lambda: 0))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)))
        stack.enter_context(mock.patch.object(CudaInterface, "get_compute_capability", lambda *_: 90))
        stack.enter_context(mock.patch.object(CudaInterface, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(CudaInterface, "raise_if_triton_unavailable", lambda *_: None))
        stack.enter_context(mock.patch.object(torch._inductor.scheduler, "has_triton", lambda: True))
        yield


@contextmanager
def plain_attention() -> Iterator[None]:
    """What ComfyUI picks on a GPU. Its choice for a CPU asks for the free memory in every call, which no compiler
    traces. It holds for the models that are imported by now."""
    from comfy.ldm.modules.attention import attention_pytorch

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for function in ("optimized_attention", "optimized_attention_masked"):
                if name.startswith("comfy.ldm.") and hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, attention_pytorch))
        yield


def quantizers_of(architecture: Architecture) -> tuple[Quantizers, float]:
    """Those of a small model of it with all its linears INT8, one by one, compiled whole, and its relative error to
    eager."""
    import comfy.model_management

    from support import small_models
    from support.random_models import unfused

    torch._dynamo.reset()
    model = small_models.int8_of(architecture)
    comfy.model_management.load_models_gpu([unfused(model)])
    quantizers = Quantizers()
    with plain_attention():
        expected = small_models.output_of(architecture, model)
        model.model.diffusion_model.compile(backend=quantizers.compiler())
        return quantizers, relative_error(small_models.output_of(architecture, model), expected)
