"""Load INT8 DiT: every kind of file it reads, what becomes INT8, and what the kernel widget does on a CPU."""

import gc
import mmap
import os
import sys
import threading
import uuid
from pathlib import Path
from time import sleep

import comfy.model_management
import numpy
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext

from int8_dit.kernels import BF16, ChannelTransform, quantize_weight
from int8_dit.kernels.card.device import ComputePath
from int8_dit.nodes import load_int8_dit
from int8_dit.nodes.comfyui import quantized
from int8_dit.nodes.comfyui.quantized import HostCopies, copy_through, new_in_host, stored, to_device
from int8_dit.nodes.host import notices
from int8_dit.nodes.linears.int8_weight import int8_weight
from support.file_formats import config_in, fp8_scaled, in_metadata
from support.tensors import DEVICE


@pytest.fixture
def native(dit):
    return dit.native_int8()


def test_another_file_of_that_name_is_loaded_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(load_int8_dit, "model_path", tmp_path.joinpath)
    for name in ("a.safetensors", "base.safetensors"):
        (tmp_path / name).touch()

    def fingerprint(*names):
        return load_int8_dit.LoadINT8DiT.fingerprint_inputs("bf16", *names)

    alone, with_base = ("a.safetensors",), ("a.safetensors", "base.safetensors")
    before = fingerprint(*alone), fingerprint(*with_base)
    assert before == (fingerprint(*alone), fingerprint(*with_base))
    (tmp_path / "base.safetensors").write_text("another")
    assert fingerprint(*alone) == before[0] and fingerprint(*with_base) != before[1]
    (tmp_path / "a.safetensors").write_text("another")
    assert fingerprint(*alone) != before[0]
    assert fingerprint(None) == ""  # as ComfyUI asks where another node gives the name


@pytest.mark.parametrize("named_with", ("", "model.diffusion_model.", "diffusion_model.", "model."))
@pytest.mark.parametrize("prefix", ("", "model.diffusion_model.", "model."))
@pytest.mark.parametrize("group", (None, 64))
def test_prefix_and_marks_in_the_metadata(dit, tmp_path, prefix, named_with, group):
    """Beside a text encoder in the same file, if the model has a prefix. Both may be named otherwise."""
    native = dit.native_int8(rotation_group=group)
    expected = dit.output(dit.load(dit.write(tmp_path / "plain.safetensors", native)))
    marks = {layer: config_in(native.pop(f"{layer}.comfy_quant")) for layer in dit.LINEARS}
    whole = {f"{prefix}{key}": tensor for key, tensor in native.items()}
    layers = {f"{named_with}{layer}": mark for layer, mark in marks.items()}
    if prefix:
        whole["text_encoders.t5.layer.weight"] = torch.zeros(8, 8, dtype=torch.int8)
        layers["text_encoders.t5.layer"] = {"format": "int8_tensorwise"}
    path = dit.write(tmp_path / "m.safetensors", whole, in_metadata(layers))
    assert torch.equal(dit.output(dit.load(path)), expected)


RUNS = "INT8 DiT runs in"


@pytest.fixture(params=(True, False), ids=("fits", "does not fit"))
def in_bf16(request, dit, native, tmp_path, monkeypatch):
    """A native file loaded with "auto" on a machine without a GPU, that has memory for its bf16 weights or has not:
    they would leave none for inference."""
    path = dit.write(tmp_path / "native.safetensors", native)
    assert os.path.getsize(path) < 1 << 24 < 1 << 26 < comfy.model_management.minimum_inference_memory()
    with monkeypatch.context() as memory:
        if not request.param:
            memory.setattr(comfy.model_management, "get_total_memory", lambda *args, **kwargs: 1 << 26)
        model = dit.load(path, "auto")
    # Dequantized once, or as they are used.
    assert len(dit.int8_weights(model)) == (0 if request.param else len(dit.LINEARS))
    return model


