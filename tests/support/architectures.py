"""The architectures of small MODELs: a table with an entry for each.

Each is one of ComfyUI's own, at least 64 wide, so that its linears can be INT8. small_models.py builds them. This file
needs no ComfyUI, so that tests can be named after its entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Architecture:
    """How to build a small model of one kind, and what one forward of it takes."""

    kind: str  # its class in comfy.supported_models
    sizes: Mapping[str, object]  # arguments of its diffusion model beside those of that class's `unet_config`
    # Of a forward; a tuple is the shape of a random tensor, and a list of tuples are those of several.
    inputs: Mapping[str, object]
    # Shapes of tensors in its files that are not the diffusion model's.
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # The function of comfy.utils that knows the names Diffusers gives its tensors, if one does.
    diffusers: str | None = None


IMAGE = (1, 16, 4, 4)
VIDEO = (1, 16, 1, 4, 4)
TEXT = (1, 6, 64)

# A name a line would be 500 lines.
# fmt: off
_FLUX = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 64, "context_in_dim": 64, "hidden_size": 128,
    "mlp_ratio": 4.0, "num_heads": 1, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000,
    "patch_size": 2, "qkv_bias": True, "guidance_embed": False, "txt_ids_dims": [], "yak_mlp": False,
    "txt_norm": False,
}
_FLUX2 = {
    "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "mlp_ratio": 3.0, "axes_dim": [32, 32, 32, 32],
    "theta": 2000, "patch_size": 1, "qkv_bias": False, "global_modulation": True, "mlp_silu_act": True,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
}
_CHROMA = {k: v for k, v in _FLUX.items() if k not in ("guidance_embed", "yak_mlp", "txt_norm")} | {
    "in_channels": 64, "out_channels": 64, "vec_in_dim": None, "in_dim": 64, "out_dim": 128, "hidden_dim": 128,
    "n_layers": 2,
}
_HUNYUAN_VIDEO = {
    "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768, "context_in_dim": 64,
    "hidden_size": 128, "mlp_ratio": 4.0, "num_heads": 1, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56], "theta": 256, "qkv_bias": True, "guidance_embed": False, "byt5": False,
    "meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}
_WAN = {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2, "in_dim": 16, "out_dim": 16, "text_dim": 64}
_LUMINA = {
    "patch_size": 2, "in_channels": 16, "dim": 128, "cap_feat_dim": 64, "n_layers": 2, "n_refiner_layers": 1,
    "qk_norm": True, "n_heads": 4, "n_kv_heads": 2, "axes_dims": [8, 12, 12], "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}
_Z_IMAGE = {
    "dim": 256, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [32, 48, 48], "rope_theta": 256.0,
    "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}
_COSMOS = {
    "max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
    "patch_temporal": 1, "model_channels": 128, "num_blocks": 1, "num_heads": 2, "crossattn_emb_channels": 64,
    "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 32,
}
_OMNIGEN = {
    "hidden_size": 128, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2,
    "multiple_of": 64, "axes_dim_rope": [8, 12, 12], "axes_lens": [64, 64, 64],
}
_LTX_2 = {
    "num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2, "cross_attention_dim": 128,
    "audio_attention_head_dim": 32, "audio_num_attention_heads": 2, "audio_cross_attention_dim": 64,
    "caption_channels": 64, "connector_attention_head_dim": 32, "connector_num_attention_heads": 2,
    "connector_num_layers": 1,
}
_QWEN = {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2, "axes_dims_rope": (16, 24, 24)}

ARCHITECTURES = {
    "Flux": Architecture(
        "FluxSchnell",
        _FLUX,
        {"x": IMAGE, "context": TEXT, "y": (1, 64)},
        diffusers="flux_to_diffusers",
    ),
    "Flux, yak": Architecture("FluxSchnell", _FLUX | {"yak_mlp": True}, {"x": IMAGE, "context": TEXT, "y": (1, 64)}),
    "Flux 2": Architecture("Flux2", _FLUX | _FLUX2, {"x": (1, 128, 3, 3), "context": TEXT}),
    "Chroma": Architecture("Chroma", _CHROMA, {"x": IMAGE, "context": TEXT, "guidance": torch.zeros(1)}),
    "SD3": Architecture(
        "SD3",
        {
            "patch_size": 2, "out_channels": 16, "depth": 2, "input_size": None, "adm_in_channels": 64,
            "context_embedder_config": {
                "target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}
            },
            "num_patches": 16, "pos_embed_max_size": 4, "qk_norm": "rms", "x_block_self_attn_layers": [0],
        },
        {"x": IMAGE, "context": TEXT, "y": (1, 64)},
        diffusers="mmdit_to_diffusers",
    ),
    "AuraFlow": Architecture(
        "AuraFlow",
        {
            "dim": 128, "n_layers": 2, "n_double_layers": 1, "n_heads": 2, "global_conddim": 128, "cond_seq_dim": 64,
            "max_seq": 16,
        },
        {"x": (1, 4, 4, 4), "context": TEXT},
        diffusers="auraflow_to_diffusers",
    ),
    "PixArt": Architecture(
        "PixArtSigma",
        {
            "hidden_size": 128, "num_heads": 2, "depth": 2, "patch_size": 2, "in_channels": 4, "input_size": 8,
            "caption_channels": 64, "model_max_length": 8, "micro_condition": False,
        },
        {"x": (1, 4, 2, 66), "context": TEXT},  # no smaller: it would divide by zero
        diffusers="pixart_to_diffusers",
    ),
    "HunyuanDiT": Architecture(
        "HunyuanDiT",
        {
            "hidden_size": 128, "num_heads": 2, "depth": 2, "text_states_dim": 64, "text_states_dim_t5": 64,
            "text_len": 6, "text_len_t5": 5,
        },
        {
            "x": (1, 4, 4, 4), "context": TEXT, "text_embedding_mask": torch.ones(1, 6, dtype=torch.long),
            "encoder_hidden_states_t5": (1, 5, 64), "text_embedding_mask_t5": torch.ones(1, 5, dtype=torch.long),
        },
    ),
    "Hunyuan Video": Architecture("HunyuanVideo", _HUNYUAN_VIDEO, {"x": VIDEO, "context": TEXT, "y": (1, 768)}),
    "Hunyuan i2v": Architecture(  # the first frame is given, and has another timestep than the rest
        "HunyuanVideoI2V",
        _HUNYUAN_VIDEO | {"in_channels": 33},
        {"x": (1, 33, 3, 4, 4), "context": TEXT, "y": (1, 768), "guiding_frame_index": torch.zeros(1)},
    ),
    "Hunyuan Image": Architecture(
        "HunyuanImage21",
        _HUNYUAN_VIDEO
        | {"in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "axes_dim": [64, 64], "vec_in_dim": None},
        {"x": (1, 64, 3, 3), "context": TEXT},
    ),
    "Wan t2v": Architecture("WAN21_T2V", _WAN, {"x": VIDEO, "context": TEXT}),
    "Wan i2v": Architecture(
        "WAN21_I2V", _WAN | {"in_dim": 36}, {"x": (1, 36, 1, 4, 4), "context": TEXT, "clip_fea": (1, 5, 1280)}
    ),
    "Wan 2.2": Architecture(
        "WAN22_T2V",
        _WAN | {"in_dim": 48, "out_dim": 48},
        {
            "x": (1, 48, 2, 4, 4), "context": TEXT,
            "timestep": torch.tensor([[0.0, 0.7]]).repeat_interleave(4, 1),  # of each token
        },
    ),
    "Wan VACE": Architecture(
        "WAN21_Vace",
        _WAN | {"vace_layers": 1, "vace_in_dim": 96},
        {"x": VIDEO, "context": TEXT, "vace_context": (1, 1, 96, 1, 4, 4), "vace_strength": [1.0]},
    ),
    "Wan HuMo": Architecture("WAN21_HuMo", _WAN, {"x": VIDEO, "context": TEXT, "audio_embed": (1, 1, 8, 5, 1280)}),
    "LTX-2": Architecture(
        "LTXAV", _LTX_2, {"x": [(1, 128, 3, 2, 2), (1, 8, 3, 16)], "context": (1, 6, 128), "attention_mask": None}
    ),
    "LTX-2.3": Architecture(
        "LTXAV",
        _LTX_2 | {"apply_gated_attention": True, "cross_attention_adaln": True},
        {"x": [(1, 128, 3, 2, 2), (1, 8, 3, 16)], "context": (1, 6, 128), "attention_mask": None},
    ),
    "MiniMax H3": Architecture(
        "MiniMaxH3",
        {
            "hidden_size": 128, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2,
            "attention_head_dim": 64, "ffn_hidden_size": 256, "text_dim": 64, "timestep_input_dim": 64,
            "time_embed_hidden_size": 64, "time_embed_dim": 64, "rope_inv_freq_len": 8,
        },
        {"x": [(1, 24, 1, 4, 4), (1, 32, 2, 3)], "context": TEXT},
    ),
    "LTX-Video": Architecture(
        "LTXV",
        {"num_layers": 2, "attention_head_dim": 4, "cross_attention_dim": 128, "caption_channels": 64},
        {"x": (1, 128, 2, 2, 2), "context": TEXT, "attention_mask": None},
    ),
    "Lumina 2": Architecture("Lumina2", _LUMINA, {"x": IMAGE, "context": TEXT, "num_tokens": 6}),
    "Z-Image": Architecture(
        "ZImage",
        _LUMINA | _Z_IMAGE,
        {"x": IMAGE, "context": TEXT, "num_tokens": 6},
        diffusers="z_image_to_diffusers",
    ),
    "HiDream": Architecture(
        "HiDream",
        {
            "attention_head_dim": 64, "axes_dims_rope": [32, 16, 16], "caption_channels": [64, 64],
            "max_resolution": [16, 16], "in_channels": 16, "llama_layers": [0, 1], "num_attention_heads": 2,
            # All of them: which of several a token goes to is no continuous function of its values.
            "num_routed_experts": 2, "num_activated_experts": 2, "num_layers": 1, "num_single_layers": 1,
            "out_channels": 16, "patch_size": 2, "text_emb_dim": 64,
        },
        {"x": IMAGE, "y": (1, 64), "context": TEXT, "encoder_hidden_states_llama3": (1, 2, 5, 64)},
    ),
    "Cosmos": Architecture(
        "CosmosT2V",
        _COSMOS
        | {
            "block_x_format": "THWBD", "affline_emb_norm": True, "extra_per_block_abs_pos_emb": True,
            "extra_per_block_abs_pos_emb_type": "learnable",
        },
        {"x": VIDEO, "context": TEXT, "fps": None, "padding_mask": torch.zeros(1, 1, 4, 4)},
    ),
    "Cosmos Predict 2": Architecture("CosmosT2IPredict2", _COSMOS, {"x": VIDEO, "context": TEXT}),
    "Anima": Architecture(
        "Anima",
        _COSMOS,
        {"x": VIDEO, "context": TEXT, "t5xxl_ids": torch.arange(4)[None]},
    ),
    "Qwen-Image": Architecture(
        "QwenImage",
        _QWEN | {"joint_attention_dim": 64, "in_channels": 64, "out_channels": 16},
        {"x": VIDEO, "context": TEXT},
    ),
    "Mage Flow": Architecture(
        "MageFlow",
        _QWEN | {"joint_attention_dim": 2560, "in_channels": 128, "out_channels": 128},
        {"x": (1, 128, 2, 2), "context": (1, 6, 2560)},
    ),
    "OmniGen 2": Architecture(
        "Omnigen2", _OMNIGEN | {"text_feat_dim": 64}, {"x": IMAGE, "context": TEXT, "num_tokens": 6}
    ),
    "Boogu": Architecture(
        "Boogu",
        _OMNIGEN | {"num_double_stream_layers": 1, "instruction_feat_dim": 64},
        {"x": IMAGE, "context": TEXT, "num_tokens": 6},
    ),
    "Ideogram 4": Architecture(
        "Ideogram4",
        {
            "in_channels": 128, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64,
            "intermediate_size": 256, "adaln_dim": 64, "llm_features_dim": 64, "rope_theta": 10000,
            "mrope_section": (16, 8, 8), "norm_eps": 1e-5,
        },
        {"x": (1, 128, 3, 3), "context": TEXT},
    ),
    "Krea 2": Architecture(
        "Krea2",
        {
            "features": 128, "heads": 1, "kvheads": 1, "layers": 2, "txtdim": 64, "txtlayers": 2, "txtheads": 1,
            "txtkvheads": 1, "patch": 2, "channels": 16,
        },
        {"x": IMAGE, "context": (1, 6, 128)},
    ),
    "Stable Audio": Architecture(
        "StableAudio",
        {
            "embed_dim": 128, "num_heads": 2, "depth": 2, "io_channels": 64, "cond_token_dim": 64,
            "global_cond_dim": 64, "timestep_features_type": "learned",
        },
        {"x": (1, 64, 6), "context": TEXT, "global_embed": (1, 64)},
        {
            f"conditioner.conditioners.seconds_{part}.embedder.embedding.{name}": shape
            for part in ("start", "total")
            for name, shape in (("0.weights", (128,)), ("1.weight", (768, 257)), ("1.bias", (768,)))
        },
    ),
    "ACE-Step 1.5": Architecture(
        "ACEStep15",
        {
            "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 4,
            "encoder_hidden_size": 128, "encoder_num_heads": 4, "head_dim": 32, "encoder_intermediate_size": 256,
            "num_dit_layers": 2, "num_lyric_layers": 1, "num_timbre_layers": 1, "num_tokenizer_layers": 1,
            "text_hidden_dim": 64, "fsq_dim": 128,
        },
        {"x": (1, 64, 10), "context": TEXT, "lyric_embed": (1, 5, 64), "refer_audio": (1, 64, 10), "is_covers": False},
    ),
    "Mochi": Architecture(
        "GenmoMochi",
        {
            "depth": 2, "patch_size": 2, "num_heads": 2, "hidden_size_x": 128, "hidden_size_y": 64,
            "mlp_ratio_x": 96.0,  # ComfyUI asserts the width of this MLP, whatever the model's
            "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True, "qkv_bias": False,
            "out_bias": True, "posenc_preserve_area": True, "timestep_scale": 1000.0, "use_t5": True,
            "t5_feat_dim": 64, "t5_token_length": 6,
        },
        {"x": (1, 12, 1, 4, 4), "context": TEXT, "attention_mask": torch.ones(1, 6, dtype=torch.bool), "num_tokens": 6},
    ),
    "Kandinsky 5": Architecture(
        "Kandinsky5",
        {
            "in_text_dim": 64, "in_text_dim2": 64, "time_dim": 64, "model_dim": 128, "ff_dim": 256,
            "num_text_blocks": 1, "num_visual_blocks": 2, "visual_embed_dim": 132, "axes_dims": (16, 24, 24),
        },
        {"x": (1, 33, 1, 4, 4), "context": TEXT, "y": (1, 64)},
    ),
    "Ernie-Image": Architecture(
        "ErnieImage",
        {"hidden_size": 128, "num_attention_heads": 1, "num_layers": 2, "ffn_hidden_size": 256, "text_in_dim": 64},
        {"x": (1, 128, 3, 3), "context": TEXT},
    ),
    "CogVideoX": Architecture(
        "CogVideoX_T2V",
        {
            "num_attention_heads": 2, "attention_head_dim": 64, "time_embed_dim": 64, "num_layers": 2,
            "in_channels": 16, "patch_size": 2, "text_embed_dim": 64, "use_rotary_positional_embeddings": True,
            "use_learned_positional_embeddings": False,
        },
        {"x": VIDEO, "context": TEXT},
    ),
    "Lens": Architecture(
        "Lens",
        {
            "in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 2, "enc_hidden_dim": 64,
            "multi_layer_encoder_feature": True, "selected_layer_index": (0, 1),
        },
        {"x": (1, 128, 3, 3), "context": (1, 6, 128)},
    ),
    "JoyImage": Architecture(
        "JoyImage",
        {
            "in_channels": 16, "hidden_size": 128, "patch_size": [1, 2, 2], "num_layers": 2, "num_attention_heads": 1,
            "text_dim": 64,
        },
        {"x": VIDEO, "context": TEXT},
    ),
    "Hunyuan 3D": Architecture(
        "Hunyuan3Dv2",
        {
            "in_channels": 64, "context_in_dim": 64, "hidden_size": 128, "num_heads": 2, "depth": 1,
            "depth_single_blocks": 1, "mlp_ratio": 4.0, "qkv_bias": True, "guidance_embed": False,
        },
        {"x": (1, 64, 5), "context": TEXT},
    ),
}

# Beside the table: ComfyUI takes `core.` off the names in its files, and others of its tensors have no axes.
PIXEL_DIT = Architecture(
    "PixelDiTT2I",
    {
        "num_groups": 2, "hidden_size": 128, "pixel_hidden_size": 16, "pixel_attn_hidden_size": 128,
        "pixel_num_groups": 2, "patch_depth": 2, "pixel_depth": 1, "patch_size": 16, "txt_embed_dim": 64,
        "txt_max_length": 8,
    },
    {"x": (1, 3, 32, 48), "context": TEXT},
)
# fmt: on
