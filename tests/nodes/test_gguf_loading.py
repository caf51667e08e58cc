"""GGUF files in Load INT8 DiT: as users have them, as INT8 and as stored, with LoRAs and in little memory."""

import warnings
from pathlib import Path

import pytest
import torch


@pytest.fixture
def files(pack):
    from support import gguf_files

    return gguf_files


@pytest.fixture
def write(dit, files, tmp_path):
    """A file of the glyph model; its rows of 192 weights are no K-quants, those of 768 are."""

    def write(kind="Q8_0", tensors=None, **options):
        choose = options.pop("choose", files.linears_in(kind))
        return files.write_gguf(tmp_path / f"{kind}.gguf", tensors or dit.tensors(), choose, **options)

    return write


def load(path, memory="INT8", **options):
    from int8_dit.nodes.loading.load import load_int8_model

    return load_int8_model(str(path), "fused int8", memory=memory, **options)


def stored(model):
    """The weights that stay in blocks, by layer."""
    from int8_dit.nodes.files.holding.gguf_weight import is_gguf

    return {
        name: module.weight
        for name, module in model.model.diffusion_model.named_modules()
        if is_gguf(getattr(module, "weight", None))
    }


def dequantized(dit, files, path):
    """The MODEL of ComfyUI's own loader, with the floats that a file's blocks stand for."""
    import comfy.sd

    from int8_dit.nodes.files.holding.gguf_weight import is_gguf
    from int8_dit.nodes.files.reading.gguf_file import read_gguf

    tensors, _ = read_gguf(str(path))
    floats = {key: t.dequantize() if is_gguf(t) else t.clone() for key, t in tensors.items()}
    return comfy.sd.load_diffusion_model_state_dict(floats)


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
@pytest.mark.parametrize("kind", ("Q8_0", "Q4_0", "Q4_K"))
def test_it_computes_what_its_blocks_stand_for(dit, files, write, kind, memory):
    path = write(kind)
    model, expected = load(path, memory), dit.output(dequantized(dit, files, path))
    assert dit.relative_error(dit.output(model), expected) < 2 * dit.int8_noise()
    assert (set(dit.int8_weights(model)) == set(dit.LINEARS)) == (memory == "INT8")


def test_as_stored_both_ways_compute_alike(dit, write):
    """The same INT8 weights: made once, or for each product."""
    path = write("Q8_0")
    assert torch.equal(dit.output(load(path)), dit.output(load(path, "as stored")))


def test_as_stored_the_weights_take_what_they_take_in_the_file(dit, write):
    path = write("Q8_0")
    held = stored(load(path, "as stored"))
    from int8_dit.nodes.layers.layer_selection import linears as linears_of

    linears = linears_of(load(path))
    large = {name for name, module in linears.items() if module.in_features * module.out_features // 32 * 34 >= 1 << 16}
    assert set(held) == large
    assert not large <= set(dit.LINEARS)  # those that compute in floats, too
    for weight in held.values():
        assert weight.nbytes == weight.numel() // 32 * 34
        assert weight._qdata.device.type == "cpu"


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_file_is_mapped_so_that_nothing_is_written_into_it(write, monkeypatch, memory):
    """Nor does Windows promise memory for it then. What is written into such a tensor ends the process."""
    import numpy as np

    modes, mapped = [], np.memmap

    def memmap(*arguments, mode="r+", **options):
        modes.append(mode)
        return mapped(*arguments, mode=mode, **options)

    path = write("Q4_K")
    before = Path(path).read_bytes()
    monkeypatch.setattr(np, "memmap", memmap)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = load(path, memory)
    finally:
        torch.set_warn_always(False)
    assert modes == ["r"] and Path(path).read_bytes() == before
    for parameter in model.model.diffusion_model.parameters():
        getattr(parameter, "_qdata", parameter).data.mul_(1)


def test_the_blocks_of_a_loaded_model_do_not_lie_in_the_file(write, tmp_path):
    import os

    path = write()
    model = load(path, "as stored")
    before = {name: weight._qdata.clone() for name, weight in stored(model).items()}
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))
    assert all(torch.equal(weight._qdata, before[name]) for name, weight in stored(model).items())


def test_other_floats_and_shapes(dit, files, write):
    """BF16, F16 and F32 tensors, and one that is stored in other rows than its own."""
    name = "x_embedder.proj.weight"
    shape = tuple(dit.tensors()[name].shape)
    kinds = {"pos_embed": "F32", name: "F16", "final_layer.linear.weight": "BF16"}
    path = write(choose=lambda key, _: kinds.get(key, "F32"), shapes={name: (shape[0] * shape[1], 4)})
    assert len(shape) == 4
    half = dit.tensors()
    half[name] = half[name].half()
    assert dit.relative_error(dit.output(load(path)), dit.output(dit.load())) < 1e-2


