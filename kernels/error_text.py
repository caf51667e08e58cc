"""What an error is called in a sentence for the user, and what is said around it."""

from collections.abc import Iterator
from contextlib import contextmanager


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def saying(before: str, behind: str = "") -> Iterator[None]:
    """Let a ValueError that is raised inside say more: what stands before its message, and behind it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{before}{error}{behind}") from error
