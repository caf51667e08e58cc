"""Made-up forwards of a model, and times of their linears."""

from kernels.benchmark.forward_split import BlockCalls, Calls, ForwardSplit
from kernels.benchmark.methods import BF16, COMFYUI_INT8, FUSED
from kernels.benchmark.shape_results import LinearShape, ShapeResult

QKV, DOWN, TINY = (LinearShape(*each) for each in (("qkv", 30, 10, 100), ("w2", 10, 40, 100), ("tiny", 30, 10, 1)))
SPLIT = ForwardSplit(99.0, 100.0, {QKV: Calls(4, 40.0), DOWN: Calls(2, 22.0), TINY: Calls(1, 0.5)}, 20.0)
BLOCKS = (BlockCalls(4, 60.0, "double", 2.0), BlockCalls(8, 38.0, "single", 2.0))
IN_BLOCKS = SPLIT._replace(blocks=BLOCKS)
WAITING = SPLIT._replace(watched=300.0)


def result(shape, **milliseconds):
    rounds = {method: [0.95 * time, time, 1.05 * time] for method, time in milliseconds.items()}
    zeros = dict.fromkeys(milliseconds, 0.0)
    return ShapeResult(shape, shape.tokens, rounds=rounds, relative_errors=zeros, weight_bytes=zeros)


RESULTS = [
    result(QKV, **{BF16: 10.0, FUSED: 4.0, COMFYUI_INT8: 5.0}),
    result(DOWN, **{BF16: 11.0, FUSED: 3.0}),
]
SLOW = [result(QKV, **{BF16: 10.0, FUSED: 12.5}), result(DOWN, **{BF16: 11.0, FUSED: 13.0})]
NOISE = [result(QKV, **{BF16: 10.0, FUSED: 10.2, COMFYUI_INT8: 20.0})]
