"""Images compared with references: the metrics against their formulas, the table, the node."""

import math

import folder_paths
import numpy
import pytest
import torch
from PIL import Image

from int8_dit.nodes.compare_images import CompareImagesINT8DiT as compare_node
from int8_dit.nodes.pictures import comparison as fidelity
from int8_dit.nodes.pictures.comparison import Fidelity, comparison_table


def table_of(**values):
    """The table of PSNR values, or of (PSNR, SSIM), by candidate."""
    pairs = {name: [v if isinstance(v, tuple) else (v, 0.9) for v in own] for name, own in values.items()}
    return comparison_table({name: [Fidelity(*pair) for pair in own] for name, own in pairs.items()})


def noisy(shape, noise, seed=0):
    """A smooth picture in 0..1, and the same with noise."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 3, shape[0]), torch.linspace(0, 5, shape[1]), indexing="ij")
    picture = (0.5 + 0.4 * torch.sin(x * y + seed))[..., None].expand(shape).contiguous()
    return picture, (picture + noise * torch.randn(shape, generator=generator)).clamp(0, 1)


def ssim_by_formula(a, b):
    """Wang et al. 2004 in float64, place by place."""
    a, b = a.double().numpy(), b.double().numpy()
    line = numpy.exp(-((numpy.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = numpy.outer(line, line)[..., None] / line.sum() ** 2
    c1, c2, values = 0.01**2, 0.03**2, []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mp, mq = (window * p).sum((0, 1)), (window * q).sum((0, 1))
            vp, vq = (window * (p - mp) ** 2).sum((0, 1)), (window * (q - mq) ** 2).sum((0, 1))
            covariance = (window * (p - mp) * (q - mq)).sum((0, 1))
            values.append((2 * mp * mq + c1) * (2 * covariance + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return float(numpy.mean(values))


@pytest.mark.parametrize("shape, noise", (((24, 31, 3), 0.02), ((11, 11, 3), 0.2), ((17, 12, 1), 0.5)))
def test_the_metrics_are_their_formulas(shape, noise):
    reference, image = noisy(shape, noise)
    got = fidelity.compare_images(reference, image, "image")
    error = (reference.double() - image.double()).square().mean()
    assert got.psnr == pytest.approx(float(-10 * torch.log10(error)), abs=1e-3)
    assert got.ssim == pytest.approx(ssim_by_formula(reference, image), abs=1e-4)


def test_identical_images():
    """What lies outside of the range is cut off as in a file."""
    for image in (noisy((20, 20, 3), 0.0)[0], torch.zeros(20, 20, 3), torch.ones(20, 20, 3)):
        other = 3 * image if image.min() == 1 else image.clone()
        assert fidelity.compare_images(image, other, "image") == fidelity.Fidelity(math.inf, 1.0)


def test_the_difference_is_amplified_and_cut_off():
    reference = torch.full((2, 2, 3), 0.5)
    image = reference + torch.tensor([[0.0, 0.01], [-0.02, 0.4]])[..., None]
    seen = fidelity.difference(reference, image, 10.0)
    expected = torch.tensor([[0.0, 0.1], [0.2, 1.0]])[..., None].expand(2, 2, 3)
    torch.testing.assert_close(seen, expected, atol=1e-6, rtol=0)


def test_pairs_across_batches_and_lists():
    batch = torch.rand(3, 12, 14, 3)
    reference, images = fidelity.paired_images([batch], image=[batch[:1], batch[1:]])
    assert all(torch.equal(a, b) for a, b in zip(reference, images["image"], strict=True)) and len(reference) == 3
    reference, _ = fidelity.paired_images([batch[:1]], image=[batch])
    assert len(reference) == 3 and all(torch.equal(image, batch[0]) for image in reference)


@pytest.mark.parametrize(
    "reference, image, message",
    (
        ((2, 16, 16, 3), (3, 16, 16, 3), r"reference holds 2 images \(\[2, 16, 16, 3\]\) and image 3 images"),
        ((2, 16, 16, 3), (1, 16, 16, 3), "connect as many images"),
        ((1, 16, 16, 3), (0, 16, 16, 3), "image 0 images"),
        ((1, 16, 20, 3), (1, 16, 16, 3), "reference is 20 x 16 with 3 channels, image is 16 x 16 with 3 channels"),
        ((1, 16, 16, 3), (1, 16, 16, 4), "make both the same size"),
        ((1, 10, 16, 3), (1, 10, 16, 3), "at least 11 x 11 pixels"),
    ),
)
def test_what_cannot_be_compared_is_named(reference, image, message):
    with pytest.raises(ValueError, match=message):
        fidelity.paired_images([torch.rand(reference)], image=[torch.rand(image)])


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("name", ("reference", "image"))
def test_a_broken_image_is_named(name, bad):
    images = {"reference": torch.rand(16, 16, 3), "image": torch.rand(16, 16, 3)}
    images[name][3, 4, 0] = bad
    with pytest.raises(ValueError, match=f"^{name} holds NaN or Inf"):
        fidelity.compare_images(images["reference"], images["image"], "image")


def test_the_interval_of_a_mean():
    """That of normal noise, and the same each time."""
    values = numpy.random.default_rng(3).normal(30, 2, 400)
    rows = {row[0]: row[1] for row in table_of(image=list(values))["rows"]}
    low, high = map(float, rows["95 % interval"].split(" to "))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert float(rows["mean"]) == pytest.approx(values.mean(), abs=0.01)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half + 0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half + 0.01)
    assert {row[0]: row[1] for row in table_of(image=list(values))["rows"]} == rows


def test_identical_pairs_are_in_no_mean():
    table = table_of(image=[(math.inf, 1.0), (30.0, 0.9), (32.0, 0.9)])
    assert [row[1] for row in table["rows"]] == ["identical", "30.00", "32.00", "31.00", "30.00 to 32.00"]
    assert "1 of 3 in image are identical to the reference" in str(table)
    assert [row[1] for row in table_of(image=[(math.inf, 1.0)] * 2)["rows"]] == ["identical"] * 3 + ["-"]


EIGHT = (30.0, 33.0, 28.0, 35.0, 31.0, 29.0, 36.0, 32.0)
SIGNS = (1, -1, 1, -1, -1, 1, 1, -1)


@pytest.mark.parametrize(
    "other, verdict",
    (
        ([value - 1 for value in EIGHT], "PSNR: image is closer to the reference by 1.00 dB, more than noise."),
        ([value + 0.5 for value in EIGHT], "PSNR: other is closer to the reference by 0.50 dB, more than noise."),
        ([v + s for v, s in zip(EIGHT, SIGNS, strict=True)], "PSNR: image and other differ within noise."),
        (list(EIGHT), "PSNR: image and other differ within noise."),
    ),
)
def test_two_candidates_are_compared_pair_by_pair(other, verdict):
    """Images differ by 8 dB among themselves, which would drown 1 dB if it were not paired."""
    table = table_of(image=EIGHT, other=other)
    assert table["title"] == verdict
    assert table["columns"][1:4] == ["PSNR dB, image", "PSNR dB, other", "PSNR dB, difference"]
    assert table["rows"][0][3] == f"{EIGHT[0] - other[0]:+.2f}"


@pytest.mark.parametrize("pairs, says", ((1, "two pairs or more are needed"), (5, "5 pairs are too few to tell")))
def test_too_few_pairs_are_no_verdict(pairs, says):
    assert says in table_of(image=EIGHT[:pairs], other=[value - 1 for value in EIGHT[:pairs]])["title"]


@pytest.mark.parametrize(
    "psnrs, says",
    (
        ([46.0, 47.6], "46.8 dB: most people see no difference"),
        ([33.0], "33.0 dB: small differences, seen side by side"),
        ([25.0, math.inf], "25.0 dB: differences that are seen at once"),
        ([12.0], "12.0 dB: another picture"),
        ([math.inf], "identical to the reference"),
    ),
)
def test_the_verdict_on_one_candidate(psnrs, says):
    table = table_of(image=psnrs)
    assert table["title"] == says and table["columns"] == ["pair", "PSNR dB", "SSIM"]
    assert ("interval" in str(table)) == (len(psnrs) > 1)


def test_a_pair_with_one_identical_image_has_no_difference_in_psnr():
    table = table_of(image=[math.inf, math.inf, 30.0], other=[30.0, math.inf, 29.0])
    assert [row[3] for row in table["rows"]] == ["-", "+0.00", "+1.00", "+0.50", "+0.00 to +1.00"]


@pytest.mark.parametrize(
    "image, other, verdict",
    (
        ([math.inf] * 8, EIGHT, "PSNR: image is closer to the reference in 8 of 8 pairs, more than noise."),
        (
            [*[math.inf] * 30, *EIGHT[:6]],
            [*[20.0] * 30, *(value + 1 for value in EIGHT[:6])],
            "PSNR: image is closer to the reference in 30 of 36 pairs, more than noise.",
        ),
        ([*EIGHT, 30.0], [math.inf] * 9, "PSNR: other is closer to the reference in 9 of 9 pairs, more than noise."),
        ([math.inf, 30.0] * 4, [30.0, math.inf] * 4, "PSNR: image and other differ within noise."),
        ([math.inf] * 8, [math.inf] * 8, "PSNR: image and other differ within noise."),
        ([math.inf] * 5, EIGHT[:5], "PSNR: image looks closer to the reference, but 5 pairs are too few to tell."),
        ([math.inf], [30.0], "PSNR: two pairs or more are needed to tell a difference from noise."),
    ),
)
def test_pairs_with_one_identical_image_are_counted(image, other, verdict):
    assert table_of(image=image, other=other)["title"] == verdict


@pytest.mark.parametrize("channels", (1, 3, 4))
def test_the_pictures_have_the_form_of_the_inputs(tmp_path, monkeypatch, channels):
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))
    reference, image = (
        torch.stack(pictures)
        for pictures in zip(*(noisy((16, 18, channels), 0.05, seed) for seed in range(3)), strict=True)
    )
    output = compare_node.execute(
        reference=[reference], image=[image[:1], image[1:]], other=[reference], amplification=[4.0]
    )
    pictures, text = output.args
    assert [list(picture.shape) for picture in pictures] == [[count, 16, 18, channels] for count in (1, 2, 3)]
    torch.testing.assert_close(torch.cat(pictures[:2]), (4 * (image - reference).abs()).clamp(max=1))
    assert not pictures[2].any()
    (shown,) = output.ui["int8_benchmark"]
    assert all(cell in text for row in shown["rows"] for cell in row)
    (pair,) = output.ui["int8_image_pair"]
    for file, expected in zip(pair["files"], (reference, image), strict=True):
        found = numpy.asarray(Image.open(tmp_path / file["subfolder"] / file["filename"]))
        assert numpy.abs(found - 255 * expected[pair["number"] - 1].numpy()).max() <= 1
