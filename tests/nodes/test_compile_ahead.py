"""What is compiled beside loading is what the linears of the MODEL will launch."""

import pytest
import torch

NATIVE = {"scalar scale": {"per_channel": False}, "rows": {}, "ConvRot": {"rotation_group": 64}}


@pytest.fixture
def asked(pack, monkeypatch):
    """The forms that were asked for, of linears that would run on a GPU."""
    from int8_dit.nodes.layers import compile_ahead

    asked, own = [], compile_ahead.compile_linears
    monkeypatch.setattr(compile_ahead, "runs_fused", lambda *_: True)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda forms, dtype, device: asked.append((forms, dtype)))
    for name in ("loading.load", "patching.apply_kernel"):

        def on_gpu(root, kernel, dtype, device):
            own(root, kernel, dtype, torch.device("cuda", 0))

        monkeypatch.setattr(f"int8_dit.nodes.{name}.compile_linears", on_gpu)
    return asked


@pytest.mark.parametrize("options", NATIVE.values(), ids=NATIVE)
@pytest.mark.parametrize("loads", ("the pack", "ComfyUI"))
def test_forms_are_those_of_the_linears(dit, tmp_path, asked, options, loads):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(**options))
    model = dit.load(path) if loads == "the pack" else dit.apply(dit.stock(path))
    ((forms, dtype),) = asked
    layer = dit.module(model, dit.LAYER)
    of_layer = [form for form in forms if (form.n, form.k) == tuple(layer.weight.shape)]
    assert {form.has_bias for form in of_layer} == {layer.bias is not None}
    assert {form.has_one_scale for form in of_layer} == {loads == "ComfyUI" and "per_channel" in options}
    assert {form.rotation_group for form in of_layer} == {options.get("rotation_group")}
    assert len(set(forms)) == len(forms) and [form.n * form.k for form in forms] == sorted(
        (form.n * form.k for form in forms), reverse=True
    )
    assert dtype == model.model.get_dtype_inference()


def test_nothing_is_compiled_without_a_gpu(dit, tmp_path, monkeypatch):
    from int8_dit.nodes.layers import compile_ahead

    given = []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda forms, dtype, device: given.append(forms))
    dit.load(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    assert given == [[]]
