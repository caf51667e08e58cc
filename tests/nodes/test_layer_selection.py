"""Which linears become INT8, on ComfyUI's own model classes: those of attention and MLP in the blocks, nothing else.

The models are built on the meta device, with real widths and few blocks.
"""

import importlib
import re
from itertools import product

import pytest
import torch

FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072,
    "mlp_ratio": 4.0, "num_heads": 24, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000,
    "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip
FLUX_2 = FLUX | {
    "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 15360, "hidden_size": 6144,
    "mlp_ratio": 3.0, "num_heads": 48, "axes_dim": [32] * 4, "patch_size": 1, "qkv_bias": False, "txt_ids_dims": [3],
    "global_modulation": True, "mlp_silu_act": True, "ops_bias": False,
}  # fmt: skip
CHROMA = {key: value for key, value in FLUX.items() if key != "guidance_embed"} | {
    "in_channels": 64, "vec_in_dim": None, "in_dim": 64, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5,
}  # fmt: skip
HUNYUAN_VIDEO = {key: value for key, value in FLUX.items() if key != "txt_ids_dims"} | {
    "patch_size": [1, 2, 2], "theta": 256, "byt5": False, "meanflow": False, "use_cond_type_embedding": False,
    "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
LUMINA = {"n_layers": 2, "qk_norm": True, "in_channels": 16}
FLUX_BLOCKS = "double_blocks.#.{img,txt}_{attn.qkv,attn.proj,mlp.0,mlp.2} single_blocks.#.linear{1,2}"
LUMINA_BLOCKS = (
    "{noise_refiner,context_refiner,layers}.#.attention.{qkv,out} "
    "{noise_refiner,context_refiner,layers}.#.feed_forward.w{1,2,3}"
)

# Name: module under comfy.ldm and class, its arguments, and the layers that become INT8. {a,b} is a or b, # a block.
MODELS = {
    "Ideogram 4": (
        "ideogram4.model:Ideogram4Transformer2DModel",
        {},
        "layers.#.attention.{qkv,o} layers.#.feed_forward.w{1,2,3} llm_cond_proj",
    ),
    "SD3": (
        "modules.diffusionmodules.mmdit:MMDiT",
        {
            "input_size": None, "patch_size": 2, "in_channels": 16, "depth": 24, "num_blocks": 2,
            "adm_in_channels": 2048, "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 1536},
            },
        },
        "joint_blocks.#.{context,x}_block.{attn.qkv,attn.proj,mlp.fc1,mlp.fc2}",
    ),
    "Flux": ("flux.model:Flux", FLUX, FLUX_BLOCKS),
    "Flux.2": ("flux.model:Flux", FLUX_2, FLUX_BLOCKS + " txt_in"),  # its text projection has 94 M weights
    "Chroma": ("chroma.model:Chroma", CHROMA, FLUX_BLOCKS),
    "HunyuanVideo": (
        "hunyuan_video.model:HunyuanVideo",
        HUNYUAN_VIDEO,
        FLUX_BLOCKS + " txt_in.individual_token_refiner.blocks.#.{self_attn.qkv,self_attn.proj,mlp.0,mlp.2}",
    ),
    "AuraFlow": (
        "aura.mmdit:MMDiT",
        {"n_layers": 4, "n_double_layers": 2},
        "double_layers.#.attn.w{1,2}{q,k,v,o} double_layers.#.mlp{C,X}.c_{fc1,fc2,proj} "
        "single_layers.#.attn.w1{q,k,v,o} single_layers.#.mlp.c_{fc1,fc2,proj}",
    ),
    "Lumina 2": (
        "lumina.model:NextDiT",
        LUMINA | {"dim": 2304, "cap_feat_dim": 2304, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32] * 3},
        LUMINA_BLOCKS,
    ),
    "Z-Image": (
        "lumina.model:NextDiT",
        LUMINA
        | {"dim": 3840, "cap_feat_dim": 2560, "n_heads": 30, "axes_dims": [32, 48, 48], "z_image_modulation": True},
        LUMINA_BLOCKS,
    ),
    "Qwen-Image": (
        "qwen_image.model:QwenImageTransformer2DModel",
        {"num_layers": 2},
        "transformer_blocks.#.attn.{to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out} "
        "transformer_blocks.#.{img,txt}_mlp.net.{0.proj,2}",
    ),
    "Wan": (
        "wan.model:WanModel",
        {"model_type": "i2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2, "in_dim": 36},
        "blocks.#.{self,cross}_attn.{q,k,v,o} blocks.#.cross_attn.{k,v}_img blocks.#.ffn.{0,2}",
    ),
    "Cosmos Predict 2": (
        "cosmos.predict2:MiniTrainDIT",
        {
            "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16,
            "patch_spatial": 2, "patch_temporal": 1, "model_channels": 2048, "num_blocks": 2, "pos_emb_cls": "rope3d",
            "use_adaln_lora": True,
        },
        "blocks.#.{self,cross}_attn.{q,k,v,output}_proj blocks.#.mlp.layer{1,2}",
    ),
    "LTX-Video": (
        "lightricks.model:LTXVModel",
        {"num_layers": 2},
        "transformer_blocks.#.attn{1,2}.{to_q,to_k,to_v,to_out.0} transformer_blocks.#.ff.net.{0.proj,2}",
    ),
    "OmniGen 2": (
        "omnigen.omnigen2:OmniGen2Transformer2DModel",
        {"num_layers": 2},
        "{noise_refiner,ref_image_refiner,context_refiner,layers}.#.attn.to_{q,k,v,out.0} "
        "{noise_refiner,ref_image_refiner,context_refiner,layers}.#.feed_forward.linear_{1,2,3}",
    ),
    "HiDream": (
        "hidream.model:HiDreamImageTransformer2DModel",
        {
            "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2, "num_single_layers": 2,
            "caption_channels": [4096, 4096], "llama_layers": [0, 1],
        },
        "{double,single}_stream_blocks.#.block.attn1.to_{q,k,v,out} "
        "double_stream_blocks.#.block.attn1.to_{q,k,v,out}_t "
        "{double,single}_stream_blocks.#.block.ff_i.{shared_experts,experts.0,experts.1,experts.2,experts.3}.w{1,2,3} "
        "double_stream_blocks.#.block.ff_t.w{1,2,3}",
    ),
    "Krea 2": (
        "krea2.model:SingleStreamDiT",
        {"layers": 2},
        "{blocks,txtfusion.layerwise_blocks,txtfusion.refiner_blocks}.#."
        "{attn.wq,attn.wk,attn.wv,attn.gate,attn.wo,mlp.gate,mlp.up,mlp.down}",
    ),
}  # fmt: skip


