"""Workflows as the frontend saves them: where they are, the files they name, and the prompts they become.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import PROJECT, TESTS, ComfyServer
from .workflows import Prompt

TEMPLATES = sorted((PROJECT / "example_workflows").glob("*.json"))
BLUEPRINTS = sorted((PROJECT / "subgraphs").glob("*.json"))
OLD_WORKFLOWS = sorted((TESTS / "data" / "workflows").glob("v*/*.json"))

MODEL_FOLDERS = {
    "UNETLoader": "diffusion_models",
    "LoadINT8DiT": "diffusion_models",
    "CLIPLoader": "text_encoders",
    "VAELoader": "vae",
    "LoraLoaderModelOnly": "loras",
}
DEMO = "demo_letters_q4_0.gguf"  # comes with the pack
NOTES = {"MarkdownNote", "Note"}  # what the frontend draws and the server does not know
_LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
_FROM_OUTSIDE = -10  # where a link of a subgraph begins that comes in
_WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}


def read(path: Path) -> dict:
    """A workflow file."""
    return json.loads(path.read_text(encoding="utf-8"))


def subgraphs(workflow: dict) -> dict[str, dict]:
    """The definitions of a workflow's subgraphs by the type of the nodes that stand for them."""
    return {subgraph["id"]: subgraph for subgraph in workflow.get("definitions", {}).get("subgraphs", [])}


def all_nodes(workflow: dict) -> list[dict]:
    """The nodes of a workflow: those inside of its subgraphs, and not those that stand for a subgraph."""
    inside = subgraphs(workflow)
    nodes = [node for graph in (workflow, *inside.values()) for node in graph["nodes"]]
    return [node for node in nodes if node["type"] not in inside]


def model_files(workflow: dict) -> set[tuple[str, str]]:
    """(folder, file name) of the models that a workflow's loaders name first, but for the one of this pack."""
    named = {(node["type"], node["widgets_values"][0]) for node in all_nodes(workflow) if node["type"] in MODEL_FOLDERS}
    return {(MODEL_FOLDERS[kind], name) for kind, name in named if name != DEMO}


class _Scope:
    """A graph in a workflow: the workflow itself, or a subgraph where one of its nodes stands for it."""

    def __init__(
        self,
        graph: dict,
        definitions: dict[str, dict],
        schemas: dict[str, dict],
        node: dict | None = None,
        above: _Scope | None = None,
    ):
        self._definition, self._schemas, self._node, self._above = graph, schemas, node, above
        self.prefix = "" if node is None or above is None else f"{above.prefix}{node['id']}:"
        self.nodes = {item["id"]: item for item in graph["nodes"]}
        links = graph["links"] if node else [dict(zip(_LINK, link, strict=True)) for link in graph["links"]]
        self._links = {link["id"]: link for link in links}
        self.inner = {
            number: _Scope(definitions[item["type"]], definitions, schemas, item, self)
            for number, item in self.nodes.items()
            if item["type"] in definitions
        }

    def all(self) -> Iterator[_Scope]:
        yield self
        for scope in self.inner.values():
            yield from scope.all()

    def value(self, link: int) -> object:
        """What an input has by a link, as a prompt says it: a node's output, or what a widget of the node that stands
        for this subgraph holds; None of neither. Raises ValueError where the output is not of the link's type."""
        origin, slot, type_ = (self._links[link][key] for key in ("origin_id", "origin_slot", "type"))
        if origin == _FROM_OUTSIDE:
            return self._given(self._definition["inputs"][slot]["name"])
        if origin in self.inner:
            scope = self.inner[origin]
            (inside,) = scope._definition["outputs"][slot]["linkIds"]
            return scope.value(inside)
        kind = self.nodes[origin]["type"]
        if self._schemas[kind]["output"][slot : slot + 1] != [type_]:
            raise ValueError(f"output {slot} of {kind} is no {type_}")
        return [f"{self.prefix}{origin}", slot]

    def _given(self, name: str) -> object:
        assert self._node and self._above
        widgets = [item["name"] for item in self._node["inputs"] if "widget" in item]
        (link,) = (item["link"] for item in self._node["inputs"] if item["name"] == name)
        if link is not None:
            return self._above.value(link)
        return self._node["widgets_values"][widgets.index(name)] if name in widgets else None


@contextmanager
def stand_ins(server: ComfyServer, workflows: Iterable[dict]) -> Iterator[None]:
    """Empty files for the models that the workflows name and the server does not have."""
    made = []
    for folder, name in set().union(*map(model_files, workflows)):
        path = server.base / "models" / folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            made.append(path)
    try:
        yield
    finally:
        for path in made:
            path.unlink()


def prompt_of(workflow: dict, server: ComfyServer, complete: bool = True) -> Prompt:
    """The prompt that a workflow becomes with the server's nodes.

    One that is not `complete` is older than some widgets, which stand at the end of their nodes.

    Raises ValueError where the workflow has a node, an input, an output or a widget's value that they do not have.
    """
    schemas = {node["type"]: server.object_info(node["type"]) for node in all_nodes(workflow)}
    prompt = Prompt()
    for scope in _Scope(workflow, subgraphs(workflow), schemas).all():
        for number, node in scope.nodes.items():
            kind = node["type"]
            if number in scope.inner or kind in NOTES:
                continue
            if not schemas[kind]:
                raise ValueError(f"there is no node {kind}")
            declared = {**schemas[kind]["input"].get("required", {}), **schemas[kind]["input"].get("optional", {})}
            inputs = _widget_values(kind, declared, node.get("widgets_values") or [], complete)
            for slot in node.get("inputs") or []:
                if slot["name"] not in inputs and slot["name"].partition(".")[0] not in declared:
                    raise ValueError(f"{kind} has no input {slot['name']}")
                value = None if slot["link"] is None else scope.value(slot["link"])
                if value is not None:
                    inputs[slot["name"]] = value
            prompt[f"{scope.prefix}{number}"] = {"class_type": kind, "inputs": inputs}
    return prompt


def _widget_values(kind: str, declared: dict, values: list, complete: bool) -> dict[str, object]:
    """A node's values by the names of its widgets, in whose order they are saved."""
    waiting, named = list(values), {}

    def take(name: str, spec: list) -> None:
        type_, options = spec[0], spec[1] if len(spec) > 1 else {}
        dynamic = type_ == "COMFY_DYNAMICCOMBO_V3"
        if not (dynamic or isinstance(type_, list) or type_ in _WIDGETS):
            return  # a socket
        if not waiting and not complete:
            return  # the frontend gives it its default
        if not waiting:
            raise ValueError(f"{kind} has no value for {name}")
        named[name] = waiting.pop(0)
        if options.get("control_after_generate"):
            waiting.pop(0)
        if dynamic:
            (chosen,) = (option for option in options["options"] if option["key"] == named[name])
            for group in chosen["inputs"].values():
                for inner, inner_spec in group.items():
                    take(f"{name}.{inner}", inner_spec)

    for name, spec in declared.items():
        take(name, spec)
    if any(value is not None for value in waiting):
        raise ValueError(f"{kind} has no widget for {waiting}")
    return named
