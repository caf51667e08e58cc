"""GGUF files in Load INT8 DiT: as users have them, with LoRAs. What W4A8 has too: test_stored_weights.py."""

import warnings
from pathlib import Path

import comfy.model_management
import comfy.sd
import folder_paths
import gguf
import numpy as np
import pytest
import torch
from comfy.model_management import InterruptProcessingException
from comfy.weight_adapter.lora import LoRAAdapter

from int8_dit.kernels import FUSED, NATIVE
from int8_dit.kernels.card.device import ComputePath
from int8_dit.nodes.deferred import consumers
from int8_dit.nodes.files import holding
from int8_dit.nodes.files.holding import is_gguf
from int8_dit.nodes.files.reading import gguf_file
from int8_dit.nodes.files.reading.gguf_file import read_gguf, with_lost_axes
from int8_dit.nodes.host.model_files import model_files, model_path
from int8_dit.nodes.linears import plain_loras
from int8_dit.nodes.linears.file_notes import gguf_formats_of
from int8_dit.nodes.loading import summary
from support import adapters, small_models
from support import gguf_files as files
from support.architectures import ARCHITECTURES


@pytest.fixture
def write(dit, tmp_path):
    """A file of the glyph model; its rows of 192 weights are no K-quants, those of 768 are."""

    def write(kind="Q8_0", tensors=None, **options):
        choose = options.pop("choose", files.linears_in(kind))
        return files.write_gguf(tmp_path / f"{kind}.gguf", tensors or dit.tensors(), choose, **options)

    return write


def dequantized(dit, path):
    """The MODEL of ComfyUI's own loader, with the floats that a file's blocks stand for."""
    tensors, _ = read_gguf(str(path))
    floats = {key: t.dequantize() if is_gguf(t) else t.clone() for key, t in tensors.items()}
    return comfy.sd.load_diffusion_model_state_dict(floats)


@pytest.mark.parametrize("system", ("nt", "posix"))
@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_nothing_is_written_into_a_file(dit, write, monkeypatch, memory, system):
    """Windows would promise memory for a file that may be written to, so there it may not: that ends a process."""
    modes, mapped, windows = [], np.memmap, system == "nt"

    def memmap(*arguments, mode="r+", **options):
        modes.append(mode)
        return mapped(*arguments, mode=mode, **options)

    path = write("Q4_K")
    before = Path(path).read_bytes()
    monkeypatch.setattr(np, "memmap", memmap)
    for module in (holding, gguf_file):
        monkeypatch.setattr(module, "CAN_STAY_IN_GGUF", not windows)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = dit.load(path, memory=memory)
    finally:
        torch.set_warn_always(False)
    assert modes == ["r" if windows else "c"]
    for parameter in model.model.diffusion_model.parameters():
        getattr(parameter, "_qdata", parameter).data.add_(1)
    assert Path(path).read_bytes() == before


def test_other_floats_and_shapes(dit, write):
    """BF16, F16 and F32 tensors, and one that is stored in other rows than its own."""
    name = "x_embedder.proj.weight"
    shape = tuple(dit.tensors()[name].shape)
    kinds = {"pos_embed": "F32", name: "F16", "final_layer.linear.weight": "BF16"}
    path = write(choose=lambda key, _: kinds.get(key, "F32"), shapes={name: (shape[0] * shape[1], 4)})
    assert len(shape) == 4
    half = dit.tensors()
    half[name] = half[name].half()
    assert dit.relative_error(dit.output(dit.load(path)), dit.output(dit.load())) < 1e-2


def test_axes_that_gguf_does_not_have(monkeypatch):
    """stable-diffusion.cpp and others do not say what they were: Wan's modulations have one."""
    architecture, other = ARCHITECTURES["Wan t2v"], "head.modulation"
    whole = small_models.tensors_of(architecture)
    config = small_models.stock_of(architecture, whole).model.model_config
    given = {name: tensor[0] if name.endswith("modulation") else tensor for name, tensor in whole.items()}
    given |= {other: given[other].t(), "unknown": torch.randn(4)}
    found = with_lost_axes(given, config)
    changed = {name: tensor for name, tensor in found.items() if tensor is not given[name]}
    assert found.keys() == given.keys() and changed.keys() == {f"blocks.{block}.modulation" for block in range(2)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in changed.items())
    monkeypatch.setattr(type(config), "get_model", None)
    assert with_lost_axes(given, config) == given


