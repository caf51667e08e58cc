"""The nodes in a real ComfyUI server, through its HTTP API: what a user does, from the bf16 file to INT8 images."""

import asyncio
import io
import json

import numpy
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from glyphs.alphabet import ALPHABET
from glyphs.matching import recognise
from support import workflows
from support.server import ExecutionInterrupted, PromptRejected
from support.workflows import Prompt, link


@pytest.fixture(scope="module")
def saving(server):
    """A prompt that calibrates, quantizes and saves the glyph model, and after its run the path of the file."""
    prompt = Prompt()
    model = workflows.calibrated_model(prompt, workflows.stock_model(prompt), text=ALPHABET, steps=4)
    save = workflows.save_model(prompt, model)
    return prompt, saved_file(server, prompt, save)


@pytest.fixture
def int8_file(saving):
    return saving[1]


def test_the_saved_file_says_how_it_was_made(saving):
    prompt, path = saving
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    made_by = json.loads(metadata["prompt"])
    for node in made_by.values():
        node.pop("is_changed", None)  # ComfyUI's own, of nodes that say when they have to run again
    assert made_by == prompt
    recipe = json.loads(metadata["int8_dit_recipe"])
    assert len(recipe["protected"]) == workflows.GLYPH_PROTECT_LAYERS
    errors = recipe["attention"]["errors"]
    assert len(errors) == 3 and not recipe["attention"]["exact"] and max(errors.values()) < 0.02


def draw(server, model_of, text="8", steps=4):
    """Sample `text` with the model that `model_of` adds to a prompt; the characters that can be read in the images."""
    prompt = Prompt()
    preview = workflows.glyph_images(prompt, model_of(prompt), text=text, steps=steps)
    images = [Image.open(io.BytesIO(server.view(**image))) for image in server.queue(prompt)[preview]["images"]]
    return recognise(torch.from_numpy(numpy.stack([numpy.asarray(image.convert("L")) for image in images])) / 255)


def saved_file(server, prompt, node):
    """Run a prompt and return the path of the file that a saving node wrote."""
    return server.saved_path(server.queue(prompt)[node])


def tensors_of(path):
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def assert_same_weights(path, expected):
    own, others = tensors_of(path), tensors_of(expected)
    assert own.keys() == others.keys()
    assert not [key for key in own if not torch.equal(own[key], others[key])]


def test_the_recorder_sees_the_users_own_sampling(server):
    """A sampler under the recorder, and the same sampling run by Quantize to INT8 itself, give the same INT8 model; so
    does the calibration, saved, loaded and merged with a copy of itself where that changes nothing."""
    prompt = Prompt()
    stock = workflows.stock_model(prompt)
    recorded, calibration = workflows.recorded_model(prompt, stock, text="INT8", steps=3)
    model, kept = workflows.save_model(prompt, recorded), workflows.save_calibration(prompt, calibration)
    results = server.queue(prompt)
    paths = {node: server.saved_path(results[node]) for node in (model, kept)}

    prompt = Prompt()
    own_run = workflows.calibrated_model(prompt, workflows.stock_model(prompt), text="INT8", steps=3)
    assert_same_weights(saved_file(server, prompt, workflows.save_model(prompt, own_run)), paths[model])

    prompt = Prompt()
    loaded = link(prompt.add("LoadINT8Calibration", calibration_name=paths[kept].name))
    again = workflows.quantized_model(prompt, workflows.stock_model(prompt), calibration=loaded)
    twice = {f"calibrations.calibration_{number}": loaded for number in range(2)}
    merged = workflows.save_calibration(prompt, link(prompt.add("MergeINT8Calibrations", **twice)))
    saved = workflows.save_model(prompt, again)
    results = server.queue(prompt)
    assert_same_weights(server.saved_path(results[saved]), paths[model])
    assert server.saved_path(results[merged]).stat().st_size > 0


def test_every_run_records_anew(server):
    """Two samplers under one recorder: nothing is missing or left over when a prompt runs again, changed or not."""
    calls = []
    for seed, steps in ((1, 3), (1, 3), (2, 3), (2, 4)):
        prompt = Prompt()
        recorder = prompt.add("RecordINT8Calibration", model=workflows.stock_model(prompt))
        first = workflows.glyph_latents(prompt, link(recorder), text="A", steps=2, seed=0)
        second = workflows.glyph_latents(prompt, link(recorder), text="B", steps=steps, seed=seed)
        both = link(prompt.add("LatentAdd", samples1=first, samples2=second))
        calibration = link(prompt.add("CollectINT8Calibration", recording=link(recorder, 1), after=both))
        path = saved_file(server, prompt, workflows.save_calibration(prompt, calibration))
        with safe_open(path, framework="pt") as file:
            layers = json.loads(file.metadata()["int8_dit_calibration"])
        calls.append({layer["calls"] for layer in layers.values()})
    assert calls == [{5}, {5}, {5}, {6}]


