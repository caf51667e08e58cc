"""Test-only ComfyUI nodes around the glyph model: text in, images of its characters out, no text encoder and no VAE.

ComfyUI reaches this folder through a symlink in custom_nodes; tests/glyphs is found beside the folder's real place.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from comfy_api.latest import ComfyExtension, io


def _load_glyphs() -> None:
    """Import tests/glyphs under a name of its own, so that nothing is added to sys.path of a running ComfyUI."""
    folder = Path(__file__).resolve().parents[1] / "glyphs"
    spec = importlib.util.spec_from_file_location(
        "int8_dit_test_glyphs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)


_load_glyphs()
from int8_dit_test_glyphs import conditioning, latents


class GlyphConditioning(io.ComfyNode):
    """One batch entry per character: its conditioning, and an empty latent of the same batch size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GlyphConditioning",
            display_name="Glyph Conditioning (test)",
            category="testing/glyphs",
            description="Conditions the glyph model on capital letters and digits, one image per character.",
            inputs=[io.String.Input("text", default="INT8", tooltip="A-Z and 0-9, without spaces.")],
            outputs=[io.Conditioning.Output(), io.Latent.Output()],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        context, pooled = conditioning.encode(text)
        empty = torch.zeros(len(text), latents.CHANNELS, latents.SIDE, latents.SIDE)
        return io.NodeOutput([[context, {"pooled_output": pooled}]], {"samples": empty})


class GlyphDecode(io.ComfyNode):
    """Latents to images; stands in for a VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GlyphDecode",
            display_name="Glyph Decode (test)",
            category="testing/glyphs",
            description="Turns sampled latents of the glyph model into 64 x 64 images.",
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: dict) -> io.NodeOutput:
        grey = latents.model_to_image(latents.node_to_model(samples["samples"].float())).clamp(0, 1)
        return io.NodeOutput(grey.unsqueeze(-1).repeat(1, 1, 1, 3))


class GlyphExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [GlyphConditioning, GlyphDecode]


async def comfy_entrypoint() -> GlyphExtension:
    return GlyphExtension()
