"""Which blocks keep exact attention beside INT8: measured by a calibration, kept by files, obeyed by MODELs."""

import contextlib

import folder_paths
import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounterWithBackend

from int8_dit.kernels import AttentionError
from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
from int8_dit.nodes.attention import attention_kinds
from int8_dit.nodes.linears.file_notes import keep_recipe
from int8_dit.nodes.load_int8_dit import LoadINT8DiT
from int8_dit.nodes.quantization.calibration import load_calibration, save_calibration
from int8_dit.nodes.quantization.recorder import Recording, armed
from support import comfyui_today
from support.attention_calls import OVERRIDE
from support.file_formats import encoded
from support.tensors import relative_error

INT8 = "INT8"
BLOCKS = ["joint_blocks.0", "joint_blocks.1", "joint_blocks.2"]
FRAGILE = BLOCKS[1]


@pytest.fixture(scope="module", autouse=True)
def each_call_is_compared(dit):
    """Samplings are short here."""
    dit.recorded()  # for other files too, so not while this is so
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("int8_dit.kernels.quantization.attention_error._EVERY", 1)
        yield


@pytest.fixture(scope="module")
def file(dit, tmp_path_factory):
    """Of a model with one block whose queries and keys are so large that rounding them decides."""
    tensors = dit.tensors()
    for stream in ("context", "x"):
        for part in "qk":
            tensors[f"{FRAGILE}.{stream}_block.attn.ln_{part}.weight"] *= 12
    return dit.write(tmp_path_factory.mktemp("fragile") / "fragile.safetensors", tensors)


@pytest.fixture(scope="module")
def calibration(dit, file):
    """What a calibration shows of it."""
    model = dit.stock(file)
    return dit.run_node(model, **dit.calibration(model))[3]


@pytest.fixture(scope="module")
def quantized(dit, file, calibration):
    return dit.quantize(dit.stock(file), calibration=calibration)


@pytest.fixture
def rounded(monkeypatch):
    """The attention calls that INT8 computed, which grows with them."""
    calls, run = [], attention_kinds.int8_attention
    monkeypatch.setattr(attention_kinds, "int8_attention", lambda *args: calls.append(args) or run(*args))
    return calls


def set_attention(model, kind=INT8):
    """As the nodes do."""
    from int8_dit.nodes.attention.attention_override import set_attention

    set_attention(model, kind)
    return model


def protected(model, *blocks):
    """INT8 attention but in these blocks."""
    keep_recipe(model, {"attention": {"exact": blocks}})
    return set_attention(model)


def test_a_calibration_shows_the_error_of_each_block(dit, file, calibration):
    """That of the calls which the blocks make, one after another."""
    calls, model = [], dit.stock(file)

    def watching(func, q, k, v, heads, **kwargs):
        by_token = [tensor.flatten(2).unflatten(2, (heads, -1)) for tensor in (q, k, v)]
        calls.append([tensor.transpose(1, 2) for tensor in by_token])
        return func(q, k, v, heads, **kwargs)

    model.model_options["transformer_options"][OVERRIDE] = watching
    again = dit.run_node(model, **dit.calibration(model))[3]
    assert len(calls) == 2 * len(BLOCKS) and list(again.attention) == list(calibration.attention) == BLOCKS
    for place, block in enumerate(BLOCKS):
        wanted = AttentionError()
        for q, k, v in calls[place :: len(BLOCKS)]:
            wanted.update(q, k, v)
        for seen in (calibration, again):
            assert seen.attention[block].calls == 2
            # A last bit may round the other way.
            assert seen.attention[block].error == pytest.approx(wanted.error, rel=0.02)


def test_of_an_armed_model_nothing_is_seen_but_while_it_samples(dit, file, rounded):
    recording = Recording()
    model = armed(dit.stock(file), recording)
    dit.sample(model)
    before = recording.calibration().attention[FRAGILE].calls
    dit.attached_output(model)
    assert recording.calibration().attention[FRAGILE].calls == before == 1 and not rounded


