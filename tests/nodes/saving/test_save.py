"""Save INT8 DiT: what comes back from the file, who can read it, and that a failure leaves no file behind."""

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import comfy.utils
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter.lora import LoRAAdapter
from safetensors import safe_open
from safetensors.torch import load_file

from int8_dit.nodes.files.writing.tensor_files import write_safetensors
from int8_dit.nodes.host.work import Progress
from int8_dit.nodes.linears.file_notes import recipe_of
from int8_dit.nodes.linears.patched_weights import float_weight
from int8_dit.nodes.save_models import SaveINT8DiT
from int8_dit.nodes.saving.save import save_gguf_model, save_int8_model
from support.file_formats import encoded


@pytest.fixture
def smoothed(dit):
    """A MODEL with smoothed INT8 layers and two protected ones."""
    return dit.quantize(dit.stock(), protect=2, calibration=dit.recorded())


@pytest.fixture
def in_16_bits(dit):
    """A MODEL with smoothed INT8 layers, of which three have 16-bit activations."""
    return dit.quantize(dit.stock(), 3, calibration=dit.recorded(), protected_in="INT8 with 16-bit activations")


@pytest.fixture
def plain(dit):
    """A MODEL with INT8 layers and no smoothing."""
    return dit.load()


@pytest.fixture
def save(run_saving_node):
    return lambda model, prefix="models/INT8", **entries: run_saving_node(SaveINT8DiT, model, prefix, **entries)


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


