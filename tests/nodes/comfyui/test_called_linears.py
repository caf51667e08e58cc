"""A linear whose product ComfyUI, or another pack, computes past its forward: said once, and not counted as fused."""

import sys
import types

import comfy.ops
import comfy_kitchen
import pytest
import torch
import torch.nn.functional as F

MLP = "joint_blocks.1.x_block.mlp"


def weight_in_floats(linear, x):
    return F.linear(x, linear.weight, linear.bias)


def cast(linear, x):
    weight, bias = comfy.ops.cast_bias_weight(linear, x)
    return F.linear(x, weight, bias)


def numbers(linear, x):
    weight = linear.weight
    return comfy_kitchen.int8_linear(x, weight._qdata, weight.params.scale, linear.bias, x.dtype)


def part_of_the_weight(linear, x):
    return linear._forward(x, *comfy.ops.cast_bias_weight(linear, x, offloadable=False))


def part_by_name(linear, x):
    weight, bias = comfy.ops.cast_bias_weight(linear, x, offloadable=False)
    return linear._forward(x, weight=weight, bias=bias)


PAST = {"floats": weight_in_floats, "cast": cast, "numbers": numbers}
FUSED = {
    "called": lambda linear, x: linear(x),
    "its dtype is read before": lambda linear, x: linear(x.to(linear.bias.dtype)),
    "by its own _forward": part_of_the_weight,
    "by its own _forward, with names": part_by_name,
    "not at all": lambda linear, x: x.new_zeros(*x.shape[:-1], linear.out_features),
}
CLASSES = {"loaded": lambda dit, path: dit.load(path), "applied": lambda dit, path: dit.apply(dit.stock(path))}


@pytest.fixture
def run(dit, tmp_path, monkeypatch, warned):
    """Run a MODEL whose one linear is computed by a function; what was warned of, and the MODEL."""
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8())

    def run(make, product):
        model = make(dit, path)
        mlp = dit.module(model, MLP)
        monkeypatch.setattr(mlp, "forward", lambda x: mlp.fc2(mlp.act(product(mlp.fc1, x))))
        outputs = [dit.attached_output(model) for _ in range(2)]
        assert torch.equal(*outputs)
        return warned, model, outputs[0]

    return run


@pytest.mark.parametrize("product", PAST.values(), ids=PAST)
@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_a_product_past_the_forward_is_said_and_not_counted(dit, run, make, product):
    warned, model, output = run(make, product)
    ((_, summary, detail),) = warned
    assert summary == "Not all linears run fused" and f"1 of {len(dit.LINEARS)} INT8 linears" in detail
    assert f"slower: {MLP}.fc1. " in detail
    line = dit.summarize(model)
    assert line.int8 == len(dit.LINEARS) - 1
    assert ", 1 INT8 that ComfyUI computes itself, past the fused kernel" in str(line)
    assert dit.relative_error(output, dit.output(dit.stock())) < 2 * dit.int8_noise()


@pytest.mark.parametrize("product", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
def test_what_runs_fused_or_not_at_all_is_not_said(dit, run, make, product):
    warned, model, _ = run(make, product)
    assert not warned and dit.summarize(model).int8 == len(dit.LINEARS)


@pytest.fixture
def fetching(monkeypatch):
    """ComfyUI's module that fetches a block's weights ahead, and calls some blocks."""
    fetching = types.ModuleType("comfy.model_prefetch")
    exec(
        "def fetch(linear):\n    return linear.weight, linear.bias\n\ndef run(core):\n    return core()", vars(fetching)
    )
    monkeypatch.setitem(sys.modules, fetching.__name__, fetching)
    return fetching


@pytest.mark.parametrize("product", PAST.values(), ids=PAST)
def test_what_a_block_reads_that_the_fetching_calls_is_said(run, fetching, product):
    warned, *_ = run(CLASSES["applied"], lambda linear, x: fetching.run(lambda: product(linear, x)))
    assert len(warned) == 1


def test_what_comfyui_only_fetches_ahead_is_not_said(dit, run, fetching):
    """It reads the weights of whole blocks, whatever their forwards call."""

    def product(linear, x):
        fetching.fetch(linear)
        return x.new_zeros(*x.shape[:-1], linear.out_features)

    warned, model, _ = run(CLASSES["loaded"], product)
    assert not warned and dit.summarize(model).int8 == len(dit.LINEARS)


def test_nothing_is_left_behind(dit, run):
    _, model, _ = run(CLASSES["loaded"], PAST["cast"])
    for module in model.model.diffusion_model.modules():
        assert type(module._parameters) is dict and "_forward" not in vars(module)
        assert not module._forward_pre_hooks
