"""Results without paths and names: errors of others' code name files, and with them the user and the machine."""

import contextlib
import getpass
import platform
import re
from pathlib import Path
from typing import Any

_PATH, _NAME = "<path>", "<name>"
# In quotes a path may have spaces. Outside it is a word with characters that no word of a sentence has.
_QUOTED = re.compile(r"""(?P<quote>["'`])(?:\w+://|\w:[\\/]|[~.]*[\\/])(?:(?!(?P=quote)).)*(?P=quote)""")
_WORD = re.compile(r"""[^\s"'`()\[\],;]+?(?=[.:]*(?:[\s"'`()\[\],;]|$))""")
_IS_PATH = re.compile(r"\\[\w\\]|:/|^[~.]*/.|/.*/|/.*\.[A-Za-z]")
_LEAST_NAME = 2  # characters


def anonymous(content: Any, names: frozenset[str] | None = None) -> Any:
    """Return a copy of JSON's types in which no text has a path or a name; keys stay.

    `names` are those of the user and the machine; None for the ones that the system has.
    """
    names = _system_names() if names is None else names
    if isinstance(content, dict):
        return {key: anonymous(value, names) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [anonymous(value, names) for value in content]
    return _without(content, names) if isinstance(content, str) else content


def _without(text: str, names: frozenset[str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", _NAME, text, flags=re.IGNORECASE)
    text = _QUOTED.sub(_PATH, text)
    return _WORD.sub(lambda word: _PATH if _IS_PATH.search(word[0]) else word[0], text)


def _system_names() -> frozenset[str]:
    found = {platform.node(), platform.node().partition(".")[0]}
    with contextlib.suppress(Exception):  # a container may know its user by a number only
        found.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        found.add(Path.home().name)
    return frozenset(name for name in found if len(name) >= _LEAST_NAME)
