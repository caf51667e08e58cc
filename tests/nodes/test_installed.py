"""Loading the pack beside a comfy-kitchen that lacks what it needs, or without Triton: a line says what to install."""

import asyncio
import sys

import pytest


def test_the_installed_will_do(pack, caplog):
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    assert not caplog.records


def test_a_missing_triton_is_said_in_one_line(pack, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "bf16" in line and "pip install triton" in line and "\n" not in line


def test_unknown_insides_are_said_in_one_line(pack, caplog, monkeypatch):
    unknown = [("how Triton launches", "it launches itself"), ("a table", "nothing is looked up")]
    monkeypatch.setattr(f"{pack.__name__}.nodes.host.installed.missing", lambda: unknown)
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "how Triton launches: it launches itself; a table: nothing is looked up" in line


@pytest.mark.parametrize(
    ("owner", "name"),
    (("comfy_kitchen.tensor", "BaseLayoutParams"), ("comfy.quant_ops.QuantizedTensor", "requantize_from_float")),
)
def test_an_older_one_is_named_with_the_version_that_is_needed(pack, monkeypatch, owner, name):
    import comfy.quant_ops  # noqa: F401

    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(
        ImportError, match=rf"needs comfy-kitchen 0\.2\.26 or newer, and .* is installed .*{name}"
    ) as caught:
        asyncio.run(pack.comfy_entrypoint())
    assert "\n" not in str(caught.value) and 'pip install "comfy-kitchen>=0.2.26"' in str(caught.value)
