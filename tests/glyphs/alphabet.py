"""The characters the glyph model knows; a character's class is its place in ALPHABET."""

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def classes(text: str) -> list[int]:
    """Class number of every character of `text`, in order.

    Raises ValueError on an empty text and on the first character outside ALPHABET.
    """
    if not text:
        raise ValueError(f"The text is empty; give at least one character of {ALPHABET}.")
    for character in text:
        if character not in ALPHABET:
            raise ValueError(f"Cannot draw {character!r}; the glyph model knows only {ALPHABET}.")
    return [ALPHABET.index(character) for character in text]
