"""Inductor: what an operator of the pack becomes in its graphs. Importing this takes a second."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg


def teach(operator: Any, lower: Callable[..., Any]) -> None:
    """Let `lower` make Inductor's nodes of an operator's results out of those of its arguments, once per process."""
    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lower)


def opaque(operator: Any, *arguments: Any) -> Any:
    """Nodes of an operator's results that leave it the call that it is."""
    return fallback_handler(operator, add_to_fallback_set=False)(*arguments)


def tensors_of_call() -> list[torch.Tensor]:
    """Fake tensors like the arguments of the operator that is being lowered."""
    return [node.meta["val"] for node in V.graph.current_node.all_input_nodes]


def plain(function: Callable[..., Any], inputs: list[Any], fakes: list[torch.Tensor]) -> Any:
    """Nodes of the results of a function of plain operations; `fakes` look like what the nodes `inputs` stand for."""
    with V.fake_mode:
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fakes).graph
    nodes: dict[torch.fx.Node, Any] = {}
    # A row is one program's: split among several, as Inductor likes where parts lie side by side, it is read twice.
    with config.patch(split_reductions=False):
        for node in graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                nodes[node] = inputs[len(nodes)]
            elif isinstance(node.meta["val"], torch.SymInt):
                nodes[node] = node.meta["val"].node.expr
            else:
                taken, options = map_arg((node.args, node.kwargs), nodes.__getitem__)
                nodes[node] = lowerings[node.target](*taken, **options)
            if node.target == torch.ops.aten.amax.default:
                computed = nodes[node].data.data
                computed.data = dataclasses.replace(computed.data, reduction_hint=ReductionHint.INNER)
    return map_arg(graph.output_node().args[0], nodes.__getitem__)
