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
OLD_WORKFLOWS = sorted((TESTS / "data" / "workflows").glob("v*/*.json"))

MODEL_FOLDERS = {
    "UNETLoader": "diffusion_models",
    "LoadINT8DiT": "diffusion_models",
    "CLIPLoader": "text_encoders",
    "VAELoader": "vae",
    "LoraLoaderModelOnly": "loras",
}
NOTES = {"MarkdownNote", "Note"}  # what the frontend draws and the server does not know
_WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}


def read(path: Path) -> dict:
    """A workflow file."""
    return json.loads(path.read_text(encoding="utf-8"))


def model_files(workflow: dict) -> set[tuple[str, str]]:
    """(folder, file name) of the models that a workflow's loaders name first."""
    return {
        (MODEL_FOLDERS[node["type"]], node["widgets_values"][0])
        for node in workflow["nodes"]
        if node["type"] in MODEL_FOLDERS
    }


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
    nodes = {node["id"]: node for node in workflow["nodes"] if node["type"] not in NOTES}
    schemas = {node["type"]: server.object_info(node["type"]) for node in nodes.values()}
    links = {link[0]: link for link in workflow["links"]}
    prompt = Prompt()
    for number, node in nodes.items():
        kind = node["type"]
        if not schemas[kind]:
            raise ValueError(f"there is no node {kind}")
        declared = {**schemas[kind]["input"].get("required", {}), **schemas[kind]["input"].get("optional", {})}
        inputs = _widget_values(kind, declared, node.get("widgets_values") or [], complete)
        for slot in node.get("inputs") or []:
            if slot["name"] not in inputs and slot["name"].partition(".")[0] not in declared:
                raise ValueError(f"{kind} has no input {slot['name']}")
            if slot["link"] is None:
                continue
            _, origin, place, _, _, type_ = links[slot["link"]]
            if schemas[nodes[origin]["type"]]["output"][place : place + 1] != [type_]:
                raise ValueError(f"output {place} of {nodes[origin]['type']} is no {type_}")
            inputs[slot["name"]] = [str(origin), place]
        prompt[str(number)] = {"class_type": kind, "inputs": inputs}
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
