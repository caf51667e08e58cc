"""The node "Kernel Benchmark" in this process, on a CPU and on made-up cards."""

import json
from collections import Counter

import comfy.model_management
import comfy.ops
import folder_paths
import pytest
import torch

from int8_dit.kernels.benchmark import FUSED_CODES, FUSED_GGUF, Calls, ForwardSplit, LinearShape, ShapeResult
from int8_dit.kernels.benchmark import attention_rows as attention
from int8_dit.kernels.benchmark.health import Health
from int8_dit.kernels.benchmark.methods import TICKS
from int8_dit.kernels.card.choices import Choice
from int8_dit.nodes import kernel_benchmark, sockets
from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
from int8_dit.nodes.attention.attention_override import set_attention
from int8_dit.nodes.benchmark import run
from int8_dit.nodes.benchmark.forward import AttentionSizes, attention_call, measure_forward
from int8_dit.nodes.kernel_benchmark import INT8KernelBenchmark
from int8_dit.nodes.linears.layer_selection import quantizable_linears
from int8_dit.nodes.load_int8_dit import LoadINT8DiT
from int8_dit.nodes.pictures import plot
from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant
from support.comfyui_today import today
from support.file_formats import encoded

CARD = torch.device("cuda", 0)


def only(*ticked):
    """The switches of the node, these on."""
    return {tick: tick in ticked for tick in TICKS}


def test_a_forward_is_split_into_its_parts(dit, monkeypatch, tmp_path):
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path))
    # So small a model is slowed down by its clocks.
    monkeypatch.setattr("int8_dit.kernels.benchmark.forward_split._MOST_WATCHED", 1e9)
    monkeypatch.setattr("int8_dit.nodes.benchmark.forward._SETTLING", 1.0)
    monkeypatch.setattr("int8_dit.nodes.benchmark.forward._WINDOW", 1.0)
    model = dit.stock()
    inputs = dit.calibration(model)
    (positive,) = inputs["positive"].values()
    before = dict(model.model_options["transformer_options"])
    output = INT8KernelBenchmark.execute(
        8, model, positive=positive, latent_image=inputs["latent_image"], **only("unfused")
    )
    picture, text = output.result

    first, forward, *shapes = output.ui["int8_benchmark"]
    assert [row[0] for row in forward["rows"]][:3] == ["linears", "attention", "the rest"]
    content = json.loads((tmp_path / first["download"]["filename"]).read_text())
    assert sum(linear["count"] for linear in content["forward"]["linears"]) == len(dit.LINEARS)
    # As measured: what is shown is rounded, and a tenth of a millisecond is much of so small a model.
    multiplied = sum(linear["milliseconds"] for linear in content["forward"]["linears"])
    attended, watched = content["forward"]["attention"], content["forward"]["watched"]
    assert 0 < multiplied < multiplied + attended < watched
    shown = [float(row[1]) for row in forward["rows"]][:3]
    assert shown == pytest.approx([multiplied, attended, watched - multiplied - attended], abs=0.051)
    ((blocks_name, speedup),) = ((each["name"], each["speedup"]) for each in content["forward"]["blocks"])
    assert blocks_name == "joint_blocks" and speedup > 0
    attention = [section for section in shapes if "heads of" in section["title"]]
    linears = [section for section in shapes if section not in attention]
    assert {row[0] for section in linears for row in section["rows"]} == {"bf16", "unfused _int_mm"}
    assert {row[0] for section in attention for row in section["rows"]} == {"PyTorch's choice", "ComfyUI's choice"}
    (call,) = [entry["call"] for entry in content["attention"]]
    assert call["count"] == 3 and call["shape"]["tokens"] == call["shape"]["keys"]  # of image and text, a block each
    assert first["valid"] and "No GPU" in first["summary"][0]
    assert first["title"] == "INT8 was not timed beside bf16 here: no GPU"
    assert [bar["ratio"] for bar in first["bars"]] == sorted(bar["ratio"] for bar in first["bars"])
    assert {(bar["name"], bar["ours"]) for bar in first["bars"]} == {("bf16", False), ("unfused _int_mm", False)}
    assert first["title"] in text and picture.ndim == 4

    assert model.model_options["transformer_options"] == before
    assert not any(module._forward_hooks for module in model.model.diffusion_model.modules())


