"""What files and LoRAs choose for the attention of each layer: followed, shown, kept by every way of saving.

ComfyUI has it from 0.36 on; support/comfyui_today.py puts its interface over an older one.
"""

import json

import comfy.ldm.modules.attention
import comfy.lora
import comfy.sd
import comfy_kitchen
import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from int8_dit.nodes.attention import attention_override as attention
from int8_dit.nodes.loading.load import rebuild_int8_model
from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
from support.attention_calls import FloatAttention
from support.file_formats import encoded
from support.glyph_dit import load
from support.tensors import relative_error

CHOICE = {"attention": "comfy_kitchen_int8"}
LAYER = "blocks.1.self_attn.comfy_attention"
OTHER = "blocks.0.cross_attn.comfy_attention"
KEY, OTHER_KEY = f"{LAYER}.config", f"{OTHER}.config"
IN_LORA = f"diffusion_model.{OTHER_KEY}"
AUTO, INT8 = "auto", "INT8 (comfy-kitchen)"


def decoded(tensor):
    return json.loads(tensor.numpy().tobytes())


@pytest.fixture
def write(small, tmp_path):
    """Write the file of a small Wan with these tensors more; the path."""

    def write(choices, name="chosen.safetensors"):
        model = small.wan().model
        save_file({**model.diffusion_model.state_dict(), **choices}, tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def save(dit, tmp_path):
    """Save a MODEL in one of two formats and read its choices from the file."""

    def save(model, form):
        path = dit.save(model, tmp_path / f"saved{len(list(tmp_path.iterdir()))}.{form}")
        if form == "gguf":
            tensors = {
                t.name: (t.tensor_type.name, torch.from_numpy(t.data.copy())) for t in gguf.GGUFReader(path).tensors
            }
            tensors = {key: tensor for key, (kind, tensor) in tensors.items() if kind == "I8"}
        else:
            tensors = load_file(path)
        return path, {key: decoded(t) for key, t in tensors.items() if key.endswith(".config")}

    return save


FORMS = ("safetensors", "gguf")


def with_lora(model, config=CHOICE):
    """A clone with a LoRA that chooses for the other layer and changes no weight."""
    clone = model.clone()
    patches = comfy.lora.load_lora({IN_LORA: encoded(config)}, comfy.lora.model_lora_keys_unet(model.model, {}))
    assert clone.add_patches(patches, 1.0) == [IN_LORA]
    return clone


@pytest.fixture
def called(small, preferred):
    """The calls of what layers chose in a forward of a MODEL, whose first one compares; and its output."""

    def called(model):
        small.output(model)
        preferred.clear()
        output = small.output(model)
        return list(preferred), output

    return called


def test_the_files_choice_is_followed_and_shown(dit, small, write, preferred, called):
    plain = load(write({}, "plain.safetensors"))
    expected = small.output(plain)
    assert str(dit.summarize(plain)).endswith("attention as ComfyUI") and not preferred
    model = load(write({KEY: encoded(CHOICE)}))
    assert str(dit.summarize(model)).endswith("attention as ComfyUI, 1 layer chosen by the file")
    calls, output = called(model)
    assert relative_error(output, expected) < 1e-3 and len(calls) == 1


@pytest.mark.parametrize("where", ("file", "LoRA"))
def test_the_method_that_leaves_out_is_followed_with_its_threshold(write, called, where):
    config = {"attention": "comfy_kitchen_sol", "tau": 0.25}
    model = load(write({KEY: encoded(config)} if where == "file" else {}))
    model = model if where == "file" else with_lora(model, config)
    assert [call["tau"] for call in called(model)[0]] == [0.25]


def test_a_loras_choice_is_followed_and_shown(dit, write, called):
    model = load(write({KEY: encoded(CHOICE)}))
    clone = with_lora(model)
    assert dit.described(clone) == "as ComfyUI, 2 layers chosen by the file or a LoRA"
    assert dit.described(model) == "as ComfyUI, 1 layer chosen by the file"
    assert [len(called(chosen)[0]) for chosen in (clone, model)] == [2, 1]


def test_what_cannot_run_here_is_shown(dit, write, of_today):
    model = load(write({KEY: encoded(CHOICE)}))
    assert dit.described(model) == "as ComfyUI, the choice for 1 layer cannot run here"


@pytest.mark.parametrize("config", (CHOICE, [CHOICE, {"attention": "comfy_kitchen_int8", "tau": 0.25}]))
@pytest.mark.parametrize("form", FORMS)
def test_saved_files_keep_it(write, save, of_today, form, config):
    """Also where what is chosen is not available, as here."""
    path, saved = save(load(write({KEY: encoded(config)})), form)
    assert saved == {KEY: config}
    assert load(path).get_model_object(f"diffusion_model.{LAYER}").config == config


@pytest.mark.parametrize("form", FORMS)
def test_each_clone_saves_its_own(small, write, save, preferred, form):
    """Whichever of them is in the modules."""
    model = load(write({KEY: encoded(CHOICE)}))
    clone, plain = with_lora(model), {KEY: CHOICE}
    for loaded in (clone, model):
        small.output(loaded)
        assert save(clone, form)[1] == plain | {OTHER_KEY: CHOICE}
        assert save(model, form)[1] == plain


@pytest.mark.parametrize("stock", (True, False), ids=("ComfyUI's loader", "this pack's"))
def test_quantizing_keeps_it(write, save, called, stock):
    """And a LoRA's choice is no reason to refuse the MODEL."""
    path = write({KEY: encoded(CHOICE)})
    model = with_lora(comfy.sd.load_diffusion_model(path) if stock else load(path))
    quantized, *_ = quantize_model(model, QuantizationSettings("rotate"), "fused int8", None)
    assert save(quantized, "safetensors")[1] == {KEY: CHOICE, OTHER_KEY: CHOICE}
    assert len(called(quantized)[0]) == 2


def test_a_second_gpus_copy_keeps_it(write, called):
    model = load(write({KEY: encoded(CHOICE)}))
    again = rebuild_int8_model(model.model, "fused int8")
    assert again.get_model_object(f"diffusion_model.{LAYER}").config == CHOICE
    copy = with_lora(model).deepclone_multigpu()
    assert copy.model is not model.model
    assert len(called(copy)[0]) == 2


def test_damaged_ones_are_named(write):
    nested = torch.full((100_000,), ord("["), dtype=torch.uint8)
    broken = torch.full((4,), 255, dtype=torch.uint8)
    for damaged in (encoded(CHOICE)[:-1], encoded([]), encoded("sage"), broken, nested):
        with pytest.raises(ValueError, match=f"chosen.safetensors: .*{KEY} is neither a JSON object"):
            load(write({KEY: damaged}))
    with pytest.raises(ValueError, match=f"{KEY} is neither a JSON object"):
        load(write({KEY: torch.zeros(2, 2)}))


# A ComfyUI without it


@pytest.fixture
def older():
    if hasattr(comfy.ldm.modules.attention, "ComfyAttention"):
        pytest.skip("this ComfyUI has it")


@pytest.mark.parametrize("form", FORMS)
def test_an_older_comfyui_ignores_and_keeps_it(dit, older, small, write, save, monkeypatch, form):
    """Nor is what an earlier block does not choose taken for missing."""
    monkeypatch.setitem(small.WAN_SIZES, "num_layers", 3)
    choices = {f"blocks.{block}.self_attn.comfy_attention.config": CHOICE for block in (1, 2)}
    model = load(write({key: encoded(config) for key, config in choices.items()}))
    assert dit.described(model) == "as ComfyUI, the file's choice for 2 layers needs a newer ComfyUI"
    assert torch.equal(small.output(model), small.output(load(write({}, "plain.safetensors"))))
    path, saved = save(model, form)
    assert saved == choices
    assert save(load(path), form)[1] == choices


# Beside the widget


@pytest.fixture
def kernel(preferred, monkeypatch):
    kernel = FloatAttention()
    monkeypatch.setattr(comfy_kitchen, "int8_attention", kernel, raising=False)
    monkeypatch.delattr(comfy_kitchen, "prequantize_int8_attention", raising=False)
    return kernel


@pytest.fixture
def as_on_a_gpu(of_today, monkeypatch):
    """PyTorch's attention was chosen, which `auto` is faster than."""
    for name in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(of_today, name, of_today.attention_pytorch)


LAYERS = 4  # of the small Wan, two in each block
# The choice, the widest head that INT8 takes, how many calls are of INT8, of the exact way and of what layers chose.
WIDGETS = {
    "INT8 fits": (INT8, 256, lambda choosing: (LAYERS, 0, 0)),
    "INT8 declines": (INT8, 8, lambda choosing: (0, 0, choosing)),
    "auto": (AUTO, 256, lambda choosing: (0, LAYERS - choosing, choosing)),
}


@pytest.mark.parametrize("choosing", (None, "without a LoRA", "before the LoRA", "after the LoRA"))
@pytest.mark.parametrize("widget", WIDGETS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_widget_beside_what_layers_choose(
    dit, small, write, preferred, kernel, exact, monkeypatch, widget, choosing
):
    """INT8 attention declines to it, and `auto` leaves it alone. A later choice takes the place of an earlier one."""
    kind, widest, calls = WIDGETS[widget]
    monkeypatch.setattr("int8_dit.nodes.attention.attention_kinds._WIDEST_HEAD", widest)
    model = load(write({} if choosing is None else {KEY: encoded(CHOICE)}))
    expected = small.output(model)
    if choosing == "after the LoRA":
        model = with_lora(model)
    for set_now in (AUTO, kind):
        attention.set_attention(model, set_now)
    if choosing == "before the LoRA":
        model = with_lora(model)
    count = {None: 0, "without a LoRA": 1}.get(choosing, 2)
    said = f"{INT8} where it fits" if kind == INT8 else "the fastest exact way"
    assert dit.described(model).startswith(f"{said}, {count} layer" if count else said)
    small.output(model)  # the first call compares
    preferred.clear()
    kernel.calls = exact.calls = 0
    assert relative_error(small.output(model), expected) < 1e-3
    assert (kernel.calls, exact.calls, len(preferred)) == calls(count)


@pytest.mark.parametrize("choosing", (False, True), ids=("as an override", "before choices"))
def test_a_masked_forward(small, preferred, kernel, tmp_path, monkeypatch, choosing):
    """Ideogram 4 with padded text."""
    path = str(tmp_path / "ideogram.safetensors")
    choice = {"layers.1.attention.comfy_attention.config": encoded(CHOICE)} if choosing else {}
    save_file({**small.ideogram4(monkeypatch).model.diffusion_model.state_dict(), **choice}, path)
    model, mask = load(path), torch.tensor([[1, 1, 1, 1, 0, 0]])
    expected = small.output(model, mask)
    assert relative_error(small.output(model), expected) > 1e-2
    attention.set_attention(model, INT8)
    small.output(model, mask)
    kernel.calls = kernel.masked = 0
    assert relative_error(small.output(model, mask), expected) < 1e-3
    assert kernel.calls == kernel.masked == 2


def test_int8_attention_stays_an_override_where_no_layer_chooses(small, write, preferred, kernel):
    """So that what calls attention beside the layers, and a node that calls the override it finds, have it too."""
    model = load(write({}))
    attention.set_attention(model, INT8)
    inner = model.model_options["transformer_options"]["optimized_attention_override"]
    seen = []

    def outer(func, *args, **kwargs):
        seen.append(func)
        return inner(func, *args, **kwargs)

    small.output(model)
    for override in (inner, outer):
        small.output(model, optimized_attention_override=override)  # the first call compares
        kernel.calls = 0
        seen.clear()
        small.output(model, optimized_attention_override=override)
        assert kernel.calls == LAYERS
    assert len(seen) == LAYERS


def test_another_override_stays_before_the_layers_choice(small, write, preferred, kernel):
    model = load(write({KEY: encoded(CHOICE)}))
    seen = []

    def outer(func, *args, **kwargs):
        seen.append(func)
        return func(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = outer
    attention.set_attention(model, INT8)
    small.output(model)
    seen.clear()
    kernel.calls = 0
    small.output(model)
    assert len(seen) == kernel.calls == LAYERS and not preferred


def test_choices_are_saved_from_under_int8_attention(write, save, preferred, kernel):
    model = load(write({KEY: encoded(CHOICE)}))
    attention.set_attention(model, INT8)
    assert save(with_lora(model), "safetensors")[1] == {KEY: CHOICE, OTHER_KEY: CHOICE}