def test_a_prefix_of_a_whole_checkpoint(dit, write):
    prefixed = {f"model.diffusion_model.{key}": tensor for key, tensor in dit.tensors().items()}
    model, plain = load(write(tensors=prefixed)), load(write())
    assert torch.equal(dit.output(model), dit.output(plain))
    from int8_dit.nodes.patching.file_notes import gguf_formats_of

    assert f"{dit.LAYER}.weight" in gguf_formats_of(plain)
    assert gguf_formats_of(model) == gguf_formats_of(plain)


# Formats that no kernel expands, and the package gguf decodes

DECODED = ("IQ4_NL", "MXFP4")


@pytest.fixture
def decoded(pack, monkeypatch):
    """Of what gguf decodes from now on, the bytes; but for single blocks, by which its formats are known."""
    import gguf

    sizes, decode = [], gguf.quants.dequantize

    def record(data, kind):
        if data.size > gguf.GGML_QUANT_SIZES[kind][1]:
            sizes.append(data.size)
        return decode(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", record)
    return sizes


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
@pytest.mark.parametrize("kind", DECODED)
def test_what_gguf_decodes_becomes_int8(dit, files, write, kind, memory):
    """In either memory, and computes what the decoded weights do."""
    path = write(kind)
    model = load(path, memory)
    assert set(dit.int8_weights(model)) == set(dit.LINEARS)
    assert not stored(model)
    expected = dit.output(dequantized(dit, files, path))
    assert dit.relative_error(dit.output(model), expected) < 2 * dit.int8_noise()


def test_a_file_in_two_formats_keeps_what_a_kernel_expands(dit, files, write):
    """As files in IQ4_XS have some layers in a K-quant."""
    path = write("mixed", choose=lambda key, shape: files.linears_in("Q8_0" if "attn" in key else "IQ4_NL")(key, shape))
    model = load(path, "as stored")
    kept = stored(model)
    assert kept and all("attn" in name for name in kept)
    assert set(dit.int8_weights(model)) == {name for name in dit.LINEARS if name not in kept}
    assert dit.relative_error(dit.output(model), dit.output(dequantized(dit, files, path))) < 2 * dit.int8_noise()


@pytest.mark.parametrize("kind", DECODED)
def test_reading_leaves_packed_what_gguf_decodes(write, decoded, kind):
    """The bytes of the file, and of no weight floats."""
    import gguf

    from int8_dit.nodes.files.holding.gguf_weight import is_gguf
    from int8_dit.nodes.files.reading.gguf_file import read_gguf

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


def test_what_gguf_cannot_decode_is_refused_while_reading(tmp_path):
    import gguf
    import numpy as np

    from int8_dit.nodes.files.reading.gguf_file import read_gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "sd3")
    writer.add_tensor("a.weight", np.zeros((2, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"a.weight is in the format Q8_K, which is not read; use a file in one of"):
        read_gguf(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("kernel", ("fused int8", "bf16"))
@pytest.mark.parametrize("share", (0, 0.5))
def test_a_cancel_while_blocks_are_decoded(write, decoded, interrupt_at, kernel, share):
    from comfy.model_management import InterruptProcessingException

    from int8_dit.nodes.loading.load import load_int8_model

    path = write("IQ4_NL")
    load_int8_model(path, kernel)
    whole = len(decoded)
    decoded.clear()
    interrupt_at(share)
    with pytest.raises(InterruptProcessingException):
        load_int8_model(path, kernel)
    assert len(decoded) < (0.2 + share) * whole


# Patches


@pytest.fixture
def expected(dit, files, write, lora):
    """What the floats with the LoRA compute."""
    model = dequantized(dit, files, write("Q8_0"))
    with_it = dit.output(dit.with_lora(model, lora))
    assert dit.relative_error(with_it, dit.output(model)) > 0.5
    return with_it


def test_a_lora_acts_beside_stored_weights(dit, write, lora, expected):
    model = load(write("Q8_0"), "as stored")
    before = {name: weight._qdata.clone() for name, weight in stored(model).items()}
    plain = dit.output(model)
    with_it = dit.with_lora(model, lora)
    assert dit.relative_error(dit.output(with_it), expected) < 0.1
    assert all(torch.equal(weight._qdata, before[name]) for name, weight in stored(with_it).items())
    assert torch.equal(dit.output(model), plain)  # and is gone without a trace
    assert dit.relative_error(dit.output(with_it), expected) < 0.1  # and comes back


def test_loras_are_rounded_with_a_stored_weight_once(dit, write, lora):
    """To INT8, in each product, and not to the file's format; all of them, with their strengths."""
    import comfy.sd

    model = load(write("Q4_0"), "as stored")
    with_them, _ = comfy.sd.load_lora_for_models(dit.with_lora(model, lora), None, lora, -0.25, 0)
    dit.output(with_them)
    layer = dit.module(with_them, dit.LAYER)
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(0))
    up, down = (lora[f"diffusion_model.{dit.LAYER}.lora_{end}.weight"] for end in ("up", "down"))
    weight = layer.weight.dequantize() + 0.75 * up @ down
    with torch.inference_mode():
        error = dit.relative_error(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
    assert layer.input_form() is not None  # so that its block's fused forward runs
    assert error < 0.02


def test_a_lora_is_not_asked_where_its_weight_is_elsewhere(dit, write, lora):
    """The device of a streamed weight is not that of its LoRA, and nothing computes with both."""
    from int8_dit.kernels import UNCHANGED
    from int8_dit.nodes.layers import fused_forward, plain_loras

    model = dit.with_lora(load(write("Q8_0"), "as stored"), lora)
    dit.output(model)
    layer = dit.module(model, dit.LAYER)
    [attached] = layer.weight_function
    key, patches = attached.key, attached.patches[attached.key]
    low_rank = type(attached.low_rank)(*(factor.to("meta") for factor in attached.low_rank))
    layer.weight_function = [plain_loras.StoredLoRA(key, patches, low_rank, attached.scale.to("meta"))]
    assert layer.input_form() == fused_forward.InputForm(UNCHANGED, 8)
    assert fused_forward._resident(layer, torch.device("meta"), layer.weight.dtype) is None


@pytest.mark.parametrize("partially", (False, True))
def test_blocks_run_fused_with_a_lora(dit, files, tmp_path, monkeypatch, partially):
    from int8_dit.nodes.deferred import takers
    from support import adapters, small_models

    taken, take = [], takers.linear
    monkeypatch.setattr(takers, "linear", lambda *args: taken.append(take(*args)) or taken[-1])
    monkeypatch.setattr("int8_dit.nodes.loading.load_plan.SMALLEST_STORED", 0)
    source = small_models.ideogram4(monkeypatch)
    tensors = source.model.diffusion_model.state_dict()
    path = files.write_gguf(tmp_path / "ideogram.gguf", tensors, files.linears_in("Q8_0"))
    model = load(path, "as stored")
    lora = adapters.lora({name: tensors[f"{name}.weight"] for name in stored(model) if name.startswith("layers.")}, 0.5)
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


@pytest.mark.parametrize("with_a_lora", (False, True))
def test_partially_loaded(dit, write, lora, expected, with_a_lora):
    path = write("Q8_0")
    model = load(path, "as stored")
    model = dit.with_lora(model, lora) if with_a_lora else model
    model.patch_model(device_to=model.load_device, lowvram_model_memory=1)
    streamed = dit.forward(model)
    if with_a_lora:
        assert dit.relative_error(streamed, expected) < 0.1
    else:
        assert torch.equal(streamed, dit.output(load(path, "as stored")))


def test_unloaded_in_part_a_lora_acts_once(dit, write, lora, expected):
    model = dit.with_lora(load(write("Q8_0"), "as stored"), lora)
    dit.output(model)
    model.partially_unload(model.offload_device, 1 << 30)
    assert dit.relative_error(dit.forward(model), expected) < 0.1


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_lora_for_other_shapes_is_left_out_as_comfyui_does(dit, write, lora, memory, caplog):
    """Streamed or resident: ComfyUI logs which weights it does not fit, and goes on without it."""
    key = f"diffusion_model.{dit.LAYER}.lora_down.weight"
    path, others = write("Q8_0"), {name: tensor for name, tensor in lora.items() if dit.LAYER not in name}
    expected = dit.output(dit.with_lora(load(path, memory), others))
    wrong = dit.with_lora(load(path, memory), {**lora, key: lora[key][:, :-8]})
    wrong.patch_model(device_to=wrong.load_device, lowvram_model_memory=1)
    assert dit.relative_error(dit.forward(wrong), expected) < 0.1
    assert "ERROR lora" in caplog.text and dit.LAYER in caplog.text


@pytest.mark.parametrize("room", (0, 1))
def test_unloaded_nothing_of_a_lora_stays_on_the_device(dit, write, lora, room):
    """ComfyUI itself takes patches off only the models that it loaded in part."""
    model = dit.with_lora(load(write("Q8_0"), "as stored"), lora)
    model.patch_model(device_to=model.load_device, lowvram_model_memory=room)
    layer = dit.module(model, dit.LAYER)
    assert layer.weight_function
    model.detach()
    assert not layer.weight_function


def test_another_kind_of_patch_becomes_part_of_the_product(dit, files, write, lora):
    path = write("Q8_0")
    patches = {
        f"diffusion_model.{layer}.weight": (
            lora[f"diffusion_model.{layer}.lora_up.weight"] @ lora[f"diffusion_model.{layer}.lora_down.weight"],
        )
        for layer in dit.LINEARS
    }
    outputs = []
    for model in (dequantized(dit, files, path), load(path, "as stored")):
        model.add_patches(patches)
        outputs.append(dit.output(model))
    assert dit.relative_error(outputs[1], outputs[0]) < 0.1


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))  # ComfyUI runs nodes in the latter
@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_lora_that_widens_a_layer_acts_once_and_leaves(dit, write, memory, mode):
    """As Flux' Canny and Depth LoRAs widen the first layer."""
    import comfy.model_management
    from comfy.weight_adapter.lora import LoRAAdapter

    name = "joint_blocks.0.x_block.adaLN_modulation.1"
    with mode():
        model = load(write("Q8_0"), memory)
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


# What it does not become


def test_comfyuis_own_save_nodes_are_refused(dit, write, tmp_path):
    """They would write blocks that no loader takes for a weight."""
    import comfy.sd

    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"GGUF's blocks.*Save GGUF.*memory.*INT8"):
        comfy.sd.save_checkpoint(str(path), load(write(), "as stored"))
    assert not path.exists()
    comfy.sd.save_checkpoint(str(path), load(write(), "INT8"))