def test_a_prefix_of_a_whole_checkpoint(dit, write):
    prefixed = {f"model.diffusion_model.{key}": tensor for key, tensor in dit.tensors().items()}
    model, plain = dit.load(write(tensors=prefixed)), dit.load(write())
    assert torch.equal(dit.output(model), dit.output(plain))

    assert f"{dit.LAYER}.weight" in gguf_formats_of(plain)
    assert gguf_formats_of(model) == gguf_formats_of(plain)


# Formats that no kernel expands, and the package gguf decodes


@pytest.fixture
def decoded(monkeypatch):
    """Of what gguf decodes from now on, the bytes; but for single blocks, by which its formats are known."""
    sizes, decode = [], gguf.quants.dequantize

    def record(data, kind):
        if data.size > gguf.GGML_QUANT_SIZES[kind][1]:
            sizes.append(data.size)
        return decode(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", record)
    return sizes


def test_a_file_in_two_formats_keeps_what_a_kernel_expands(dit, write):
    """As files in IQ4_XS have some layers in a K-quant."""
    path = write("mixed", choose=lambda key, shape: files.linears_in("Q8_0" if "attn" in key else "IQ4_NL")(key, shape))
    model = dit.load(path, memory="as stored")
    kept = dit.stored(model)
    assert kept and all("attn" in name for name in kept)
    assert set(dit.int8_weights(model)) == {name for name in dit.LINEARS if name not in kept}
    assert dit.relative_error(dit.output(model), dit.output(dequantized(dit, path))) < 2 * dit.int8_noise()


@pytest.mark.parametrize("kind", ("IQ4_NL", "MXFP4"))
def test_reading_leaves_packed_what_gguf_decodes(write, decoded, kind):
    """The bytes of the file, and of no weight floats."""
    path, decode = write(kind), gguf.quants.dequantize
    tensors, _ = read_gguf(path)
    assert not decoded
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    packed = {name for name, tensor in in_file.items() if tensor.tensor_type.name == kind}
    assert len(packed) > 20
    for name in packed:
        weight = tensors[name]
        assert is_gguf(weight) and weight._params.gguf_format == kind
        assert weight._qdata.dtype == torch.uint8
        assert weight._qdata.numpy().tobytes() == in_file[name].data.tobytes()
        assert torch.equal(weight.dequantize(), torch.from_numpy(decode(in_file[name].data, in_file[name].tensor_type)))


@pytest.mark.parametrize("kernel", ("fused int8", "bf16"))
@pytest.mark.parametrize("share", (0, 0.5))
def test_a_cancel_while_blocks_are_decoded(dit, write, decoded, interrupt_at, kernel, share):
    path = write("IQ4_NL")
    dit.load(path, kernel)
    whole = len(decoded)
    decoded.clear()
    interrupt_at(share)
    with pytest.raises(InterruptProcessingException):
        dit.load(path, kernel)
    assert len(decoded) < (0.2 + share) * whole


def test_a_lora_is_not_asked_where_its_weight_is_elsewhere(dit, write, lora):
    """The device of a streamed weight is not that of its LoRA, and nothing computes with both."""
    model = dit.with_lora(dit.load(write("Q8_0"), memory="as stored"), lora)
    dit.output(model)
    layer = dit.module(model, dit.LAYER)
    [attached] = layer.weight_function
    key, patches = attached.key, attached.patches[attached.key]
    low_rank = type(attached.low_rank)(*(factor.to("meta") for factor in attached.low_rank))
    layer.weight_function = [plain_loras.StoredLoRA(key, patches, low_rank, attached.scale.to("meta"))]
    assert not layer._lies_on(torch.device("meta"), layer.weight.dtype)


@pytest.mark.parametrize("partially", (False, True))
def test_blocks_run_fused_with_a_lora(dit, tmp_path, monkeypatch, partially):
    taken, take = [], consumers.linear
    monkeypatch.setattr(consumers, "linear", lambda *args: taken.append(take(*args)) or taken[-1])
    monkeypatch.setattr("int8_dit.nodes.loading.memory_choice.SMALLEST_STORED", 0)
    source = small_models.ideogram4(monkeypatch)
    tensors = source.model.diffusion_model.state_dict()
    path = files.write_gguf(tmp_path / "ideogram.gguf", tensors, files.linears_in("Q8_0"))
    model = dit.load(path, memory="as stored")
    lora = adapters.lora(
        {name: tensors[f"{name}.weight"] for name in dit.stored(model) if name.startswith("layers.")}, 0.5
    )
    expected = small_models.output(dit.with_lora(source, lora))
    assert dit.relative_error(small_models.output(model), expected) > 0.2
    patched = dit.with_lora(model, lora)
    if partially:
        patched.patch_model(device_to=patched.load_device, lowvram_model_memory=1)
        monkeypatch.setattr("comfy.model_management.load_models_gpu", lambda models: None)
    taken.clear()
    for _ in range(2):
        assert dit.relative_error(small_models.output(patched), expected) < 0.05
    assert sum(output is not None for output in taken) == 16  # qkv, w1, w3 and w2 in each of two blocks


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))  # ComfyUI runs nodes in the latter
@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_lora_that_widens_a_layer_acts_once_and_leaves(dit, write, memory, mode):
    """As Flux' Canny and Depth LoRAs widen the first layer."""
    name = "joint_blocks.0.x_block.adaLN_modulation.1"
    with mode():
        model = dit.load(write("Q8_0"), memory=memory)
        layer = dit.module(model, name)
        n, k = layer.weight.shape
        held = layer.weight.dequantize() if memory == "as stored" else layer.weight.clone()
        generator = torch.Generator().manual_seed(0)
        up, down = (torch.randn(shape, generator=generator) / 10 for shape in ((n, 4), (4, k + 64)))
        x = torch.randn(3, k + 64, generator=generator)
        wide = model.clone()
        adapter = LoRAAdapter(set(), (up, down, None, None, None, [n, k + 64]))
        wide.add_patches({f"diffusion_model.{name}.weight": adapter})
        expected = torch.nn.functional.linear(x, torch.nn.functional.pad(held, (0, 64)) + up @ down, layer.bias)
        comfy.model_management.load_models_gpu([wide])
        assert dit.relative_error(dit.module(wide, name)(x), expected) < 1e-2
        comfy.model_management.load_models_gpu([model])
        plain = torch.nn.functional.linear(x[:, :k], held, layer.bias)
        assert dit.relative_error(dit.module(model, name)(x[:, :k]), plain) < 1e-3


