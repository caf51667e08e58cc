"""Linears that read the same input: smoothed alike, quantized once where that is deferred, each by itself elsewhere."""

import comfy.sd
import pytest
import torch

from int8_dit.kernels import ActivationStatistics
from int8_dit.kernels.fused_ops import fused_ops as fused
from int8_dit.kernels.linear import int8_linear as linear
from int8_dit.nodes.deferred.install import deferred_call
from int8_dit.nodes.quantization.quantize import same_inputs
from support import ideogram_block as ideogram
from support.tensors import relative_error


@pytest.fixture
def quantizations(monkeypatch):
    """The inputs of all quantizations of activations so far."""
    calls, original = [], linear.quantize_activations_reference

    def counting(x, *options):
        calls.append(tuple(x.shape))
        return original(x, *options)

    for module in (linear, fused):
        monkeypatch.setattr(module, "quantize_activations_reference", counting)
    return calls


def hidden(seed=0):
    return torch.randn(1, 8, ideogram.HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("context", (torch.inference_mode, torch.no_grad))
def test_a_change_in_place_between_two_readers_is_seen(context):
    """Also in inference mode, where nobody counts the changes of a tensor."""
    both, alone = ideogram.block().feed_forward, ideogram.block().feed_forward
    with context():
        x = hidden()
        both.w1(x)
        x.mul_(-3)
        assert torch.equal(both.w3(x), alone.w3(x))


def test_readers_with_factors_of_their_own_get_inputs_of_their_own():
    def factors(name, channels):
        generator = torch.Generator().manual_seed(ideogram.INT8_LINEARS.index(name))
        return torch.rand(channels, generator=generator) + 0.1

    block, x = ideogram.block(factors), hidden()
    readers = block.feed_forward.w1, block.feed_forward.w3

    def products(normed):
        return [reader(normed) for reader in readers]

    with torch.inference_mode():
        expected = products(block.ffn_norm1(x))
        for product, one in zip(deferred_call(lambda: products(block.ffn_norm1(x))), expected, strict=True):
            assert relative_error(product, one) < 1e-3


# What the quantizer does so that a calibrated model shares: one vector of smoothing factors per group.


@pytest.fixture
def swiglu(small, monkeypatch):
    """A float MODEL with w1 and w3."""
    return small.ideogram4(monkeypatch)


@pytest.fixture
def attention(small):
    """A float MODEL with q, k and v, of one tensor and of two."""
    return small.wan()


FEED_FORWARD = "layers.1.feed_forward"


def factors(dit, model, layer):
    return dit.int8_weights(model)[layer]._params.smooth


def assert_factors(dit, quantized, model, statistics, members, alpha=0.5):
    """s = max|X|^alpha / max|W|^(1 - alpha) with the largest weight of all members, the same bits in each."""
    weight = torch.cat([dit.module(model, layer).weight for layer in members]).abs().amax(0)
    expected = (statistics[members[0]].absmax.double() ** alpha / weight.double() ** (1 - alpha)).float()
    vectors = [factors(dit, quantized, layer) for layer in members]
    torch.testing.assert_close(vectors[0], expected, rtol=1e-6, atol=0)
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    assert len({vector.data_ptr() for vector in vectors}) == len(vectors)


def sharing(dit, model):
    """The layers with the same factors that quantize their inputs alike, as sets."""
    groups = {}
    for layer, weight in dit.int8_weights(model).items():
        form = weight._params
        groups.setdefault((form.factors, form.rotation_group, form.activation_bits), set()).add(layer)
    return [layers for (factors, *_), layers in groups.items() if factors is not None and len(layers) > 1]


# The linears of one input in each block, by the model.
MEMBERS = {
    "swiglu": ("layers", ("feed_forward.w1", "feed_forward.w3"), ("feed_forward.w2",), ("attention.qkv",)),
    "attention": (
        "blocks",
        *(("self_attn.q", "self_attn.k", "self_attn.v"), ("cross_attn.k", "cross_attn.v"), ("cross_attn.q",)),
    ),
}


@pytest.mark.parametrize("kind, alpha", [("swiglu", alpha) for alpha in (0.0, 0.5, 1.0)] + [("attention", 0.5)])
def test_linears_of_one_tensor_are_smoothed_by_their_joint_absmax(dit, small, request, kind, alpha):
    """The q of a cross attention has factors of its own."""
    model, (blocks, *groups) = request.getfixturevalue(kind), MEMBERS[kind]
    quantized = dit.quantize(model, alpha=alpha, **small.calibration(model))
    statistics, members = small.recorded(model).statistics, []
    for block in range(2):
        members += [[f"{blocks}.{block}.{layer}" for layer in layers] for layers in groups]
    for layers in members:
        assert_factors(dit, quantized, model, statistics, layers, alpha)
    assert sharing(dit, quantized) == [set(layers) for layers in members if len(layers) > 1]


def test_a_protected_member_is_not_quantized_with_the_others(dit, small, swiglu):
    """Its weight had a say in the factors, though: it was found fragile with them."""
    calibration = small.recorded(swiglu)
    _, _, table, _ = dit.run_node(swiglu, calibration=calibration)
    ranking = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[8:]]
    fragile, other = sorted((f"{FEED_FORWARD}.w1", f"{FEED_FORWARD}.w3"), key=ranking.index)
    quantized = dit.quantize(swiglu, ranking.index(fragile) + 1, calibration=calibration)
    assert fragile not in dit.int8_weights(quantized)
    weight = torch.cat([dit.module(swiglu, layer).weight for layer in (fragile, other)]).abs().amax(0)
    expected = (calibration.statistics[other].absmax / weight) ** 0.5
    torch.testing.assert_close(factors(dit, quantized, other), expected, rtol=1e-5, atol=0)
    assert not [group for group in sharing(dit, quantized) if other in group]


