"""What the pack can raise to a user, out of its sources: every sentence, with something in its placeholders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from itertools import product
from pathlib import Path

from .server import PROJECT

# Where what is raised reaches no user: checks of arguments that the pack's own code passes.
OF_PROGRAMMERS = (
    "kernels/checks.py",
    *(f"kernels/{room}/" for room in ("linear", "fused_ops", "attention", "launching", "ahead")),
    *(f"kernels/weights/{name}" for name in ("weight", "gguf_kernels", "gguf_decoding", "grouped")),
    "kernels/quantization/column_rounding.py",
)
KINDS = "nodes/files/reading/kinds.py"


def raised_sentences() -> dict[str, str]:
    """Texts by where they are raised, `file:line`, and by their number where a place has several."""
    found = {}
    for room in ("kernels", "nodes"):
        for path in sorted((PROJECT / room).rglob("*.py")):
            name = path.relative_to(PROJECT).as_posix()
            if not name.startswith(OF_PROGRAMMERS):
                found |= dict(_Module(path).sentences(name))
    return found


class _Module:
    """A source file, whose texts are made of its own constants, variables and functions."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def _functions(self) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)]

    def sentences(self, name: str) -> Iterator[tuple[str, str]]:
        for place, text in self._places(name):
            for number, (words, _) in enumerate(self._texts(text, self._around(text))):
                yield f"{name}:{place}#{number}", _numbered(words)

    def _places(self, name: str) -> Iterator[tuple[int, ast.expr]]:
        """Where a text is that a user may read, and the expression that makes it."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                yield node.lineno, node.exc.args[-1]
            elif isinstance(node, ast.FunctionDef) and node.name.endswith("_obstacle"):
                yield from ((value.lineno, value) for value in _returned(node))
            elif name == KINDS and isinstance(node, ast.Call) and ast.unparse(node.func) == "Kind":
                kind, advice = node.args[:2]
                sentence = ast.JoinedStr([ast.Constant("v1 is "), kind, ast.Constant("; "), advice])
                packed = any(keyword.arg == "packed" for keyword in node.keywords)
                yield from (
                    (kind.lineno, text) for text in ([ast.copy_location(sentence, kind)] if packed else node.args[:2])
                )

    def _around(self, text: ast.expr) -> ast.AST:
        """The innermost function around a text, or the module."""
        inside = [f for f in self._functions if f.lineno <= text.lineno <= (f.end_lineno or f.lineno)]
        return max(inside, key=lambda function: function.lineno, default=self._tree)

    def _texts(self, node: ast.expr | None, scope: ast.AST) -> list[tuple[str, bool]]:
        """All that an expression can be, with \\0 for what only a run knows, and whether any of it is known here."""
        match node:
            case ast.Constant(value=str(text)):
                return [(text, True)]
            case ast.JoinedStr(values=parts):
                return _joined([self._texts(part, scope) for part in parts])
            case ast.FormattedValue(value=value):
                return self._texts(value, scope)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return _joined([self._texts(left, scope), self._texts(right, scope)])
            case ast.IfExp(body=body, orelse=other):
                return [*self._texts(body, scope), *self._texts(other, scope)]
            case ast.Name(id=name):
                found = [text for value in _assigned(name, scope, self._tree) for text in self._texts(value, scope)]
                return [text for text in found if text[1]] or [("\0", False)]
            case ast.Call(func=ast.Name(id=name)):
                own = [function for function in self._functions if function.name == name]
                found = [text for f in own for value in _returned(f) for text in self._texts(value, f)]
                return [text for text in found if text[1]] or [("\0", False)]
        return [("\0", False)]


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]


def _assigned(name: str, *scopes: ast.AST) -> Iterator[ast.expr]:
    """What a name becomes in the innermost of these scopes that says it."""
    for scope in scopes:
        found = False
        for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ast.iter_child_nodes(scope):
            match node:
                case ast.Assign(targets=[ast.Name(id=other)], value=value) if other == name:
                    found = True
                    yield value
                case ast.NamedExpr(target=ast.Name(id=other), value=value) if other == name:
                    found = True
                    yield value
        if found:
            return


def _joined(parts: list[list[tuple[str, bool]]]) -> list[tuple[str, bool]]:
    return [("".join(text for text, _ in way), any(known for _, known in way)) for way in product(*parts)]


def _numbered(text: str) -> str:
    """A text with another value in each place that only a run fills."""
    first, *others = text.split("\0")
    return first + "".join(f"v{number}{part}" for number, part in enumerate(others, 1))
