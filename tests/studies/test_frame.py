"""What the studies of whole models measure: the models they say, and a table that one failure does not end."""

import pytest
import torch

FAMILIES = (
    *("Ideogram 4", "Flux.1", "Qwen-Image", "Z-Image", "SD3.5 Large"),
    *("Wan 14 B", "Wan VACE 14 B", "LTX-Video 13 B", "Kandinsky 5 Pro", "LTX-2.3", "MiniMax H3", "HunyuanVideo 1.5"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_comfyui_takes_the_tensors_of_a_family_for_that_family(pack, name):
    import comfy.model_detection

    from support.random_models import FAMILIES as families
    from support.random_models import RandomModel

    assert tuple(families) == FAMILIES
    model = RandomModel(families[name], torch.device("cpu"))
    tensors = {key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in model.shapes.items()}
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=families[name].metadata())
    assert type(config).__name__ == families[name].kind
    config.set_inference_dtype(torch.bfloat16, None)
    built = config.get_model({}, "", device="meta").diffusion_model.state_dict()
    assert {key: tuple(tensor.shape) for key, tensor in built.items()} == model.shapes


def test_a_row_that_fails_says_why_and_the_next_one_is_measured(pack, capsys):
    import time

    from studies.frame import Rows

    def fail():
        raise ValueError("no such card\nmore")

    rows = Rows()
    rows.measure({"variant": "a"}, fail, seconds=60)
    rows.measure({"variant": "b"}, lambda: time.sleep(60), seconds=0.1)
    rows.measure({"variant": "c"}, lambda: {"ms": 1.0}, seconds=60)
    assert [row.get("failed") for row in rows] == ["ValueError: no such card", "TimeoutError: more than 0.1 s", None]
    assert rows[2]["ms"] == 1.0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_kernel_belongs_to_a_part(pack):
    from studies.frame import by_part

    parts = {
        "int8_gemm_kernel": "GEMM",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT": "GEMM",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "rms_rope_split_half_kernel": "qk-norm and rope",
        "_quantize_rows_kernel": "norms, activations, quantizer",
        "void at::native::vectorized_elementwise_kernel<4, ...>": "other elementwise passes",
        "something": "else",
    }
    for kernel, part in parts.items():
        assert by_part({kernel: 2.0})[part] == 2.0
