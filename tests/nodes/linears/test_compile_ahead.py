"""What is compiled beside loading is what the linears of the MODEL will launch."""

from functools import partial

import pytest
import torch

from int8_dit.kernels.ahead import calls_ahead as ahead
from int8_dit.kernels.operators import Operator
from int8_dit.nodes.deferred.mode import Deferring
from int8_dit.nodes.linears import compile_ahead
from int8_dit.nodes.linears.compile_ahead import compile_planned
from int8_dit.nodes.linears.int8_weight import is_int8
from int8_dit.nodes.loading import load_plan
from support.architectures import ARCHITECTURES

NATIVE = {"scalar scale": {"per_channel": False}, "rows": {}, "ConvRot": {"rotation_group": 64}}


class Asked(list):
    """Of each time the forms, the block and the dtype; and of all times the other calls."""

    def __init__(self):
        self.others = set()


@pytest.fixture
def asked(monkeypatch):
    """What was asked for, of linears that would run on a GPU."""
    asked, own, planned = Asked(), compile_ahead.compile_linears, compile_ahead.compile_planned
    monkeypatch.setattr(compile_ahead, "runs_fused", lambda *_: True)

    def compile(*given):
        asked.append(given[:3])
        asked.others |= set(given[4])

    monkeypatch.setattr(compile_ahead, "compile_ahead", compile)
    for name in ("loading.load", "linears.apply_kernel"):

        def on_gpu(root, kernel, dtype, device):
            own(root, kernel, dtype, torch.device("cuda", 0))

        monkeypatch.setattr(f"int8_dit.nodes.{name}.compile_linears", on_gpu)

    def planned_on_gpu(tensors, layers, kernel, dtype, device):
        planned(tensors, layers, kernel, dtype, torch.device("cuda", 0))

    monkeypatch.setattr("int8_dit.nodes.loading.load_plan.compile_planned", planned_on_gpu)
    return asked


@pytest.mark.parametrize("options", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize("loads", ("the pack", "ComfyUI"))
def test_forms_are_those_of_the_linears(dit, tmp_path, asked, options, loads):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(**options))
    model = dit.load(path) if loads == "the pack" else dit.apply(dit.stock(path))
    ((forms, _, dtype),) = asked
    layer = dit.module(model, dit.LAYER)
    of_layer = [form for form in forms if (form.n, form.k) == tuple(layer.weight.shape)]
    assert {form.has_bias for form in of_layer} == {layer.bias is not None}
    assert {form.has_one_scale for form in of_layer} == {loads == "ComfyUI" and "per_channel" in options}
    assert {form.rotation_group for form in of_layer} == {options.get("rotation_group")}
    assert len(set(forms)) == len(forms) and [form.n * form.k for form in forms] == sorted(
        (form.n * form.k for form in forms), reverse=True
    )
    assert dtype == model.model.get_dtype_inference()


@pytest.mark.usefixtures("all_may_stay_stored")
@pytest.mark.parametrize("kind", ("floats", "Q8_0", "W4A8"))
@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_weights_that_become_int8_are_known_before_they_do(dit, tmp_path, asked, monkeypatch, kind, memory):
    """The same forms as of the MODEL, and the same block; none of a weight that is stored, and computes in floats."""
    asked_before, own = [], load_plan.make_room_to_quantize

    def made(*given):
        asked_before.append(len(asked))
        own(*given)

    monkeypatch.setattr(load_plan, "make_room_to_quantize", made)
    dit.load(dit.write_as(tmp_path, kind), memory=memory)
    before, of_model = [(set(forms), *others) for forms, *others in asked]
    works = memory == "INT8" or kind != "W4A8"  # codes are held as they are
    assert of_model[0] and before == of_model and asked_before == [1] * works


@pytest.mark.usefixtures("all_may_stay_stored")
@pytest.mark.parametrize("kind", ("Q8_0", "W4A8", "W6A8"))
def test_what_makes_int8_or_floats_of_stored_weights_is_what_runs(dit, tmp_path, asked, monkeypatch, kind):
    ran, run = set(), Operator.__call__

    def recorded(op, *given):
        ran.add(op.called_with(*given))
        return run(op, *given)

    model = dit.load(dit.write_as(tmp_path, kind), memory="as stored")
    with monkeypatch.context() as patch:
        patch.setattr(Operator, "__call__", recorded)
        dit.output(model)
    names = {call.operator.name for call in asked.others}
    gguf = {"gguf_channel_scales", "expand_gguf", "dequantize_gguf"}
    assert names == (gguf if kind == "Q8_0" else {"expand_codes"})
    assert asked.others == {call for call in ran if call.operator.name in {"dequantize_gguf", *names}}


def test_nothing_is_compiled_without_a_gpu(dit, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda forms, block, *_: given.append((forms, block)))
    dit.load(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    assert given == [([], None)]


def described(op, arguments):
    """An op's call in what its kernel is compiled for: which tensors there are, of how many channels, and words."""
    names = op.operator._schema.arguments
    values = zip([argument.name for argument in names], op.flat(arguments[: len(op._parameters)]), strict=False)
    kinds = {name: value.shape[-1] if isinstance(value, torch.Tensor) else value for name, value in values}
    return op.name, *((name, kind) for name, kind in kinds.items() if kind is not None and not name.endswith("eps"))


# With which rotary positions; small ones of the others have a head as wide as their stream, or none.
BLOCKS = {"Ideogram 4": 1, "Z-Image": 1, "Qwen-Image": 1, "Flux": 0, "Flux 2": 0, "Wan t2v": 0, "SD3": 0}


@pytest.mark.parametrize("name", BLOCKS)
def test_fused_ops_of_blocks_are_those_that_run(small, asked, monkeypatch, name):
    """But for the pairs of rotary positions, of which both are compiled."""
    ran, plan = set(), Operator._plan

    def recorded(op, arguments, flat, tensors):
        ran.add(described(op, arguments))
        return plan(op, arguments, flat, tensors)

    architecture = ARCHITECTURES[name]
    model = small.int8_of(architecture, "plain")
    ((forms, block, dtype),) = asked
    asked.clear()
    layers = [
        name for name, layer in model.model.diffusion_model.named_modules() if is_int8(getattr(layer, "weight", None))
    ]
    compile_planned(small.tensors_of(architecture), layers, "fused int8", dtype, torch.device("cuda", 0))
    assert [(set(forms), block) for forms, block, _ in asked] == [(set(forms), block)]
    monkeypatch.setattr("int8_dit.nodes.deferred.mode.LEAST_ROWS", 2)
    monkeypatch.setattr(Operator, "_plan", recorded)
    with torch.no_grad(), Deferring() as mode:
        mode.finish(small.output_of(architecture, model))
    calls = [described(op, given) for op, given in ahead._calls((), block, partial(torch.empty, device="meta"))]
    turned = [call for call in calls if call[0] == "norm_rope"]
    assert len(calls) - len(turned) == 3 and {call for call in calls if call not in turned} <= ran
    assert len(ran.intersection(turned)) == BLOCKS[name]
