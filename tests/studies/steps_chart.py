"""Draws the chart of README.md out of results/ideogram4/ideogram4.json.

python tests/studies/steps_chart.py
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS.parent)]

from kernels.card.machine import title
from support.small_png import save_small_png

RESULTS = Path(__file__).resolve().parent / "results" / "ideogram4"
SIDE = 1024
BARS = {
    "bf16": "bf16",
    "native": "ComfyUI's INT8",
    "kitchen-attention": "ComfyUI's INT8 ConvRot, all of\ncomfy-kitchen's fusions and INT8 attention",
    "unfused": "this pack, linears only",
    "pack": "this pack",
    "attention": "this pack + INT8 attention",
}
OWN, OTHER, INK, MUTED = "#2f6fd0", "#a9b3bf", "#1b1f24", "#5b6570"


def main() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stored = json.loads((RESULTS / "ideogram4.json").read_text(encoding="utf-8"))
    times = {row["name"]: row[f"ms_{SIDE}"] for row in stored["steps"] if f"ms_{SIDE}" in row}
    figure = Figure((8, 3.5), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (name, label) in enumerate(BARS.items()):
        axes.barh(place, times[name], color=OWN if label.startswith("this") else OTHER, height=0.66)
        speed = f"{times[name]:.0f} ms   {times['bf16'] / times[name]:.2f} x"
        axes.text(times[name] + 4, place, speed, va="center", color=INK, size=10)
    axes.set_yticks(range(len(BARS)), BARS.values(), size=10, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.32 * times["bf16"])
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)
    figure.suptitle(f"A step of Ideogram 4 at {SIDE} px: shorter is better", size=12, color=INK)
    machine = f"{title(stored['environment'])}, ComfyUI {stored['comfyui']}"
    figure.supxlabel(machine, size=7, color=MUTED)
    save_small_png(figure, RESULTS / "steps.png")


if __name__ == "__main__":
    main()
