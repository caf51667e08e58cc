"""The words of the pack's nodes: what the server says of them, in the form of locales/*/nodeDefs.json.

The frontend looks a node's texts up there by the node's id, an input's by its name with dots made underscores, an
output's by its place. Two more of its habits decide what there is to translate. An input inside of a DynamicCombo has a
name, which all choices share that have an input of that id, but keeps the tooltip of its schema. The slots of an
Autogrow have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from .server import PROJECT

LOCALES = PROJECT / "locales"
MODULE = "custom_nodes.int8_dit"


def own_nodes(object_info: Mapping[str, dict]) -> dict[str, dict]:
    """This pack's part of the server's /object_info."""
    return {name: info for name, info in object_info.items() if info["python_module"] == MODULE}


def english_texts(object_info: Mapping[str, dict]) -> dict[str, dict]:
    """The texts of this pack's nodes, from the server's /object_info."""
    return {name: _node_texts(info) for name, info in own_nodes(object_info).items()}


def read_texts(language: str) -> dict[str, dict]:
    """The texts of a language, as they lie in the pack."""
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def flat(texts: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    """Each text with its key, such as SaveINT8DiT.inputs.fold.tooltip."""
    for key, value in texts.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)


def _node_texts(info: Mapping) -> dict:
    texts = {"display_name": info["display_name"], "description": info["description"], "inputs": {}, "outputs": {}}
    for name, options in _inputs(info["input"]):
        texts["inputs"][name] = {"name": options.get("display_name") or name} | _tooltip(options.get("tooltip"))
        for choice in options.get("options", ()):
            for inner, _ in _inputs(choice["inputs"]) if isinstance(choice, dict) else ():
                texts["inputs"][f"{name}_{inner}"] = {"name": inner}
    outputs = zip(info["output"], info["output_name"], info["output_tooltips"] or [], strict=False)
    for place, (kind, name, tooltip) in enumerate(outputs):
        texts["outputs"][str(place)] = ({"name": name} if name != kind else {}) | _tooltip(tooltip)
    return {key: value for key, value in texts.items() if value}


def _inputs(groups: Mapping[str, Mapping]) -> Iterator[tuple[str, dict]]:
    for group in ("required", "optional"):
        for name, (_kind, *options) in groups.get(group, {}).items():
            yield name, options[0] if options else {}


def _tooltip(text: str | None) -> dict[str, str]:
    return {"tooltip": text} if text else {}
