"""Loading the pack beside a comfy-kitchen that lacks what it needs: one line says what to install."""

import asyncio

import pytest


def test_the_installed_one_will_do(pack):
    assert asyncio.run(pack.comfy_entrypoint()) is not None


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
