"""The imitation of ComfyUI 0.36 to 0.38: it does what is known of them, and leaves nothing behind."""

import json
import sys

import pytest
import torch

from support.architectures import CHOOSING_BLOCKS


@pytest.fixture
def imitation(pack):
    from support import comfyui_today

    return comfyui_today


@pytest.fixture
def attention(imitation):
    with imitation.today() as attention:
        yield attention


@pytest.fixture
def preferred(attention, monkeypatch):
    """The calls of the function that layers may prefer, which computes what PyTorch's does."""
    calls = []

    def int8(*args, **kwargs):
        calls.append(kwargs)
        return attention.attention_pytorch(*args, **kwargs)

    monkeypatch.setattr(attention, "attention_comfy_kitchen_int8", int8)
    monkeypatch.setattr(attention, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", True)
    monkeypatch.setattr("comfy_kitchen.int8_attention_is_available", lambda *_: True, raising=False)
    return calls


def encoded(config):
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


CONFIG = {"attention": "comfy_kitchen_int8"}
FAMILY, LAYER = "Ideogram 4", "attention.comfy_attention"


def known(imitation):
    names = ("attention", "optimized_attention", "wrap_attn", "ComfyAttention", "AttentionTensorContainer")
    modules = [module for name, module in sys.modules.items() if name.startswith("comfy.ldm")]
    classes = (*imitation.LAYERS, *imitation._NEW_ARGUMENTS)
    functions = {(module.__name__, key): value for module in modules for key, value in vars(module).items()}
    return {key: value for key, value in functions.items() if key[1].startswith(names) or key[1] == "contained"} | {
        (cls, name): vars(cls)[name] for cls in classes for name in ("__init__", "forward")
    }


def test_nothing_stays(imitation):
    before = known(imitation)
    with imitation.today():
        assert known(imitation) != before
    assert known(imitation) == before


def test_every_layer_has_the_child_and_calls_with_its_choice(attention, preferred):
    from support import small_blocks as blocks

    for family in CHOOSING_BLOCKS:
        block = blocks.exact(family)
        expected = blocks.run(block, family)
        layers = [module for module in block.modules() if isinstance(module, attention.ComfyAttention)]
        assert layers and not preferred
        for layer in layers:
            layer.load_state_dict({"config": encoded(CONFIG)})
        output = blocks.run(block, family)
        assert len(preferred) >= len(layers), family
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(output, expected, strict=True))
        preferred.clear()


def test_the_config_is_read_and_written(attention, preferred):
    from support import small_blocks as blocks

    block = blocks.exact(FAMILY)
    weights = block.state_dict()
    key = f"{LAYER}.config"
    assert key not in weights
    for config in (CONFIG, [{"attention": "unknown"}, CONFIG]):
        block.load_state_dict(weights | {key: encoded(config)})
        assert json.loads(block.state_dict()[key].numpy().tobytes()) == config
        assert block.get_submodule(LAYER).function is attention.attention_comfy_kitchen_int8
    block.load_state_dict(weights)
    assert key not in block.state_dict() and block.get_submodule(LAYER).function is None


def test_who_computes(attention, preferred):
    q, k, v = (torch.randn(1, 3, 8) for _ in range(3))
    layer, calls = attention.ComfyAttention().with_config(encoded(CONFIG)), []

    def override(function, *args, **kwargs):
        calls.append((function, args[0]))
        return function(*args, **kwargs)

    def contained(*args, **kwargs):
        calls.append((None, args[0]))
        return attention.attention_pytorch(*(tensor.take() for tensor in args[:3]), *args[3:], **kwargs)

    expected = attention.attention_pytorch(q, k, v, 2)
    for container_function in (None, contained):
        if container_function is not None:
            override.container_function = container_function
        held = [attention.AttentionTensorContainer(tensor) for tensor in (q, k, v)]
        options = {"optimized_attention_override": override}
        output = attention.optimized_attention(*held, 2, preferred_attention=layer, transformer_options=options)
        assert torch.allclose(output, expected, atol=1e-6) and not preferred
        assert [tensor.tensor for tensor in held] == [None] * 3
    (function, plain), (none, container) = calls
    assert function is not None and plain is q and none is None
    assert isinstance(container, attention.AttentionTensorContainer)
    attention.optimized_attention(q, k, v, 2, preferred_attention=layer)
    assert len(preferred) == 1 and preferred[0]["_inside_attn_wrapper"]


def test_a_lora_replaces_the_choice_of_a_layer(attention, preferred, monkeypatch):
    import comfy.lora

    from support import small_models

    model = small_models.ideogram4(monkeypatch).clone()
    name = f"diffusion_model.layers.0.{LAYER}"
    before = set(model.model.state_dict())
    patches = comfy.lora.load_lora({f"{name}.config": encoded(CONFIG), "nowhere.config": encoded(CONFIG)}, {})
    assert model.clone().add_patches(patches, 0.0) == [f"{name}.config"]
    assert model.add_patches(patches, 0.5) == [f"{name}.config"] and model.get_model_object(name).config == CONFIG
    small_models.output(model)
    assert len(preferred) == 1 and model.model.state_dict().keys() - before == {f"{name}.config"}
    model.unpatch_model(model.offload_device)
    assert model.model.state_dict().keys() == before


# Around linears


def test_a_rebuilt_model_does_not_lie_on_the_disk_of_the_other(attention, dit):
    """ComfyUI reads weights again from a fast disk; what this pack made of them is in no file."""
    from int8_dit.nodes.patching.apply_kernel import apply_fused_kernel

    model = dit.stock()
    model.fast_disk = True
    assert model.clone().fast_disk and not dit.quantize(model).fast_disk
    native = dit.quantize(dit.stock())
    native.fast_disk = True
    assert apply_fused_kernel(native, "fused int8").fast_disk


def test_a_file_loads_where_weights_are_none_until_then(attention, dit, tmp_path):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8())
    expected = dit.output(dit.load(path))
    assert dit.relative_error(expected, dit.output(dit.stock())) < 0.1


@pytest.fixture
def lacking(attention, monkeypatch):
    """What is said of ComfyUI's linears when the pack is loaded beside 0.43."""
    from int8_dit.nodes.comfyui import assumptions

    monkeypatch.setattr(assumptions, "comfyui_version", lambda: "0.43.0")
    return lambda: [found for assumption, found in assumptions.lacking() if assumption.name.startswith("comfy.ops:")]


def test_what_is_assumed_of_linears(lacking):
    import comfy.ops

    assert lacking() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(comfy.ops, "INPUT_ACT_EAGER")
        assert lacking() == []
        patch.delattr(comfy.ops, "_eager_input_act")
        assert lacking() == ["comfy.ops._eager_input_act"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.ops.disable_weight_init.Linear, "forward", _of_a_later_version)
        assert lacking() == ["support for act_bias of comfy.ops.disable_weight_init.Linear.forward"]


def _of_a_later_version(self, input, input_act=None, act_weight=None, act_bias=None, residual=None): ...