def test_auto_without_gpu_computes_with_dequantized_weights(dit, native, in_bf16, tmp_path):
    """Those that a native INT8 file stands for."""
    plain = {key: t for key, t in native.items() if not key.endswith((".comfy_quant", ".weight_scale"))}
    plain |= {f"{n}.weight": native[f"{n}.weight"].float() * native[f"{n}.weight_scale"] for n in dit.LINEARS}
    stock = dit.stock(dit.write(tmp_path / "plain.safetensors", plain))
    torch.testing.assert_close(dit.output(in_bf16), dit.output(stock), rtol=0, atol=1e-5)  # float32 rounding


def test_auto_without_gpu_warns_once_per_run(dit, in_bf16, caplog, logged):
    assert not logged(RUNS)
    for _ in range(2):
        prompt = str(uuid.uuid4())  # as the server makes them: what was said of a prompt is remembered by its name
        for node in ("1", "2"):
            with CurrentNodeContext(prompt, node):
                dit.sample(in_bf16)
        (warning,) = logged(RUNS)
        assert "cpu" in warning and "fused int8" in warning  # which device, and what overrides it
        caplog.clear()


def test_auto_says_before_it_loads_that_the_model_cannot_be_saved(dit, native, tmp_path, monkeypatch, caplog, logged):
    """And the sampling that follows in the same run does not say it again."""
    path = dit.write(tmp_path / "native.safetensors", native)
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="division by zero"):
        patched.setattr("int8_dit.nodes.loading.load.build_model", lambda *_: 1 / 0)
        dit.load(path, "auto")
    (warning,) = logged(RUNS)
    assert warning.endswith("This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it.")

    caplog.clear()
    with CurrentNodeContext(str(uuid.uuid4()), "1"):
        model = dit.load(path, "auto")
        dit.sample(model)
    assert logged(RUNS) == [warning]
    with pytest.raises(ValueError, match="holds no INT8 weights"):
        dit.save(model, tmp_path / "again.safetensors")


def test_a_warning_is_about_the_linears_of_the_model(dit, native, tmp_path, monkeypatch):
    """What `auto` runs was measured of some shapes only."""
    asked = []
    decided = ComputePath(BF16, "measured to be the fastest")
    monkeypatch.setattr(notices, "choose_model_path", lambda device, kernel, shapes: asked.append(shapes) or decided)
    path = dit.write(tmp_path / "native.safetensors", native)
    dit.sample(dit.load(path, "auto"))
    dit.sample(dit.apply(dit.stock(path), "auto"))
    assert asked == [{tuple(native[f"{name}.weight"].shape) for name in dit.LINEARS}] * 3


def test_auto_does_not_say_so_where_int8_weights_are_kept(dit, native, tmp_path, monkeypatch, logged):
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *args, **kwargs: 0)
    model = dit.load(dit.write(tmp_path / "native.safetensors", native), "auto")
    assert not logged(RUNS)
    assert dit.save(model, tmp_path / "again.safetensors")


@pytest.mark.parametrize("kernel", ("auto", "fused int8", "bf16"))
def test_fp8_layers_compute_as_in_the_stock_loader(dit, tmp_path, kernel):
    """This device has no FP8: the input of an FP8 layer is not rounded to it, however wide its channels spread."""
    layer = "joint_blocks.0.x_block.adaLN_modulation.1"  # one that the pack leaves as it is
    path = dit.write(tmp_path / "fp8.safetensors", fp8_scaled(dit.tensors(), [layer]))
    ours, stock = (dit.module(model, layer) for model in (dit.load(path, kernel), dit.stock(path)))
    x = dit.rows(ours, 4)
    x[:, 5] *= 1000
    assert torch.equal(ours(x), stock(x))


def test_unknown_kernel(dit):
    with pytest.raises(ValueError, match=r"auto, fused int8, bf16.*'int4'"):
        dit.load(kernel="int4")


@pytest.mark.parametrize("kernel", ("fused int8", "bf16"))
def test_a_chosen_kernel_is_obeyed_without_a_warning(dit, logged, kernel):
    model = dit.load(kernel=kernel)
    dit.sample(model)
    assert not logged(RUNS)
    if kernel == "bf16":
        assert not dit.int8_weights(model) and torch.equal(dit.output(model), dit.output(dit.stock()))