def test_another_nodes_override_computes_while_it_is_observed(dit, file):
    """And is all that a MODEL quantized from the armed one has."""
    model, recording = dit.stock(file), Recording()
    assert OVERRIDE not in dit.quantize(armed(model, Recording())).model_options["transformer_options"]
    doubling = lambda func, q, *args, **kwargs: func(2 * q, *args, **kwargs)  # noqa: E731
    model.model_options["transformer_options"][OVERRIDE] = doubling
    expected = dit.sample(model)
    torch.testing.assert_close(dit.sample(armed(model, recording)), expected)
    assert recording.calibration().attention.keys() == set(BLOCKS)
    assert dit.quantize(armed(model, Recording())).model_options["transformer_options"][OVERRIDE] is doubling


def test_in_containers_it_sees_the_same(small, monkeypatch):
    """As ComfyUI 0.36 and newer give them to overrides."""
    seen = []
    for version in (contextlib.nullcontext, comfyui_today.today):
        with monkeypatch.context() as patch, version():
            seen.append(small.recorded(small.ideogram4(patch)).attention)
    old, new = seen
    assert list(old) == list(new) == ["layers.0", "layers.1"]
    for block in old:
        assert old[block].sums == pytest.approx(new[block].sums, rel=0.02) and old[block].calls == 2


@pytest.mark.parametrize("kind", (None, "auto", INT8))
@pytest.mark.parametrize("chosen", (False, True), ids=("no layer chooses", "a layer chooses"))
def test_what_layers_choose_computes_while_they_are_recorded(small, preferred, rounded, monkeypatch, chosen, kind):
    """Then nothing is observed: ComfyUI would not ask them beside any override."""
    monkeypatch.setattr("int8_dit.nodes.attention.attention_kinds._chooses_exact", lambda device: True)
    model = small.wan()
    if chosen:
        config = encoded({"attention": "comfy_kitchen_int8"})
        model.model.diffusion_model.blocks[1].self_attn.comfy_attention.load_state_dict({"config": config})
    if kind is not None:
        set_attention(model, kind)
    expected = small.output(model)
    count = len(preferred)
    assert bool(count) == (chosen and kind != INT8)
    torch.testing.assert_close(small.output(armed(model, Recording())), expected)
    assert len(preferred) == 2 * count
    assert bool(small.recorded(model).attention) != chosen


def test_blocks_above_the_budget_keep_exact_attention(dit, file, calibration):
    model, _, table, _ = dit.run_node(dit.stock(file), calibration=calibration)
    found = dit.recipe(model)["attention"]
    assert found["exact"] == [FRAGILE] and list(found["errors"]) == BLOCKS
    for block, error in found["errors"].items():
        assert error == pytest.approx(calibration.attention[block].error, rel=1e-3)
        assert (error > 0.03) == (block == FRAGILE)
        assert f"| {block} | {100 * error:.2f} % | {'exact' if block == FRAGILE else 'INT8'} |" in table
    assert "exact in 1 of 3 blocks" in table
    model, _, table, _ = dit.run_node(dit.stock(file))  # without a calibration nothing is said
    assert "attention" not in dit.recipe(model) and "INT8 attention" not in table
    assert dit.described(set_attention(model)) == "INT8 where it fits"


def test_int8_attention_leaves_the_block_out(dit, file, quantized, rounded):
    """And no other choice looks at it. Quantized again, the MODEL still says it."""
    assert dit.recipe(dit.quantize(quantized))["attention"] == dit.recipe(quantized)["attention"]
    model = set_attention(quantized.clone(), "auto")
    assert model.object_patches.keys() == quantized.object_patches.keys() and dit.described(model) == "as ComfyUI"
    model = set_attention(quantized.clone())
    assert dit.described(model) == "INT8 where it fits, exact in 1 block"
    dit.attached_output(model)
    assert len(rounded) == 2
    rounded.clear()
    expected = dit.attached_output(quantized)
    torch.testing.assert_close(dit.attached_output(protected(quantized.clone(), *BLOCKS)), expected)
    assert not rounded


