"""What the benchmark's methods compute with: random activations, and weights in the forms that they hold them in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

ERROR_ROWS = 256
_ERROR_COLUMNS = 1024  # of a float64 weight at a time


class Unavailable(Exception):
    """A method that does not exist on this machine or for this shape; the message says why."""


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of N output and K input channels; `tokens` overrides the run's M for a layer with its own."""

    name: str
    n: int
    k: int
    tokens: int | None = None


IDEOGRAM4_SHAPES = (
    LinearShape("qkv", 13824, 4608),
    LinearShape("attention out", 4608, 4608),
    LinearShape("ffn up", 12288, 4608),
    LinearShape("ffn down", 4608, 12288),
    LinearShape("llm projection", 4608, 53248, tokens=512),
)
"""Those of a block of Ideogram 4, and the one in front of its blocks."""


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
    """What the methods compute with: random x [M, K], and copies of a weight [N, K]."""

    def __init__(self, m: int, n: int, k: int, copies: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.copies = device, copies
        self.x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        self.weight = torch.randn(n, k, device=device, generator=generator).bfloat16() / k**0.5
        self._copies_of_forms: dict[WeightForm, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def weights(self, form: WeightForm) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies of the weight in a form, made at the first request, and their scale. Raises Unavailable."""
        if form not in self._copies_of_forms:
            weight, scale = form.make(self)
            self._copies_of_forms[form] = [weight, *(weight.clone() for _ in range(self.copies - 1))], scale
        return self._copies_of_forms[form]

    def exact(self) -> torch.Tensor:
        """x . weight^T in float64, the rows that `sample` takes."""
        x = self.sample(self.x).double()
        return torch.cat([x @ part.double().t() for part in self.weight.split(_ERROR_COLUMNS)], 1)

    def sample(self, output: torch.Tensor) -> torch.Tensor:
        """The rows [.., N] of an output [M, N] that errors are measured on."""
        return output[sampled_rows(len(self.x), self.device)]


def sampled_rows(count: int, device: torch.device) -> torch.Tensor:
    """Indices of the rows of so many that errors are measured on."""
    return torch.arange(0, count, max(1, count // ERROR_ROWS), device=device)


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


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
