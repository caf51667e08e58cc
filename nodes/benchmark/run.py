"""The benchmark of a card inside ComfyUI: the gate, a model's forward, the linears, and what follows for `auto`."""

import math
import os
from collections.abc import Collection, Sequence

import comfy.model_management
import torch
from comfy.model_management import throw_exception_if_processing_interrupted as check_cancelled
from comfy.model_patcher import ModelPatcher

from ...kernels import ATTENTION_CHOICES, AUTO_CHOICES, FUSED, WAYS, first_line, runs_kitchen
from ...kernels.benchmark import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    COMFYUI_INT8,
    COPIED_BYTES,
    IDEOGRAM4_SHAPES,
    METHOD_OF_WAY,
    AttentionResult,
    ForwardSplit,
    LinearShape,
    LoadedForm,
    LoadedSizes,
    Outcome,
    Room,
    ShapeResult,
    attention_memory,
    benchmark_attention,
    benchmark_shape,
    bus_rate,
    describe_machine,
    examine,
    examine_again,
    ideogram4_attention,
    loaded_forms,
    native_backend,
    notes,
    shown_methods,
    total_times,
    totals_by_shape,
    working_memory,
)
from ..comfyui.patcher import undo_object_patches
from ..files.writing.new_file import write_new_file
from ..host.output_files import output_paths
from ..host.work import Progress, make_room
from ..linears.layer_selection import quantizable_linears
from ..loading.memory_choice import free_for_weights, models_of_a_step
from .forward import NoForward, label, measure_forward

STORE, KEEP, CLEAR = "by this run", "as before", "by the card's name"
DECISIONS = (STORE, KEEP, CLEAR)
"""What `auto` is decided by after a run."""

_GATE_BYTES = 1 << 30  # of the product that the gate measures, rounded up
_MOST_WEIGHTS_ON_CPU = 32 << 20  # what it does in a fraction of a second, so that a run ends and can be cancelled
_METHODS_NOTE = (
    "Median times of a busy device with weights out of its cache; ± is half the range of the rounds. The quantization "
    "of the activations is included. x bf16: how many times as fast as bf16. error: against float64, on random data."
)
_TO_LOAD_NOTE = (
    "What to load is predicted, for steps of {}. Weights that do not fit in {:.1f} GB of the card come over the bus in "
    "each step, at {:.1f} GB/s here."
)
_STEP_OF_MODELS = {1: "one forward (CFG makes it two)", 2: "two forwards, one of each model"}


def run(
    model: ModelPatcher | None,
    tokens: int,
    ticked: Collection[str],
    positive: list | None,
    latent: dict | None,
    decision: str,
) -> Outcome:
    """Measure this machine, and let `auto` be decided as the user wants it. Raises ComfyUI's interrupt on cancel."""
    device = comfy.model_management.get_torch_device() if model is None else model.load_device
    methods = shown_methods(ticked)
    progress = timing = Progress()

    def say(text: str) -> None:
        timing.step()
        timing.say(text)

    progress.say("checking the card")
    split, remarks = None, [_METHODS_NOTE]
    with comfy.model_management.cuda_device_context(device):
        if model is not None:
            progress.say("measuring a forward of the model")
            undo_object_patches(model)
            try:
                split = measure_forward(model, positive, latent)
            except NoForward as reason:
                remarks.append(f"No forward was measured: {reason}.")
        make_room(device, _GATE_BYTES)
        health = examine(device, check_cancelled)
        shapes = _shapes(model, split, device, remarks)
        timing = progress.part(0.85, len(shapes) * len(methods))
        if shapes:
            make_room(device, max(working_memory(shape, tokens) for shape in shapes))
        linears = []
        for shape in shapes:
            linears.append(benchmark_shape(shape, tokens, device, methods, check=check_cancelled, say=say))
            if (speed := linears[-1].speedup(FUSED)) is not None:
                timing.say(f"{shape.name}: fused INT8 {speed:.2f} x bf16")
        own = [] if split is None else split.attention_calls
        calls = ideogram4_attention(tokens, device) if model is None else own
        timing = progress.part(0.1, len(calls) * len(ATTENTION_METHODS))
        attention = []
        for call in calls:
            make_room(device, attention_memory(call))
            attention.append(benchmark_attention(call, device, check=check_cancelled, say=say))
        health = examine_again(health, device)
        to_load = [] if model is None or split is None else ways_to_load(model, split, linears, remarks)
    remarks += [*_native_remark(device, ticked), *_kitchen_remark(device, linears), *notes(linears), *notes(attention)]
    outcome = Outcome(describe_machine(device), health, linears, attention, split, [str(health)], remarks, to_load)
    outcome.sentences += [_decide(device, outcome, ticked, decision), *attention_sentences(attention)]
    if device.type == "cuda" and decision == STORE and health.healthy:
        outcome.sentences += store_attention(device, attention)
    progress.finish()
    return outcome


