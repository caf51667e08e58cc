"""The choice `auto` of the widget `memory`: INT8 where it fits, else what the file stores."""

import inspect
from types import SimpleNamespace

import comfy.model_management as management
import comfy.supported_models
import pytest
import torch
from comfy.model_base import BaseModel

from int8_dit.nodes import load_int8_dit
from int8_dit.nodes.files.holding import is_gguf
from int8_dit.nodes.files.reading.checkpoint import read_checkpoint
from int8_dit.nodes.loading import memory_choice
from int8_dit.nodes.loading.summary import summarize

GB = 10**9
NONE = lambda *_: False  # noqa: E731 - no linear is held in floats


@pytest.fixture
def gguf_file(dit, tmp_path):
    """A file of the glyph model, whose rows of 768 weights are in a K-quant."""

    return lambda kind: dit.write_as(tmp_path, kind)


@pytest.fixture
def free(monkeypatch):
    """Set what is free for weights on the card, and on the host."""

    def set_free(card, host=100 * GB):
        monkeypatch.setattr(memory_choice, "free_for_weights", lambda *_: card)
        monkeypatch.setattr("comfy.model_management.get_free_memory", lambda *_: host)

    return set_free


@pytest.fixture
def sizes():
    """Bytes of a file's MODEL as INT8, and as stored."""

    def measure(path):
        return memory_choice.held_bytes(read_checkpoint(str(path)), torch.float32, NONE)

    return measure


def held_layers(model):
    return sum(is_gguf(getattr(module, "weight", None)) for module in model.model.diffusion_model.modules())


def line(model):
    return str(summarize(model))


def test_int8_is_held_where_it_fits_and_the_line_says_so(dit, gguf_file, free, sizes):
    path = gguf_file("Q4_K")
    int8, stored = sizes(path)
    free(card=int8)
    model = dit.load(path, memory="auto")
    assert not held_layers(model)
    assert line(model).endswith(f", weights as INT8 in {int8 / 1e6:.1f} MB (as stored {stored / 1e6:.1f} MB)")


@pytest.mark.parametrize("place", ("card", "host"))
def test_the_files_bits_are_held_where_int8_does_not_fit(dit, gguf_file, free, sizes, place):
    path = gguf_file("Q4_K")
    int8, _ = sizes(path)
    free(**{"card": 100 * GB, place: int8 - 1})
    model = dit.load(path, memory="auto")
    assert held_layers(model)
    assert f"the {place} has {(int8 - 1) / 1e6:.1f} MB free" in line(model)


def test_the_sizes_are_those_of_the_models(dit, gguf_file, sizes):
    """What ComfyUI counts, but for the scales of rows."""
    path = gguf_file("Q4_K")
    for memory, expected in zip(("INT8", "as stored"), sizes(path), strict=True):
        assert dit.load(path, memory=memory).model_size() == pytest.approx(expected, rel=0.02)


def test_bits_that_take_more_than_int8_are_never_kept(dit, gguf_file, free, monkeypatch):
    """Q8_0 has 8.5 bits a weight; only layers that are never INT8 take less in it."""
    monkeypatch.setattr(memory_choice, "is_quantizable", lambda name, shape: True)
    free(card=0)
    model = dit.load(gguf_file("Q8_0"), memory="auto")
    assert not held_layers(model)
    assert "weights" not in line(model)


def test_of_other_files_nothing_is_decided(dit, free):
    free(card=0)
    assert "weights" not in line(dit.load(memory="auto"))


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_what_a_user_chose_is_not_decided_again(dit, gguf_file, free, memory):
    free(card=0 if memory == "INT8" else 100 * GB)
    model = dit.load(gguf_file("Q4_K"), memory=memory)
    assert bool(held_layers(model)) == (memory == "as stored")
    assert "weights" not in line(model)


def test_a_second_model_holds_weights_as_the_first_does(dit, gguf_file, free):
    """ComfyUI asks for one for another card, which may have other memory."""
    free(card=0)
    model = dit.load(gguf_file("Q4_K"), memory="auto")
    free(card=100 * GB)
    factory, arguments = model.cached_patcher_init
    assert held_layers(factory(*arguments)) == held_layers(model) > 0


def test_the_two_models_of_a_step_must_fit_together(dit, gguf_file, free, sizes, monkeypatch):
    path = gguf_file("Q4_K")
    int8, stored = sizes(path)
    checkpoint = SimpleNamespace(tensors={}, architecture=type("Ideogram4", (), {})())
    monkeypatch.setattr(memory_choice, "held_bytes", lambda *_: (int8, stored))
    for card, as_stored in ((2 * int8, False), (2 * int8 - 1, True)):
        free(card=card)
        choice = memory_choice.choose_memory("auto", checkpoint, torch.bfloat16, torch.device("cpu"), NONE)
        assert choice.as_stored == as_stored
        assert choice.why.startswith("weights of both models as ")


def test_what_comfyui_would_unload_counts_as_free(monkeypatch):
    device, architecture = torch.device("cpu"), comfy.supported_models.ZImage({})
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 8 * GB)
    before = memory_choice.free_for_weights(architecture, device, torch.bfloat16)
    loaded = [SimpleNamespace(device=at, model_loaded_memory=lambda: 3 * GB) for at in (device, torch.device("meta"))]
    monkeypatch.setattr(management, "current_loaded_models", loaded)
    assert memory_choice.free_for_weights(architecture, device, torch.bfloat16) == before + 3 * GB


@pytest.mark.parametrize(
    ("kind", "area"),
    (
        ("Ideogram4", 64 * 64),
        ("ZImage", 128 * 128),
        ("QwenImage", 128 * 128),
        ("WAN21_T2V", 104 * 60 * 21),
        ("LTXV", 26 * 15 * 11),
    ),
)
def test_the_step_that_is_set_aside_is_an_image_or_a_video(monkeypatch, kind, area):
    """As much as ComfyUI's own BaseModel.memory_required expects of it, for one of a batch."""
    architecture = getattr(comfy.supported_models, kind)({})
    monkeypatch.setattr(management, "get_free_memory", lambda *_: 100 * GB)
    monkeypatch.setattr(management, "minimum_inference_memory", lambda: 0)
    monkeypatch.setattr(management, "xformers_enabled", lambda: True)
    model = SimpleNamespace(
        memory_usage_factor=architecture.memory_usage_factor,
        memory_usage_factor_conds=(),
        get_dtype_inference=lambda: torch.bfloat16,
    )
    expected = BaseModel.memory_required(model, (1, 16, area)) + management.extra_reserved_memory()
    set_aside = 100 * GB - memory_choice.free_for_weights(architecture, torch.device("cpu"), torch.bfloat16)
    assert set_aside == pytest.approx(expected, abs=1)


def test_a_workflow_from_before_the_choice_gets_int8():
    assert inspect.signature(load_int8_dit.LoadINT8DiT.execute).parameters["memory"].default == "INT8"
    assert load_int8_dit.MEMORY_CHOICES[0] == "auto"  # what a new node says
