"""Workflows as the frontend saves them: where they are, their nodes, and the files that they name.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .server import PROJECT, TESTS, ComfyServer

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
