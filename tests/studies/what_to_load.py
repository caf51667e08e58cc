"""Steps on cards with little memory as Kernel Benchmark predicts them, beside those that were measured.

    python tests/studies/what_to_load.py [--out DIR]

Needs no card: it reads the rows of `small_cards.py` in results/small_cards_auto. What a loader computes is its step
with 24 GiB, where all weights lie on the card. What the card has for weights is what `memory` *auto* read there. The
rate of the bus was not measured in that run: it is the one with which ComfyUI's own INT8 with 12 GiB comes out right,
so that this row says nothing.
"""

import argparse
import json
import re
import sys
from pathlib import Path

STUDIES = Path(__file__).resolve().parent
sys.path.append(str(STUDIES.parents[1]))  # as a script, only this folder is there

from kernels.benchmark import markdown
from kernels.benchmark.what_to_load import step_milliseconds
from kernels.card.machine import title

MEASURED = STUDIES / "results" / "small_cards_auto" / "small_cards.json"
RESULTS = STUDIES / "results" / "what_to_load"
LARGE, FITTED = 24.0, ("stock", 12.0)


def bus_rate(computed: float, measured: float, weights: int, card: int) -> float:
    """The bytes a second with which a step that streams is predicted as it was measured."""
    streamed = weights - card
    return 1000 * streamed / (measured - (1 - streamed / weights) * computed)


def predictions(rows: list[dict]) -> tuple[float, list[tuple[float, str, float, float]]]:
    """The rate of the bus; and GiB of the card, loader, milliseconds as measured and as predicted."""
    by_case = {(row["loader"], row["free"]): row for row in rows}
    auto = {row["free"]: row["held"] for row in rows if "auto" in row["loader"]}
    rooms = {free: re.search(r"the card has ([\d.]+) GB free", held) for free, held in auto.items()}
    cards = {free: int(1e9 * float(room[1])) for free, room in rooms.items() if room}
    computed = {row["loader"]: row["ms"] for row in rows if row["free"] == LARGE}
    known = by_case[FITTED]
    rate = bus_rate(computed[FITTED[0]], known["ms"], known["weights_gb"] * 10**9, cards[FITTED[1]])
    found = []
    for (loader, free), row in by_case.items():
        if free != LARGE and "auto" not in loader and loader in computed:
            weights = row["weights_gb"] * 10**9
            predicted = step_milliseconds(computed[loader], weights, max(0, weights - cards[free]), rate)
            found.append((free, loader, row["ms"], predicted))
    return rate, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    folder = parser.parse_args().out
    content = json.loads(MEASURED.read_text(encoding="utf-8"))
    rate, found = predictions(content["rows"])
    columns = ["card, GiB free", "loader", "measured, ms a step", "predicted, ms a step", "predicted / measured"]
    rows = [
        [f"{free:g}", loader, f"{measured:.0f}", f"{predicted:.0f}", f"{predicted / measured:.2f}"]
        for free, loader, measured, predicted in found
    ]
    machine = title(content["environment"])
    said = (
        f"Measured: {machine}, dynamic VRAM. The bus: {rate / 1e9:.0f} GB/s, which makes the first row come out right."
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{markdown(columns, rows)}\n\n{said}\n\n`python tests/studies/what_to_load.py`\n"
    (folder / "what_to_load.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
