"""How Inductor lowers an operator. Importing this takes a second."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg


def inline(operator: Any, plain: Callable[..., Callable[..., Any] | None], warn: Callable[[Exception], None]) -> None:
    """Let Inductor inline an operator as plain operations, from now on in this process.

    Args:
        operator: its tensors come first.
        plain: (*arguments, fake tensors among them) -> a function of the tensors, or None to leave the operator opaque.
        warn: called with an error of either, which leaves the operator opaque.
    """

    def lower(*arguments: Any) -> Any:
        fakes = [node.meta["val"] for node in V.graph.current_node.all_input_nodes]
        try:
            function = plain(*fakes, *arguments[len(fakes) :])
            if function is not None:
                return _lowered(function, arguments, fakes)
        except Exception as error:  # a PyTorch whose Inductor is made otherwise
            warn(error)
        return fallback_handler(operator, add_to_fallback_set=False)(*arguments)

    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lower)


def _lowered(function: Callable[..., Any], inputs: Sequence[Any], fakes: Sequence[torch.Tensor]) -> Any:
    """Return the nodes of a function's results for the nodes `inputs`, which stand for tensors like `fakes`."""
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
