"""How a MODEL was quantized: attachments of the MODEL and an entry of the metadata of its file."""

import json
from collections.abc import Mapping

import torch

from ..comfyui.attention import attention_choices
from ..comfyui.patcher import DIFFUSION_MODEL, CallbacksMP, ModelPatcher, is_patched
from ..files.faults import json_object
from ..host import notices

RECIPE_KEY = "int8_dit_recipe"
FOLDED = "folded"
"""The entry of a recipe that says whether smoothing factors were folded into the layers before."""
_FOLDED_CALLBACK_KEY = "int8_dit_folded"
_BLOCK_FORMATS_KEY = "int8_dit_gguf_formats"
_CHOICES_KEY = "int8_dit_attention_choices"
_MOST = 1 << 22  # characters of a recipe; that of a thousand layers has about 200,000


def keep_recipe(model: ModelPatcher, recipe: Mapping[str, object]) -> None:
    """Let a MODEL know how it was quantized, in values that JSON has."""
    model.set_attachments(RECIPE_KEY, json.dumps(recipe))


def recipe_of(model: ModelPatcher) -> dict[str, object]:
    """How a MODEL was quantized; empty where it is not known."""
    return json.loads(model.get_attachment(RECIPE_KEY) or "{}")


def recipe_in(metadata: Mapping[str, str]) -> dict[str, object]:
    """How the weights of a file were quantized; empty where it is not known. What is no JSON object is not a recipe."""
    try:
        return json_object(metadata.get(RECIPE_KEY, ""), _MOST)
    except ValueError:
        return {}


def keep_recipe_of_file(model: ModelPatcher, metadata: Mapping[str, str]) -> None:
    """Let a loaded MODEL know how it was quantized."""
    recipe = recipe_in(metadata)
    if recipe:
        keep_recipe(model, recipe)
    if recipe.get(FOLDED):
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _FOLDED_CALLBACK_KEY, warn_of_patches_on_folded)


def keep_block_formats(model: ModelPatcher, formats: Mapping[str, str]) -> None:
    """Let a MODEL know which of its weights, by their names in the diffusion model, were in which of GGUF's formats."""
    if formats:
        model.set_attachments(_BLOCK_FORMATS_KEY, dict(formats))


def block_formats_of(model: ModelPatcher) -> Mapping[str, str]:
    """The GGUF formats that a MODEL's weights have or had, by their names in the diffusion model. Of a file that was
    saved as INT8 they are not known."""
    return model.get_attachment(_BLOCK_FORMATS_KEY) or {}


def keep_unknown_choices(model: ModelPatcher, choices: Mapping[str, torch.Tensor]) -> None:
    """Let a loaded MODEL keep, for its next file, the layers' choices of attention that this ComfyUI does not know."""
    known = {f"{name.removeprefix(DIFFUSION_MODEL)}.config" for name in attention_choices(model)}
    if unknown := {name: choice for name, choice in choices.items() if name not in known}:
        model.set_attachments(_CHOICES_KEY, unknown)


def unknown_choices_of(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """The choices that `keep_unknown_choices` kept, by name in a file."""
    return dict(model.get_attachment(_CHOICES_KEY) or {})


def warn_of_patches_on_folded(model: ModelPatcher) -> None:
    """Warn, once per run, if weights are patched (LoRA) in a MODEL whose weights are not in the original's basis."""
    if is_patched(model) and recipe_of(model).get(FOLDED):
        notices.warn(
            "folded-lora",
            "LoRA on a folded INT8 file",
            "the smoothing factors of this file are folded into its weights, so that a LoRA made for the original "
            "model comes out wrong. Use an INT8 file saved with fold switched off.",
        )