def test_a_stored_model_is_not_saved_as_int8(dit, write, tmp_path):
    from int8_dit.nodes.saving.save import save_int8_model

    with pytest.raises(ValueError, match=r"Set memory to INT8.*Save GGUF"):
        save_int8_model(load(write(), "as stored"), str(tmp_path / "m.safetensors"), {})


def test_a_stored_model_can_be_quantized(dit, write):
    """With the recipe, from the floats that its blocks stand for."""
    model = load(write("Q8_0"), "as stored")
    quantized = dit.quantize(model, calibration=dit.recorded())
    assert set(dit.int8_weights(quantized)) == set(dit.LINEARS)
    assert dit.relative_error(dit.output(quantized), dit.output(dit.stock())) < 0.1


def test_what_is_too_sensitive_for_int8_computes_in_floats(dit, files, write):
    path = write("Q8_0")
    name = "joint_blocks.0.x_block.adaLN_modulation.1"
    ours = dit.module(load(path, "as stored"), name)
    theirs = dit.module(dequantized(dit, files, path), name)
    x = torch.randn(3, ours.in_features, generator=torch.Generator().manual_seed(0))
    assert name in stored(load(path, "as stored"))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, memory", (("Q8_0", "as stored"), ("IQ4_NL", "as stored"), ("IQ4_NL", "INT8")))