def expand(patterns):
    """Every name that the patterns stand for."""
    names = set()
    for pattern in patterns.split():
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        names |= {"".join(choice) for choice in product(*parts)}
    return names


def linears(model, arguments):
    """Every linear of a ComfyUI model class, by name."""
    import comfy.ops

    module, name = model.split(":")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    model = build(**arguments, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}


@pytest.fixture
def is_quantizable(pack):
    from int8_dit.nodes.layers.layer_selection import is_quantizable

    return is_quantizable


@pytest.mark.parametrize("model, arguments, expected", MODELS.values(), ids=MODELS)
def test_attention_and_mlp_of_the_blocks(is_quantizable, model, arguments, expected):
    layers = linears(model, arguments)
    selected = {name for name, layer in layers.items() if is_quantizable(name, tuple(layer.weight.shape))}
    assert {re.sub(r"\.\d+\.", ".#.", name, count=1) for name in selected} == expand(expected)
    # In each of the blocks, not only in one.
    unselected = {re.sub(r"\.\d+\.", ".#.", name, count=1) for name in layers.keys() - selected}
    assert not unselected & expand(expected)


def test_the_whole_ideogram_4(is_quantizable):
    layers = linears("ideogram4.model:Ideogram4Transformer2DModel", {})
    assert len(layers) == 211
    assert sum(is_quantizable(name, tuple(layer.weight.shape)) for name, layer in layers.items()) == 34 * 5 + 1


@pytest.mark.parametrize(
    "name, shape, expected",
    (
        ("blocks.0.mlp", (64, 64), True),
        ("blocks.0.mlp", (63, 4096), False),
        ("blocks.0.mlp", (4096, 63), False),
        ("blocks.0.experts", (8, 4096, 4096), False),
        ("blocks.0.mlp", (4096,), False),
        ("text_in", (8192, 8192), True),
        ("text_in", (8192, 8191), False),
        ("blocks.0.norm1.linear", (8192, 8192), False),
        ("blocks.0.modulation.1", (8192, 8192), False),
        ("blocks.0.adaLN_modulation", (8192, 8192), False),
        ("blocks.0.adaln.1", (8192, 8192), False),
        ("blocks.0.time_emb.1", (8192, 8192), False),
        ("blocks.0.model.fc", (4096, 4096), True),
        ("embedder.0.proj", (4096, 4096), False),
        ("projection.0", (4096, 4096), False),
    ),
)
def test_names_and_sizes_at_the_edges(is_quantizable, name, shape, expected):
    assert is_quantizable(name, shape) is expected
