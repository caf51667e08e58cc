"""Transformer Lab's INT8 files: the linears of both models of Ideogram 4, the rest from a base checkpoint."""

import json

import comfy.sd
import folder_paths
import pytest
import torch

from int8_dit.nodes.load_int8_dit import LoadINT8DiT
from int8_dit.nodes.loading.load import load_int8_model
from support.file_formats import FORMATS, config_in, fp8_scaled, in_metadata

NAME, BASE = "the linears.safetensors", "the base.safetensors"
QKV, W1, W2 = (f"layers.0.{layer}" for layer in ("attention.qkv", "feed_forward.w1", "feed_forward.w2"))
PROTECTED = (W2, "adaln_proj")
SMOOTHED = (QKV, "layers.1.feed_forward.w1", "llm_cond_proj")
ABSENT = "layers.1.attention.o"  # a linear that this file has not
NORM = "layers.1.ffn_norm1.weight"
BRANCHES = ("conditional", "unconditional")


@pytest.fixture
def models(small, monkeypatch):
    """The tensors of the two float models, by branch."""
    conditional = small.ideogram4(monkeypatch).model.diffusion_model.state_dict()
    unconditional = {key: tensor.flip(-1) for key, tensor in conditional.items()}
    return dict(zip(BRANCHES, (conditional, unconditional), strict=True))


def linears(tensors):
    return [key.removesuffix(".weight") for key, t in tensors.items() if t.ndim == 2 and "embed" not in key]


def quantized(layer, weight, smooth=None, scale_shape=(-1,), scale_dtype=torch.float32):
    weight = weight if smooth is None else weight * smooth
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    tensors = {f"{layer}.wq": (weight / scale).round().to(torch.int8)}
    tensors[f"{layer}.ws"] = scale.reshape(scale_shape).to(scale_dtype)
    return tensors | ({} if smooth is None else {f"{layer}.smooth": smooth})


def both_branches(models, **scales):
    """The tensors of the file: some layers protected, some smoothed, one absent; biases of half of them."""
    file = {}
    for branch, tensors in models.items():
        for index, layer in enumerate(linears(tensors)):
            weight, bias = tensors[f"{layer}.weight"], tensors.get(f"{layer}.bias")
            smooth = torch.linspace(0.5, 2, weight.shape[1]) if layer in SMOOTHED else None
            kept = {f"{layer}.weight": weight} if layer in PROTECTED else quantized(layer, weight, smooth, **scales)
            if bias is not None and index % 2 == 0:
                kept[f"{layer}.bias"] = bias
            if layer != ABSENT:
                file |= {f"{branch}.{key}": tensor for key, tensor in kept.items()}
    return file


def in_fp8(tensors):
    """FP8 with a scale a layer, which its metadata marks, as most users hold this model."""
    made = fp8_scaled(tensors, linears(tensors))
    return made, in_metadata({layer: config_in(made.pop(f"{layer}.comfy_quant")) for layer in linears(tensors)})


def in_int8(tensors):
    return FORMATS["native"](tensors, linears(tensors)).tensors, None


BASES = {
    "fp32": lambda tensors: (tensors, None),
    "bf16": lambda tensors: ({key: tensor.bfloat16() for key, tensor in tensors.items()}, None),
    "fp8 scaled": in_fp8,
    "int8": in_int8,
    "all in one": lambda tensors: ({f"model.diffusion_model.{key}": t for key, t in tensors.items()}, None),
}


@pytest.fixture
def load(dit, tmp_path):
    """Write the file and its base, and load a branch."""

    def write_and_load(file, base=None, metadata=None, branch="conditional", kernel="fused int8"):
        path = dit.write(tmp_path / NAME, file)
        base_path = None if base is None else dit.write(tmp_path / BASE, base, metadata)
        return load_int8_model(path, kernel, branch, base_path)

    return write_and_load


def stock(tensors):
    return comfy.sd.load_diffusion_model_state_dict(dict(tensors))


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("base", BASES)
def test_a_branch_computes_what_its_float_model_computes(dit, small, models, load, base, branch):
    model = load(both_branches(models), *BASES[base](dict(models[branch])), branch=branch)
    expected, other = (small.output(stock(models[name])) for name in (branch, *set(BRANCHES) - {branch}))
    assert dit.relative_error(other, expected) > 0.5
    assert dit.relative_error(small.output(model), expected) < 0.05
    if base == "fp32":  # dequantized where INT8 is not used
        model = load(both_branches(models), dict(models[branch]), branch=branch, kernel="bf16")
        assert not dit.int8_weights(model)
        assert dit.relative_error(small.output(model), expected) < 0.05


@pytest.fixture
def file(models):
    return both_branches(models)


