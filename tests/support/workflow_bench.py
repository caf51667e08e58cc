"""Workflows of ComfyUI's own nodes, run with float models and with their INT8 twins in one server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file, save_file

from . import adapters, workflows
from .server import ComfyServer
from .tensors import relative_error
from .workflows import Link, Prompt, link

TEXT, OTHER_TEXT = "INT8", "DIT3"
STEPS = 3
CFG = 3.0
FIRST, SECOND = "first", "second"
SECOND_FILE = "second.safetensors"
LINEAR = re.compile(r"joint_blocks\..*\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight")
SCALE = 0.2  # what an adapter changes of a weight, relative to the norm


class Graph(Prompt):
    """A prompt under construction whose two models, from `files` by name, come from one kind of loader."""

    def __init__(self, load: Callable[[Prompt, str], Link], files: Mapping[str, str]) -> None:
        super().__init__()
        self._load, self._files = load, files
        self._loaded: dict[str, Link] = {}

    def node(self, class_type: str, **inputs) -> Link:
        """Add a node; its first output."""
        return link(self.add(class_type, **inputs))

    def model(self, name: str) -> Link:
        """A MODEL, of which a prompt has one loader."""
        if name not in self._loaded:
            self._loaded[name] = self._load(self, self._files[name])
        return self._loaded[name]

    @property
    def first(self) -> Link:
        return self.model(FIRST)

    @property
    def second(self) -> Link:
        return self.model(SECOND)

    def text(self, text: str) -> Link:
        """A conditioning."""
        return workflows.glyph_conditioning(self, text)[0]

    def basic(self, model: Link, positive: Link | None = None) -> Link:
        """A guider without guidance."""
        return self.node("BasicGuider", model=model, conditioning=positive or self.text(TEXT))

    def cfg(self, model: Link, positive: Link | None = None) -> Link:
        """A guider with a negative prompt."""
        negative = self.text(OTHER_TEXT)
        return self.node("CFGGuider", model=model, positive=positive or self.text(TEXT), negative=negative, cfg=CFG)

    def lora(self, model: Link, kind: str = "lora", strength: float = 0.7) -> Link:
        """A MODEL with one of the adapter files."""
        return self.node("LoraLoaderModelOnly", model=model, lora_name=f"{kind}.safetensors", strength_model=strength)

    def hooked(self, hooks: Link) -> Link:
        """The positive conditioning with hooks."""
        return self.node(
            "ConditioningSetProperties", cond_NEW=self.text(TEXT), strength=1.0, set_cond_area="default", hooks=hooks
        )

    def hook_lora(self) -> Link:
        """Hooks that apply the LoRA."""
        return self.node("CreateHookLoraModelOnly", lora_name="lora.safetensors", strength_model=0.7)


Guider = Callable[[Graph], Link]


def plain(graph: Graph) -> Link:
    """The first model by itself."""
    return graph.basic(graph.first)


class Bench:
    """The float models and their INT8 twins in one server."""

    def __init__(self, server: ComfyServer, int8_first: str) -> None:
        self.server = server
        files = {FIRST: workflows.GLYPH_MODEL, SECOND: SECOND_FILE}
        self._loading = {
            "float": (workflows.stock_model, files),
            "INT8": (workflows.int8_model, files | {FIRST: int8_first}),
        }
        self._kept: dict[tuple, list[torch.Tensor]] = {}

    def graph(self, kind: str) -> Graph:
        """An empty prompt; the kind is "float" or "INT8"."""
        return Graph(*self._loading[kind])

    def run(self, graph: Graph, *latents: Link) -> list[torch.Tensor]:
        """Run a prompt that samples latents."""
        nodes = [workflows.save_latents(graph, samples) for samples in latents]
        results = self.server.queue(graph)
        paths = [self.server.saved_path(results[node], "latents") for node in nodes]
        return [load_file(path)["latent_tensor"] for path in paths]

    def sample(self, kind: str, guider: Guider) -> torch.Tensor:
        """The latents of a workflow."""
        return self._sample(kind, guider)[0]

    def plain_afterwards(self, guider: Guider) -> torch.Tensor:
        """What the first INT8 model draws after the workflow, in the same prompt."""
        return self._sample("INT8", guider)[1]

    def error(self, guider: Guider) -> float:
        """What INT8 costs."""
        return relative_error(self.sample("INT8", guider), self.sample("float", guider))

    def _sample(self, kind: str, guider: Guider) -> list[torch.Tensor]:
        if (kind, guider) not in self._kept:
            expected = None if guider is plain else self.sample(kind, plain)
            graph = self.graph(kind)
            latents = sampled(graph, guider(graph))
            latents, after = self.run(graph, latents, sampled_after(graph, latents, plain(graph)))
            self._kept[kind, guider] = [latents, after]
            if expected is not None and not torch.equal(after, expected):
                self.server.forget()  # what is broken now must not break the next workflow
        return self._kept[kind, guider]


def sampled(graph: Graph, guider: Link, latent: Link | None = None, text: str = TEXT) -> Link:
    """Latents of a guider; all have the schedule of the first model."""
    latent = latent or workflows.glyph_conditioning(graph, text)[1]
    return workflows.sampled(graph, graph.first, guider, latent, steps=STEPS, seed=0)


def sampled_after(graph: Graph, latents: Link, guider: Link) -> Link:
    """The same once those latents are there: none of them is in the result, but ComfyUI has to wait for them."""
    return sampled(graph, guider, graph.node("LatentMultiply", samples=latents, multiplier=0.0))


def prepare(server: ComfyServer) -> Bench:
    """Write all files. The first INT8 model's has smoothed weights; the second is quantized while it is loaded."""
    models = server.base / "models"
    first = load_file(models / "diffusion_models" / workflows.GLYPH_MODEL)
    weights = {name.removesuffix(".weight"): first[name].float() for name in first if LINEAR.fullmatch(name)}
    adapter_files = {kind: getattr(adapters, kind)(weights, SCALE) for kind in ("lora", "loha", "lokr")}
    adapter_files["other_lora"] = adapters.lora(dict(reversed(weights.items())), SCALE)
    second = adapters.with_delta(first, adapters.lora(weights, 2 * SCALE, rank=16))
    for folder in ("loras", "checkpoints"):
        (models / folder).mkdir(exist_ok=True)
    for name, tensors in adapter_files.items():
        save_file(tensors, models / "loras" / f"{name}.safetensors")
    save_file(second, models / "diffusion_models" / SECOND_FILE)
    checkpoint = {f"model.diffusion_model.{name}": tensor for name, tensor in second.items()}
    save_file(checkpoint, models / "checkpoints" / SECOND_FILE)

    prompt = Prompt()
    model = workflows.calibrated_model(prompt, workflows.stock_model(prompt), text=TEXT, steps=STEPS, protect_layers=0)
    saving = workflows.save_model(prompt, model)
    return Bench(server, server.saved_path(server.queue(prompt)[saving]).name)