def forget(device: torch.device) -> str:
    """Forget the choices of a card; return in words what was done."""
    if device.type != "cuda":
        return "No GPU: there is no stored choice."
    forgotten = [choices.decide_by(device, None) for choices in (AUTO_CHOICES, ATTENTION_CHOICES)]
    if any(forgotten):
        return "The stored choice is forgotten: auto is fused INT8 on RTX 30 cards and bf16 on others again."
    return "No choice was stored for this card: nothing changes."


def save_json(outcome: Outcome) -> str | None:
    """Write every figure to ComfyUI's output folder; return the file's name, None where it cannot be written."""
    text = outcome.as_json().encode()
    try:
        path = write_new_file(output_paths("int8_benchmark", "json"), text, {})
    except OSError as error:
        outcome.remarks.append(f"The figures could not be written to the output folder: {error}.")
        return None
    return os.path.basename(path)


def _shapes(
    model: ModelPatcher | None, split: ForwardSplit | None, device: torch.device, remarks: list[str]
) -> list[LinearShape]:
    shapes = IDEOGRAM4_SHAPES if model is None else split.shapes() if split is not None else linear_shapes(model)
    most = _MOST_WEIGHTS_ON_CPU if device.type == "cpu" else math.inf
    large = [shape for shape in shapes if shape.n * shape.k > most]
    remarks += [f"Left out: {shape.name} ({shape.n} x {shape.k} weights are too many for a CPU)." for shape in large]
    return [shape for shape in shapes if shape not in large]


def linear_shapes(model: ModelPatcher) -> list[LinearShape]:
    """Return the distinct shapes of a MODEL's quantizable linears, each named after the first layer that has it.

    Raises ValueError for a model without such layers.
    """
    shapes: dict[tuple[int, ...], LinearShape] = {}
    for name, module in quantizable_linears(model).items():
        n, k = module.weight.shape
        shapes.setdefault((n, k), LinearShape(label(name), n, k))
    if not shapes:
        raise ValueError("this MODEL has no linear layers in repeated blocks: disconnect it to benchmark Ideogram 4's")
    return list(shapes.values())


def ways_to_load(
    model: ModelPatcher, split: ForwardSplit, linears: Sequence[ShapeResult], remarks: list[str]
) -> list[LoadedForm]:
    """Return the ways to load a MODEL with what each would take of this machine's time and memory; none on a CPU."""
    device, base = model.load_device, model.model
    if device.type != "cuda":
        return []
    dtype, models = base.get_dtype_inference(), models_of_a_step(base.model_config)
    weights = sum(module.weight.shape.numel() for module in quantizable_linears(model).values())
    others = sum(parameter.shape.numel() for parameter in base.diffusion_model.parameters()) - weights
    sizes = LoadedSizes(models, models * weights, models * others * dtype.itemsize)
    make_room(device, COPIED_BYTES)
    try:
        bus = bus_rate(device)
    except RuntimeError as error:  # the host has no memory to pin
        remarks.append(f"What to load was not predicted: {first_line(error)}.")
        return []
    host = comfy.model_management.get_free_memory(torch.device("cpu"))
    card = max(0, free_for_weights(base.model_config, device, dtype))
    room = Room(card, host, split.working_bytes, bus)
    forms = loaded_forms(split, linears, sizes, room)
    if forms:
        remarks.append(_TO_LOAD_NOTE.format(_STEP_OF_MODELS[models], room.card / 1e9, room.bus / 1e9))
    return forms


