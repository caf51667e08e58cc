"""The registered operators: what PyTorch's own checks, torch.compile and CUDA graphs make of them."""

import importlib.util
import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func

import kernels
from kernels import UNCHANGED, ChannelTransform, int8_linear, quantize_weight
from kernels.linear.int8_linear import quantize_activations
from support import inductor_kernels
from support.covering import covering
from support.fused_op_cases import Form, calls
from support.tensors import DEVICE, random_float, random_int8, relative_error

OPERATORS = torch.ops.int8_dit
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The eager reference on a CPU: what runs inside the operators is another test's subject.

    And no compiled leftovers.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch._dynamo.reset()


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TRANSFORMS = ((False, None), (True, None), (False, 16), (True, 64))


def opcheck(name, *arguments):
    torch.library.opcheck(getattr(OPERATORS, name).default, arguments)


def factors(with_smooth):
    return random_float(64, seed=1).abs() + 0.5 if with_smooth else None


@pytest.mark.parametrize("form, rows", covering(list(itertools.product(TRANSFORMS, (8, 16), FLOATS)), (0, 1, 2, 5, 7)))
def test_opcheck_of_the_quantization(form, rows):
    (with_smooth, group), bits, dtype = form
    opcheck("quantize_activations", random_float(rows, 64, dtype=dtype), factors(with_smooth), group, bits)


@pytest.mark.parametrize("tokens, dtype", covering((0, 1, 5), (torch.bfloat16, torch.float32)))
def test_opcheck_of_the_fused_ops(tokens, dtype):
    form = Form("", 64, tokens=tokens, heads=(4, 1), dtype=dtype)
    rotated = replace(form, group=16, smooth=True)
    for case, _, arguments in calls(DEVICE, form, rotated, replace(form, activation_bits=16)):
        opcheck(case.name, *case.op.flat(arguments))


# Five shapes and 18 forms: in turn each form meets another shape.
@pytest.mark.parametrize(
    "shape, form",
    covering(
        ((5, 16, (8,)), (5, 16, (8, 1)), (1, 16, ()), (0, 16, (8,)), (5, 0, (8,))),
        list(itertools.product(FLOATS, (None, torch.bfloat16, torch.float32), (1, 2))),
    ),
)
def test_opcheck_of_the_gemm(shape, form):
    (rows, channels, scale_shape), (out_dtype, bias_dtype, passes) = shape, form
    bias = None if bias_dtype is None else random_float(8, seed=3, dtype=bias_dtype)
    weight_scale = torch.full(scale_shape, 0.01, device=DEVICE)
    operands = random_int8(rows, passes * channels), torch.ones(rows, device=DEVICE), random_int8(8, channels, seed=1)
    opcheck("int8_gemm", *operands, weight_scale, bias, out_dtype)