def test_int8_attention_of_an_earlier_node_obeys_too(dit, file, calibration, rounded):
    """And again after another calibration."""
    model = set_attention(dit.stock(file))
    assert dit.described(model) == "INT8 where it fits"
    model = dit.quantize(model, calibration=calibration)
    assert dit.described(model) == "INT8 where it fits, exact in 1 block"
    dit.attached_output(model)
    assert len(rounded) == 2
    healthy = dit.quantize(model, calibration=dit.recorded())
    rounded.clear()
    dit.attached_output(healthy)
    assert dit.described(healthy) == "INT8 where it fits" and len(rounded) == 3
    rounded.clear()
    dit.attached_output(model)
    assert len(rounded) == 2


def test_unpatched_the_block_has_its_own_class(small, dit, monkeypatch):
    model = protected(small.ideogram4(monkeypatch), "layers.1", "layers.9", "no.such")
    blocks = model.model.diffusion_model.layers
    own = type(blocks[0])
    small.output(model)
    assert type(blocks[0]) is own and type(blocks[1]) is not own and type(blocks[1]).__name__ == own.__name__
    model.unpatch_model(model.offload_device)
    assert type(blocks[1]) is own


def test_compiled_each_block_does_as_it_was_told(compilable, small, monkeypatch):
    """Blocks are alike to a compiler, which makes one graph for both."""
    model = protected(small.ideogram4(monkeypatch), "layers.1")
    expected = small.output(model)
    everywhere = small.output(protected(small.ideogram4(monkeypatch)))
    for block in model.model.diffusion_model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(small.output(model), expected)
    assert relative_error(everywhere, expected) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("quantize", (False, True), ids=("bf16", "fused INT8"))
def test_a_model_under_torch_compile_model(compilable, small, dit, monkeypatch, quantize):
    """As ComfyUI's node does it, which lets no guard look at transformer_options."""
    source = small.ideogram4(monkeypatch)
    model = protected(dit.quantize(source) if quantize else source, "layers.1")
    for _ in range(2):
        expected = small.output(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = model.clone()
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(compiled, backend=counter, fullgraph=True, options=options)
    for _ in range(2):
        torch.testing.assert_close(small.output(compiled), expected, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1


@pytest.mark.parametrize("form", ("safetensors", "gguf"))
def test_files_keep_it(dit, quantized, rounded, tmp_path, form):
    path = dit.save(quantized, tmp_path / f"saved.{form}")
    loaded = dit.load(dit.save(dit.load(path), tmp_path / f"again.{form}"))
    assert dit.recipe(loaded)["attention"] == dit.recipe(quantized)["attention"]
    assert dit.described(set_attention(loaded)) == "INT8 where it fits, exact in 1 block"
    dit.attached_output(loaded)
    assert len(rounded) == 2


def test_all_nodes_that_set_it_obey(dit, file, calibration, quantized, rounded, tmp_path, monkeypatch):
    path = dit.save(quantized, tmp_path / "saved.safetensors")
    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda folder, name: name)
    loaded, line = LoadINT8DiT.execute(path, "fused int8", attention=INT8).result
    assert line.endswith("attention INT8 where it fits, exact in 1 block")
    applied, again = ApplyFusedINT8Kernel.execute(dit.load(path), attention=INT8).result
    assert again.endswith("attention INT8 where it fits, exact in 1 block")
    made = dit.run_node(dit.stock(file), calibration=calibration, attention=INT8)[0]
    for model in (loaded, applied, made):
        rounded.clear()
        dit.attached_output(model)
        assert len(rounded) == 2


@pytest.mark.parametrize("said", (None, 3, {}, {"exact": None}, {"exact": [1, None]}, {"exact": {}}, ["exact"]))
def test_a_recipe_that_says_something_else_says_nothing(dit, quantized, said):
    model = quantized.clone()
    keep_recipe(model, {"attention": said})
    assert dit.described(set_attention(model)) == "INT8 where it fits"


def test_an_earlier_file_has_none(calibration, tmp_path):
    path = str(tmp_path / "c.safetensors")
    save_calibration(calibration, path, {})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["int8_dit_calibrated_attention"]
    save_file(load_file(path), path, metadata)
    assert load_calibration(path).attention == {}
