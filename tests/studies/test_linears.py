"""The study of single linears: one run of the command, on a CPU."""

import json

import torch

from kernels.benchmark import title
from kernels.benchmark.methods import BF16, FP16_SUMS, FUSED
from kernels.benchmark.shape_results import LinearShape
from studies import linears as study


def test_command_writes_what_it_prints(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(study, "BLOCK_SHAPES", (LinearShape("qkv", 96, 64), LinearShape("ffn down", 32, 256)))
    monkeypatch.setattr(study, "LLM_SHAPE", LinearShape("llm projection", 32, 512, tokens=3))
    monkeypatch.setattr(study, "FEW_TOKENS", 2)
    monkeypatch.setattr(study, "_LARGE_COPY_BYTES_ON_CPU", 1 << 10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = tmp_path / "figures.json", tmp_path / "tables.md"
    study.main(["--tokens", "4", "5", "--rounds", "2", "--json", str(files[0]), "--markdown", str(files[1])])

    printed = capsys.readouterr().out
    assert files[1].read_text() == printed
    (left_out,) = (line for line in printed.splitlines() if line.startswith("Left out (no GPU): "))
    assert "CPU" in printed and FP16_SUMS in left_out and study.FP8 in left_out
    content = json.loads(files[0].read_text())
    assert title(content["environment"]) in printed
    assert [shape["m"] for shape in content["shapes"]] == [4, 4, 5, 5, 3, 2, 2]
    for shape in content["shapes"]:
        assert BF16 in shape["rounds"] and FUSED not in shape["rounds"]
        assert all(len(times) == 2 and min(times) > 0 for times in shape["rounds"].values())
        assert max(shape["relative_errors"].values()) < 0.15
    assert [(entry["m"], entry["k"]) for entry in content["quantizations"]] == [
        (4, 64), (4, 256), (5, 64), (5, 256), (3, 512), (2, 64), (2, 256)
    ]  # fmt: skip
