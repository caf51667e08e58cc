"""Where ComfyUI finds a tensor in its file."""

import comfy.memory_management as memory
import pytest
import torch

from int8_dit.nodes.comfyui.file_slices import read_into
from int8_dit.nodes.comfyui.quantized import stored
from int8_dit.nodes.files.holding import is_gguf
from int8_dit.nodes.files.reading.gguf_file import read_gguf


@pytest.mark.parametrize("dynamic", (False, True))
def test_comfyui_reads_from_a_gguf_file_what_is_mapped(dit, tmp_path, monkeypatch, dynamic):
    """Weights in blocks and what is beside them, but where there is no dynamic VRAM."""
    monkeypatch.setattr(memory, "aimdo_enabled", dynamic)
    tensors, _ = read_gguf(dit.write_as(tmp_path, "Q8_0"))
    kinds = set()
    for tensor in tensors.values():
        held = stored(tensor) if is_gguf(tensor) else tensor
        copy = torch.empty_like(held)
        assert memory.read_tensor_file_slice_into(held, copy) == dynamic
        assert not dynamic or torch.equal(copy, held)
        assert not read_into(copy, held)  # a copy of the host
        kinds.add(is_gguf(tensor))
    assert kinds == {False, True}
