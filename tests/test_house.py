"""What keeps the house in order: who may import whom, how large a room gets, and files that must say the same."""

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer

PROJECT = Path(__file__).resolve().parents[1]
MOST_LINES = 400
# From the ground up: a room imports what stands before it. In nodes/ what is above the rooms is the nodes themselves.
KERNEL_ROOMS = (
    *("internals", "card", "launching", "linear", "weights", "fused_ops", "attention", "ahead", "quantization"),
    "benchmark",
)
NODE_ROOMS = (
    *("comfyui", "demo", "host", "files", "deferred", "linears", "attention", "loading", "saving", "quantization"),
    *("benchmark", "pictures"),
)

# What differs between versions of ComfyUI and comfy-kitchen: only the door asks for it.
VERSIONED = {
    *("COMPILE_KEY", "ComfyAttention", "EnumHookMode", "LoRAAdapter"),
    *("attention_pytorch", "clone_base_uuid", "comfy_patched_weights", "create_multigpu_deepclones"),
    *("current_weight_patches_uuid", "fast_disk", "hook_mode", "is_lowvram_patch", "pause_malloc_graph"),
}
# Private names of others that files outside of the doors have: they override them, or read them in every call.
FOREIGN = {
    "_load_from_state_dict": {"operations"},  # PyTorch's
    "_parameters": {"fused_forward", "operations", "weight_form"},
    "_schema": {"writes"},
    "_copy_with": {"stored_weights"},  # comfy-kitchen's
    "_forward": {"fused_forward"},  # ComfyUI's
    "_get": {"gguf_file"},  # gguf's
    "_get_field_parts": {"gguf_file"},
}

FILES = {path: ast.parse(path.read_text()) for room in ("kernels", "nodes") for path in (PROJECT / room).rglob("*.py")}


def module_of(path):
    """`kernels.linear.gemm` for kernels/linear/gemm.py; a folder for its __init__.py."""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports_of(path):
    """(module of the pack, name taken of it) and all other packages that a file imports, also inside functions."""
    own, others = [], set()
    package = path.relative_to(PROJECT).parts[:-1]
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                own.append((inner, None) if inner in MODULES else (base, alias.name))
    return own, others


OWN_IMPORTS = {module_of(path): {module for module, _ in imports_of(path)[0]} for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_is_a_second_subject_large(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_imports_run_in_no_circle():
    waiting, free = dict(OWN_IMPORTS), set()
    while ready := {module for module, imported in waiting.items() if imported <= free | {module}}:
        free |= ready
        waiting = {module: imported for module, imported in waiting.items() if module not in ready}
    assert not waiting


def test_kernels_know_no_comfyui():
    for path in FILES:
        if path.is_relative_to(PROJECT / "kernels"):
            own, others = imports_of(path)
            assert all(module.startswith("kernels") for module, _ in own), path
            assert not others & {"comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server"}, path


# Public, and as old as the oldest versions that the pack runs with. What else is taken of Triton goes through the door.
PUBLIC_TRITON = {"jit", "cdiv", "language", "__version__"}


def dotted(node):
    """`torch._C.name` of an attribute's node, None where it is not one of a module's."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def insides_named(path):
    """What a file names of Triton's, PyTorch's and comfy-kitchen's insides."""
    bound = {"torch": "torch", "triton": "triton"}  # what names stand for
    named = []
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names if alias.name != "triton.language"]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named += [f"{node.module}.{alias.name}" for alias in node.names]
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            root, _, rest = name.partition(".")
            named.append(f"{bound.get(root, '')}.{rest}")
    return {name for name in named if is_inside(name.split("."))}


def is_inside(parts):
    package, *rest = parts
    if package == "triton":
        return bool(rest) and rest[0] not in PUBLIC_TRITON
    if package == "torch":
        return rest[:1] == ["fx"] or any(re.match("_(?!_)", part) for part in rest)
    return package == "comfy_kitchen"


def test_one_room_names_the_insides_of_triton_and_torch():
    room = PROJECT / "kernels" / "internals"
    found = {path: named for path in FILES if (named := insides_named(path))}
    for path, named in found.items():
        # nodes/ has a door of its own to comfy-kitchen.
        assert path.parent == room or {name.partition(".")[0] for name in named} == {"comfy_kitchen"}, path
        assert "kernels" not in path.relative_to(PROJECT).parts or path.parent == room, path
    assert {path.name for path in found} >= {"triton_runtime.py", "torch_functions.py", "inductor.py"}


def names_of_others(path):
    """What a file asks of objects and modules by name: attributes, also by getattr, and what it imports."""
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Attribute):
            yield node.attr, ast.unparse(node.value) == "super()"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield ast.unparse(node.args[1]).strip("'"), False
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((alias.name, False) for alias in node.names)


