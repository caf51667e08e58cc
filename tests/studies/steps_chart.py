"""Draws the charts of README.md out of results/ideogram4_attention/ideogram4.json and results/words/words.json.

python tests/studies/steps_chart.py
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS.parent)]

from kernels.card.machine import title
from support.small_png import save_small_png

RESULTS = Path(__file__).resolve().parent / "results"
SIDE = 1024
STEPS = {
    "bf16": "bf16",
    "native": "ComfyUI's INT8",
    "kitchen-attention": "ComfyUI's INT8 ConvRot, all of\ncomfy-kitchen's fusions and INT8 attention",
    "unfused": "this pack, linears only",
    "pack": "this pack, ComfyUI's attention",
    "attention": "this pack, INT8 attention",
    "exact": "this pack, the fastest exact attention",
}
FIDELITY = {
    "NF4": "NF4 (4 bits)",
    "Q4_K": "GGUF Q4_K (4.5 bits)",
    "FP8": "FP8",
    "FP8 scaled": "FP8 scaled",
    "naive W8A8": "this pack, quantized while loading",
    "ComfyUI ConvRot INT8": "ComfyUI's INT8 ConvRot",
    "Q8_0": "GGUF Q8_0 (8.5 bits)",
    "best per layer, protected, calibrated rounding": "this pack, Quantize to INT8",
}
OWN, OTHER, INK, MUTED = "#2f6fd0", "#a9b3bf", "#1b1f24", "#5b6570"


def draw(path: Path, heading: str, bars: dict[str, tuple[float, str]], machine: str) -> None:
    """Horizontal bars: (length, what stands behind it) by label. This pack's are blue."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((8, 3.5), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    longest = max(length for length, _ in bars.values())
    for place, (label, (length, text)) in enumerate(bars.items()):
        axes.barh(place, length, color=OWN if label.startswith("this") else OTHER, height=0.66)
        axes.text(length + 0.012 * longest, place, text, va="center", color=INK, size=10)
    axes.set_yticks(range(len(bars)), bars, size=10, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.32 * longest)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    figure.suptitle(heading, size=12, color=INK)
    figure.supxlabel(machine, size=7, color=MUTED)
    save_small_png(figure, path)


def main() -> None:
    stored = json.loads((RESULTS / "ideogram4_attention" / "ideogram4.json").read_text(encoding="utf-8"))
    times = {row["name"]: row[f"ms_{SIDE}"] for row in stored["steps"] if f"ms_{SIDE}" in row}
    draw(
        RESULTS / "ideogram4_attention" / "steps.png",
        f"A step of Ideogram 4 at {SIDE} px: shorter is better",
        {
            label: (times[name], f"{times[name]:.0f} ms   {times['bf16'] / times[name]:.2f} x")
            for name, label in STEPS.items()
        },
        f"{title(stored['environment'])}, ComfyUI {stored['comfyui']}",
    )
    stored = json.loads((RESULTS / "words" / "words.json").read_text(encoding="utf-8"))
    errors = {name: 100 * stored["figures"][name]["all"]["latent"][0] for name in FIDELITY}
    draw(
        RESULTS / "words" / "fidelity.png",
        "How far an image moves from that of bf16: shorter is better",
        {label: (errors[name], f"{errors[name]:.1f} %") for name, label in FIDELITY.items()},
        f"Mean latent error of {len(stored['texts'])} images of a small model that writes words\n"
        f"{title(stored['environment'])}, ComfyUI {stored['comfyui']}",
    )


if __name__ == "__main__":
    main()