def test_each_tensor_comes_from_where_it_should(dit, models, load, file):
    """The base's biases are told apart by a little, and its INT8 layer comes with scale and mark."""
    base = {k: t + 1e-3 if k.endswith(".bias") else t for k, t in models["conditional"].items()}
    base = in_int8(base)[0]
    loaded = dit.snapshot(load(file, base))
    parts = {"weight": "wq", "weight_scale": "ws", "weight_smooth": "smooth"}
    for key, tensor in loaded.items():
        layer, _, part = key.rpartition(".")
        own = file.get(f"conditional.{layer}.{parts.get(part)}", file.get(f"conditional.{key}"))
        if part != "comfy_quant":
            assert torch.equal(tensor.flatten(), (base[key] if own is None else own).flatten()), key
    assert all(torch.equal(loaded[f"{ABSENT}.{part}"], base[f"{ABSENT}.{part}"]) for part in ("weight", "comfy_quant"))
    assert {key.removesuffix(".weight_smooth") for key in loaded if key.endswith("_smooth")} == set(SMOOTHED)
    protected = [layer for layer in linears(models["conditional"]) if f"{layer}.comfy_quant" not in loaded]
    assert set(protected) == set(PROTECTED)


@pytest.mark.parametrize("shape", ((-1,), (-1, 1)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_scales_of_any_float_dtype(dit, models, load, shape, dtype):
    file = both_branches(models, scale_shape=shape, scale_dtype=dtype)
    scale = dit.snapshot(load(file, models["conditional"]))[f"{QKV}.weight_scale"]
    assert scale.dtype == torch.float32
    assert torch.equal(scale.flatten(), file[f"conditional.{QKV}.ws"].float().flatten())


def test_a_plain_weight_beside_a_quantized_one_is_taken(dit, models, load, file):
    file |= {f"conditional.{key}": t for key, t in quantized(W2, models["unconditional"][f"{W2}.weight"]).items()}
    loaded = dit.snapshot(load(file, models["conditional"]))
    assert torch.equal(loaded[f"{W2}.weight"], models["conditional"][f"{W2}.weight"])


def test_a_file_that_lacks_nothing_needs_no_base(dit, models, load, file):
    rest = {
        f"conditional.{k}": t for k, t in models["conditional"].items() if k.removesuffix(".weight") not in SMOOTHED
    }
    complete = {key: t for key, t in file.items() if key.startswith("unc") or key.split(".", 1)[1].startswith(SMOOTHED)}
    complete |= rest
    alone = dit.snapshot(load(complete))
    with_base = dit.snapshot(load(complete, models["unconditional"]))
    assert alone.keys() == with_base.keys() and not [
        key for key in alone if not torch.equal(alone[key], with_base[key])
    ]
    assert torch.equal(alone[NORM], models["conditional"][NORM])


def test_a_file_with_one_model_needs_neither_branch_nor_base(dit, models, load):
    plain, base = models["conditional"], models["unconditional"]
    model = load(plain, base, branch="unconditional", kernel="bf16")
    assert not [key for key, tensor in dit.snapshot(model).items() if not torch.equal(tensor, plain[key])]


def test_saved_it_is_a_file_like_any_other(dit, small, models, load, file, tmp_path):
    """And it can be built again, for another GPU and without dynamic VRAM."""
    model = load(file, models["unconditional"], branch="unconditional")
    path = dit.save(model, tmp_path / "saved.safetensors")
    build, arguments = model.cached_patcher_init
    for again in (dit.load(path), model.deepclone_multigpu(), build(*arguments, disable_dynamic=True)):
        dit.assert_same_tensors(dit.snapshot(again), dit.snapshot(model))
        assert torch.equal(small.output(again), small.output(model))


def test_the_widgets_of_the_node(dit, models, file, tmp_path, monkeypatch):
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})  # of a folder that does not stay
    dit.write(tmp_path / NAME, file)
    dit.write(tmp_path / BASE, models["unconditional"])
    inputs = {entry.id: entry for entry in LoadINT8DiT.define_schema().inputs}
    assert list(inputs)[:4] == ["model_name", "kernel", "branch", "base_checkpoint"]  # in the order of old workflows
    assert inputs["branch"].optional and inputs["base_checkpoint"].optional
    assert inputs["base_checkpoint"].options == ["none", BASE, NAME]
    model, _ = LoadINT8DiT.execute(NAME, "fused int8", "unconditional", BASE).result
    assert torch.equal(dit.snapshot(model)[NORM], models["unconditional"][NORM])
    with pytest.raises(ValueError, match="Set base_checkpoint"):
        LoadINT8DiT.execute(NAME, "fused int8")


# What cannot be loaded


