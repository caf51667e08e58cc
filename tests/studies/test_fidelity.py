"""The fidelity command on constructed cases: what is known of them is what it finds."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("rapidocr")
STUDIES = Path(__file__).resolve().parent
TEXTS = ("WORDS", "MOTORWAYS", "FIRST\nSECOND", "QUICK", "HYPHENATED", "NORTH\nSTATION")


@pytest.fixture(scope="module")
def study(pack):
    from studies import fidelity

    return fidelity


@pytest.fixture(scope="module")
def texts():
    from words.alphabet import Text

    return [Text(tuple(text.split("\n")), number % 4, 1) for number, text in enumerate(TEXTS)]


def drawn(texts):
    from words.drawing import draw, layout

    return ((1 - draw(layout(texts))) * 255).round().byte().numpy()


@pytest.fixture
def folder_of(tmp_path):
    """Writes a folder of PNGs, with texts where they are given."""

    def make(name, images, texts=(), latents=None):
        folder = tmp_path / name
        folder.mkdir()
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number:03d}.png")
            if latents is not None:
                np.save(folder / f"{number:03d}.npy", latents[number])
        if texts:
            entries = {
                f"{n:03d}": {"text": "\n".join(text.lines), "category": text.category} for n, text in enumerate(texts)
            }
            (folder / "texts.json").write_text(json.dumps(entries))
        return folder

    return make


def results(study, folders, out):
    study.evaluate(folders, out, "here")
    stored = json.loads((out / "fidelity.json").read_text())
    assert all((out / name).stat().st_size > 1000 for name in ("bars.png", "worst.png"))
    return stored["figures"], stored["scores"], (out / "fidelity.md").read_text()


def test_identical_folders(study, texts, folder_of, tmp_path):
    images, latents = drawn(texts), np.ones((6, 2, 3), np.float32)
    folders = [folder_of("a", images, texts, latents), folder_of("b", images, latents=latents)]
    figures, _, text = results(study, folders, tmp_path / "out")
    for name in ("a", "b"):
        assert [figures[name][c]["images"] for c in ("short", "long", "two lines", "all")] == [2, 2, 2, 6]
        assert all(cell["exact"] == [1, 1, 1] and cell["distance"] == [0, 0, 0] for cell in figures[name].values())
    everything = figures["b"]["all"]
    assert everything["psnr"] == [None, None, None]  # infinite, in no mean
    assert everything["ssim"] == [1, 1, 1] and everything["latent"] == [0, 0, 0]
    assert everything["minus reference"] == {"exact": [0, 0, 0], "distance": [0, 0, 0]}
    assert "| b | short | 2 | 100.0 [100.0, 100.0] | 0.00 [0.00, 0.00] |  | 1.0000 [1.0000, 1.0000] |" in text


def test_what_differs_is_found(study, texts, folder_of, tmp_path):
    """One letter changed, two images swapped, and nothing at all, beside a faithful candidate."""
    images = drawn(texts)
    other = [replace(texts[0], lines=("WORKS",)), *texts[1:]]
    swapped = images[[3, 1, 2, 0, 4, 5]]
    folders = [
        folder_of("reference", images, texts),
        folder_of("letter", drawn(other)),
        folder_of("swapped", swapped),
        folder_of("blank", np.full_like(images, 255)),
    ]
    figures, scores, _ = results(study, folders, tmp_path / "out")
    assert [score["distance"] for score in scores["letter"]] == [1, 0, 0, 0, 0, 0]
    assert scores["letter"][0]["read"] == "WORKS" and scores["letter"][1]["psnr"] == "inf"
    assert figures["letter"]["short"]["exact"][0] == 0.5 and figures["letter"]["long"]["exact"][0] == 1
    assert figures["letter"]["all"]["minus reference"]["exact"][0] == pytest.approx(-1 / 6)

    assert [score["exact"] for score in scores["swapped"]] == [0, 1, 1, 0, 1, 1]
    assert scores["swapped"][0]["distance"] == scores["swapped"][3]["distance"] == 5  # WORDS, QUICK: no letter in place
    assert scores["swapped"][0]["psnr"] == pytest.approx(scores["swapped"][3]["psnr"]) and figures["swapped"]["all"][
        "minus first"
    ]["ssim"][0] == pytest.approx(figures["swapped"]["all"]["ssim"][0] - figures["letter"]["all"]["ssim"][0])

    assert {score["read"] for score in scores["blank"]} == {""}
    assert [score["distance"] for score in scores["blank"]] == [5, 9, 11, 5, 10, 12]
    error = np.mean((images[0] / 255 - 1) ** 2)
    assert scores["blank"][0]["psnr"] == pytest.approx(-10 * math.log10(error), abs=1e-3)
    assert figures["blank"]["all"]["minus first"]["exact"][0] == pytest.approx(-5 / 6)


def test_a_stack_is_a_folder_of_images(study, texts, folder_of, tmp_path):
    images = drawn(texts[:2])
    latents = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    folders = []
    for name, factor in (("a", 1.0), ("b", 1.1)):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        np.save(folders[-1] / "images.npy", images)
        np.save(folders[-1] / "latents.npy", latents * factor)
    (folders[0] / "texts.json").write_text(json.dumps(["WORDS", "MOTORWAYS"]))
    figures, _, _ = results(study, folders, tmp_path / "out")
    assert figures["b"]["all"]["latent"] == pytest.approx([0.1, 0.1, 0.1]) and figures["b"]["all"]["exact"][0] == 1


@pytest.mark.parametrize(
    "damage, message",
    (
        (lambda a, b: (b / "003.png").unlink(), r"^b lacks 003 of the reference\. What belongs"),
        (lambda a, b: (b / "003.png").rename(b / "3.png"), "^b lacks 003 of the reference; the reference lacks 3 of b"),
        (lambda a, b: (a / "texts.json").unlink(), "^the texts of .*a lacks 000, 001, 002 … of "),
        (
            lambda a, b: Image.new("L", (64, 64)).save(b / "002.png"),
            r"002 of b is \(64, 64\), its reference \(64, 192\)",
        ),
        (lambda a, b: [path.unlink() for path in b.iterdir()], "b holds no image"),
    ),
)
def test_what_is_wrong_is_one_clear_error(study, texts, folder_of, tmp_path, damage, message):
    folders = [folder_of("a", drawn(texts), texts), folder_of("b", drawn(texts))]
    damage(*folders)
    with pytest.raises(ValueError, match=message):
        study.evaluate(folders, tmp_path / "out", "here")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_is_wrong_and_fails(comfyui, tmp_path):
    command = [sys.executable, str(STUDIES / "fidelity.py"), "--comfyui", str(comfyui), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, str(tmp_path / "none"), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"fidelity: {tmp_path / 'none'} is no folder."


def test_reading_order_is_by_lines():
    from words.reading import in_reading_order

    def box(x, y):
        return np.array([(x, y), (x + 30, y), (x + 30, y + 10), (x, y + 10)], dtype=float)

    boxes = np.stack([box(50, 21), box(0, 2), box(45, 0), box(0, 20)])
    assert in_reading_order(boxes, ("D", "A", "B", "C")) == ["A B", "C D"]


@pytest.mark.parametrize("a, b, distance", (("", "", 0), ("ABC", "", 3), ("KITTEN", "SITTING", 3), ("AB", "BA", 2)))
def test_edit_distance(a, b, distance):
    from words.reading import edit_distance

    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_intervals_hold_noise_and_only_noise(study):
    """A difference that is there is found; where there is none, zero is inside."""
    noise = np.random.default_rng(0).normal(size=200)
    for shift, inside in ((0.0, True), (1.0, False)):
        middle, low, high = study.figure(list(noise + shift))
        assert low < middle < high and (low < 0 < high) == inside
    assert study.figure([math.nan, math.inf]) == [None, None, None]