def _decide(device: torch.device, outcome: Outcome, ticked: Collection[str], decision: str) -> str:
    """Store the measurement where it counts and the user wants it; return in words what decides `auto` now."""
    if device.type != "cuda":
        return "auto is bf16: INT8 tensor cores need a GPU."
    before = AUTO_CHOICES.stored(device)
    kept = "auto stays as it was" + (f", decided by the run of {before.date}." if before else ", decided by the card.")
    if decision != STORE:
        return f"Nothing was stored: {kept}"
    if not outcome.health.healthy:
        return f"Nothing was stored, because this run does not count: {kept}"
    if all(result.speedup(FUSED) is None for result in outcome.linears):
        return f"No times of linears were stored, because the fused kernel was not timed beside bf16: {kept}"
    if "native_int8" not in ticked:
        return f"No times of linears were stored, because ComfyUI's own INT8 was not timed (tick native_int8): {kept}"
    found = totals_by_shape(outcome.linears, outcome.split)
    choice = AUTO_CHOICES.beside_earlier(device, found)
    try:
        AUTO_CHOICES.decide_by(device, choice)
    except OSError as error:
        return f"The choice could not be stored ({error}): {kept}"
    winners = [METHOD_OF_WAY[way] for shape in found if (way := choice.fastest(shape, WAYS, FUSED))]
    counted = ", ".join(f"{name} for {winners.count(name)}" for name in dict.fromkeys(winners))
    return f"Stored: auto now runs what was fastest here, of {len(winners)} shapes {counted}."


def attention_sentences(results: Sequence[AttentionResult]) -> list[str]:
    """Return in words the fastest exact way of each call; none where there was no choice."""
    sentences = []
    for result in results:
        times = result.exact_milliseconds()
        if len(times) > 1 and COMFYUI_CHOICE in result.rounds:
            best = min(times, key=times.__getitem__)
            speed = f"{result.speedup(best):.2f} x ComfyUI's choice"
            sentences.append(f"Exact attention, {result.place()}: {best} is the fastest, {speed}.")
    return sentences


def store_attention(device: torch.device, results: Sequence[AttentionResult]) -> list[str]:
    """Let these times decide what exact attention runs on a GPU, beside earlier times of other calls.

    Returns a sentence, none where there was no choice.
    """
    found = [(result.call.shape, result.exact_milliseconds()) for result in results]
    totals = total_times((shape, times) for shape, times in found if len(times) > 1)
    if not totals:
        return []
    try:
        ATTENTION_CHOICES.decide_by(device, ATTENTION_CHOICES.beside_earlier(device, totals))
    except OSError as error:
        return [f"What was fastest of attention could not be stored ({error})."]
    return ["What was fastest of attention is stored for its choice auto."]


def _kitchen_remark(device: torch.device, linears: Sequence[ShapeResult]) -> list[str]:
    places = [each.place() for each in linears if runs_kitchen(each.m, each.shape.n, each.shape.k, device)]
    said = f"{FUSED} runs comfy-kitchen's GEMM, which gives the same and is faster here, at {', '.join(places)}."
    return [said] if places else []


def _native_remark(device: torch.device, ticked: Collection[str]) -> list[str]:
    if "native_int8" not in ticked:
        return []
    try:
        backend = native_backend(device)
    except LookupError:
        return []
    why = ""
    if backend == "eager" and device.type == "cuda":
        why = f"; its CUDA kernels need a PyTorch for CUDA 13, and this one is for {torch.version.cuda}"
    return [f"{COMFYUI_INT8} is comfy-kitchen's {backend} backend here{why}."]
