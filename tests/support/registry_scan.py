"""What the ComfyUI registry reports in a package: its standards, and what reviews ban packs for.

Its scanner matches texts, so words that name the worst must not even stand in a comment. The rest is read as Python.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

# Modules that start programs, run or unpickle code, or reach the network.
MODULES = {
    *("subprocess", "multiprocessing", "pty", "runpy", "code", "codeop", "ctypes", "cffi"),
    *("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("socket", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "telnetlib"),
    *("pip", "ensurepip", "imp"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = re.compile(r"os\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*|startfile|fork\w*)|importlib\.reload")
WORDS = re.compile(r"subprocess|runpy|os\.system|os\.popen|pickle\.load|__import__|(?<!\w)(?:eval|exec)\(")
IN_A_BROWSER = re.compile(r"(?<!\w)eval\(|new Function\b")
# Of a server: handlers of the pack's own, whatever they do.
ROUTES = {"routes", "add_routes", "add_route", "add_post", "add_get", "add_on_prompt_handler", "router"}


def findings(files: Mapping[str, str]) -> list[str]:
    """What is reported of the texts of a package's files, by their names: `file:line: what`."""
    found = []
    for name, text in files.items():
        if name.endswith(".py"):
            found += [f"{name}:{line}: {what}" for line, what in _of_words(text, WORDS)]
            found += [f"{name}:{line}: {what}" for line, what in _of_python(ast.parse(text))]
        elif name.endswith((".js", ".mjs", ".html")):
            found += [f"{name}:{line}: {what}" for line, what in _of_words(text, IN_A_BROWSER)]
    return found


def _of_words(text: str, words: re.Pattern) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, match[0]) for match in words.finditer(line))


def _of_python(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, f"import {each.name}") for each in names if _package(each.name) in MODULES)
            case ast.ImportFrom(module=str(module), level=0) if _package(module) in MODULES:
                yield node.lineno, f"from {module} import"
            case ast.ImportFrom(module="os", names=names):
                yield from ((node.lineno, f"os.{each.name}") for each in names if ATTRIBUTES.match(f"os.{each.name}"))
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in ROUTES:
                yield node.lineno, f"a route: {name}"
            case ast.Attribute() if ATTRIBUTES.fullmatch(ast.unparse(node)):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=function, args=args, keywords=keywords):
                called = ast.unparse(function)
                if called == "torch.load" and not _is_safe(keywords):
                    yield node.lineno, "torch.load of what may be a program"
                if called.endswith("import_module") and _package(_text(args)) in MODULES:
                    yield node.lineno, f"import_module of {_text(args)}"
                if any(each.arg == "shell" for each in keywords):
                    yield node.lineno, "a shell"


def _package(module: str) -> str:
    return module.partition(".")[0]


def _text(args: list[ast.expr]) -> str:
    """The first argument, where it is a text."""
    return args[0].value if args and isinstance(args[0], ast.Constant) and isinstance(args[0].value, str) else ""


def _is_safe(keywords: list[ast.keyword]) -> bool:
    return any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in keywords)
