"""Models of which ComfyUI reads something beside the diffusion model's tensors: it is kept, in memory and in files."""

import comfy.model_detection
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy.model_base import ModelType
from safetensors.torch import load_file

from int8_dit.nodes.quantization import quantize
from support.architectures import ARCHITECTURES, PIXEL_DIT


@pytest.fixture
def after(dit, tmp_path):
    """A MODEL as it comes out of the quantizer, of this pack's loader, and of ComfyUI's own."""

    def make(model):
        quantized = dit.quantize(model, method="none")
        again = dit.load(dit.save(quantized, tmp_path / "saved.safetensors"))
        path = dit.save(again, tmp_path / "again.safetensors")
        return {"quantized": quantized, "loaded": again, "stock": comfy.sd.load_diffusion_model(path)}

    return make


def video_output(small, model):
    comfy.model_management.load_models_gpu([model])
    x, text = small._randn(1, 128, 3, 4, 4, seed=1), small._randn(1, 8, small.TEXT, seed=2)
    with torch.inference_mode():
        return model.model.apply_model(x, torch.full((1,), 0.7), c_crossattn=text, attention_mask=None, frame_rate=25)


CONFIG = {"causal_temporal_positioning": True, "use_middle_indices_grid": True, "rope_type": "split"}


def test_the_config_of_an_ltx_video(dit, small, after):
    model = small.ltx_video(**CONFIG)
    expected = video_output(small, model)
    assert dit.relative_error(video_output(small, small.ltx_video()), expected) > 0.05  # it makes a difference
    for name, made in after(model).items():
        assert dit.relative_error(video_output(small, made), expected) < 0.02, name


def test_a_config_that_comes_from_tensors_alone_is_not_changed(dit, after):
    model = dit.stock()
    for made in after(model).values():
        own, other = (m.model.model_config.unet_config for m in (model, made))
        assert {k: v for k, v in own.items() if k != "dtype"} == {k: v for k, v in other.items() if k != "dtype"}


NOTHING = torch.tensor([])
SIGMAS = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.003)}


@pytest.mark.parametrize(
    "marks, predicts, sigma_max",
    (
        ({"v_pred": NOTHING, "ztsnr": NOTHING}, ModelType.V_PREDICTION, 4518),  # zero terminal SNR
        (SIGMAS, ModelType.V_PREDICTION_EDM, 120),
        ({"edm_mean": torch.zeros(4), "edm_std": torch.ones(4)}, ModelType.EDM, 80),
    ),
    ids=("v", "CosXL", "Playground"),
)
def test_how_a_model_predicts(dit, small, after, monkeypatch, tmp_path, marks, predicts, sigma_max):
    model = small.marked_unet(monkeypatch, marks)
    made_of_it = after(model)
    made_of_it["GGUF"] = dit.load(dit.save(made_of_it["loaded"], tmp_path / "again.gguf"))
    for name, made in {"": model, **made_of_it}.items():
        sampling = made.get_model_object("model_sampling")
        assert made.model.model_type == predicts and int(sampling.sigma_max) == sigma_max, name
        assert float(sampling.sigma_min) == float(model.get_model_object("model_sampling").sigma_min), name
        assert type(made.model.latent_format) is type(model.model.latent_format), name


def test_a_mark_that_is_not_known_is_refused_before_the_work(dit, small, monkeypatch, tmp_path):
    model = dit.load(dit.save(small.marked_unet(monkeypatch, {}), tmp_path / "plain.gguf"))
    model.model.model_config.sampling_settings = {"of tomorrow": True}
    with pytest.raises(ValueError, match="taken for another kind of model"):
        dit.save(model, tmp_path / "refused.safetensors")


def test_embedders_that_belong_to_the_model(dit, small, after):
    with small.known_to_comfyui(ARCHITECTURES["Stable Audio"]):
        made_of_it = after(model := small.stock_of(ARCHITECTURES["Stable Audio"]))
    expected = dict(model.model.seconds_total_embedder.state_dict())
    for made in made_of_it.values():
        dit.assert_same_tensors(dict(made.model.seconds_total_embedder.state_dict()), expected)


def test_names_that_a_model_has_in_files_alone(dit, small, after, tmp_path):
    tensors = {f"core.{name}": tensor for name, tensor in small.tensors_of(PIXEL_DIT).items()}
    model = small.stock_of(PIXEL_DIT, tensors)
    expected = small.output_of(PIXEL_DIT, model)
    with small.known_to_comfyui(PIXEL_DIT):
        made_of_it = after(model)
        made_of_it["GGUF"] = dit.load(dit.save(made_of_it["loaded"], tmp_path / "again.gguf"))
    for name, made in made_of_it.items():
        assert dit.relative_error(small.output_of(PIXEL_DIT, made), expected) < 0.05, name


@pytest.mark.parametrize("ending", ("safetensors", "gguf", "quantized"))
def test_a_kind_that_comfyui_would_not_know_again_is_refused_before_the_work(dit, tmp_path, monkeypatch, ending):
    model, stock = dit.load(), dit.stock()
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", lambda *args, **options: None)
    monkeypatch.setattr(quantize, "_quantize_layers", None)
    with pytest.raises(ValueError, match=r"would not know a file of this model \(SD3\) again"):
        dit.quantize(stock) if ending == "quantized" else dit.save(model, tmp_path / f"saved.{ending}")
    assert not list(tmp_path.iterdir())


def test_a_kind_that_cannot_be_kept_is_refused(dit):
    """As of a checkpoint whose sampling ComfyUI reads from marks that it does not write again."""
    model = dit.stock()
    model.model.model_type = ModelType.EDM
    with pytest.raises(ValueError, match=r"another kind of model .*FLOW instead of .*EDM.*images would be wrong"):
        dit.quantize(model)


def test_folding_does_not_make_an_fp16_model_of_a_z_image(dit, small, tmp_path):
    """ComfyUI tells by the spread of a norm's weight whether a Z-Image can run in fp16; folding divides just that."""
    architecture = ARCHITECTURES["Z-Image"]
    tensors = small.tensors_of(architecture)
    for index, name in enumerate(name for name in tensors if name.endswith("norm1.weight")):
        tensors[name] = 1 + 0.6 * small._randn(*tensors[name].shape, seed=index)
    model = small.stock_of(architecture, tensors)
    inputs = small.calibration(model)
    inputs["positive"] = {"positive_0": [[small._randn(1, 7, 64, seed=5), {}]]}
    with small.known_to_comfyui(architecture):
        path = dit.save(dit.quantize(model, **inputs), tmp_path / "folded.safetensors", fold=True)
    before = model.model.diffusion_model.state_dict()
    for name, folded in load_file(path).items():
        if name.endswith("norm1.weight") and name.startswith("layers."):
            assert not torch.equal(folded.float(), before[name].float())
            assert float(folded.float().std()) == pytest.approx(float(before[name].std()), rel=0.01)
