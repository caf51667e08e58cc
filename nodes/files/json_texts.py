"""JSON objects in texts of files."""

import json
from typing import Any


def json_object(text: str | bytes, most: int) -> dict[str, Any]:
    """The JSON object that a text of at most `most` characters is. Raises ValueError where it is none."""
    if len(text) > most:
        raise ValueError(f"not read: it has {len(text)} bytes, and at most {most} are expected")
    try:
        decoded = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"not the bytes of a JSON object ({error})") from error
    if not isinstance(decoded, dict):
        raise ValueError("not a JSON object")
    return decoded