@pytest.mark.parametrize("layout", ("MXFP8", "NVFP4"))
def test_other_layouts_beside_int8_come_back_bit_equal(dit, save, tmp_path, layout):
    """In ComfyUI too, whose own reader of large files knows fewer dtypes than the package safetensors."""
    tensors, layer = dit.native_int8(), dit.LINEARS[0]
    packed = QuantizedTensor.from_float(dit.tensors()[f"{layer}.weight"].bfloat16(), f"TensorCore{layout}Layout")
    tensors |= packed.state_dict(f"{layer}.weight") | {f"{layer}.comfy_quant": encoded({"format": layout.lower()})}
    path = dit.write(tmp_path / "mixed.safetensors", tensors)
    model, stock = dit.load(path), dit.stock(path)
    saved = save(model)
    header = json.loads(saved.read_bytes()[8 : 8 + int.from_bytes(saved.read_bytes()[:8], "little")])
    assert {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"} <= comfy.utils._TYPES.keys()
    for made, again in ((model, dit.load(saved)), (stock, dit.stock(saved))):
        dit.assert_same_tensors(dit.snapshot(again), dit.snapshot(made))
        assert torch.equal(dit.output(again), dit.output(made))


def test_files_with_the_earlier_names_of_formats_load(dit, smoothed, save, tmp_path):
    """Their marks and the metadata that repeats them."""
    path = save(smoothed)
    tensors, head = load_file(path), metadata(path)
    for key in tensors:
        if key.endswith(".comfy_quant"):
            mark = json.loads(tensors[key].numpy().tobytes())
            mark["format"] = mark["format"].partition(" ")[0]
            tensors[key] = encoded(mark)
    marks = json.loads(head["int8_dit_marks"])
    earlier = {layer: {**mark, "format": mark["format"].partition(" ")[0]} for layer, mark in marks.items()}
    assert earlier != marks
    written = dit.write(tmp_path / "earlier.safetensors", tensors, {**head, "int8_dit_marks": json.dumps(earlier)})
    loaded, now = dit.load(written), dit.load(path)
    assert dit.int8_weights(loaded).keys() == dit.int8_weights(now).keys()
    again = save(loaded)
    assert json.loads(metadata(again)["int8_dit_marks"]) == marks
    with pytest.raises(Exception, match="int8_smoothquant"):
        dit.stock(written)


def test_the_recipe_is_in_the_metadata(dit, smoothed, save):
    """And survives loading and saving again; what is none is ignored, whoever wrote it."""
    path = save(smoothed)
    recipe = json.loads(metadata(path)["int8_dit_recipe"])
    assert json.loads(metadata(save(dit.load(path)))["int8_dit_recipe"]) == recipe
    for text in ("[1]", "{", "7"):
        other = dit.write(path.parent / "other.safetensors", dit.native_int8(), {"int8_dit_recipe": text})
        assert recipe_of(dit.load(other)) == {}
    protected = set(dit.LINEARS) - set(dit.int8_weights(smoothed))
    assert set(recipe.pop("protected")) == protected
    layers = recipe.pop("layers")
    assert set(layers) == set(dit.LINEARS)
    attention = recipe.pop("attention")
    assert len(attention["errors"]) == 3 and attention["exact"] == []
    assert {layer["transform"] for layer in layers.values()} == {"smooth 0.5"}
    assert recipe == {
        "method": "smooth",
        "alpha": 0.5,
        "search_alpha": False,
        "protect": {"number": 2},
        "weight_scales": "absmax",
        "smooth_only_foldable": False,
        "protected_in": "bf16",
        "rounding": "nearest",
        "linears": 34,
        "quantized": len(dit.LINEARS) - 2,
        "calibration": {"calls": 2, "rows": 16},
        "error_of": "output",
        "folded": False,
    }


def test_prompt_and_workflow_are_in_the_metadata_unless_disabled(dit, plain, save, monkeypatch):
    graphs = {"prompt": {"1": {"class_type": "LoadINT8DiT"}}, "workflow": {"nodes": []}}
    written = metadata(save(plain, **graphs))
    assert {name: json.loads(written[name]) for name in graphs} == graphs
    monkeypatch.setattr("comfy.cli_args.args.disable_metadata", True)
    assert not metadata(save(plain, **graphs)).keys() & graphs.keys()


FOREIGN = ("int8_dit_marks", "int8_dit_recipe", "config", "_quantization_metadata", "format", "modelspec.title")


@pytest.mark.parametrize("kind", ("smoothed", "plain"))
def test_a_workflow_s_entries_overwrite_none_that_a_loader_reads(dit, request, save, kind):
    """Whatever an extension of ComfyUI adds to it: the file loads, and loses nothing of what was added."""
    model = request.getfixturevalue(kind)
    entries = {key: {"layers": {}} for key in FOREIGN}
    with dit.untouched(model):
        path = save(model, workflow={"nodes": []}, **entries, **{"half \ud800": "\ud800"})
    written, alone = metadata(path), metadata(save(model))
    assert {key: written.get(key) for key in alone} == alone
    assert {written[f"workflow.{key}"] for key in FOREIGN} == {'{"layers": {}}'}
    assert not written.keys() & {*FOREIGN} - alone.keys() and json.loads(written["workflow"]) == {"nodes": []}
    assert "half ?" in written
    assert torch.equal(dit.output(dit.load(path)), dit.output(model))


LOAD = {
    "not loaded": lambda dit, model: None,
    "loaded": lambda dit, model: model.patch_model(),
    "partially loaded": lambda dit, model: dit.stream(model),
}


@pytest.mark.parametrize("kind", ("smoothed", "in_16_bits"))
@pytest.mark.parametrize("load", LOAD.values(), ids=LOAD)
def test_a_lora_is_baked_in(dit, request, save, load, kind):
    """Into INT8 layers, the protected ones and the modulation, wherever ComfyUI has the patches at that time."""
    model = request.getfixturevalue(kind)
    before = dit.output(model)
    patched = dit.with_lora(model, dit.lora([*dit.LINEARS, "joint_blocks.0.x_block.adaLN_modulation.1"], scale=0.2))
    model.detach()
    load(dit, patched)
    saved = dit.output(dit.load(save(patched)))
    patched.detach()
    assert dit.relative_error(saved, before) > 0.1
    assert torch.equal(saved, dit.output(patched))


@pytest.mark.parametrize("type", (None, "Q8_0", "Q8_CR"))
def test_a_lora_that_widens_a_layer_is_baked_in(dit, plain, tmp_path, type):
    """As those for Flux's control images do: the layer then reads more channels."""
    layer, more, lora = "context_embedder", 64, dit.lora(["context_embedder"])
    key, before = f"diffusion_model.{layer}", dit.tensors()[f"{layer}.weight"].float()
    up, down = (lora[f"{key}.lora_{end}.weight"] for end in ("up", "down"))
    down = lora[f"{key}.lora_down.weight"] = torch.cat((down, torch.ones(len(down), more)), 1)
    lora[f"{key}.reshape_weight"] = torch.tensor([len(before), before.shape[1] + more])
    wide, path = dit.with_lora(plain, lora), str(tmp_path / "wide.gguf")
    saved = save_gguf_model(wide, path, {}, type) if type else dit.save(wide, tmp_path / "wide.safetensors")
    weight = float_weight(dit.module(dit.load(saved), layer).weight)
    assert dit.relative_error(weight.float(), torch.nn.functional.pad(before, (0, more)) + up @ down) < 0.02


def test_a_lora_that_gives_a_layer_more_outputs_is_refused(dit, plain, tmp_path):
    """As one for fewer steps of MiniMax H3 does. ComfyUI's classes build the layer with its own outputs alone."""
    bias = dit.tensors()["context_embedder.bias"]
    more = LoRAAdapter(set(), (torch.zeros(2 * len(bias), 1), torch.zeros(1, 1), None, None, None, [2 * len(bias)]))
    plain.add_patches({"diffusion_model.context_embedder.bias": more})
    for use in (
        lambda: dit.save(plain, tmp_path / "more.safetensors"),
        lambda: save_gguf_model(plain, str(tmp_path / "more.gguf"), {}, "Q8_0"),
        lambda: dit.quantize(plain),
    ):
        with pytest.raises(ValueError, match=r"gives context_embedder\.bias more outputs.* connect it where"):
            use()
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_wider_model_names_no_narrower_one(dit, plain, tmp_path, monkeypatch):
    """Of some families ComfyUI believes a file's config rather than its tensors."""
    monkeypatch.setitem(plain.model.model_config.unet_config, "in_dim", 16)
    for wide in (False, True):
        if wide:
            shape = [dit.tensors()["context_embedder.weight"].shape[0], 1 << 10]
            factors = (torch.zeros(shape[0], 1), torch.zeros(1, shape[1]), None, None, None, shape)
            plain.add_patches({"diffusion_model.context_embedder.weight": LoRAAdapter(set(), factors)})
        path = dit.save(plain, tmp_path / f"{wide}.safetensors")
        with safe_open(path, "pt") as file:
            assert ("in_dim" in json.loads(file.metadata()["config"])["transformer"]) == (not wide)


def test_another_models_lora_is_not_saved(dit, plain, save):
    """The patches of a second MODEL sit in the shared weights at the time of saving."""
    before = dit.snapshot(plain)
    dit.output(dit.with_lora(plain, dit.lora(dit.LINEARS)))
    dit.assert_same_tensors(dit.snapshot(dit.load(save(plain))), before)


def test_a_model_without_int8_is_refused(dit, save, tmp_path):
    """Also one of another GGUF pack, which names tensors without values in its state dict."""
    for packed in (False, True):
        model = dit.stock()
        if packed:
            empty = torch.nn.Parameter(torch.empty(8, 8, device="meta"))
            dit.module(model, dit.LAYER).register_parameter("weight", empty)
        with pytest.raises(ValueError, match=r"holds no INT8 weights. Connect Quantize to INT8"):
            save(model)
    assert not [*tmp_path.rglob("*.*")]


# What goes wrong while writing: nothing may be left, and an earlier file stays what it was.


@pytest.fixture
def target(tmp_path):
    """Where to save: two paths, the first of which an earlier file has. And a check that a failure left only that."""
    folder = tmp_path / "target"
    folder.mkdir()
    earlier, path = (folder / f"model_{number:05}_.safetensors" for number in (1, 2))
    earlier.write_bytes(b"the previous model")

    def assert_untouched():
        assert list(folder.iterdir()) == [earlier]
        assert earlier.read_bytes() == b"the previous model"

    return (str(earlier), str(path)), assert_untouched


def assert_explains(error, number, text):
    assert error.value.errno == number
    message = str(error.value)
    assert "model_00002_.safetensors" in message and text in message and "Nothing was saved" in message


def no_room(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 1000))
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("something was written"))


