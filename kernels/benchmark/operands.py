"""What the benchmark's methods compute with: random activations, and weights in the forms that they hold them in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Unavailable(Exception):
    """A method that does not exist on this machine or for this shape; the message says why."""


@dataclass(frozen=True)
class WeightForm:
    """A form in which methods hold their weight.

    Attributes:
        bytes_per_weight: what a copy takes.
        make: (operands) -> the weight [N, K] and its float32 scale. Raises Unavailable.
    """

    bytes_per_weight: float
    make: Callable[["Operands"], tuple[torch.Tensor, torch.Tensor]]


class Operands:
    """What the methods compute with: random x [M, K], bias [N], smoothing factors [K], copies of weights [N, K]."""

    def __init__(self, m: int, n: int, k: int, copies: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.copies = copies
        self.x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        self.bias = torch.randn(n, device=device, generator=generator).bfloat16()
        self.smooth = torch.rand(k, device=device, generator=generator) + 0.5
        self.weight = torch.randn(n, k, device=device, generator=generator).bfloat16() / k**0.5
        self._copies_of_forms: dict[WeightForm, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def weights(self, form: WeightForm) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies of the weight in a form, made at the first request, and their scale. Raises Unavailable."""
        if form not in self._copies_of_forms:
            weight, scale = form.make(self)
            self._copies_of_forms[form] = [weight, *(weight.clone() for _ in range(self.copies - 1))], scale
        return self._copies_of_forms[form]


PreparedCall = Callable[[int], torch.Tensor]
"""One call of a method with the copy of the weight at this index: [M, N] in bf16 or fp16."""

Prepare = Callable[[Operands, list[torch.Tensor], torch.Tensor], PreparedCall]
"""(operands, copies of the weight in the method's form, their scale) -> the call that is timed."""


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def leaving_out(name: str, foreign: bool, absent: dict[str, str]) -> Iterator[None]:
    """Note in `absent` why a method does not run here, in place of its error. Of `foreign` ones, the code of others,
    any error is such a reason."""
    try:
        yield
    except Unavailable as reason:
        absent[name] = str(reason)
    except torch.cuda.OutOfMemoryError:
        absent[name] = "not enough memory"
    except Exception as error:
        if not foreign:
            raise
        absent[name] = first_line(error)