def test_the_same_prompt_gives_the_same_file_byte_for_byte(server):
    prompt = Prompt()
    model = workflows.calibrated_model(prompt, workflows.stock_model(prompt), text="DIT", steps=2, seed=7)
    save = workflows.save_model(prompt, model, "diffusion_models/same")
    first = saved_file(server, prompt, save)
    server.forget()
    second = saved_file(server, prompt, save)
    assert first != second
    assert first.read_bytes() == second.read_bytes()


def test_half_connected_calibration_says_what_is_missing(server):
    """Before anything runs."""
    prompt = Prompt()
    model = workflows.calibrated_model(prompt, workflows.stock_model(prompt))
    inputs = prompt[model[0]]["inputs"]
    sigmas = inputs.pop("sigmas")
    workflows.save_model(prompt, model)
    with pytest.raises(PromptRejected, match="calibration also needs sigmas: connect it"):
        server.submit(prompt)
    inputs["sigmas"] = inputs["sampler"]
    with pytest.raises(PromptRejected, match="sigmas is linked to SAMPLER, but it takes SIGMAS"):
        server.submit(prompt)
    inputs |= {"sigmas": sigmas, "calibration": [model[0], 3]}
    inputs["calibration"][0] = workflows.calibrated_model(prompt, workflows.stock_model(prompt))[0]
    with pytest.raises(PromptRejected, match="a calibration is connected, and so are inputs of a calibration run"):
        server.submit(prompt)


async def _listen(server, prompt, stop):
    # A dependency of ComfyUI.
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=tests") as socket:
        async with session.post(f"{server.url}/prompt", json={"prompt": prompt, "client_id": "tests"}) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        events = []
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:  # previews are binary
                events.append(message.json())
                if stop(events[-1]):
                    return prompt_id, events


def listen(server, prompt, stop):
    """Queue a prompt as the browser does and follow its events until `stop(event)`: the prompt's id and the events."""
    return asyncio.run(asyncio.wait_for(_listen(server, prompt, stop), timeout=300))


def is_progress_of(node_id):
    return lambda event: event["type"] == "progress" and event["data"]["node"] == node_id


def assert_stops_and_goes_on(server, prompt, node_id):
    """Cancel a prompt while that node shows progress; the server must then run the next one."""
    prompt_id, _ = listen(server, prompt, is_progress_of(node_id))
    server.interrupt()
    with pytest.raises(ExecutionInterrupted, match=f"at node {node_id} "):
        server.wait(prompt_id)
    assert draw(server, workflows.stock_model) == ["8"]


def test_cancel_while_calibrating_leaves_no_file(server):
    prompt = Prompt()
    model = workflows.calibrated_model(prompt, workflows.stock_model(prompt), steps=1000)
    workflows.save_model(prompt, model, "diffusion_models/cancelled")
    assert_stops_and_goes_on(server, prompt, node_id=model[0])
    assert not list((server.base / "output").rglob("cancelled*"))


def test_cancel_while_sampling_in_int8(server, int8_file):
    prompt = Prompt()
    workflows.glyph_images(prompt, workflows.int8_model(prompt, int8_file.name), steps=1000)
    sampler = next(node_id for node_id, node in prompt.items() if node["class_type"] == "SamplerCustomAdvanced")
    assert_stops_and_goes_on(server, prompt, node_id=sampler)


def inputs_of(info, inside=""):
    """Every input that a node's description names, those inside of others too, with its options."""
    for group in ("required", "optional"):
        for name, (_type, *options) in info.get(group, {}).items():
            yield f"{inside}{name}", options[0] if options else {}
            for part in (options[0] if options else {}).get("options", ()):
                if isinstance(part, dict):
                    yield from inputs_of(part["inputs"], f"{inside}{name}.{part['key']}.")
            template = (options[0] if options else {}).get("template", {})
            yield from inputs_of(template.get("input", {}), f"{inside}{name}.")


def test_all_inputs_and_outputs_have_tooltips(server):
    nodes = json.loads(server.get("/object_info"))
    nodes = {name: info for name, info in nodes.items() if info["python_module"] == "custom_nodes.int8_dit"}
    assert len(nodes) == 14
    for name, info in nodes.items():
        inputs = dict(inputs_of(info["input"]))
        assert inputs and not [key for key, options in inputs.items() if not options.get("tooltip")], name
        tips = info["output_tooltips"] or []
        assert len(tips) == len(info["output"]) and all(tips), name
