"""Prompts in ComfyUI's API format, for the demo and the tests. Standard library only."""

from __future__ import annotations

Link = list  # [node id, output slot], ComfyUI's own notation

GLYPH_MODEL = "glyph_dit.safetensors"
GLYPH_TEXT = "INT8DIT3090"
GLYPH_STEPS = 12
# The glyph model has few linears; the node's own default would protect nearly all of them.
GLYPH_PROTECT_LAYERS = 2


class Prompt(dict):
    """An API-format prompt that is written node by node."""

    def add(self, class_type: str, **inputs) -> str:
        """Add a node and return its id; an input is a value or a :func:`link`."""
        node_id = str(len(self) + 1)
        self[node_id] = {"class_type": class_type, "inputs": inputs}
        return node_id


def link(node_id: str, slot: int = 0) -> Link:
    """The output ``slot`` of a node, as another node's input."""
    return [node_id, slot]


def stock_model(prompt: Prompt, name: str = GLYPH_MODEL) -> Link:
    """The MODEL of ComfyUI's own loader."""
    return link(prompt.add("UNETLoader", unet_name=name, weight_dtype="default"))


def int8_model(prompt: Prompt, name: str, kernel: str = "fused int8") -> Link:
    """The MODEL of this pack's loader."""
    return link(prompt.add("LoadINT8DiT", model_name=name, kernel=kernel))


def calibrated_model(
    prompt: Prompt,
    model: Link,
    *,
    text: str = GLYPH_TEXT,
    steps: int = GLYPH_STEPS,
    protect_layers: int = GLYPH_PROTECT_LAYERS,
    seed: int = 0,
    **widgets: object,
) -> Link:
    """``model`` quantized after a calibration run that samples ``text`` with it; more widgets by name."""
    conditioning, latent = glyph_conditioning(prompt, text)
    run = {"sampler": _euler(prompt), "sigmas": _sigmas(prompt, model, steps), "latent_image": latent}
    run |= {"cfg": 1.0, "seed": seed, "positive.positive_0": conditioning}
    return _quantize(prompt, model, protect_layers, **run, **widgets)


def uncalibrated_model(prompt: Prompt, model: Link) -> Link:
    """``model`` quantized with nothing known about its activations."""
    return _quantize(prompt, model, 0)


def quantized_model(prompt: Prompt, model: Link, *, calibration: Link) -> Link:
    """``model`` quantized with a calibration."""
    return _quantize(prompt, model, GLYPH_PROTECT_LAYERS, calibration=calibration)


def recorded_model(prompt: Prompt, model: Link, *, text: str, steps: int) -> tuple[Link, Link]:
    """``model`` quantized after an ordinary sampler drew ``text`` with it under the recorder; also the calibration."""
    recorder = prompt.add("RecordINT8Calibration", model=model)
    sampled = glyph_latents(prompt, link(recorder, 0), text=text, steps=steps)
    calibration = link(prompt.add("CollectINT8Calibration", recording=link(recorder, 1), after=sampled))
    return quantized_model(prompt, model, calibration=calibration), calibration


def save_calibration(prompt: Prompt, calibration: Link) -> str:
    """Write a calibration; the id of the node, whose ui result names the file."""
    return prompt.add("SaveINT8Calibration", calibration=calibration, filename_prefix="int8_calibrations/calibration")


def save_model(prompt: Prompt, model: Link, filename_prefix: str = "diffusion_models/INT8") -> str:
    """Write a quantized model; the id of the node, whose ui result names the file."""
    return prompt.add("SaveINT8DiT", model=model, filename_prefix=filename_prefix, fold=False)


def glyph_images(
    prompt: Prompt, model: Link, *, text: str = GLYPH_TEXT, steps: int = GLYPH_STEPS, seed: int = 0
) -> str:
    """Sample one image per character; the id of the node whose ui result names them."""
    sampled = glyph_latents(prompt, model, text=text, steps=steps, seed=seed)
    images = prompt.add("GlyphDecode", samples=sampled)
    return prompt.add("PreviewImage", images=link(images))


def glyph_latents(
    prompt: Prompt, model: Link, *, text: str = GLYPH_TEXT, steps: int = GLYPH_STEPS, seed: int = 0
) -> Link:
    """Sample one latent per character."""
    conditioning, latent = glyph_conditioning(prompt, text)
    guider = link(prompt.add("BasicGuider", model=model, conditioning=conditioning))
    sampled = prompt.add(
        "SamplerCustomAdvanced",
        noise=link(prompt.add("RandomNoise", noise_seed=seed)),
        guider=guider,
        sampler=_euler(prompt),
        sigmas=_sigmas(prompt, model, steps),
        latent_image=latent,
    )
    return link(sampled)


def save_latents(prompt: Prompt, samples: Link) -> str:
    """Write latents; the id of the node, whose ui result names the file under "latents"."""
    return prompt.add("SaveLatent", samples=samples, filename_prefix="latents/latents")


def glyph_conditioning(prompt: Prompt, text: str) -> tuple[Link, Link]:
    """The conditioning for one image per character, and an empty latent of that batch size."""
    node = prompt.add("GlyphConditioning", text=text)
    return link(node, 0), link(node, 1)


def kernel_benchmark(prompt: Prompt, *, tokens: int, model: Link) -> str:
    """Time the linears of ``model``; the id of the node whose ui result is the table."""
    return prompt.add("INT8KernelBenchmark", tokens=tokens, model=model)


def _quantize(prompt: Prompt, model: Link, protect_layers: int, **inputs: object) -> Link:
    defaults = {
        "method": "smooth",
        "alpha": 0.5,
        "search_alpha": False,
        "protect": "number of layers",
        "protect.layers": protect_layers,
        "weight_scales": "absmax",
        "smooth_only_foldable": False,
        "kernel": "fused int8",
    }
    return link(prompt.add("QuantizeToINT8SmoothQuant", model=model, **defaults | inputs))


def _euler(prompt: Prompt) -> Link:
    return link(prompt.add("KSamplerSelect", sampler_name="euler"))


def _sigmas(prompt: Prompt, model: Link, steps: int) -> Link:
    return link(prompt.add("BasicScheduler", model=model, scheduler="simple", steps=steps, denoise=1.0))