@pytest.mark.parametrize("rows", (0, 1, 5))
def test_opcheck_of_weights(rows):
    scale = torch.ones(rows, 1, device=DEVICE)
    for with_smooth, group in ((False, None), (True, 16)):
        opcheck("requantize_weight", random_float(rows, 64), factors(with_smooth), group, 3)
        opcheck("dequantize_weight", random_int8(rows, 64), scale, factors(with_smooth), group, torch.bfloat16)
    for name in ("Q8_0", "Q4_K"):
        blocks = kernels.quantize_gguf(random_float(rows, 512), name)
        for low_rank in ((None, None), (random_float(rows, 3, seed=1), random_float(3, 512, seed=2))):
            opcheck("expand_gguf", blocks, name, scale, *low_rank)
        for dtype in (torch.bfloat16, torch.float32):
            opcheck("dequantize_gguf", blocks, name, dtype)
        opcheck("gguf_channel_scales", blocks, name)
    addition = scale, scale * 2, random_float(rows, 3, seed=1), random_float(3, 64, seed=2)
    for bits, codebook in ((4, None), (4, random_float(16)), (6, None)):
        codes = random_int8(rows, 64 * bits // 8)
        group_scale = random_float(rows, 4, dtype=torch.bfloat16)  # the check computes with it, and cannot in FP8
        for added in ((None,) * 4, addition):
            opcheck("expand_codes", codes, group_scale, codebook, 16, *added)


def test_blocks_in_a_compiled_graph():
    blocks = kernels.quantize_gguf(random_float(8, 512), "Q4_K")
    scale = kernels.gguf_channel_scales(blocks, "Q4_K")

    def linear(x):
        return int8_linear(x, kernels.expand_gguf(blocks, "Q4_K", scale), scale)

    x = random_float(5, 512)
    assert targets_in_compiled_graph(linear, x).count(OPERATORS.expand_gguf.default) == 1
    torch._dynamo.reset()
    assert torch.equal(torch.compile(linear, backend="aot_eager", fullgraph=True)(x), linear(x))
    decoded = kernels.dequantize_gguf(blocks, "Q4_K")
    compiled = torch.compile(lambda: kernels.dequantize_gguf(blocks, "Q4_K"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), decoded) and decoded.dtype == torch.bfloat16


WIDTH = 64


def swiglu():
    """That of a diffusion transformer."""
    shapes = (96, WIDTH), (96, WIDTH), (WIDTH, 96)
    *gates, down = (
        (*quantize_weight(random_float(n, k, seed=seed) / k**0.5), random_float(n, seed=seed) / 10)
        for seed, (n, k) in enumerate(shapes)
    )

    def block(x):
        hidden = F.layer_norm(x, (WIDTH,))
        gate, up = (int8_linear(hidden, *linear) for linear in gates)
        return x + int8_linear(F.silu(gate) * up, *down)

    return block


def tokens(count, seed=0):
    return random_float(2, count, WIDTH, seed=seed)


@pytest.mark.parametrize(
    "counts, dynamic, most",
    (((12, 12, 12, 12), False, 1), ((12, 20, 28, 7), False, 2), ((12, 20, 28), True, 1)),
    ids=str,
)
@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_compiled_and_eager_are_equal_and_steps_do_not_recompile(context, counts, dynamic, most):
    """A block is one graph for all steps, one more for other numbers of tokens, and one where these are marked."""
    block, counter = swiglu(), CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    with context():
        for step, count in enumerate(counts):
            x = tokens(count, seed=step)
            if dynamic:
                torch._dynamo.mark_dynamic(x, 1)
            # Another order of float additions may move a value across a rounding boundary.
            expected, most_off = block(tokens(count, seed=step)), 1e-3 if BACKEND == "aot_eager" else 1e-2
            assert relative_error(compiled(x), expected) <= most_off
    assert counter.frame_count <= most


def targets_in_compiled_graph(function, *arguments):
    """The calls in the graph that a compiler gets after AOTAutograd."""
    targets = []

    def compiler(graph, example_inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return targets


def test_a_compiler_sees_the_two_opaque_operators():
    targets = targets_in_compiled_graph(swiglu(), tokens(12))
    assert targets.count(OPERATORS.quantize_activations.default) == 3
    assert targets.count(OPERATORS.int8_gemm.default) == 3


class Quantizer(torch.nn.Module):
    """A modulated LayerNorm and the quantizer: as plain operations, Inductor would store the modulated rows."""

    def __init__(self, transform=UNCHANGED, bits=8):
        super().__init__()
        self.transform, self.bits = transform, bits

    def forward(self, x, scale, shift):
        rows = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return quantize_activations(rows, self.transform, self.bits)


def rows_and_modulation(count, channels=96):
    """Random ones; the first row has a NaN, the second an Inf."""
    x = random_float(count, channels)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    return x, random_float(1, channels, seed=1), random_float(1, channels, seed=2)


@pytest.mark.parametrize(
    "transform, bits, kernels",
    (
        (UNCHANGED, 8, 1),
        (ChannelTransform(torch.linspace(0.5, 2.0, 96)), 8, 1),
        (ChannelTransform(None, 16), 8, 1),  # that of the norm; the rotating quantizer is an operator
        (UNCHANGED, 16, 1),  # and so is that of 16 bits
    ),
)
def test_inductor_makes_one_kernel_of_producer_and_quantizer(transform, bits, kernels):
    quantizers = inductor_kernels.Quantizers()
    compiled = torch.compile(Quantizer(transform, bits).cpu(), backend=quantizers.compiler(), fullgraph=True)
    with torch.no_grad():
        compiled(*(tensor.cpu() for tensor in rows_and_modulation(5)))
    assert quantizers.total == {"producer": 1}
    assert quantizers.folded == (transform.rotation_group is None and bits == 8)
    assert quantizers.kernels == kernels


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_inductor_quantizes_like_the_kernel():
    transform = ChannelTransform(torch.linspace(0.5, 2.0, 96, device=DEVICE))
    compiled = torch.compile(Quantizer(transform), fullgraph=True)
    with torch.no_grad():
        for count in (5, 9, 11):  # the second one makes it dynamic
            inputs = rows_and_modulation(count)
            q, scale = compiled(*inputs)
            expected_q, expected_scale = Quantizer(transform)(*inputs)
            assert scale[:2].isnan().all() and not q[:2].any()
            torch.testing.assert_close(scale, expected_scale, equal_nan=True)
            # Another order of float additions may move a value across a rounding boundary.
            assert (q.int() - expected_q.int()).abs().max() <= 1


def test_where_inductor_is_made_otherwise_the_quantizer_stays_opaque(monkeypatch, caplog):
    monkeypatch.setattr(kernels.compilers, "quantize_activations_reference", None)
    monkeypatch.setattr(kernels.compilers, "_warned_of", set())
    quantizers = inductor_kernels.Quantizers()
    compiled = torch.compile(Quantizer().cpu(), backend=quantizers.compiler(), fullgraph=True)
    with torch.no_grad():
        compiled(*(tensor.cpu() for tensor in rows_and_modulation(5)))
    assert quantizers.total == {"producer": 1} and not quantizers.folded
    assert caplog.text.count("this PyTorch's Inductor raised TypeError") == 1


def test_without_inductor_s_insides_a_compiled_linear_still_runs(monkeypatch, caplog):
    monkeypatch.setattr(kernels.compilers, "_warned_of", set())
    monkeypatch.delattr(kernels.internals, "inductor", raising=False)
    monkeypatch.setitem(sys.modules, "kernels.internals.inductor", None)
    weight, scale = quantize_weight(random_float(24, 32, seed=2))
    x = random_float(5, 32)
    compiled = torch.compile(lambda x: int8_linear(x, weight, scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), int8_linear(x, weight, scale))
    assert caplog.text.count("compiled models run slower than they could") == 1


@pytest.mark.parametrize("bits", (8, 16))
def test_compiled_under_the_interpreter_or_on_the_gpu(interpreter, bits):
    transform = ChannelTransform(random_float(32, seed=1).abs() + 0.5, 16)
    weight, scale = quantize_weight(random_float(24, 32, seed=2), transform)
    x = random_float(5, 32)

    def linear(x):
        return int8_linear(x, weight, scale, None, transform, activation_bits=bits)

    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), linear(x))


