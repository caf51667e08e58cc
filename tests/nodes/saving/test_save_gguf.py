"""Save GGUF: what the package gguf reads in its files, what is baked in, and that a failure leaves no file behind."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import comfy.sd
import comfy.supported_models
import gguf
import pytest
import torch

from int8_dit.nodes.files.writing.tensor_files import PendingGGUF, plain_type, write_gguf
from int8_dit.nodes.linears.layer_selection import linears
from int8_dit.nodes.save_models import SaveGGUFDiT
from int8_dit.nodes.saving.save import architecture_name
from support import small_models
from support.architectures import ARCHITECTURES
from support.file_formats import FORMATS
from support.small_models import wide_mmdit_tensors

TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K")
MOST_ERROR = {"Q8_0": 0.012, "Q6_K": 0.035, "Q5_K": 0.06, "Q4_K": 0.12}  # relative, of the model's weights


@pytest.fixture
def save(run_saving_node):
    return lambda model, type="Q8_0", **entries: run_saving_node(SaveGGUFDiT, model, "models/GGUF", type, **entries)


def read(path):
    """A GGUF file's tensors as the package gguf reads them: name -> (type, float32 of the real shape)."""
    reader = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        field = reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}")
        shape = field.contents() if field else [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = tensor.tensor_type.name, torch.from_numpy(values.copy()).reshape(shape)
    return found


def fields(path):
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def wide(dit):
    """A MODEL of the glyph model's kind with a width that K-quants divide."""
    return comfy.sd.load_diffusion_model_state_dict(wide_mmdit_tensors())


@pytest.mark.parametrize("type", TYPES)
def test_what_is_saved_is_read_back(dit, wide, save, type):
    """Every linear in the type, all else in F16, tensors of one dimension in F32."""
    expected = wide.model.diffusion_model.state_dict()
    layers = {f"{name}.weight" for name in linears(wide)}
    found = read(save(wide, type))
    assert found.keys() == expected.keys()
    for name, (kind, values) in found.items():
        width = expected[name].shape[-1]
        fitting = type if width % 256 == 0 else "Q8_0"
        plain = "F32" if expected[name].ndim < 2 else "F16"
        assert kind == (fitting if name in layers and width % 32 == 0 else plain), name
        error = dit.relative_error(values, expected[name].float())
        assert error <= MOST_ERROR.get(kind, 1e-3 if kind == "F16" else 0), (name, kind, error)
    assert {kind for kind, _ in found.values()} == {type, "Q8_0", "F16", "F32"}


def test_the_header_says_what_the_file_is(dit, save):
    graph = {"nodes": []}
    found = fields(save(dit.stock(), "Q4_K", workflow=graph))
    assert found["general.architecture"] == "sd3"
    assert found["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert found["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_S
    assert json.loads(found["workflow"]) == graph
    assert json.loads(found["config"])["transformer"]["depth"] == 3


FOREIGN = (
    *("general.architecture", "general.alignment", "general.file_type", "GGUF.version", "GGUF.tensor_count"),
    *("comfy.gguf.orig_shape.x_embedder.proj.weight", "split.count", "int8_dit_marks", "config", "int8_dit_recipe"),
)


def test_a_workflow_s_entries_overwrite_none_that_a_loader_reads(dit, save):
    path = save(dit.load(), workflow={"nodes": []}, **dict.fromkeys(FOREIGN, 64))
    written, alone = fields(path), fields(save(dit.load()))
    for key in alone.keys() - {"GGUF.kv_count"}:
        assert written[key] == alone[key], key
    assert {written[f"workflow.{key}"] for key in FOREIGN} == {"64"} and written["workflow"] == '{"nodes": []}'
    assert not written.keys() & {*FOREIGN} - alone.keys()
    assert dit.relative_error(dit.output(dit.load(path)), dit.output(dit.load())) < 0.05


def test_no_temporary_folder_is_needed(dit, save, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert read(save(dit.load()))


SOURCES = ("native", "smoothed, ConvRot", "16-bit activations", "stock native", "stock FP8 scaled", "stock FP8")


@pytest.mark.parametrize("source", SOURCES)
def test_quantized_sources_are_dequantized_first(dit, save, tmp_path, source):
    """The file holds what the source stands for, no scale or mark of it, and loads."""
    tensors = {name: tensor.float() for name, tensor in dit.tensors().items()}
    file = FORMATS[source.removeprefix("stock ")](tensors, dit.LINEARS)
    path = dit.write(tmp_path / "source.safetensors", file.tensors)
    with dit.untouched(model := dit.stock(path) if source.startswith("stock") else dit.load(path)):
        saved = save(model)
    found = read(saved)
    assert found.keys() == tensors.keys()
    for layer in dit.LINEARS:
        assert (
            dit.relative_error(found[f"{layer}.weight"][1], file.values[f"{layer}.weight"]) < 1.1 * MOST_ERROR["Q8_0"]
        )
    exact = dit.output(dit.stock(dit.write(tmp_path / "values.safetensors", file.values)))
    assert dit.relative_error(dit.output(dit.load(saved)), exact) < 2 * dit.int8_noise()


def test_a_lora_is_baked_in(dit, save):
    """Into quantized layers and into those that stay floats."""
    layers = [*dit.LINEARS, "final_layer.linear"]
    model = dit.stock()
    lora = dit.lora(layers, scale=0.5)
    patched, before = read(save(dit.with_lora(model, lora))), read(save(model))
    for layer in layers:
        got = patched[f"{layer}.weight"][1] - before[f"{layer}.weight"][1]
        assert dit.relative_error(got, dit.delta(lora, layer).float()) < 0.1, layer


@pytest.fixture
def as_stored(dit, save):
    """A MODEL that holds the blocks of a file that Save GGUF wrote, and the file."""
    path = save(dit.stock(), "Q4_K")
    return dit.load(path, memory="as stored"), path


def raw(path):
    return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}


def test_blocks_that_a_model_holds_are_written_as_they_are(dit, as_stored, save):
    model, path = as_stored
    held = list(dit.stored(model))
    before, after = raw(path), raw(save(model, "Q4_K"))
    assert len(held) > 5
    assert [name for name in held if before[f"{name}.weight"] != after[f"{name}.weight"]] == []
    other = read(save(model, "Q8_0"))
    assert {other[f"{name}.weight"][0] for name in held} == {"Q8_0"}


def test_a_lora_on_stored_blocks_is_baked_in(dit, as_stored, save):
    """Where it acts in the products and not in the weight."""
    model, path = as_stored
    layer = "joint_blocks.1.x_block.mlp.fc2"
    lora = dit.lora([layer], scale=0.5)
    patched = dit.with_lora(model, lora)
    dit.output(patched)
    got = read(save(patched, "Q8_0"))[f"{layer}.weight"][1] - read(path)[f"{layer}.weight"][1]
    assert dit.relative_error(got, dit.delta(lora, layer).float()) < 0.1
    assert raw(save(model, "Q4_K"))[f"{layer}.weight"] == raw(path)[f"{layer}.weight"]


K_QUANT = "joint_blocks.1.x_block.mlp.fc2"  # the two that K-quants divide
OTHER_K_QUANT = "joint_blocks.0.x_block.mlp.fc2"


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_lora_on_rounded_weights_is_warned_of_once(dit, save, warned, memory):
    """However many layers it changes, and whether their blocks are still there."""
    model = dit.with_lora(dit.load(save(dit.stock(), "Q4_K"), memory=memory), dit.lora([K_QUANT, OTHER_K_QUANT]))
    assert not warned
    save(model, "Q4_K")
    ((reason, summary, detail, advice),) = warned
    assert reason == "gguf-lora" and summary == "Save GGUF may lose a LoRA"
    assert "rounded to Q4_K before" in detail and "Save as Q8_0" in advice and "16-bit" in advice
    save(model, "Q6_K")
    assert len(warned) == 2


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_lora_that_is_kept_is_not_warned_of(dit, save, warned, memory):
    """There is none; it goes into Q8_0, also as the layer's width wants it; the weights are 16-bit, or in finer blocks
    than those that they are saved in."""
    lora, in_q8_0 = dit.lora([K_QUANT]), dit.lora(["joint_blocks.1.x_block.attn.qkv"])
    rounded = dit.load(save(dit.stock(), "Q4_K"), memory=memory)
    save(rounded, "Q4_K")
    save(dit.with_lora(rounded, lora), "Q8_0")
    save(dit.with_lora(rounded, in_q8_0), "Q4_K")
    save(dit.with_lora(dit.stock(), lora), "Q4_K")
    save(dit.with_lora(dit.load(memory=memory), lora), "Q4_K")
    for finer in ("Q8_0", "Q6_K"):
        save(dit.with_lora(dit.load(save(dit.stock(), finer), memory=memory), lora), "Q4_K")
    assert not warned


def test_values_that_half_precision_does_not_hold_stay_float32(dit, save, tmp_path):
    tensors = dit.tensors()
    name = "x_embedder.proj.weight"
    for factor in (1e7, 1e-9):
        changed = tensors | {name: tensors[name].float() * factor}
        kind, values = read(save(dit.stock(dit.write(tmp_path / f"{factor}.safetensors", changed))))[name]
        assert kind == "F32"
        assert torch.equal(values, changed[name])


@pytest.mark.parametrize("type", ("Q8_0", "Q8_CR"))
@pytest.mark.parametrize("name", ("x_embedder.proj.weight", "joint_blocks.0.x_block.mlp.fc2.weight"))
def test_a_nan_is_refused(dit, save, tmp_path, name, type):
    model = dit.stock()
    model.model.diffusion_model.get_parameter(name).data.view(-1)[7] = float("nan")
    with pytest.raises(ValueError, match=rf"{name} cannot be saved as GGUF: (it|weight) has a NaN or Inf"):
        save(model, type)
    assert not [*tmp_path.rglob("*.*")]


def test_a_model_of_another_gguf_loader_is_refused(dit, save, tmp_path):
    """It holds bytes of blocks under the name of a weight, which would be taken for numbers."""
    model = dit.stock()
    packed = torch.nn.Parameter(torch.zeros(8, 34, dtype=torch.uint8), requires_grad=False)
    dit.module(model, dit.LAYER).weight = packed
    with pytest.raises(ValueError, match=rf"{dit.LAYER}: its weight is stored as torch.uint8, .* Load INT8 DiT"):
        save(model)
    assert not [*tmp_path.rglob("*.*")]


def test_a_bypass_lora_is_refused(dit, save):
    model = dit.stock()
    model.set_injections("bypass_lora", [])
    model.injections["bypass_lora"] = [object()]
    with pytest.raises(ValueError, match="bypass_lora"):
        save(model)


def test_without_the_package_gguf_the_error_says_what_to_do(dit, save, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        save(dit.stock())
    assert not [*tmp_path.rglob("*.*")]


@pytest.mark.parametrize("name", ("Wan t2v", "Flux", "Stable Audio", "HiDream", "LTX-Video"))
def test_other_families(save, name):
    """Convolutions of five dimensions, raw parameters, parts of a checkpoint beside the diffusion model."""
    with small_models.known_to_comfyui(ARCHITECTURES[name]):
        tensors = small_models.tensors_of(ARCHITECTURES[name])
        found = read(save(comfy.sd.load_diffusion_model_state_dict(dict(tensors))))
    assert found.keys() == tensors.keys()
    for key, (_, values) in found.items():
        assert values.shape == tensors[key].shape, key
        assert torch.allclose(values, tensors[key], atol=0.02 * float(tensors[key].abs().max())), key


NAMED = {
    "Flux": "flux",
    "Flux 2": "flux",
    "Chroma": "flux",
    "SD3": "sd3",
    "AuraFlow": "aura",
    "Hunyuan Video": "hyvid",
    "Wan i2v": "wan",
    "LTX-Video": "ltxv",
    "Z-Image": "lumina2",
    "Lumina 2": "lumina2",
    "Ideogram 4": "lumina2",
}


def test_architectures_are_named_as_comfyui_gguf_names_them(warned):
    for name, architecture in NAMED.items():
        kind = getattr(comfy.supported_models, ARCHITECTURES[name].kind)
        config = kind({**kind.unet_config, **ARCHITECTURES[name].sizes})
        assert architecture_name(SimpleNamespace(model_config=config)) == architecture
    assert not warned
    kind = comfy.supported_models.PixArtSigma
    assert architecture_name(SimpleNamespace(model_config=kind(kind.unet_config))) == "pixart_sigma"
    ((reason, summary, detail),) = warned
    assert reason == "gguf-architecture" and "may refuse" in summary and "'pixart_sigma'" in detail


# The writer alone. What goes wrong with the file itself, tests/nodes/saving/test_save.py has.

TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float16": torch.tensor([1.0, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([[1.0], [3e38]], dtype=torch.bfloat16),
    "int64": torch.tensor([-(1 << 52)]),
    "int32": torch.tensor([1 << 30], dtype=torch.int32),
    "int8": torch.arange(-128, 128, dtype=torch.int8).reshape(2, 128),
    "0-dim": torch.tensor(0.25),
    "empty": torch.empty(0),
    "not contiguous": torch.arange(12.0).reshape(3, 4).t(),
    "5 dimensions": torch.arange(48.0).reshape(2, 3, 2, 2, 2),
    "a name with ä": torch.ones(1),
    "n" * 127: torch.ones(2, 1, 1),
}


@pytest.fixture
def write(tmp_path):
    """Write plain tensors and return the file's path."""

    def run(tensors, type=None):
        paths = (str(tmp_path / f"written_{number}.gguf") for number in (1, 2))
        pending = {
            name: PendingGGUF(tuple(t.shape), type or plain_type(t.dtype), lambda t=t: t) for name, t in tensors.items()
        }
        return Path(write_gguf(paths, pending, "test", "MOSTLY_Q8_0", {}))

    return run


def test_every_dtype_and_shape_is_read_back(write):
    path = write(TENSORS)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        raw = found[name].data.tobytes()
        assert raw == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), name
        assert found[name].data_offset % 32 == 0
        if tensor.ndim < 5:
            assert tuple(reversed(found[name].shape.tolist())) == tensor.shape, name
    assert found["5 dimensions"].shape.tolist() == [24, 2]
    assert fields(path)["comfy.gguf.orig_shape.5 dimensions"] == [2, 3, 2, 2, 2]
    assert path.stat().st_size % 32 == 0


@pytest.mark.parametrize(
    "tensors, type, says",
    (
        ({"n" * 126 + "ä": torch.ones(1)}, None, "has 128 bytes, and GGUF readers take 127"),
        ({"wave": torch.ones(1, dtype=torch.complex64)}, None, "it is torch.complex64, which GGUF files cannot hold"),
        ({"odd": torch.ones(2, 48)}, "Q8_0", "odd: rows of 48 weights do not divide into blocks of 32"),
        ({"wrong": torch.ones(2, 32)}, "Q8_0", "wrong has 256 bytes and was announced with 68"),
    ),
    ids=("name", "dtype", "rows", "size"),
)
def test_what_no_file_can_hold_leaves_none(write, tmp_path, tensors, type, says):
    with pytest.raises(ValueError, match=says):
        write(tensors, type)
    assert not [*tmp_path.rglob("*.*")]
