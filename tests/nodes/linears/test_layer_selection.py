"""Which linears become INT8, on ComfyUI's own model classes: those of attention and MLP in the blocks, nothing else."""

import re
from itertools import product

import comfy.ops
import pytest
import torch
from comfy.quant_ops import QuantizedTensor

from int8_dit.nodes.comfyui.quantized import NATIVE_LAYOUT
from int8_dit.nodes.linears.layer_selection import is_quantizable, quantizable_in
from support.architectures import ARCHITECTURES

FLUX = "double_blocks.#.{img,txt}_{attn.qkv,attn.proj,mlp.0,mlp.2} single_blocks.#.linear{1,2}"
LUMINA = (
    "{noise_refiner,context_refiner,layers}.#.attention.{qkv,out} "
    "{noise_refiner,context_refiner,layers}.#.feed_forward.w{1,2,3}"
)
# The layers of an architecture that become INT8. {a,b} is a or b, # a block.
LAYERS = {
    "Ideogram 4": "layers.#.attention.{qkv,o} layers.#.feed_forward.w{1,2,3}",
    "SD3": (
        "joint_blocks.#.{context,x}_block.{attn.qkv,attn.proj,mlp.fc1,mlp.fc2} joint_blocks.#.x_block.attn2.{qkv,proj}"
    ),
    "Flux": FLUX,
    "Flux 2": FLUX,
    "Chroma": FLUX,
    "Hunyuan Video": (FLUX + " txt_in.individual_token_refiner.blocks.#.{self_attn.qkv,self_attn.proj,mlp.0,mlp.2}"),
    "AuraFlow": (
        "double_layers.#.attn.w{1,2}{q,k,v,o} double_layers.#.mlp{C,X}.c_{fc1,fc2,proj} "
        "single_layers.#.attn.w1{q,k,v,o} single_layers.#.mlp.c_{fc1,fc2,proj}"
    ),
    "Lumina 2": LUMINA,
    "Z-Image": LUMINA,
    "Qwen-Image": (
        "transformer_blocks.#.attn.{to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out} "
        "transformer_blocks.#.{img,txt}_mlp.net.{0.proj,2}"
    ),
    "Wan i2v": "blocks.#.{self,cross}_attn.{q,k,v,o} blocks.#.cross_attn.{k,v}_img blocks.#.ffn.{0,2}",
    "Cosmos Predict 2": "blocks.#.{self,cross}_attn.{q,k,v,output}_proj blocks.#.mlp.layer{1,2}",
    "LTX-Video": "transformer_blocks.#.attn{1,2}.{to_q,to_k,to_v,to_out.0} transformer_blocks.#.ff.net.{0.proj,2}",
    "OmniGen 2": (
        "{noise_refiner,ref_image_refiner,context_refiner,layers}.#.attn.to_{q,k,v,out.0} "
        "{noise_refiner,ref_image_refiner,context_refiner,layers}.#.feed_forward.linear_{1,2,3}"
    ),
    "HiDream": (
        "{double,single}_stream_blocks.#.block.attn1.to_{q,k,v,out} "
        "double_stream_blocks.#.block.attn1.to_{q,k,v,out}_t "
        "{double,single}_stream_blocks.#.block.ff_i.{shared_experts,experts.0,experts.1}.w{1,2,3} "
        "double_stream_blocks.#.block.ff_t.w{1,2,3}"
    ),
    "Krea 2": (
        "{blocks,txtfusion.layerwise_blocks,txtfusion.refiner_blocks}.#."
        "{attn.wq,attn.wk,attn.wv,attn.gate,attn.wo,mlp.gate,mlp.up,mlp.down}"
    ),
}


def expand(patterns):
    """Every name that the patterns stand for."""
    names = set()
    for pattern in patterns.split():
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        names |= {"".join(choice) for choice in product(*parts)}
    return names


def of_blocks(names):
    return {re.sub(r"\.\d+\.", ".#.", name, count=1) for name in names}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_and_mlp_of_the_blocks(small, name):
    modules = small.stock_of(ARCHITECTURES[name]).model.diffusion_model.named_modules()
    layers = {name: tuple(layer.weight.shape) for name, layer in modules if isinstance(layer, torch.nn.Linear)}
    selected = {name for name, shape in layers.items() if is_quantizable(name, shape)}
    assert of_blocks(selected) == expand(LAYERS[name])
    # In each of the blocks, not only in one.
    assert not of_blocks(layers.keys() - selected) & expand(LAYERS[name])


@pytest.mark.parametrize(
    "name, shape, expected",
    (
        ("blocks.0.mlp", (64, 64), True),
        ("blocks.0.mlp", (63, 4096), False),
        ("blocks.0.mlp", (4096, 63), False),
        ("blocks.0.experts", (8, 4096, 4096), False),
        ("blocks.0.mlp", (4096,), False),
        ("text_in", (8192, 8192), True),
        ("txt_in", (6144, 15360), True),  # of Flux 2
        ("llm_cond_proj", (4608, 53248), True),  # of Ideogram 4
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
def test_names_and_sizes_at_the_edges(name, shape, expected):
    assert is_quantizable(name, shape) is expected


@pytest.mark.parametrize("shape", ((4, 96, 128), (4 * 96, 128)), ids=("an axis of experts", "their rows"))
def test_a_bank_of_experts_is_no_linear(shape):
    operations = comfy.ops.mixed_precision_ops(compute_dtype=torch.float32)
    bank, linear = operations.MoEExperts(4, 128, 96, dtype=torch.float32), operations.Linear(128, 96)
    weight = torch.ones(shape)
    bank.weight = weight if len(shape) == 3 else QuantizedTensor.from_float(weight, NATIVE_LAYOUT)
    linear.weight = torch.nn.Parameter(torch.ones(96, 128))
    assert list(quantizable_in(torch.nn.ModuleDict({"0": torch.nn.ModuleList([bank, linear])}))) == ["0.1"]