def own_names(paths):
    """What files define: functions, classes, and what is assigned."""
    for node in (node for path in paths for node in ast.walk(FILES[path])):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (getattr(name, "attr", getattr(name, "id", "")) for part in targets for name in ast.walk(part))


def test_one_room_reaches_into_comfyui():
    """The door alone names what is private in other packages, but for FOREIGN, and what differs between versions."""
    nodes = {path for path in FILES if path.is_relative_to(PROJECT / "nodes")}
    door = {path for path in nodes if path.is_relative_to(PROJECT / "nodes" / "comfyui")}
    own = {*own_names(nodes - door), "_asdict", "_fields", "_replace"} - FOREIGN.keys()
    foreign, versioned = {}, set()
    for path in nodes - door:
        for name, of_parent in names_of_others(path):
            if re.match("_(?!_)", name) and (of_parent or name not in own):
                foreign.setdefault(name, set()).add(path.stem)
            versioned |= {name} & VERSIONED
    assert foreign == FOREIGN and not versioned
    assert {"_qdata", "_params", *VERSIONED} <= {name for path in door for name, _ in names_of_others(path)}


def room_of(module, rooms):
    """The place of a module's room in their order; None for a file that stands in no room."""
    parts = module.split(".")
    return rooms.index(parts[1]) if len(parts) > 1 and parts[1] in rooms else None