def test_with_the_kernel_bf16_it_computes_in_floats(dit, files, write, kind, memory):
    from int8_dit.nodes.loading.load import load_int8_model

    path = write(kind)
    model = load_int8_model(path, "bf16", memory=memory)
    assert bool(stored(model)) == (kind == "Q8_0")
    torch.testing.assert_close(dit.output(model), dit.output(dequantized(dit, files, path)), rtol=1e-3, atol=1e-3)


def test_comfyuis_own_int8_is_not_said_of_stored_weights(dit, write, monkeypatch):
    """Where a benchmark found it the fastest, it takes the layers whose weights are INT8, and not blocks."""
    from int8_dit.kernels import FUSED, NATIVE
    from int8_dit.kernels.card.device import ComputePath
    from int8_dit.nodes.loading import summary

    monkeypatch.setattr("int8_dit.nodes.loading.load_plan.SMALLEST_STORED", 0)
    model = load(write("Q8_0"), "as stored")

    def measured(device, kernel="auto", shape=None, ways=(NATIVE,)):
        return ComputePath(NATIVE if NATIVE in ways else FUSED, "measured")

    monkeypatch.setattr(summary, "choose_path", measured)
    kinds = summary.summarize(model)
    assert (kinds.int8, kinds.native) == (len(dit.LINEARS), 0) and "from GGUF Q8_0" in str(kinds)


# Where files are


def test_files_are_listed_where_users_keep_them(pack, tmp_path, monkeypatch):
    import folder_paths

    from int8_dit.nodes.host.model_files import model_files, model_path

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
