"""What an error is called in a sentence for the user."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
