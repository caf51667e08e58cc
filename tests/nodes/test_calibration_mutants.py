"""Damaged copies of a calibration: each is refused in one clear error, or a MODEL can be quantized with it."""

from collections import Counter

import pytest
import torch

from support.limits import no_hang, peak_memory

MUTANTS = 78  # each kind six times
QUANTIZED = 6  # of those that load as another calibration
SECONDS = 100
MOST_MEMORY = 1 << 30


@pytest.fixture
def model(dit):
    return dit.stock()


def same(a, b):
    return a.shapes == b.shapes and all(
        (one.calls, one.spikiness) == (other.calls, other.spikiness)
        and torch.equal(one.absmax, other.absmax)
        and list(map(len, one.sample.parts)) == list(map(len, other.sample.parts))
        and torch.equal(one.sample.rows, other.sample.rows)
        for one, other in ((a.statistics[name], b.statistics.get(name)) for name in a.statistics)
        if other is not None
    )


@pytest.mark.slow
def test_mutants_are_refused_or_can_be_quantized_with(dit, model, tmp_path):
    from int8_dit.nodes.calibration.file import load_calibration, save_calibration
    from int8_dit.nodes.quantization.quantize import quantization_targets
    from support.calibration_mutants import damaged

    path = tmp_path / "the mutant.safetensors"
    save_calibration(dit.recorded(), str(path), {}, lambda: None)
    data, whole, ended = path.read_bytes(), load_calibration(str(path)), Counter()
    before = peak_memory()
    for mutant in damaged(data, MUTANTS):
        path.write_bytes(mutant.data)
        what = f"{mutant.kind}, {mutant.where}"
        with no_hang(SECONDS):
            try:
                loaded = load_calibration(str(path))
            except ValueError as error:
                assert path.name in str(error) and len(str(error)) < 1000, (what, error)
                ended["refused"] += 1
                continue
            try:
                loaded.check_fits(quantization_targets(model))
            except ValueError:
                ended["of another model"] += 1
                continue
            if same(loaded, whole) and loaded.statistics.keys() == whole.statistics.keys():
                ended["the same"] += 1
                continue
            assert mutant.free, what
            ended["another"] += 1
            if ended["another"] > QUANTIZED:
                continue
            quantized, picture, *_ = dit.node_output(model, method="best per layer", calibration=loaded).result
            weights = dit.int8_weights(quantized).values()
            assert all(bool(torch.isfinite(weight.dequantize()).all()) for weight in weights), what
            assert bool(torch.isfinite(picture).all()), what
    assert ended["refused"] and ended["another"], ended
    assert peak_memory() - before < MOST_MEMORY


@pytest.mark.parametrize("value", (1e12, 1e-30, 0.0))
def test_a_model_can_be_quantized_with_the_largest_and_smallest_values_that_load(dit, model, tmp_path, value):
    from int8_dit.kernels import ActivationStatistics
    from int8_dit.nodes.calibration.calibration import Calibration

    whole = dit.recorded()
    statistics = {
        name: ActivationStatistics.restored(
            1, 1.0, torch.full_like(seen.absmax, value), [seen.sample.rows[:4] * 0 + value]
        )
        for name, seen in whole.statistics.items()
    }
    extreme = Calibration(whole.shapes, statistics)
    output = dit.node_output(model, method="best per layer", rounding="calibrated", calibration=extreme)
    quantized, picture, *_ = output.result
    weights = dit.int8_weights(quantized).values()
    assert all(bool(torch.isfinite(weight.dequantize()).all()) for weight in weights)
    assert bool(torch.isfinite(picture).all()) and bool(torch.isfinite(dit.output(quantized)).all())