def test_gradients_are_refused():
    weight, scale = quantize_weight(random_float(8, 16, seed=2))
    x = random_float(2, 16).requires_grad_()
    q_scale = torch.ones(2, device=DEVICE).requires_grad_()
    calls = {
        "quantize_activations": (x, UNCHANGED, 8),
        "int8_gemm": (random_int8(2, 16), q_scale, weight, scale, None, torch.float32),
    }
    with pytest.raises(RuntimeError, match="int8_linear has no gradient"):
        int8_linear(x, weight, scale)
    for name, arguments in calls.items():
        op = getattr(kernels.linear.int8_linear, name)
        for function, given in ((op, arguments), (op.operator, op.flat(arguments))):
            with pytest.raises(RuntimeError, match=f"{name} has no gradient"):
                function(*given)
            with pytest.raises(RuntimeError, match=f"{name} has no gradient"):
                torch.compile(lambda *values, call=function: call(*values), backend="aot_eager", fullgraph=True)(*given)
            with torch.no_grad():
                function(*given)


def test_compiled_fused_ops_that_do_not_round_have_gradients():
    freqs = random_float(1, 3, 2, 2, 2, seed=3)

    def together(residual, x, gate):
        total = kernels.gated_residual(residual, x, gate)
        return kernels.norm_rope(total.view(1, 3, 4, 4), residual.view(1, 3, 4, 4), None, None, freqs, "halves")[0]

    gradients = []
    for function in (together, torch.compile(together, backend="aot_eager", fullgraph=True)):
        inputs = [random_float(1, 3, 16, seed=seed).requires_grad_() for seed in range(3)]
        function(*inputs).pow(3).sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    for eager, traced in zip(*gradients, strict=True):
        assert eager.abs().sum() > 0
        torch.testing.assert_close(traced, eager)


def test_weights_and_biases_are_constants():
    weight, scale = quantize_weight(random_float(8, 16, seed=2))
    bias = random_float(8, seed=3).requires_grad_()
    for rows in (2, 0):
        assert not int8_linear(random_float(rows, 16), weight, scale, bias).requires_grad


def test_the_pack_can_be_imported_twice(monkeypatch):
    """As a custom node and as `kernels`: the operators are the process's, and both imports compute with them."""
    folder = Path(kernels.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "kernels_again", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels_again", again)
    before = OPERATORS.int8_gemm.default
    spec.loader.exec_module(again)
    assert again.int8_linear is not int8_linear
    assert torch.ops.int8_dit.int8_gemm.default is before
    weight, scale = quantize_weight(random_float(8, 16, seed=2))
    x = random_float(3, 16)
    compiled = torch.compile(lambda x: again.int8_linear(x, weight, scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), int8_linear(x, weight, scale))
    for name in [name for name in sys.modules if name.startswith("kernels_again.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_cuda_graph_replays_on_new_input():
    block, x = swiglu(), tokens(40).clone()
    stream = torch.cuda.Stream()
    with torch.inference_mode():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # tunes and compiles the kernels
                block(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = block(x)
        for seed in (1, 2):
            other = tokens(40, seed)
            x.copy_(other)
            graph.replay()
            assert torch.equal(out, block(other))