@pytest.mark.parametrize("holds", ("floats", "INT8"))
def test_linears_that_comfyui_calls_past_their_forward_are_timed(small, monkeypatch, holds):
    """And no forward but the watched one calls theirs."""
    monkeypatch.setattr("int8_dit.nodes.benchmark.forward.fused_speedup", lambda *_: None)
    with today("linear_input_act"), monkeypatch.context() as wanted:
        wanted.setattr(comfy.ops, "_fp16_linear_wanted", lambda x: True, raising=False)
        model = small.wan() if holds == "floats" else small.in_comfyuis_int8(small.wan())
        linears, calls = quantizable_linears(model), Counter()
        for name, linear in linears.items():
            linear.register_forward_hook(lambda *_, name=name: calls.update([name]))
        split = measure_forward(model, None, None)
    assert sum(call.count for call in split.linears.values()) == len(linears)
    assert {name for name, count in calls.items() if count == 1} == {"blocks.0.ffn.2", "blocks.1.ffn.2"}
    assert not any("comfy_force_forward" in vars(linear) for linear in linears.values())


@pytest.mark.parametrize("kind", (None, "auto"))
def test_what_layers_chose_computes_while_a_forward_is_measured(small, preferred, monkeypatch, kind):
    monkeypatch.setattr("int8_dit.nodes.attention.attention_kinds._chooses_exact", lambda device: True)
    monkeypatch.setattr("int8_dit.nodes.benchmark.forward.fused_speedup", lambda *_: None)
    model = small.wan()
    config = encoded({"attention": "comfy_kitchen_int8"})
    model.model.diffusion_model.blocks[1].self_attn.comfy_attention.load_state_dict({"config": config})
    if kind is not None:
        set_attention(model, kind)
    small.output(model)
    assert preferred
    once, inputs = len(preferred), small.calibration(model)
    measure_forward(model, inputs["positive"]["positive_0"], inputs["latent_image"])
    assert len(preferred) == (1 + 7) * once


def test_cancelling_stops_it(dit, interrupt_at):
    interrupt_at(0)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        INT8KernelBenchmark.execute(8, dit.stock(), **only())


def test_ideogram_s_linears_are_left_out_on_a_cpu_and_named(monkeypatch, tmp_path):
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path))
    output = INT8KernelBenchmark.execute(4352, **only())
    _, shape, attention = output.ui["int8_benchmark"]
    assert "attention out, 64 x 4608 x 4608" in shape["title"]
    assert attention["title"].startswith("Ideogram 4, 18 heads of 256")
    said = " ".join(attention["notes"])
    assert "qkv" in said and "too many for a CPU" in said and "(there is no such kernel here): flash; cuDNN" in said


def test_each_run_measures_anew():
    assert INT8KernelBenchmark.fingerprint_inputs(tokens=1) != INT8KernelBenchmark.fingerprint_inputs(tokens=1)


@pytest.fixture
def choices(monkeypatch):
    """What was stored for a card, None for forgotten, in order; the last one counts."""
    kept = []
    for kind in (run.AUTO_CHOICES, run.ATTENTION_CHOICES):
        monkeypatch.setattr(kind, "decide_by", lambda device, choice: kept.append(choice) or True)
        monkeypatch.setattr(kind, "stored", lambda device: kept[-1] if kept else None)
    return kept


def healthy(**changes):
    return Health(**{"teraflops": 65.0, "expected": 71.0} | changes)