@pytest.mark.parametrize("package, rooms", (("kernels", KERNEL_ROOMS), ("nodes", NODE_ROOMS)))
def test_no_room_imports_one_above_it(package, rooms):
    folders = {path.name for path in (PROJECT / package).iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(rooms)
    for module, imported in OWN_IMPORTS.items():
        own = room_of(module, rooms) if module.startswith(package) else None
        if own is not None:
            assert all((room_of(other, rooms) or 0) <= own for other in imported if other.startswith(package)), module


def test_nodes_import_no_other_node():
    """They stand side by side in nodes/, and what they share is sockets.py or lies in the rooms below."""
    standing = {module for module in MODULES if re.fullmatch(r"nodes\.\w+", module)}
    nodes = standing - {f"nodes.{room}" for room in NODE_ROOMS} - {"nodes.extension", "nodes.sockets"}
    assert len(nodes) == 8
    for module in MODULES - {"nodes.extension"}:
        assert not OWN_IMPORTS[module] & nodes, module


@pytest.mark.parametrize("face", ("kernels", "kernels.benchmark"))
def test_a_face_shows_what_nodes_use_and_nothing_else(face):
    used = set()
    for path in FILES:
        if path.is_relative_to(PROJECT / "nodes"):
            own, _ = imports_of(path)
            reached = {(module, name) for module, name in own if module.startswith("kernels")}
            assert {module for module, _ in reached} <= {"kernels", "kernels.benchmark"}, path
            used |= {name for module, name in reached if module == face}
    body = FILES[PROJECT / face.replace(".", "/") / "__init__.py"].body
    assert {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names} == used


# What takes whatever ComfyUI gives it, and needs none of the rest: it makes nothing of a call.
DROPS = {
    "fingerprint_inputs": "a node's other inputs do not change what it says of itself",
    "_patch_once": "a callback of ComfyUI's, told how a MODEL was loaded",
    "_keep_schedule": "a callback of ComfyUI's, told how a MODEL was loaded",
    "_load_again": "a callback of ComfyUI's",
    "patch": "a callback of ComfyUI's, told how a MODEL was loaded",
    "execute": "the ticks of a node, which ComfyUI checks",
}


def functions_of(path):
    return [node for node in ast.walk(FILES[path]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def free_arguments(function):
    """The names of what a function takes without saying what."""
    return {argument.arg for argument in (function.args.vararg, function.args.kwarg) if argument is not None}


def names_in(nodes):
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def paths_that_drop(body, free, read):
    """The lines where a function returns and has not looked at all of its free arguments; and what it has looked at
    where it goes on, None where it does not."""
    lines = []
    for statement in body:
        if isinstance(statement, (ast.Return, ast.Raise)):
            refuses = isinstance(statement, ast.Raise) or ast.unparse(statement) == "return NotImplemented"
            lines += [statement.lineno] * (not refuses and not free <= read | names_in([statement]))
            return lines, None
        if isinstance(statement, ast.If):
            read = read | names_in([statement.test])
            ways = [paths_that_drop(branch, free, read) for branch in (statement.body, statement.orelse)]
            lines += [line for found, _ in ways for line in found]
            going_on = [after for _, after in ways if after is not None]
            if not going_on:
                return lines, None
            read = set.intersection(*going_on)
        elif isinstance(statement, (ast.With, ast.Try, ast.For)):
            found, after = paths_that_drop(statement.body, free, read)
            lines += found
            others = [*getattr(statement, "items", ()), *([statement.iter] if isinstance(statement, ast.For) else ())]
            read = (read if after is None else after) | names_in(others)
            if after is None and isinstance(statement, ast.With):
                return lines, None
        else:
            read = read | names_in([statement])
    return lines, read


def dropping(function):
    """The lines where free arguments are dropped."""
    free = free_arguments(function)
    lines, read = paths_that_drop(function.body, free, set())
    return lines + [function.lineno] * (read is not None and not free <= read)


def test_nothing_drops_what_comfyui_gives_it():
    """An argument that is taken and not looked at is a wrong image without a word: it is passed on, followed or
    refused, on every path."""
    found = {
        (path.relative_to(PROJECT).as_posix(), function.name): dropping(function)
        for path in FILES
        if path.is_relative_to(PROJECT / "nodes")
        for function in functions_of(path)
        if free_arguments(function)
    }
    assert {name for (_, name), lines in found.items() if lines} == DROPS.keys(), found


def pyproject():
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(lines):
    return {str(Requirement(line)) for line in lines if line.strip() and not line.startswith("#")}


def test_requirements_are_those_of_pyproject():
    in_file = requirements((PROJECT / "requirements.txt").read_text().splitlines())
    assert in_file == requirements(pyproject()["project"]["dependencies"])


def test_the_map_names_every_room_and_no_other():
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:kernels|nodes|tests|web)/[\w/.]+\.(?:py|md))`", text)
    assert len(named) > 15 and not [path for path in named if not (PROJECT / path).exists()]
    drawn = set(re.findall(r"[\w/]+(?:\.py|/)(?=\s)", text.partition("```")[2].partition("```")[0]))
    assert {f"{room}/" for room in (*KERNEL_ROOMS, *NODE_ROOMS)} <= drawn
    kernels = PROJECT / "kernels"
    folders = {PROJECT / "nodes", kernels, *(kernels / room for room in KERNEL_ROOMS[:-1])}
    shown = [path for path in FILES if path.parent in folders]
    assert {path.name for path in shown} - {"__init__.py"} <= drawn
    assert not {name for name in drawn if name.endswith(".py")} - {path.name for path in PROJECT.rglob("*.py")}