ACT16 = {"protected_in": "INT8 with 16-bit activations"}
BUILT = {
    "fused int8": lambda dit: dit.load(kernel="fused int8"),
    "bf16": lambda dit: dit.load(kernel="bf16"),
    "quantized": lambda dit: dit.quantize(dit.stock(), 2, calibration=dit.recorded(), **ACT16),  # out of no file
    "in 4 bits": lambda dit: dit.quantize(dit.stock(), 2, weights="4 bits"),
}


@pytest.mark.usefixtures("all_may_stay_stored")
@pytest.mark.parametrize("make", BUILT.values(), ids=BUILT)
def test_built_again_for_another_gpu_and_without_dynamic_vram(dit, make):
    """ComfyUI rebuilds a MODEL through its `cached_patcher_init`, here with weights and settings of its own."""
    model = make(dit)
    build, arguments = model.cached_patcher_init
    twin, rebuilt = model.deepclone_multigpu(), build(*arguments, disable_dynamic=True)
    assert twin.model is not model.model and not rebuilt.is_dynamic()
    for other in (twin, rebuilt):
        dit.assert_same_tensors(dit.snapshot(other), dit.snapshot(model))
        assert torch.equal(dit.output(other), dit.output(model))


@pytest.mark.usefixtures("all_may_stay_stored")
@pytest.mark.parametrize("kind", ("quantized", "in 4 bits"))
def test_built_again_while_its_weights_hold_patches(dit, kind):
    """As those that ComfyUI puts onto the card at once, with dynamic VRAM."""
    model = BUILT[kind](dit)
    expected, kinds = dit.output(model), dit.snapshot(model)
    layers = [name for name in dit.LINEARS if f"{name}.comfy_quant" in kinds][:2]
    assert not torch.equal(dit.output(dit.with_lora(model, dit.lora([*layers, "final_layer.linear"]))), expected)
    build, arguments = model.cached_patcher_init
    rebuilt = build(*arguments)
    dit.assert_same_tensors(dit.snapshot(rebuilt), kinds)
    assert torch.equal(dit.output(rebuilt), expected)


@pytest.mark.parametrize("dtype", (torch.int8, torch.bfloat16, torch.float32, torch.float8_e4m3fn))
@pytest.mark.parametrize("shape", ((), (0, 4), (5, 7), (64, 16), (3, 5, 41)))
def test_a_copy_through_buffers(dtype, shape):
    """Shorter than a buffer, of several fillings, and with a rest."""
    x = torch.randint(-8, 8, shape).to(dtype)
    for there, back in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        given = x.to(there)
        buffers = torch.empty(2, 128, dtype=torch.uint8, pin_memory=DEVICE != "cpu")
        copy = new_in_host(given) if back == "cpu" else torch.empty(shape, dtype=dtype, device=back)
        copy_through(buffers, given, copy)
        assert copy.device.type == torch.device(back).type and copy.is_contiguous()
        assert copy.dtype == dtype and torch.equal(copy.cpu().float(), x.float())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems get such memory back")
