"""What a file says of a MODEL beside weights, as attachments: how it was quantized (a recipe), formats, choices."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import comfy.model_detection
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ..files.attention_choices import choices_in
from ..files.errors import json_object
from ..files.holding import is_gguf
from ..files.reading.importers import Checkpoint
from ..host import notices

RECIPE_KEY = "int8_dit_recipe"
FOLDED = "folded"
"""Entry of a recipe: whether smoothing factors were folded into the layers before."""
ATTENTION = "attention"
"""Entry of a recipe: the error of INT8 attention in each block ("errors"), and which blocks stay exact ("exact")."""
_FOLDED_CALLBACK_KEY = "int8_dit_folded"
_BLOCK_FORMATS_KEY = "int8_dit_gguf_formats"
_CHOICES_KEY = "int8_dit_attention_choices"
_MOST = 1 << 22  # characters of a recipe; that of a thousand layers has about 200,000


def keep_recipe(model: ModelPatcher, recipe: Mapping[str, object]) -> None:
    """Attach a recipe, in values that JSON has, to a MODEL."""
    model.set_attachments(RECIPE_KEY, json.dumps(recipe))


def recipe_of(model: ModelPatcher) -> dict[str, object]:
    """Return the recipe of a MODEL; empty where it is not known."""
    return json.loads(model.get_attachment(RECIPE_KEY) or "{}")


def recipe_in(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the recipe in a file's metadata; empty where there is none that is a JSON object."""
    try:
        return json_object(metadata.get(RECIPE_KEY, ""), _MOST)
    except ValueError:
        return {}


def exact_attention_of(model: ModelPatcher) -> tuple[str, ...]:
    """Return the paths of blocks whose attention a calibration keeps exact; none if the entry is no list of names."""
    said = recipe_of(model).get(ATTENTION)
    exact = said.get("exact") if isinstance(said, dict) else None
    return tuple(name for name in exact if isinstance(name, str)) if isinstance(exact, list) else ()


def notes_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the attachments of a file's MODEL: its recipe, the formats of GGUF weights by their names in the diffusion
    model, and layers' choices of attention. Call before ComfyUI's loader empties the checkpoint's tensors."""
    tensors, prefix = checkpoint.tensors, comfy.model_detection.unet_prefix_from_state_dict(checkpoint.tensors)
    recipe = recipe_in(checkpoint.metadata)
    return {
        RECIPE_KEY: json.dumps(recipe) if recipe else None,
        _BLOCK_FORMATS_KEY: {k.removeprefix(prefix): t.params.gguf_format for k, t in tensors.items() if is_gguf(t)},
        _CHOICES_KEY: choices_in(tensors),
    }


def keep_notes(model: ModelPatcher, notes: Mapping[str, Any], unexpected: Collection[str]) -> None:
    """Attach a file's notes to its loaded MODEL, for its next file; of the choices of attention only `unexpected` ones,
    which this ComfyUI does not know."""
    unknown = {name: choice for name, choice in notes[_CHOICES_KEY].items() if name in unexpected}
    for key, note in {**notes, _CHOICES_KEY: unknown}.items():
        if note:
            model.set_attachments(key, note)
    if recipe_of(model).get(FOLDED):
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _FOLDED_CALLBACK_KEY, warn_of_patches_on_folded)


def gguf_formats_of(model: ModelPatcher) -> Mapping[str, str]:
    """Return the GGUF formats that weights have or had, by their names in the diffusion model; none for INT8 files."""
    return model.get_attachment(_BLOCK_FORMATS_KEY) or {}


def unknown_choices_of(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """Return the choices of attention that a MODEL keeps for its next file, by name there."""
    return dict(model.get_attachment(_CHOICES_KEY) or {})


def warn_of_patches_on_folded(model: ModelPatcher) -> None:
    """Warn, once a run, of patches (LoRAs) of a MODEL whose weights are folded, which no longer fit the original's:
    also of those that hooks or a bypass LoRA bring."""
    if model.patches or any(model.hook_patches.values()) or "bypass_lora" in model.injections:
        warn_of_folded(model)


def warn_of_folded(model: ModelPatcher) -> None:
    """Warn, once a run, if the weights of a MODEL are folded, where they are taken for the original's."""
    if recipe_of(model).get(FOLDED):
        notices.warn(
            "folded-lora",
            "LoRA or merge on a folded INT8 file",
            "the smoothing factors of this file are folded into its weights, so that a LoRA made for the original "
            "model comes out wrong, as does a merge. Use an INT8 file saved with fold switched off.",
        )
