"""The templates and blueprints as files. tests/web/test_templates.py opens them and sends what they ask to a server."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from support.server import PROJECT
from support.workflows_saved import BLUEPRINTS, DEMO, MODEL_FOLDERS, NOTES, TEMPLATES, all_nodes, read

tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer

MOST_BYTES = 500_000
MOST_THUMBNAIL_BYTES = 60_000
MOST_OF_A_NOTE = 1800  # characters, half of which are addresses of models

every_template = pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)


@every_template
def test_one_press_of_run_does_the_whole(path):
    nodes = all_nodes(read(path))
    assert {node["mode"] for node in nodes} == {0}
    (note,) = (node for node in nodes if node["type"] in NOTES)
    assert note["id"] == 1 and note["widgets_values"][0].startswith("## ")
    assert len(note["widgets_values"][0]) < MOST_OF_A_NOTE


@every_template
def test_each_model_says_where_it_comes_from(path):
    """For the frontend, which offers to download it, and in the note for the reader."""
    nodes = all_nodes(read(path))
    (note,) = (node["widgets_values"][0] for node in nodes if node["type"] in NOTES)
    published = _published_models()
    for node in nodes:
        if node["type"] in MODEL_FOLDERS and node["widgets_values"][0] != DEMO:
            (model,) = node["properties"]["models"]
            assert model["name"] == node["widgets_values"][0]
            assert model["directory"] == MODEL_FOLDERS[node["type"]]
            assert model["url"] in published | OF_OTHERS
            assert f"[{model['name']}]({model['url']})" in note


OF_OTHERS = {
    "https://huggingface.co/jayn7/Z-Image-Turbo-GGUF/resolve/main/z_image_turbo-Q4_K_M.gguf",
    "https://huggingface.co/martin-rizzo/Qwen3-4B-INT8-ConvRot-ComfyUI/resolve/main/"
    "qwen3-4b_int8_convrot_fp16emixed.safetensors",
}
"""What no template of ComfyUI names; the pages of both were read on 2026-11-28."""


def _published_models():
    """What ComfyUI's own templates say of models' addresses."""
    package = importlib.util.find_spec("comfyui_workflow_templates_json")
    if package is None:
        pytest.skip("the templates of ComfyUI are not installed")
    files = Path(package.origin).parent.glob("templates/*.json")
    return set(re.findall(r'"url": ?"(https://[^"]+)"', "".join(file.read_text(encoding="utf-8") for file in files)))


@pytest.mark.parametrize("path", (*TEMPLATES, *BLUEPRINTS), ids=lambda path: path.stem)
def test_each_node_names_its_pack(path):
    """By which ComfyUI Manager finds what is missing."""
    pack = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    own = set(re.findall(r'node_id="(\w+)"', "".join(file.read_text() for file in (PROJECT / "nodes").glob("*.py"))))
    for node in all_nodes(read(path)):
        if node["type"] not in NOTES:
            assert node["properties"]["cnr_id"] == (pack if node["type"] in own else "comfy-core"), node["type"]
            assert re.fullmatch(r"\d+\.\d+\.\d+", node["properties"]["ver"])


@pytest.mark.parametrize("name, count", (("Ideogram 4 INT8", 1), ("Ideogram 4 calibrate and quantize", 3)))
def test_ideograms_prompts_are_json_captions(name, count):
    """In the form of ComfyUI's own caption template: plain prose is not what the model was trained on."""
    (path,) = (path for path in TEMPLATES if path.stem == name)
    texts = [node["widgets_values"][0] for node in all_nodes(read(path)) if node["type"] == "CLIPTextEncode"]
    assert len(texts) == len(set(texts)) == count
    for text in texts:
        caption = json.loads(text)
        assert text == json.dumps(caption, separators=(",", ":"), ensure_ascii=False)  # one line, no spaces
        assert list(caption) == ["aspect_ratio", "high_level_description", "compositional_deconstruction"]
        assert caption["aspect_ratio"] == "1:1"
        assert len(caption["high_level_description"].split()) <= 50
        assert list(caption["compositional_deconstruction"]) == ["background", "elements"]
        for element in caption["compositional_deconstruction"]["elements"]:
            top, left, bottom, right = element["bbox"]
            assert 0 <= top < bottom <= 1000 and 0 <= left < right <= 1000
            wanted = {"obj": ["type", "bbox", "desc"], "text": ["type", "bbox", "text", "desc"]}[element["type"]]
            assert list(element) == wanted
            assert len(element["desc"].split()) <= 60


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_is_one_subgraph_that_comfyui_offers(server, path):
    blueprint = read(path)
    (node,), (subgraph,) = blueprint["nodes"], blueprint["definitions"]["subgraphs"]
    assert node["type"] == subgraph["id"] and subgraph["name"] == path.stem and subgraph["description"]
    offered = json.loads(server.get("/global_subgraphs")).values()
    assert {"source": "custom_node", "name": path.stem, "info": {"node_pack": "custom_nodes.int8_dit"}} in offered


@every_template
def test_it_has_a_thumbnail(path):
    """A square one: the template browser crops others."""
    thumbnail = path.with_suffix(".jpg")
    assert thumbnail.stat().st_size <= MOST_THUMBNAIL_BYTES
    with Image.open(thumbnail) as image:
        assert image.format == "JPEG" and image.width == image.height >= 400


def test_the_folder_is_small_and_holds_nothing_else():
    files = list((PROJECT / "example_workflows").iterdir())
    assert {path.suffix for path in files} == {".json", ".jpg"} and len(files) == 2 * len(TEMPLATES)
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
