"""Loading the pack beside a comfy-kitchen that lacks what it needs, or without Triton: a line says what to install."""

import ast
import asyncio
import re
import sys
from pathlib import Path

import pytest


def test_the_installed_will_do(pack, caplog):
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    assert not caplog.records


def test_a_missing_triton_is_said_in_one_line(pack, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "bf16" in line and "\n" not in line
    assert re.search(r"`pip install \"triton(-windows)?==\d+\.\d+\.\*\"`", line)


def test_unknown_insides_are_said_in_one_line(pack, caplog, monkeypatch):
    unknown = [("how Triton launches", "it launches itself"), ("a table", "nothing is looked up")]
    monkeypatch.setattr(f"{pack.__name__}.nodes.host.installed.missing", lambda: unknown)
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "how Triton launches (it launches itself); a table (nothing is looked up)" in line


@pytest.mark.parametrize(
    ("owner", "name"),
    (("comfy_kitchen.tensor", "BaseLayoutParams"), ("comfy.quant_ops.QuantizedTensor", "requantize_from_float")),
)
def test_an_older_one_is_named_with_the_version_that_is_needed(pack, monkeypatch, owner, name):
    import comfy.quant_ops  # noqa: F401

    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(
        ImportError, match=rf"comfy-kitchen 0\.2\.\d+\): it lacks .*{name}.* must be 0\.2\.26 or newer"
    ) as caught:
        asyncio.run(pack.comfy_entrypoint())
    assert "\n" not in str(caught.value) and 'pip install -U "comfy-kitchen>=0.2.26"' in str(caught.value)


def test_what_the_pack_can_do_without_is_said_in_one_line(pack, caplog, monkeypatch):
    """A class that was renamed, and a module that is gone: the log says what, and what happens instead."""
    import comfy.ldm.lumina.model

    monkeypatch.delattr(comfy.ldm.lumina.model, "JointTransformerBlock")
    monkeypatch.setitem(sys.modules, "latent_preview", None)
    assert asyncio.run(pack.comfy_entrypoint()) is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "latent_preview.get_previewer (calibration shows no previews); " in line and "\n" not in line
    assert "comfy.ldm.lumina.model.JointTransformerBlock (its linears run one by one)" in line


def test_an_argument_that_is_gone_is_named(pack, monkeypatch):
    import comfy.ops

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lambda layer, input=None, dtype=None, device=None: None)
    with pytest.raises(ImportError, match=r"lacks .*want_requant of comfy\.ops\.cast_bias_weight"):
        asyncio.run(pack.comfy_entrypoint())


def test_every_name_that_the_door_imports_is_in_the_table(pack):
    """By hand in the table, so that each has its line; by the code here, so that none is forgotten."""

    from int8_dit.nodes.comfyui import assumptions

    known = {assumption.name.replace(":", ".") for assumption in assumptions.ASSUMPTIONS}
    theirs = ("comfy.", "comfy_kitchen", "comfy_execution", "comfy_api", "folder_paths", "latent_preview")
    used = set()
    for path in Path(assumptions.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(theirs):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", name := ast.unparse(node)):
                used |= {name} if name.startswith(theirs) else set()
    names = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    assert len(names) > 40
    forgotten = {name for name in names if not any(f"{other}.".startswith(f"{name}.") for other in known)}
    assert not sorted(forgotten)