def decided(run, health=None, decision="by this run", ticked=("native_int8",), n=64, **milliseconds):
    """What is said of a run with these times of the ways of one linear."""
    names = {"fused": "fused int8", "native": "ComfyUI's INT8", "bf16": "bf16"}
    milliseconds = milliseconds or {"fused": 1.0, "native": 2.0, "bf16": 3.0}
    rounds = {names[way]: [time] * 3 for way, time in milliseconds.items()}
    results = [ShapeResult(LinearShape("qkv", n, 32), 8, rounds=rounds)]
    outcome = run.Outcome({"card": "a card"}, health or healthy(), results, [], None, [], [])
    return run._decide(CARD, outcome, ticked, decision)


def test_a_healthy_run_decides_what_auto_runs(choices):
    assert decided(run) == "Stored: auto now runs what was fastest here, of 1 shapes fused int8 for 1."
    (choice,) = choices
    assert dict(choice.milliseconds) == {(64, 32): {"fused int8": 1.0, "native int8": 2.0, "bf16": 3.0}}


def test_a_run_is_stored_beside_earlier_ones_of_other_shapes(choices):
    for run_of in ({"n": 64}, {"n": 4096, "fused": 3.0, "bf16": 1.0}, {"n": 64, "fused": 5.0, "bf16": 4.0}):
        said = decided(run, **run_of)
    assert said == "Stored: auto now runs what was fastest here, of 1 shapes bf16 for 1."
    assert dict(choices[-1].milliseconds) == {
        (64, 32): {"fused int8": 5.0, "bf16": 4.0},
        (4096, 32): {"fused int8": 3.0, "bf16": 1.0},
    }


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"health": {"faults": ("too hot",)}}, "does not count"),
        ({"decision": "as before"}, "Nothing was stored: auto stays"),
        ({"ticked": []}, "No times of linears were stored, because ComfyUI's own INT8 was not timed (tick"),
        ({"bf16": 1.0}, "No times of linears were stored, because the fused kernel was not timed"),
    ],
)
def test_what_does_not_count_is_not_stored(choices, changes, says):
    health = healthy(**changes.pop("health", {}))
    assert says in decided(run, health, **changes) and choices == []


def test_where_kitchens_gemm_runs_is_said(monkeypatch):
    monkeypatch.setattr(run, "runs_kitchen", lambda m, n, k, device: device == CARD and (m, n) == (4096, 512))
    results = [ShapeResult(shape=LinearShape("", n, 256), m=m) for m, n in ((4096, 256), (4096, 512), (77, 512))]
    (said,) = run._kitchen_remark(CARD, results)
    assert said.endswith("faster here, at 4096 x 512 x 256.") and not run._kitchen_remark(torch.device("cpu"), results)


def test_forgetting_measures_nothing(choices, monkeypatch):
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: CARD)
    output = INT8KernelBenchmark.execute(8, auto_decided=run.CLEAR)
    assert choices == [None, None] and "forgotten" in output.result[1]


@pytest.fixture
def on_a_card(dit, monkeypatch):
    """A MODEL on a made-up card with room for 1000 bytes of weights, a slow bus and a large host."""
    model = dit.stock()
    model.load_device = CARD
    monkeypatch.setattr(run, "make_room", lambda device, needed: None)
    monkeypatch.setattr(run, "bus_rate", lambda device: 1e6)
    monkeypatch.setattr(run, "free_for_weights", lambda architecture, device, dtype: 1000)
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: 1 << 40)
    return model


TIMES = {"bf16": 2.0, "fused int8": 1.0, FUSED_CODES: 1.1, FUSED_GGUF: 1.2}


def ways(model, remarks, times=TIMES):
    shape = LinearShape("qkv", 64, 32, 8)
    rounds = {name: [time] * 3 for name, time in times.items()}
    split = ForwardSplit(30.0, 30.0, {shape: Calls(10, 20.0)}, 5.0, working_bytes=77)
    return run.ways_to_load(model, split, [ShapeResult(shape, 8, rounds=rounds)], remarks)