def becomes_full(monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs Linux's /dev/full, where every write finds the disk full")

    def open_full(path, mode, **options):
        return open("/dev/full" if mode == "xb" else path, "r+b" if mode == "xb" else mode, **options)

    monkeypatch.setattr("int8_dit.nodes.files.writing.new_file.open", open_full, raising=False)


def failing(number):
    """Where a network share tells of errors."""

    def fail(_):
        raise OSError(number, os.strerror(number))

    return lambda monkeypatch: monkeypatch.setattr(os, "fsync", fail)


DISKS = {
    "no room": (no_room, errno.ENOSPC, "not enough disk space: 0.00 GB are free"),
    "becomes full": (becomes_full, errno.ENOSPC, "not enough disk space"),
    "quota": (failing(errno.EDQUOT), errno.EDQUOT, "your disk quota is exceeded; delete some of your files, or choose"),
    "broken": (
        failing(errno.EIO),
        errno.EIO,
        "the disk reports an error; check it, or choose another output directory",
    ),
    "too large": (
        failing(errno.EFBIG),
        errno.EFBIG,
        "allows no file of that size; raise it, or choose another output directory",
    ),
    "read-only": (failing(errno.EROFS), errno.EROFS, f"{os.strerror(errno.EROFS)}; check its name and its folder, or"),
}


@pytest.mark.parametrize("disk, number, text", DISKS.values(), ids=DISKS)
def test_a_disk_that_fails_is_named(plain, target, monkeypatch, disk, number, text):
    paths, assert_untouched = target
    disk(monkeypatch)
    with pytest.raises(OSError) as error:
        save_int8_model(plain, paths, {})
    assert_explains(error, number, text)
    assert_untouched()


def test_a_name_that_is_too_long_is_seen_before_writing(plain, save, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("something was written"))
    with pytest.raises(OSError, match=r"x_00001_.safetensors .*could not be written: .*check its name"):
        save(plain, "x" * 250)
    assert not [*tmp_path.rglob("*.*")]


@pytest.mark.parametrize("share", (0, 0.5))
@pytest.mark.parametrize("save, options", ((save_int8_model, ()), (save_gguf_model, ("Q8_0",))), ids=("INT8", "GGUF"))
def test_a_cancel_while_saving(plain, target, interrupt_at, save, options, share):
    paths, assert_untouched = target
    interrupt_at(share)
    with pytest.raises(InterruptProcessingException):
        save(plain, paths, {}, *options)
    assert_untouched()


def test_an_existing_file_is_never_replaced(plain, target):
    (earlier, _), assert_untouched = target
    with pytest.raises(FileExistsError, match=r"model_00001_.safetensors exists already and is not overwritten"):
        save_int8_model(plain, earlier, {})
    assert_untouched()


# The writer alone, read back by the safetensors package.

TENSORS = {
    "float64": torch.tensor([1.5, -2.5], dtype=torch.float64),
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float16": torch.tensor([1.0, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([[1.0], [3e38]], dtype=torch.bfloat16),
    "float8_e4m3fn": torch.tensor([448.0, -0.5]).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.tensor([57344.0]).to(torch.float8_e5m2),
    "int64": torch.tensor([-(1 << 52)]),
    "int32": torch.tensor([1 << 30], dtype=torch.int32),
    "int16": torch.tensor([[-7]], dtype=torch.int16),
    "int8": torch.arange(-128, 128, dtype=torch.int8).reshape(2, 128),
    "uint8": torch.tensor([255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "0-dim": torch.tensor(0.25),
    "empty": torch.empty(0, 5, dtype=torch.bfloat16),
    "not contiguous": torch.arange(12.0).reshape(3, 4).t(),
    'a name with ä, " and \\': torch.ones(1),
}


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path."""

    def run(tensors, metadata, on_tensor=lambda: None):
        with patch.object(Progress, "step", lambda *_: on_tensor()):
            return Path(write_safetensors([str(tmp_path / "written.safetensors")], tensors, metadata))

    return run


def test_all_is_read_back(write):
    texts, calls = {"prompt": '{"a": "ä \\" \\n"}', "empty": ""}, []
    path = write(TENSORS, texts, lambda: calls.append(None))
    read = load_file(path)
    assert metadata(path) == texts and len(calls) == len(TENSORS)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape, name
        # As float64, because float8 tensors cannot be compared.
        assert torch.equal(read[name].double(), tensor.double()), name


def test_what_fails_beside_the_writing_is_not_told_of_the_file(write, tmp_path):
    """A weight may come from another disk, which can fail too."""

    def fail():
        raise OSError(errno.EIO, "the disk of the weights")

    with pytest.raises(OSError) as error:
        write(TENSORS, {}, fail)
    assert error.value.strerror == "the disk of the weights"
    assert not [*tmp_path.rglob("*.*")]


def test_a_dtype_that_the_format_lacks(write, tmp_path):
    with pytest.raises(ValueError, match=r"wave is torch.complex64"):
        write({"fine": torch.ones(1), "wave": torch.ones(1, dtype=torch.complex64)}, {})
    assert not [*tmp_path.rglob("*.*")]


def test_a_header_that_readers_refuse_is_seen_before_writing(write, tmp_path):
    most = 100_000_000
    rest = len('{"__metadata__":{"prompt":"","workflow":""}}')
    path = write({}, {"prompt": "p" * 8, "workflow": "w" * (most - rest - 8)})
    assert path.stat().st_size == most + 8 and load_file(path) == {}
    path.unlink()
    message = r"header would have 100\.0 MB.*its metadata entry 'workflow' \(100\.0 MB\).*--disable-metadata"
    with pytest.raises(ValueError, match=message):
        write({}, {"prompt": "p" * 8, "workflow": "w" * (most - rest)})
    with pytest.raises(ValueError, match="Most of it is the list of its tensors"):
        write({"n" * (most - 8): torch.ones(1)}, {"workflow": "{}"})
    assert not [*tmp_path.rglob("*.*")]
