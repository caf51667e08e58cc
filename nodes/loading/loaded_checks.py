"""Checks of a built model: that it got all its tensors, and holds floats that a trained model can hold.

ComfyUI goes on without a tensor, with whatever lay in memory. The checks of a file know weights, biases and quantized
layers by their names. Only the built model says what else it has: modulations, tables, positions, tokens.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor

from ...kernels import LazyTensor
from ..comfyui.patcher import CALLBACK_KEY, DIFFUSION_MODEL, weight_below_patches
from ..files.attention_choices import CONFIG
from ..files.block_lists import AGAIN, block_of, check_lists, lists_in
from ..files.holding import is_gguf
from ..files.reading.values import WEIGHT_DTYPES, check_finite
from .load_plan import LoadPlan

# ComfyUI builds them into every LTX-2 and uses those of its text encoder.
_MAY_BE_MISSING = re.compile(r"(audio|video)_embeddings_connector\.")
# Buffers that modules compute when they are made: blur kernels, rotary frequencies, a fixed mix of frames.
_COMPUTED = re.compile(r"(.*\.)?(kernel|freqs|scale|mix_factor)")
_AT_ONCE = 1 << 20  # elements; on a card a larger tensor is checked when it got there
_INDICES = (torch.int64, torch.bool)  # of buffers. No damage makes them of floats, which are shorter.


def check_loaded(model: ModelPatcher, names: Collection[str], operations: type, plan: LoadPlan) -> None:
    """Raise ValueError naming the first tensor that a loaded MODEL lacks, or of a file's that no trained model has.

    `model` was just built, with `operations` and `plan`, of tensors of these `names`. Large tensors are checked on the
    card when a sampling begins, which then raises it: on the host it would take long.
    """
    module = model.model.diffusion_model
    computed = {name for name, held in module.named_buffers() if held.numel() == 0 or _COMPUTED.fullmatch(name)}
    linears = (operations.Linear, getattr(operations, "MoEExperts", operations.Linear))
    unset = [f"{name}.weight" for name, m in module.named_modules() if isinstance(m, linears) and m.weight is None]
    needed = [name for name in (*unset, *plan.missing) if name not in computed and not _MAY_BE_MISSING.match(name)]
    # An older ComfyUI knows no layers' choices of attention, and a model lacks none of them.
    unexpected = [name for name in plan.unexpected if not name.endswith(CONFIG)]
    known = {*names, *unexpected}  # which ComfyUI may have renamed
    lacking = list(dict.fromkeys([*needed, *_overlooked(unexpected, known)]))
    if lacking:
        others = f", and {len(lacking) - 1} more tensors" if len(lacking) > 1 else ""
        raise ValueError(f"{lacking[0]} is missing{others}; {AGAIN}")
    _check_blocks(module, unexpected, known)
    if plan.file:
        _check_values(model, set(names), plan)


def unscaled_codes(tensors: Mapping[str, torch.Tensor], marked: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the weights of marked layers, by layer, that `check_scaled` compares: they may be those of no linear."""
    weights = {layer: tensors[f"{layer}.weight"] for layer in marked if f"{layer}.weight" in tensors}
    return {k: w for k, w in weights.items() if not is_gguf(w) and (w.ndim > 3 or w.numel() <= _AT_ONCE)}


def check_scaled(model: ModelPatcher, codes: Mapping[str, torch.Tensor], operations: type) -> None:
    """Raise ValueError naming the first layer of a loaded MODEL that holds `unscaled_codes` as if they were weights.

    ComfyUI scales those of some classes of layers, and convolutions are not among them.
    """
    modules = dict(model.model.diffusion_model.named_modules())
    for layer, weight in codes.items():
        module = modules.get(layer)
        held = getattr(module, "weight", None)
        if held is None or isinstance(module, operations.Linear) or isinstance(held, QuantizedTensor):
            continue
        if held.shape == weight.shape and torch.equal(held.detach().float().cpu(), weight.float().cpu()):
            raise ValueError(
                f"{layer}.weight is quantized ({weight.dtype}) and belongs to a {type(module).__name__}, which this "
                "ComfyUI computes without its scale: the image would be noise. Take a file in which such layers have "
                "16 bits"
            )


def _overlooked(unexpected: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yield what a file may lack of a part that ComfyUI therefore built the model without.

    Files hold tensors that their model does not need. But a bias without its weight, and what all blocks but an earlier
    one have, are what is left of something that it does.
    """
    having: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in unexpected:
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight not in names:
            yield weight
        if block := block_of(name):
            having[block[0], block[2]].add(block[1])
    blocks = lists_in(names)
    for (before, after), those in having.items():
        # By their number first: a file can have many thousands of such names.
        if len(those) > 1 and len(blocks[before]) - len(those) == 1:
            (without,) = blocks[before].keys() - those
            if without < max(those):
                yield f"{before}{without}{after}"


def _check_blocks(module: torch.nn.Module, unexpected: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError for blocks that a file has and the model has not.

    ComfyUI counts blocks up to the first that the file lacks, or reads their number in its metadata. Of a list that
    lacks its first one it makes none, and often not even the list.
    """
    unbuilt = []  # of lists that are not there
    for name in unexpected:
        parent, before = module, 0  # the last module on the way to the tensor, and how long the name up to it is
        for part in name.split("."):
            child = getattr(parent, part, None)
            if not isinstance(child, torch.nn.Module):
                break
            parent, before = child, before + len(part) + 1
        of_list, part = name[:before], name[before:].partition(".")[0]
        if isinstance(parent, torch.nn.ModuleList) and part.isdecimal():
            if any(other.startswith(f"{of_list}{len(parent)}.") for other in names):
                raise ValueError(
                    f"the model would have {len(parent)} blocks of {of_list[:-1]}, and the file holds more, such as "
                    f"{of_list}{part}; its metadata or its tensors are damaged; {AGAIN}"
                )
            raise ValueError(f"{of_list}{len(parent)} is missing, but {of_list}{part} is there; {AGAIN}")
        if (block := block_of(name)) and before <= len(block[0]):
            unbuilt.append(name)
    check_lists(unbuilt, names)


def _check_values(model: ModelPatcher, names: Collection[str], plan: LoadPlan) -> None:
    module = model.model.diffusion_model
    buffers = dict(module.named_buffers())
    for name in sorted(plan.unexplained.keys() - set(plan.unexpected)):
        dtype, buffer = plan.unexplained[name], buffers.get(name)
        if dtype not in _INDICES or buffer is None or buffer.dtype != dtype:  # no table of indices that the model has
            raise ValueError(f"{name} is {dtype}, which no weight is; {AGAIN}")
    on_card = not comfy.model_management.is_device_cpu(model.load_device)
    later = []
    # Of buffers those that come from its file. PixArt's is a parameter.
    for name, tensor in (*module.named_parameters(), *((n, held) for n, held in buffers.items() if n in names)):
        if isinstance(tensor, (QuantizedTensor, LazyTensor)) or tensor.dtype not in WEIGHT_DTYPES:
            continue  # lazy ones are checked by their first copy
        small = tensor.numel() <= _AT_ONCE
        if small and name in names and name.endswith((".weight", ".bias")):
            continue  # checked in the file
        if small or not on_card:
            check_finite(name, tensor.detach())
        else:
            later.append(name)

    def check_there(patcher: ModelPatcher) -> None:
        for name in later:
            check_finite(f"{plan.file}: {name}", weight_below_patches(patcher, f"{DIFFUSION_MODEL}{name}"))
        later.clear()

    if later:
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, check_there)