def test_what_to_load_counts_the_weights_of_the_model(on_a_card):
    remarks = []
    int8, codes, gguf = ways(on_a_card, remarks)
    parameters = dict(on_a_card.model.diffusion_model.named_parameters())
    linears = sum(parameters[f"{name}.weight"].numel() for name in quantizable_linears(on_a_card))
    others = sum(each.numel() for each in parameters.values()) - linears
    size = on_a_card.model.get_dtype_inference().itemsize
    assert others > 0 and int8.weights == linears + size * others
    assert codes.weights == gguf.weights == linears * 9 / 16 + size * others
    assert int8.streamed == int8.weights - 1000 and int8.peak == 1077 and int8.fits
    assert int8.milliseconds > codes.milliseconds  # there is less to fetch
    (said,) = remarks
    assert "one forward" in said and "0.0 GB/s" in said


def test_two_models_of_a_step_take_twice_of_both(on_a_card, monkeypatch):
    one = ways(on_a_card, [])
    monkeypatch.setattr(run, "models_of_a_step", lambda architecture: 2)
    two = ways(on_a_card, [])
    assert [each.weights for each in two] == [2 * each.weights for each in one]


def test_on_a_card_without_room_everything_streams(on_a_card, monkeypatch):
    monkeypatch.setattr(run, "free_for_weights", lambda architecture, device, dtype: -1)
    assert all(each.streamed == each.weights for each in ways(on_a_card, []))


def test_nothing_is_said_of_what_was_not_timed(on_a_card):
    remarks = []
    assert ways(on_a_card, remarks, {"bf16": 1.0}) == remarks == []


def test_without_pinned_memory_nothing_is_predicted(on_a_card, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(run, "bus_rate", fail)
    remarks = []
    assert ways(on_a_card, remarks) == []
    assert remarks == ["What to load was not predicted: CUDA error: out of memory."]


def test_a_file_is_loaded_where_no_model_is_connected(dit, monkeypatch, tmp_path):
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path))
    monkeypatch.setattr(kernel_benchmark, "model_path", lambda name: f"folder/{name}")
    loaded, measured = [], []
    monkeypatch.setattr(
        kernel_benchmark, "load_int8_model", lambda *args, **options: loaded.append((args, options)) or "M"
    )
    attention = []
    monkeypatch.setattr(kernel_benchmark, "set_attention", lambda *given: attention.append(given))
    monkeypatch.setattr(kernel_benchmark, "run", lambda model, *_: measured.append(model))
    for model, name in ((None, "a.gguf"), ("mine", "a.gguf"), (None, "none")):
        with pytest.raises(AttributeError):  # of what was not measured
            INT8KernelBenchmark.execute(8, model, model_name=name)
    assert measured == ["M", "mine", None] and loaded == [(("folder/a.gguf", "auto"), {"memory": "auto"})]
    assert attention == [("M", "auto")]  # as a new Load INT8 DiT has it; a MODEL stays as it was connected


def zeros(*shape):
    return torch.zeros(shape, device="meta")


@pytest.mark.parametrize(
    "q, k, keywords, expected",
    [
        (zeros(2, 9, 64), zeros(2, 9, 64), {}, ("attention", 4, (9, 9, 16, False), 4, 2)),
        (zeros(2, 9, 64), zeros(2, 5, 64), {"mask": zeros(9, 5)}, ("cross attention", 4, (9, 5, 16, True), 4, 2)),
        (zeros(2, 9, 64), zeros(2, 9, 32), {"enable_gqa": True}, ("attention", 4, (9, 9, 16, False), 2, 2)),
        (zeros(2, 9, 64), zeros(2, 9, 2, 16), {"enable_gqa": True}, ("attention", 4, (9, 9, 16, False), 2, 2)),
        (
            zeros(1, 4, 9, 16),
            zeros(1, 2, 7, 16),
            {"skip_reshape": True},
            ("cross attention", 4, (9, 7, 16, False), 2, 1),
        ),
        (zeros(9, 64), zeros(9, 64), {}, None),
    ],
)
def test_what_an_attention_call_computes(q, k, keywords, expected):
    call = attention_call(q, k, k, 4, transformer_options={}, **keywords)
    assert call == (None if expected is None else AttentionSizes(*expected))


