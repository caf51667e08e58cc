"""Memory and time of a prompt: full-width text encoders with random weights in ComfyUI, in bf16, FP8, native INT8 and
with this pack's kernel.

    python tests/studies/text_encoders.py --comfyui PATH [--encoders NAME ...] [--variants NAME ...] [--out DIR]

Needs an NVIDIA card with 40 GB of memory and 64 GB of host memory; `--tiny` tries the script out on a CPU. "first" and
"cold" are a prompt whose encoder lies in host memory: the first of all, which also compiles and tunes kernels, and a
later one. The other times are medians of prompts whose encoder lies on the card.
"""

import argparse
import logging
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results" / "text_encoders"
# A name, the form of the weights, and to how many bits the kernel rounds activations: 16 for users, None without it.
VARIANTS = {
    "bf16": ("bf16", None),
    "fp8": ("fp8", None),
    "native": ("native", None),
    "pack": ("native", 16),
    "pack-8": ("native", 8),
}
TITLES = {
    "bf16": "bf16",
    "fp8": "scaled FP8",
    "native": "native INT8",
    "pack": "this pack",
    "pack-8": "this pack, activations of 8 bits",
}


class Clips:
    """The CLIPs of one encoder, of which only the last is held: several variants may have the same. A variant with
    activations of 8 bits changes it for ComfyUI too, so it comes last."""

    def __init__(self, random) -> None:
        self._random = random
        self._kind, self._clip = None, None

    def get(self, variant: str):
        """That of a variant."""
        kind, bits = VARIANTS[variant]
        if kind != self._kind:
            self._kind = self._clip = None
            self._clip = self._random.clip(kind)
            self._kind = kind
        if bits is None:
            return self._clip
        from int8_dit.nodes.patching.apply_kernel import apply_to_text_encoder

        for module in self._clip.cond_stage_model.modules():
            if hasattr(module, "_full_precision_mm"):
                module._full_precision_mm = bits == 16
                vars(module).pop("known_weight", None)  # which says how many bits it was
        return apply_to_text_encoder(self._clip, "fused int8")


def measure(random, clips: Clips, variant: str, arguments, expected: dict) -> dict:
    """The figures of a row."""
    import comfy.model_management

    from support.measuring import synchronize, wall_and_host
    from support.tensors import relative_error

    clip, device = clips.get(variant), random.device
    prompts = {tokens: random.prompt(tokens) for tokens in arguments.tokens}
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
    if random.encoder.writes and arguments.written and VARIANTS[variant][1] != 8:

        def write(count: int) -> None:
            clip.generate(prompts[min(prompts)], do_sample=False, max_length=count)

        write(2)
        one, more = [seconds(partial(write, count)) for count in (1, 1 + arguments.written)]
        figures["token_ms"] = (more - one) * 1e3 / arguments.written
    return figures


def table(rows: list[dict], tokens: list[int]) -> str:
    """A line a row."""
    from int8_dit.kernels.benchmark import markdown
    from support.measuring import number, ratio, row_of

    columns = ["encoder", "variant", "weights GB", "peak GB", "first s", "cold s"]
    for count in tokens:
        columns += [f"ms, {count} tokens", "vs native INT8", "rel. error"]
    columns.append("ms per token written")
    lines = []
    for row in rows:
        base = row_of(rows, encoder=row["encoder"], name="native")
        line = [row["encoder"], TITLES[row["name"]]]
        line += [number(row, key, ".2f") for key in ("weights_gb", "peak_gb", "first_s", "cold_s")]
        for count in tokens:
            line.append(number(row, f"ms_{count}", ".1f"))
            line.append(ratio(row, base, f"ms_{count}"))
            line.append(number(row, f"error_{count}", ".4f"))
        lines.append([*line, number(row, "token_ms", ".1f")])
    notes = [f"- {row['encoder']}, {TITLES[row['name']]}: {row['failed']}" for row in rows if "failed" in row]
    return "\n\n".join([markdown(columns, lines), *(["\n".join(notes)] if notes else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", metavar="NAME", help="how names begin; all by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 512], help="lengths of prompts")
    parser.add_argument("--written", type=int, default=16, help="tokens that an encoder goes on with; 0 for none")
    parser.add_argument("--spikes", type=float, default=32.0, help="how large outlier channels are; 1 for none")
    parser.add_argument("--layers", type=int, help="so many, instead of all")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--row-seconds", type=float, default=90.0, help="the most for a row")
    parser.add_argument("--total-seconds", type=float, default=230.0, help="the most for all; later rows are left out")
    parser.add_argument("--tuning-seconds", type=float, default=0.5, help="for a shape of the GEMM; 0 for no tuning")
    parser.add_argument("--tiny", action="store_true", help="a few small layers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for text_encoders.md and text_encoders.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("int8_dit").setLevel(logging.INFO)
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support.measuring import Rows, limit_tuning, write_results
    from support.random_encoders import ENCODERS, RandomEncoder

    begun = arguments.encoders or list(ENCODERS)
    names = [name for name in ENCODERS if any(name.startswith(beginning) for beginning in begun)]
    if not names:
        parser.error(f"no encoder begins so; there are {', '.join(ENCODERS)}")
    limit_tuning(arguments.tuning_seconds)
    device = comfy.model_management.get_torch_device()
    machine = describe_machine(device)
    rows, begin = Rows(), time.monotonic()
    for name in names:
        encoder, expected = ENCODERS[name], {}
        settings = dict(encoder.tiny) if arguments.tiny else {}
        if arguments.layers:
            settings[encoder.depth] = arguments.layers
        random = RandomEncoder(encoder, device, settings, arguments.spikes)
        clips = Clips(random)
        for variant in arguments.variants:
            left = arguments.total_seconds - (time.monotonic() - begin)
            if left < 5:
                rows.append({"encoder": name, "name": variant, "failed": "left out, the time was over"})
                continue
            run = partial(measure, random, clips, variant, arguments, expected)
            with torch.inference_mode():  # as ComfyUI loads and runs everything
                rows.measure({"encoder": name, "name": variant}, run, min(arguments.row_seconds, left))
    spikes = f"{arguments.spikes:g} times as large as the others" if arguments.spikes != 1 else "as large as the others"
    text = (
        f"{title(machine)}, ComfyUI {comfyui_version}, random weights, some channels {spikes}. The error is that of "
        f"the conditioning against bf16's.\n\n{table(rows, arguments.tokens)}\n"
    )
    data = {"environment": machine, "comfyui": comfyui_version, "spikes": arguments.spikes, "rows": rows}
    write_results(arguments.out, "text_encoders", text, data)


if __name__ == "__main__":
    main()
