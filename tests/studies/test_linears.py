"""The study of single linears: its summary on made-up figures, and one run of the command."""

import json

import pytest
import torch

from kernels.benchmark import title
from kernels.benchmark.methods import BF16, FP16_SUMS, FUSED
from kernels.benchmark.shape_results import LinearShape, ShapeResult
from studies import linears as study
from studies.linears import FP8, METHODS, summary

SMOOTHING = "fused + smoothing"


def made_up(milliseconds, name="qkv", m=100, tokens=None):
    """A result whose methods take these times in all three rounds."""
    rounds = {method: [time, time, time] for method, time in milliseconds.items()}
    return ShapeResult(LinearShape(name, 1000, 2000, tokens), m, rounds=rounds)


def test_the_table_of_methods_is_consistent():
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    for method, own in study.COMPARED.items():
        assert method in names and set(own) <= set(names) - {method}
    assert set(study.IN_TABLES) <= set(names)


def test_summary_is_of_the_shapes_at_the_runs_m():
    results = [
        made_up({BF16: 8.0, FUSED: 2.0, SMOOTHING: 2.0}, name="qkv"),
        made_up({BF16: 2.0, FUSED: 2.0, SMOOTHING: 2.42}, name="ffn up"),
        made_up({BF16: 100.0, FUSED: 1.0, SMOOTHING: 9.0}, name="llm", tokens=512),
    ]
    columns, rows = summary(results)
    by_name = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert by_name[f"{FUSED} vs {BF16}"]["geometric mean"] == "2.000 x"
    assert by_name[f"{FUSED} vs {BF16}"]["worst"] == "1.000 x"
    assert by_name[f"{FUSED} vs {BF16}"]["at"] == "ffn up, M = 100"
    assert by_name["cost of smoothing"]["geometric mean"] == "+10.0 %"
    assert by_name["cost of smoothing"]["worst"] == "+21.0 %"
    assert set(by_name) == {f"{FUSED} vs {BF16}", "cost of smoothing"}
    assert summary(results[2:])[1] == []


def test_quantization_bandwidth_counts_all_bytes():
    result = study.QuantizationResult(1000, 500, 2, {study.QUANTIZE: [1.0], study.COPY: [2.0]})
    assert result.gigabytes_per_second(study.QUANTIZE) == pytest.approx(1000 * (500 * 3 + 4) / 1e6)
    assert result.gigabytes_per_second(study.COPY) == pytest.approx(1000 * 500 * 4 / 2 / 1e6)


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
    assert "CPU" in printed and FP16_SUMS in left_out and FP8 in left_out
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