@pytest.fixture
def refuse(models, load, tmp_path):
    """Assert that a file and its base are refused with these words, and none of their folder."""

    def check(*says, **inputs):
        with pytest.raises(ValueError) as error:
            load(**inputs)
        message = str(error.value)
        assert not [text for text in says if text not in message], message
        assert str(tmp_path) not in message

    return check


def without(*keys):
    return lambda base: {key: tensor for key, tensor in base.items() if key not in keys}


def more_blocks(base):
    return base | {key.replace("layers.1.", "layers.2."): t.clone() for key, t in base.items() if "layers.1." in key}


OTHER = ("is the conditional model", "branch")
BASES_TO_REFUSE = {
    "no Ideogram": (lambda base: {"a.weight": torch.ones(2, 2)}, (NAME, "is not a diffusion model"), {}),
    "one tensor missing": (without(NORM), (NAME, "lacks 1 of the tensors", NORM), {}),
    "a scale missing": (
        lambda base: without(f"{ABSENT}.weight_scale")(in_int8(base)[0]),
        (f"{ABSENT}.weight_scale is missing",),
        {},
    ),
    "more blocks": (more_blocks, ("layers.2.", "is no layer of this Ideogram 4"), {}),
    "the other branch": (lambda base: BASES["bf16"](base)[0], OTHER, {"branch": BRANCHES[1]}),
    "folded": (dict, ("folded",), {"metadata": {"int8_dit_recipe": json.dumps({"folded": True})}}),
    "the same kind": (lambda base: both_branches({BRANCHES[0]: base}), ("Transformer Lab",), {}),
}


@pytest.mark.parametrize("change, says, options", BASES_TO_REFUSE.values(), ids=BASES_TO_REFUSE)
def test_a_base_that_is_wrong(models, refuse, file, change, says, options):
    refuse(BASE, *says, file=file, base=change(dict(models["conditional"])), **options)


def test_no_base_and_the_other_branch_in_fp8(models, refuse, file):
    own = {key.replace(".wq", ".weight") for key in file}
    missing = [key for key in models["conditional"] if f"conditional.{key}" not in own]
    says = ("Transformer Lab", f"{len(missing)} tensors", f"the first is {missing[0]}", "Set base_checkpoint")
    refuse(NAME, *says, file=file)
    base, metadata = in_fp8(dict(models["conditional"]))
    refuse(BASE, *OTHER, file=file, base=base, metadata=metadata, branch=BRANCHES[1])


@pytest.mark.parametrize("key", (NORM, f"{ABSENT}.weight", "t_embedding.mlp_out.bias"))
@pytest.mark.parametrize("convert", (BASES["fp32"], in_fp8))
def test_a_base_of_another_shape(models, refuse, file, key, convert):
    file.pop(f"conditional.{key}", None)
    base, metadata = convert({k: t[:-1].clone() if k == key else t for k, t in models["conditional"].items()})
    refuse(BASE, key, str(list(base[key].shape)), file=file, base=base, metadata=metadata)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_that_is_not_there(models, refuse, file, branch):
    file = {key: tensor for key, tensor in file.items() if not key.startswith(f"{branch}.")}
    refuse(NAME, f"no {branch} model", "branch", file=file, base=models[branch], branch=branch)


WRONG = {
    "no layer of Ideogram 4": ("layers.0.mlp.wq", lambda t: torch.ones(4, 4, dtype=torch.int8)),
    "no codes": (f"{QKV}.wq", lambda t: None),
    "no scale": (f"{QKV}.ws", lambda t: None),
    "smooth of another length": (f"{QKV}.smooth", lambda t: t[:-1]),
    "smooth that is not positive": (f"{QKV}.smooth", torch.zeros_like),
    "smooth with a NaN": (f"{QKV}.smooth", lambda t: t * torch.nan),
    "scale of another length": (f"{QKV}.ws", lambda t: t[:-1]),
    "scale in integers": (f"{QKV}.ws", lambda t: t.int()),
    "weight in bytes": (f"{QKV}.wq", lambda t: t.byte()),
    "weight of another shape": (f"{W1}.wq", lambda t: t[:, :-1]),
    "bias of another shape": ("input_proj.bias", lambda t: t[:-1]),
    "protected weight of another shape": (f"{W2}.weight", lambda t: t[:, :-1]),
}


@pytest.mark.parametrize("key, damage", WRONG.values(), ids=WRONG)
def test_tensors_that_are_wrong(refuse, models, file, key, damage):
    changed = damage(file.pop(f"conditional.{key}", None))
    file |= {} if changed is None else {f"conditional.{key}": changed.clone()}
    refuse(NAME, key.rpartition(".")[0], file=file, base=models["conditional"])