def test_a_model_quantizes_the_input_of_w1_and_w3_once(dit, small, swiglu, quantizations, tmp_path):
    """Calibrated, out of the quantizer and loaded from the file that ComfyUI's own node writes of it; and native."""
    quantized = dit.quantize(swiglu, **small.calibration(swiglu))
    path = str(tmp_path / "saved.safetensors")
    comfy.sd.save_checkpoint(path, quantized)
    loaded = dit.load(path)
    with pytest.raises(Exception, match="int8"):
        dit.stock(path)
    native = dit.apply(dit.stock(dit.save(dit.quantize(swiglu), tmp_path / "native.safetensors")))
    together = [{f"layers.{block}.feed_forward.{w}" for w in ("w1", "w3")} for block in range(2)]
    for model in (quantized, loaded, native):
        assert model is native or sharing(dit, model) == together
        small.output(model)  # the first call of a block also runs as ComfyUI has it
        quantizations.clear()
        small.output(model)
        assert len(quantizations) == 2 * 4  # qkv, o, w1 with w3, w2
    # Their outputs can differ: where a tensor begins in memory decides how a CPU adds its products up.
    dit.assert_same_tensors(dit.snapshot(loaded), dit.snapshot(quantized))


def test_those_of_one_module_whose_inputs_agree_belong_together():
    def seen(seed):
        statistics = ActivationStatistics()
        statistics.update(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        return statistics

    inputs = {"b.10.w3": 0, "b.1.w2": 1, "b.1.w1": 0, "b.1.w3": 0, "b.10.w1": 0, "v": 2, "k": 2, "q": 3, "x.v": 2}
    statistics = {name: seen(seed) for name, seed in inputs.items()}
    together = [["b.10.w3", "b.10.w1"], ["b.1.w2"], ["b.1.w1", "b.1.w3"], ["v", "k"], ["q"], ["x.v"]]
    assert same_inputs(inputs, statistics) == together
    assert same_inputs(inputs, {}) == [[name] for name in inputs]


@pytest.mark.parametrize("held", ("16 bits", "rotated", "smoothed"))
def test_only_members_that_are_quantized_alike_share(dit, small, swiglu, quantizations, held):
    """w1 and w3 that are both changed do; one alone does not."""
    quantized = dit.quantize(swiglu)
    small.output(quantized)  # the first call of a block also runs as ComfyUI has it
    for member, number in (("w1", 9), ("w3", 8)):
        module = dit.module(quantized, f"{FEED_FORWARD}.{member}")
        smooth = torch.full((module.in_features,), 2.0) if held == "smoothed" else None
        small.hold_int8(module, smooth, 64 if held == "rotated" else None, 16 if held == "16 bits" else 8)
        quantizations.clear()
        small.output(quantized)
        assert len(quantizations) == number