def test_a_stored_model_is_not_saved_as_int8(dit, write, tmp_path):
    with pytest.raises(ValueError, match=r"Set memory to INT8.*Save GGUF"):
        dit.save(dit.load(write(), memory="as stored"), tmp_path / "m.safetensors")


def test_what_is_too_sensitive_for_int8_computes_in_floats(dit, write):
    path = write("Q8_0")
    name = "joint_blocks.0.x_block.adaLN_modulation.1"
    ours = dit.module(dit.load(path, memory="as stored"), name)
    theirs = dit.module(dequantized(dit, path), name)
    x = dit.rows(ours, 3)
    assert name in dit.stored(dit.load(path, memory="as stored"))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_comfyuis_own_int8_is_not_said_of_stored_weights(dit, write, monkeypatch):
    """Where a benchmark found it the fastest, it takes the layers whose weights are INT8, and not blocks."""
    monkeypatch.setattr("int8_dit.nodes.loading.memory_choice.SMALLEST_STORED", 0)
    model = dit.load(write("Q8_0"), memory="as stored")

    def measured(device, kernel="auto", shape=None, ways=(NATIVE,)):
        return ComputePath(NATIVE if NATIVE in ways else FUSED, "measured")

    monkeypatch.setattr(summary, "choose_path", measured)
    kinds = summary.summarize(model)
    assert (kinds.int8, kinds.native) == (len(dit.LINEARS), 0) and "from GGUF Q8_0" in str(kinds)


# Where files are


def test_files_are_listed_where_users_keep_them(tmp_path, monkeypatch):
    for folder in ("models", "gguf", "gguf/flux"):
        (tmp_path / folder).mkdir()
    for name in ("models/a.safetensors", "models/b.gguf", "gguf/c.gguf", "gguf/flux/d.GGUF", "gguf/e.txt"):
        (tmp_path / name).write_bytes(b"")
    known = dict(folder_paths.folder_names_and_paths)
    known["diffusion_models"] = ([str(tmp_path / "models")], folder_paths.supported_pt_extensions)
    known["unet_gguf"] = ([str(tmp_path / "models"), str(tmp_path / "gguf")], {".gguf"})
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", known)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    before = dict(known)
    nested = str((tmp_path / "gguf/flux/d.GGUF").relative_to(tmp_path / "gguf"))
    *users, _demo = model_files()
    assert users == ["a.safetensors", "b.gguf", "c.gguf", nested]
    assert model_path(nested) == str(tmp_path / "gguf/flux/d.GGUF")
    assert model_path("a.safetensors") == str(tmp_path / "models/a.safetensors")
    with pytest.raises(FileNotFoundError):
        model_path("gone.gguf")
    assert known == before
    del known["unet_gguf"]  # without a pack that loads GGUF files
    assert model_files()[:-1] == ["a.safetensors", "b.gguf"]
