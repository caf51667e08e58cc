"""Memory and time of a prompt: full-width text encoders with random weights in ComfyUI, in bf16, FP8, native INT8 and
with this pack's kernel.

    python tests/studies/text_encoders.py --comfyui PATH [--variants NAME ...] [--out DIR]

Needs an NVIDIA card with 40 GB of memory and 64 GB of host memory; `--tiny` tries the script out on a CPU. "first" and
"cold" are a prompt whose encoder lies in host memory: the first of all, which also compiles and tunes kernels, and a
later one. The other times are medians of prompts whose encoder lies on the card.
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import Rows, Study, failures, markdown, number, ratio, row_of, synchronize, wall_and_host

TOKENS = (64, 512)  # of the prompts
WRITTEN = 16  # tokens that an encoder goes on with

# A title, the form of the weights, and to how many bits the kernel rounds activations: 16 for users, None without it.
VARIANTS = {
    "bf16": ("bf16", "bf16", None),
    "fp8": ("scaled FP8", "fp8", None),
    "native": ("native INT8", "native", None),
    "pack": ("this pack", "native", 16),
    "pack-8": ("this pack, activations of 8 bits", "native", 8),
}


class Clips:
    """The CLIPs of one encoder, of which only the last is held: several variants may have the same. A variant with
    activations of 8 bits changes it for ComfyUI too, so it comes last."""

    def __init__(self, random) -> None:
        self._random = random
        self._kind, self._clip = None, None

    def get(self, variant: str):
        """That of a variant."""
        _, kind, bits = VARIANTS[variant]
        if kind != self._kind:
            self._kind = self._clip = None
            self._clip = self._random.clip(kind)
            self._kind = kind
        if bits is None:
            return self._clip
        from int8_dit.nodes.linears.apply_kernel import apply_to_text_encoder

        for module in self._clip.cond_stage_model.modules():
            if hasattr(module, "_full_precision_mm"):
                module._full_precision_mm = bits == 16
                vars(module).pop("known_weight", None)  # which says how many bits it was
        return apply_to_text_encoder(self._clip, "fused int8")


def measure(random, clips: Clips, variant: str, arguments, expected: dict) -> dict:
    """The figures of a row."""
    import comfy.model_management

    from support.tensors import relative_error

    clip, device = clips.get(variant), random.device
    prompts = {tokens: random.prompt(tokens) for tokens in TOKENS}
    longest = prompts[max(prompts)]

    def encode(prompt):
        return clip.encode_from_tokens(prompt)

    def seconds(run) -> float:
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - begin

    def unload() -> None:
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()

    unload()
    figures = {"weights_gb": comfy.model_management.module_size(clip.cond_stage_model) / 1e9}
    figures["first_s"] = seconds(partial(encode, longest))
    unload()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    figures["cold_s"] = seconds(partial(encode, longest))
    if device.type == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    for tokens, prompt in prompts.items():
        output = encode(prompt).float()
        figures[f"error_{tokens}"] = relative_error(output, expected.setdefault(tokens, output))
        times = wall_and_host(partial(encode, prompt), device, arguments.repetitions)
        figures |= {f"{name}_{tokens}": value for name, value in times.items()}
    if random.encoder.writes and VARIANTS[variant][2] != 8:

        def write(count: int) -> None:
            clip.generate(prompts[min(prompts)], do_sample=False, max_length=count)

        write(2)
        one, more = [seconds(partial(write, count)) for count in (1, 1 + WRITTEN)]
        figures["token_ms"] = (more - one) * 1e3 / WRITTEN
    return figures


def table(rows: list[dict]) -> str:
    """A line a row."""
    columns = ["encoder", "variant", "weights GB", "peak GB", "first s", "cold s"]
    for count in TOKENS:
        columns += [f"ms, {count} tokens", "vs native INT8", "rel. error"]
    columns.append("ms per token written")
    lines = []
    for row in rows:
        base = row_of(rows, encoder=row["encoder"], name="native")
        line = [row["encoder"], row["variant"]]
        line += [number(row, key, ".2f") for key in ("weights_gb", "peak_gb", "first_s", "cold_s")]
        for count in TOKENS:
            line.append(number(row, f"ms_{count}", ".1f"))
            line.append(ratio(row, base, f"ms_{count}"))
            line.append(number(row, f"error_{count}", ".4f"))
        lines.append([*line, number(row, "token_ms", ".1f")])
    return markdown(columns, lines)


def main() -> None:
    study = Study(__doc__, "text_encoders")
    study.option("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    study.option("--repetitions", type=int, default=9)
    study.tuning(0.5)
    study.option("--tiny", action="store_true", help="a few small layers")
    arguments = study.start()
    from support.random_encoders import ENCODERS, SPIKE, RandomEncoder

    rows = Rows()
    for name, encoder in ENCODERS.items():
        random = RandomEncoder(encoder, study.device, encoder.tiny if arguments.tiny else {})
        clips, expected = Clips(random), {}
        for variant in arguments.variants:
            labels = {"encoder": name, "name": variant, "variant": VARIANTS[variant][0]}
            run = partial(measure, random, clips, variant, arguments, expected)
            with torch.inference_mode():  # as ComfyUI loads and runs everything
                rows.measure(labels, run, 90.0)
    about = (
        f", random weights, some channels {SPIKE:g} times as large as the others. "
        "The error is that of the conditioning against bf16's."
    )
    tables = table(rows), failures(rows, "encoder", "variant")
    study.write(about, *tables, spikes=SPIKE, rows=rows)


if __name__ == "__main__":
    main()
