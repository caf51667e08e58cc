"""No access outside the operands: odd shapes under CUDA's own memory checker, where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or CHECKER is None, reason="needs a GPU and compute-sanitizer"
)

PROGRAM = """
from dataclasses import replace

import torch
from kernels import ChannelTransform, int8_linear, quantize_weight
from kernels.quantization.weight_rounding import quantize_to_codes, round_columns
from kernels.linear.gemm import launch_config
from kernels.linear.gemm_kernel import Operands
from kernels.linear.tiles import GemmConfig

for m, n, k, group in ((77, 131, 1040, 16), (3, 1001, 333, None), (130, 257, 2064, None)):
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda")
    smooth, bias = torch.rand(k, device="cuda") + 0.5, torch.randn(n, device="cuda")
    transform = ChannelTransform(smooth, group)
    weight, scale = quantize_weight(w, transform)
    round_columns(torch.randn(n, 128, device="cuda"), scale, torch.eye(128, device="cuda"))
    if k % 16 == 0:
        quantize_to_codes(w, 16)
    int8_linear(x, weight, scale, bias, transform)
    int8_linear(x, weight, scale, bias, transform, activation_bits=16)
    out = torch.empty(m, n, dtype=torch.int32, device="cuda")
    q, q16 = (torch.ones(m, columns, dtype=torch.int8, device="cuda") for columns in (k, 2 * k))
    configs = [GemmConfig(128, 128, 64, 8, 4, 3, split_k=3), GemmConfig(64, 64, 128, 8, 4, 3)]
    configs.append(GemmConfig(256, 128, 64, 8, 8, 4, "ring", 3))
    if torch.cuda.get_device_capability() == (9, 0):
        configs.append(GemmConfig(128, 128, 128, 8, 4, 3, "descriptors", 2))
    for config in configs:
        launch_config(config, Operands(q, weight, None, None, None, out))
        launch_config(replace(config, split_k=1), Operands(q16, weight, None, None, None, out))
"""

FUSED_OPS = """
import torch
from kernels import ChannelTransform
from kernels.linear.int8_linear import quantize_activations
from support.fused_op_cases import Form, calls

for batch, tokens, channels, heads, group in ((3, 7, 1040, 5, 16), (1, 77, 333, 3, 1), (2, 1, 4864, 19, 256)):
    for bits in (8, 16):
        form = Form("", channels, batch, tokens, (heads, 1), group, True, bits)
        for case, _, arguments in calls("cuda", form):
            case.op(*arguments)
        transform = ChannelTransform(torch.rand(channels, device="cuda") + 0.5, group if group > 1 else None)
        quantize_activations(torch.randn(tokens, channels, device="cuda"), transform, bits)
"""


BLOCKS = """
import torch
from kernels import GGUF_FORMATS, LowRank, dequantize_gguf, expand_gguf, gguf_channel_scales

for name, form in GGUF_FORMATS.items():
    for n, row_blocks in ((1, 1), (37, 3), (5, 129)):
        blocks = torch.randint(0, 60, (n, row_blocks * form.bytes), dtype=torch.uint8, device="cuda")
        expand_gguf(blocks, name, gguf_channel_scales(blocks, name))
        factors = torch.randn(n, 3, device="cuda"), torch.randn(3, row_blocks * form.weights, device="cuda")
        low_rank = LowRank(*factors)
        expand_gguf(blocks, name, gguf_channel_scales(blocks, name) + low_rank.channel_scales(), low_rank)
        dequantize_gguf(blocks, name)
"""


CODES = """
import torch
from kernels.weights.weight_reference import GroupedCodes
from kernels.weights.weight_ops import expand_codes
from kernels.weights.weight_reference import LowRank

for bits, group in ((4, 4), (4, 16), (6, 16), (6, 32)):
    for n, k in ((1, 32), (37, 96), (5, 4128)):
        codes = torch.randint(-128, 128, (n, k * bits // 8), dtype=torch.int8, device="cuda")
        scale = torch.rand(n, k // group, device="cuda").to(torch.float8_e4m3fn)
        for codebook in (None, torch.randn(16, device="cuda")) if bits == 4 else (None,):
            weight = GroupedCodes(codes, scale, codebook, group)
            expand_codes(weight)
            low_rank = LowRank(torch.randn(n, 3, device="cuda"), torch.randn(3, k, device="cuda"))
            ones = torch.ones(n, device="cuda")
            expand_codes(weight, ones, ones + low_rank.channel_scales(), low_rank)
"""


ATTENTION = """
import torch
from kernels.attention.int8_attention import float_attention, int8_attention

for batch, heads, kv, tq, tk, width in ((2, 2, 2, 33, 77, 64), (1, 4, 2, 5, 129, 40), (1, 1, 1, 129, 31, 256)):
    q = torch.randn(batch, tq, heads, width, device="cuda").bfloat16().transpose(1, 2)
    k, v = (torch.randn(batch, tk, kv, width, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
    row = torch.rand(batch, 1, 1, tk, device="cuda") > 0.3
    for mask in (None, row, torch.randn(1, heads, tq, tk, device="cuda")):
        int8_attention(q, k, v, mask)
        if width > 128:
            float_attention(q, k, v, mask)
"""


@pytest.mark.parametrize(
    "program",
    (PROGRAM, FUSED_OPS, BLOCKS, CODES, ATTENTION),
    ids=("linear", "fused ops", "blocks", "codes", "attention"),
)
def test_odd_shapes_under_the_memory_checker(program):
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
        "INT8_DIT_TUNING": "off",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    program += "torch.cuda.synchronize(); print('finished')"
    command = [CHECKER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", program]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    output = finished.stdout + finished.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this machine")
    assert finished.returncode == 0 and "finished" in output and "ERROR SUMMARY: 0 errors" in output, output[-3000:]
