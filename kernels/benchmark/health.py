"""The gate in front of the benchmark: whether the state of a card allows a measurement.

A throttled card multiplies bf16 too slowly, and every ratio to bf16 would flatter INT8. A busy one is unsteady.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..card.device import BF16
from ..card.timing import CallSeries, sustained_milliseconds

# Floating point operations of bf16 tensor cores per multiprocessor and clock, dense, with float32 accumulation, by
# compute capability. From NVIDIA's white papers of the architectures: peak rate / (multiprocessors x boost clock).
_OPERATIONS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
_OPERATIONS_PER_CLOCK |= dict.fromkeys(((8, 6), (8, 7), (8, 9), (12, 0)), 1024)
# GeForce cards accumulate in float32 at half the rate of professional cards of the same chip.
_HALVED = ("GeForce", "TITAN")
# A healthy RTX 3090 reaches 65.5 of 71 TFLOPS (arXiv 2606.14598), a throttled one 8.1; a card that two processes share
# equally half of what it can. Cards with a low power limit stay above this.
_LEAST_SHARE = 0.4
_MOST_BUSY_PERCENT = 25  # a desktop and a browser on the same card stay below
_MOST_DRIFT = 0.15
_PROBE = 8192  # M = N = K of the product that is measured
_ROUNDS = 3


class Health(NamedTuple):
    """The findings of the gate; rates are of bf16, in 10^12 operations per second."""

    teraflops: float | None  # as measured; None without a GPU
    expected: float | None  # the card's peak; None where the card is not known
    faults: tuple[str, ...] = ()  # a sentence each

    @property
    def healthy(self) -> bool:
        """Whether measurements count."""
        return self.teraflops is not None and not self.faults

    def __str__(self) -> str:
        if self.teraflops is None:
            return "No GPU: there is nothing to check, and nothing here decides what auto runs."
        rate = f"{self.teraflops:.0f} bf16 TFLOPS"
        if self.expected is not None:
            rate += f", {self.teraflops / self.expected:.0%} of the card's peak of {self.expected:.0f}"
        if self.faults:
            return f"INVALID RUN. {' '.join(self.faults)} Measured: {rate}."
        return f"The card is healthy: {rate}."


def peak_teraflops(device: torch.device) -> float | None:
    """Return the card's peak rate of dense bf16 products with float32 accumulation, or None where it is not known.

    It is multiprocessors x clock x operations per clock, with the highest clock that the driver gives.
    """
    properties = torch.cuda.get_device_properties(device)
    operations = _OPERATIONS_PER_CLOCK.get((properties.major, properties.minor))
    if operations is None or torch.version.hip is not None:
        return None
    if properties.major != 9 and any(word in properties.name for word in _HALVED):
        operations //= 2
    return properties.multi_processor_count * properties.clock_rate * operations / 1e9


def bf16_teraflops(device: torch.device, check: Callable[[], None] = lambda: None) -> list[float]:
    """Return the rate of a large bf16 product in 10^12 operations per second, in each of a few rounds."""
    x = torch.randn(_PROBE, _PROBE, device=device).bfloat16()
    weight = torch.randn(_PROBE, _PROBE, device=device).bfloat16()
    F.linear(x, weight)
    series = CallSeries(lambda _: F.linear(x, weight), 1, device)
    rounds = sustained_milliseconds({BF16: series}, _ROUNDS, check)
    return [2 * _PROBE**3 / milliseconds / 1e9 for milliseconds in rounds[BF16]]


def examine(device: torch.device, check: Callable[[], None] = lambda: None) -> Health:
    """Examine a GPU, which must be the current one, before anything is measured on it."""
    if device.type != "cuda":
        return Health(None, None)
    busy = _busy_percent(device)
    rates = bf16_teraflops(device, check)
    expected = peak_teraflops(device)
    rate, varies = statistics.median(rates), max(rates) / min(rates) - 1
    faults = []
    if busy is not None and busy > _MOST_BUSY_PERCENT:
        faults.append(f"Another program uses the card ({busy} % busy before this began): close it and measure again.")
    if expected is not None and rate < _LEAST_SHARE * expected:
        faults.append("The card is throttled or busy: look at its temperature, power limit and other programs.")
    if varies > _MOST_DRIFT:
        faults.append(f"Its speed varies by {varies:.0%} from one moment to the next.")
    return Health(rate, expected, tuple(faults))


def examine_again(before: Health, device: torch.device) -> Health:
    """Return the health at the end of a run: the faults before, and whether the card's speed changed meanwhile."""
    if before.teraflops is None:
        return before
    rates = bf16_teraflops(device)
    drift, varies = statistics.median(rates) / before.teraflops - 1, max(rates) / min(rates) - 1
    faults = list(before.faults)
    if abs(drift) > _MOST_DRIFT or (varies > _MOST_DRIFT and not faults):
        faults.append(f"The card's speed changed by {drift:+.0%} during the run: leave it alone and measure again.")
    return Health(before.teraflops, before.expected, tuple(faults))


def _busy_percent(device: torch.device) -> int | None:
    """Return how busy others keep the card; None where PyTorch cannot say, without nvidia-ml-py."""
    torch.cuda.synchronize(device)
    time.sleep(1.0)  # the driver averages over up to a second
    try:
        return torch.cuda.utilization(device)
    except Exception:  # what is missing, and what the driver's library raises of its own
        return None