def test_memory_of_weights_goes_back_to_the_system():
    """Though something small lies behind each."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size, weights, small = 8 << 20, [], []
    freed = numpy.ones(31 << 20, numpy.uint8)
    del freed  # since then glibc keeps what lay in smaller pieces
    begin = resident()
    for _ in range(16):
        weights.append(new_in_host(torch.empty(size, dtype=torch.uint8, device="meta")).fill_(1))
        small.append(numpy.ones(1 << 16, numpy.uint8))
    assert resident() - begin >= 16 * size
    weights.clear()
    assert resident() - begin < 2 * size


def test_a_weight_from_device_to_device():
    transform = ChannelTransform(torch.linspace(0.5, 2, 64, device=DEVICE), 64)
    q, scale = quantize_weight(torch.randn(48, 64, device=DEVICE), transform)
    weight = int8_weight(q, scale, torch.bfloat16, transform)
    moved = to_device(weight, torch.device("cpu"))
    assert type(moved) is type(weight) and torch.equal(stored(moved), q.cpu())
    assert {t.device.type for t in (stored(moved), moved.params.scale, moved.params.smooth)} == {"cpu"}
    assert torch.equal(moved.dequantize(), weight.to(device="cpu").dequantize())
    device = torch.device(DEVICE)
    for again in (to_device(moved, device), moved.to(device, None, False), moved.to(device=device, copy=True)):
        assert torch.equal(stored(again), q) and again.params.smooth.device.type == DEVICE
        assert type(again) is type(weight)
    half = moved.to(device, torch.float16)
    assert half.dtype == torch.float16 and torch.equal(half.dequantize(), weight.to(dtype=torch.float16).dequantize())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_nobody_waits_for_the_scales_of_a_streamed_weight():
    """They lie in pageable memory, and the weight is pinned."""
    q, scale = quantize_weight(torch.randn(1 << 15, 64))
    weight = int8_weight(q.pin_memory(), scale, torch.bfloat16, ChannelTransform(torch.rand(64)))
    there = torch.empty_like(weight, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 31)  # about a second
    there.copy_(weight, non_blocking=True)
    waited = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert not waited and torch.equal(there.params.scale.cpu(), weight.params.scale)
    assert torch.equal(there.params.smooth.cpu(), weight.params.smooth) and torch.equal(stored(there).cpu(), q)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
def test_a_weight_is_copied_where_no_device_is_named(dtype):
    """ComfyUI's patches change such a copy, and its hooks keep what they ask a device for."""
    weight = int8_weight(*quantize_weight(torch.randn(48, 64), ChannelTransform()), torch.bfloat16)
    for copy in (weight.to(dtype, copy=True), weight.to(dtype=dtype, copy=True)):
        assert torch.equal(stored(copy), stored(weight)) and copy.data_ptr() != weight.data_ptr()
    assert weight.to(device=weight.device, copy=True).data_ptr() == weight.data_ptr()


@pytest.fixture
def beside(monkeypatch):
    """What threads beside the loading have copied into the host's memory, slowly. Weights on a CPU are copied, too."""
    copied, own = [], quantized._fill_beside

    def fill(copy, x, ready):
        sleep(0.01)
        own(copy, x, ready)
        copied.append(threading.current_thread().name)

    monkeypatch.setattr(quantized, "_fill_beside", fill)
    monkeypatch.setattr(quantized, "_crosses_slowly", lambda x, device: device.type == "cpu")
    return copied


@pytest.mark.parametrize("inference", (False, True))
def test_copies_are_made_beside_the_caller(beside, inference):
    to_host = HostCopies()
    with torch.inference_mode(inference):
        for number in range(3):
            q, scale = quantize_weight(torch.randn(48, 64, device=DEVICE))
            quantized, plain = to_host(int8_weight(q, scale, torch.bfloat16)), to_host(scale)
            to_host.wait()
            assert torch.equal(stored(quantized), q.cpu()) and torch.equal(plain, scale.cpu())
            assert torch.equal(quantized.params.scale.flatten(), scale.cpu()) and len(beside) == 2 * (number + 1)
    assert threading.current_thread().name not in beside


def test_what_goes_wrong_beside_the_caller_is_raised(beside, monkeypatch):
    def fails(copy, x, ready):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(quantized, "_fill_beside", fails)
    to_host = quantized.HostCopies()
    with pytest.raises(RuntimeError, match="out of memory"):
        for _ in range(3):  # two are under way at most
            to_host(torch.ones(4))
    with pytest.raises(RuntimeError, match="out of memory"):
        to_host.wait()


@pytest.mark.parametrize("kernel", ("fused int8", "auto"))
@pytest.mark.parametrize("kind", ("floats", "Q8_0", "W4A8"))
def test_a_model_is_whole_though_weights_come_beside(dit, tmp_path, beside, monkeypatch, kind, kernel):
    """With weights that no linear holds, and with floats of W4A8's."""
    path = dit.write_as(tmp_path, kind)
    loaded = dit.snapshot(dit.load(path, kernel=kernel))
    assert beside or (kind, kernel) == ("floats", "auto")
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in beside:
            thread.join(60)
            assert not thread.is_alive()
    monkeypatch.undo()
    dit.assert_same_tensors(loaded, dit.snapshot(dit.load(path, kernel=kernel)))
