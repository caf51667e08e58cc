"""What is said of a machine, and what a choice is bound to with it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.attention import attention_kernel, attention_launch
from kernels.card import machine
from kernels.card.machine import MEASURED_SOURCES, kernel_source_hash
from kernels.linear.gemm import launch_config
from kernels.linear.gemm_kernel import int8_gemm_kernel

CARD = torch.device("cuda", 0)
PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@builder)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Pretend that there is a card whose driver says this of itself; None for nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3090")

    def pretend(text):
        file = tmp_path / "version"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(machine, "_DRIVER", file)
        return machine.describe_machine(CARD)

    return pretend


@pytest.mark.parametrize("text, release", ((PROPRIETARY, "535.183.01"), (OPEN, "580.159.04")))
def test_the_release_of_the_driver_is_what_its_module_says(card, text, release):
    found = card(text)
    assert (found["card"], found["driver"]) == ("NVIDIA GeForce RTX 3090", release)
    assert machine.title(found).startswith(f"NVIDIA GeForce RTX 3090, driver {release}, torch {torch.__version__}")


@pytest.mark.parametrize("text", (None, "", "NVRM version: of another kind\n"))
def test_a_driver_that_says_nothing_is_left_out(card, text):
    assert "driver" not in card(text)


def test_a_triton_that_cannot_be_imported_is_left_out(card, monkeypatch, tmp_path):
    broken = tmp_path / "packages" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise AttributeError('of another PyTorch')")
    monkeypatch.syspath_prepend(broken.parent)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert "triton" not in card(OPEN)


MEMORIES = {  # kHz and bits of each card's, and bytes a second
    "RTX 3090": ([(9_751_000, 384)], 936.1e9),
    "H200": ([(3_201_000, 6144)], 4916.7e9),
    "both": ([(3_201_000, 6144), (9_751_000, 384)], 936.1e9),
    "unknown": ([()], 936e9),
    "none": ([], 936e9),
}


@pytest.mark.parametrize("cards, rate", MEMORIES.values(), ids=MEMORIES)
def test_the_slowest_memory_of_the_machine(monkeypatch, cards, rate):
    names = "memory_clock_rate", "memory_bus_width"
    told = [SimpleNamespace(**dict(zip(names, card, strict=False))) for card in cards]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(told))
    monkeypatch.setattr(torch.cuda, "get_device_properties", told.__getitem__)
    assert machine.memory_rate.__wrapped__() == pytest.approx(rate, rel=1e-4)


def test_what_was_measured_is_bound_to_kernels_and_their_launches():
    linears = {Path(function.__code__.co_filename) for function in (int8_gemm_kernel.fn, launch_config)}
    linears.add(Path(launch_config.__code__.co_filename).with_name("ring_gemm_kernel.py"))
    assert linears == set(MEASURED_SOURCES["GEMM"]) < set(MEASURED_SOURCES["linear"])
    assert {Path(each.__file__) for each in (attention_launch, attention_kernel)} <= set(MEASURED_SOURCES["attention"])


@pytest.mark.parametrize("what", MEASURED_SOURCES)
def test_a_source_hash_follows_each_file_of_what_was_measured(monkeypatch, tmp_path, what):
    copies = tuple(tmp_path / source.name for source in MEASURED_SOURCES[what])
    monkeypatch.setitem(MEASURED_SOURCES, what, copies)
    for copy in copies:
        copy.write_text("a = 1")
    hashes = {kernel_source_hash.__wrapped__(what)}
    for copy in copies:
        copy.write_text("a = 2")
        hashes.add(kernel_source_hash.__wrapped__(what))
    assert len(hashes) == len(copies) + 1
    copies[0].unlink()
    with pytest.raises(FileNotFoundError):
        kernel_source_hash.__wrapped__(what)
