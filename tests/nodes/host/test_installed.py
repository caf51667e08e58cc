"""Loading the pack beside a comfy-kitchen that lacks what it needs, or without Triton: a line says what to install.

What is wrong with Triton is a toast too, in the browsers that run a node where there is a card for it.
"""

import ast
import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management
import comfy.ops
import pytest

from int8_dit.nodes import extension
from int8_dit.nodes.comfyui import assumptions
from int8_dit.nodes.host import installed, notices
from int8_dit.nodes.load_int8_dit import LoadINT8DiT


@pytest.fixture
def said_at_load(pack, caplog):
    """Load the pack; what the log says."""

    def load():
        assert asyncio.run(pack.comfy_entrypoint()) is not None
        return [record.getMessage() for record in caplog.records]

    return load


def test_the_installed_will_do(said_at_load):
    assert not said_at_load()


def test_a_missing_triton_is_said_in_one_line(pack, said_at_load, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(f"{pack.__name__}.nodes.host.notices._from_load", [])  # where there is a card, it is kept
    (line,) = said_at_load()
    assert "bf16" in line and "\n" not in line
    assert re.search(r"in the folder \S+ run `\S+ -m (uv )?pip install \"triton(-windows)?==\d+\.\d+\.\*\"`", line)


DETAIL = "Triton 3.8 is installed, but PyTorch 2.13 is built for Triton 3.7: torch.compile may fail; run `a command`"


@pytest.fixture
def loaded(pack, monkeypatch):
    """Load the pack on a machine with a card or without, where this is wrong with Triton; its module of notices."""
    monkeypatch.setattr(notices, "_from_load", [])

    def load(card=True, summary="Triton does not go with PyTorch", detail=DETAIL):
        problem = None if detail is None else SimpleNamespace(summary=summary, detail=detail)
        monkeypatch.setattr(installed, "takes_kernels", lambda device: card)
        monkeypatch.setattr(installed, "triton_problem", lambda: problem)
        assert asyncio.run(pack.comfy_entrypoint()) is not None
        return notices

    return load


@pytest.fixture
def toasts(monkeypatch):
    """What a browser is shown while a node of its prompt runs."""
    shown = []
    server = SimpleNamespace(client_id="a browser", send_sync=lambda name, event, to: shown.append((to, name, event)))
    monkeypatch.setattr(notices, "prompt_server", lambda: server)
    monkeypatch.setattr(notices, "get_executing_context", lambda: SimpleNamespace(prompt_id="a prompt", node_id="7"))
    notices._said_in.cache_clear()
    yield shown
    notices._said_in.cache_clear()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_triton_of_another_pytorch_is_one_line_at_load_and_a_toast_of_each_run(loaded, toasts, caplog):
    """The browser shows a reason once a session."""
    loaded()
    (line,) = messages(caplog)
    assert line == f"INT8 DiT: Triton does not go with PyTorch: {DETAIL}." and not toasts
    LoadINT8DiT.execute("demo_letters_q4_0.gguf", "bf16")  # which the pack brings
    (toast,) = toasts
    assert toast == (
        "a browser",
        "int8_dit.warning",
        {"reason": "triton", "summary": "Triton does not go with PyTorch", "detail": f"{DETAIL}.", "node": "7"},
    )
    assert messages(caplog) == [line]


def test_a_fallback_for_want_of_triton_is_the_same_toast(loaded, toasts):
    notices = loaded(summary="INT8 layers compute in bf16", detail="Triton is not installed; run `a command`")
    notices.warn("bf16", "INT8 DiT runs in bf16", "Triton is not installed; run `a command`.")
    notices.warn("bf16", "INT8 DiT runs in bf16", "the model runs on cpu.")
    assert [event["reason"] for *_, event in toasts] == ["triton", "bf16"]


@pytest.mark.parametrize("card, detail", ((True, None), (False, DETAIL)))
def test_nothing_is_said_of_a_triton_that_goes_with_pytorch_or_without_a_card(loaded, toasts, caplog, card, detail):
    loaded(card, detail=detail)
    LoadINT8DiT.execute("demo_letters_q4_0.gguf", "bf16")  # which the pack brings
    assert not messages(caplog) and not [event for *_, event in toasts if event["reason"] == "triton"]


def test_a_triton_that_raises_when_it_is_imported_stops_nothing(said_at_load, monkeypatch, tmp_path):
    """Whatever it raises: the pack is loaded, and says it where there is a card."""
    monkeypatch.setattr(notices, "_from_load", [])
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise AttributeError('of another PyTorch')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(installed, "takes_kernels", lambda device: True)
    (line,) = [text for text in said_at_load() if "cannot be imported" in text]
    assert "Triton cannot be imported (of another PyTorch); in the folder " in line and "--force-reinstall" in line


def test_unknown_insides_are_said_in_one_line(pack, said_at_load, monkeypatch):
    unknown = [("how Triton launches", "it launches itself"), ("a table", "nothing is looked up")]
    monkeypatch.setattr(f"{pack.__name__}.nodes.host.installed.missing", lambda: unknown)
    (line,) = said_at_load()
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


def test_what_the_pack_can_do_without_is_said_in_one_line(said_at_load, monkeypatch):
    """A module that is gone: the log says what, and what happens instead."""
    monkeypatch.setitem(sys.modules, "latent_preview", None)
    (line,) = said_at_load()
    assert "latent_preview.get_previewer (calibration shows no previews)" in line and "\n" not in line


def test_an_argument_that_is_gone_is_named(pack, monkeypatch):
    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lambda layer, input=None, dtype=None, device=None: None)
    with pytest.raises(ImportError, match=r"lacks .*want_requant of comfy\.ops\.cast_bias_weight"):
        asyncio.run(pack.comfy_entrypoint())


def test_every_name_of_comfyui_is_in_the_table():
    """By hand in the table; by the code here, so that none is forgotten."""
    known = {name.partition("(")[0].replace(":", ".") for name in assumptions.ASSUMPTIONS}
    theirs = ("comfy.", "comfy_kitchen", "comfy_execution", "comfy_api.torch", "folder_paths", "latent_preview")
    used = set()
    for path in Path(assumptions.__file__).parents[1].rglob("*.py"):
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


def test_what_the_first_image_would_wait_for_is_begun_while_comfyui_starts(pack, monkeypatch):
    begun = []
    monkeypatch.setattr(extension, "prepare_compiling", begun.append)
    asyncio.run(asyncio.run(pack.comfy_entrypoint()).on_load())
    assert begun == [comfy.model_management.get_torch_device()]
