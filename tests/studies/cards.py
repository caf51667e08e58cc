"""The table of cards: every benchmark that users have sent, a row each.

    python tests/studies/cards.py

Put the `int8_benchmark_*.json` of the node Kernel Benchmark into results/cards/ under the card's name, and run this.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.append(str(PROJECT))

from kernels.benchmark import markdown, title
from kernels.benchmark.methods import BF16, COMFYUI_INT8, FUSED
from kernels.benchmark.shape_results import LinearShape, ShapeResult

RESULTS = Path(__file__).resolve().parent / "results"
RIVALS = (
    BF16,
    COMFYUI_INT8,
    "fp8 _scaled_mm",
    "fp8 dequantized",
    "NF4 dequantized",
    "GGUF Q8_0 dequantized",
    "fake-quant",
)


def row(content: Mapping) -> list[str]:
    """A card's row: the geometric mean over its shapes of the fused kernel's speed relative to each rival."""
    results = [ShapeResult(LinearShape(**s["shape"]), s["m"], rounds=s["rounds"]) for s in content["shapes"]]
    cells = [title(content["environment"]), "yes" if content["health"].startswith("The card is healthy") else "**no**"]
    for rival in RIVALS:
        speeds = [speed for result in results if (speed := result.speedup(FUSED, rival)) is not None]
        cells.append(f"{statistics.geometric_mean(speeds):.2f} x" if speeds else "-")
    return [*cells, str(len(results))]


def document() -> str:
    """The whole page."""
    files = sorted((RESULTS / "cards").glob("*.json"))
    rows = [row(json.loads(file.read_text(encoding="utf-8"))) for file in files]
    columns = ["card", "healthy", *(f"fused int8 vs {rival}" for rival in RIVALS), "shapes"]
    lines = [
        "# Cards",
        "How many times as fast a linear is on the fused kernel, quantization included: geometric means over the "
        "shapes of each run of **Kernel Benchmark**. A run on an unhealthy card says nothing.",
        markdown(columns, rows),
        "Yours is missing? Run the template *INT8 kernel benchmark* and open an issue with its JSON.",
    ]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "cards.md").write_text(document(), encoding="utf-8")
    print(document())