def attention_times(width=128, tokens=4096, heads=24, **milliseconds):
    names = {"comfyui": attention.COMFYUI_CHOICE, "cudnn": "cuDNN", "flash": "flash", "pytorch": "PyTorch's choice"}
    shape = attention.AttentionShape(tokens, tokens, width, False)
    rounds = {names[name]: [time] * 3 for name, time in milliseconds.items()}
    return attention.AttentionResult(attention.AttentionSizes("attention", heads, shape, heads), rounds=rounds)


def test_what_was_fastest_of_attention_is_said_and_stored_beside_earlier_runs(choices):
    first = attention_times(comfyui=2.0, flash=2.0, cudnn=1.0, pytorch=2.0)
    again = attention_times(heads=8, comfyui=1.0, flash=1.0, cudnn=0.5)
    wide = attention_times(width=256, comfyui=3.0, flash=3.0, pytorch=3.1)
    alone = attention_times(width=64, comfyui=1.0, pytorch=1.0)
    (said, *_) = run.attention_sentences([first, again, alone])
    assert said == "Exact attention, 24 heads of 128, 4096 tokens: cuDNN is the fastest, 2.00 x ComfyUI's choice."
    assert run.store_attention(CARD, [alone]) == [] and not choices
    assert run.store_attention(CARD, [first, again]) == ["What was fastest of attention is stored for its choice auto."]
    run.store_attention(CARD, [wide])
    both, last = (dict(choice.milliseconds) for choice in choices)
    assert both == {first.call.shape: {"flash": 3.0, "cuDNN": 1.5}}
    assert last == both | {wide.call.shape: {"flash": 3.0, "PyTorch's choice": 3.1}}


def test_a_full_disk_ends_no_run_and_is_said(monkeypatch):
    def full(*args):
        raise OSError("no space left")

    for kind in (run.AUTO_CHOICES, run.ATTENTION_CHOICES):
        monkeypatch.setattr(kind, "decide_by", full)
        monkeypatch.setattr(kind, "stored", lambda device: None)
    monkeypatch.setattr(run, "write_new_file", full)
    outcome = run.Outcome({"card": "a card"}, healthy(), [], [], None, [], [])
    assert run.save_json(outcome) is None
    said = decided(run), *run.store_attention(CARD, [attention_times(flash=1.0, cudnn=2.0)])
    assert all("no space left" in text for text in (*said, *outcome.remarks)) and len(said) == 2 and outcome.remarks


def test_nodes_run_again_when_auto_is_decided_anew(monkeypatch):
    """Or a MODEL out of ComfyUI's cache would go on running what another choice chose."""
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: CARD)
    choices = [None, Choice("d", {(1, 1): {"bf16": 1.0}}), Choice("d", {(1, 1): {"bf16": 2.0}})]
    for node in (ApplyFusedINT8Kernel, LoadINT8DiT, QuantizeToINT8SmoothQuant):
        stamps = {"auto": set(), "fused int8": set()}
        for choice in choices:
            monkeypatch.setattr(sockets.AUTO_CHOICES, "stored", lambda device, choice=choice: choice)
            for kernel, found in stamps.items():
                found.add(node.fingerprint_inputs(kernel=kernel))
        assert (len(stamps["auto"]), len(stamps["fused int8"])) == (3, 1)


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run, "examine", lambda *args: pytest.fail("measured"))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        INT8KernelBenchmark.execute(8)
