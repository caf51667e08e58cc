"""What the kernels assume of the insides of Triton and PyTorch, and what they do where it does not hold."""

import dataclasses
import importlib.util

import pytest
import torch

from kernels import missing
from kernels.internals import insides as assumptions
from support.tensors import random_int8

triton_runtime = pytest.importorskip("kernels.internals.triton_runtime", exc_type=ImportError)
needs_descriptors = pytest.mark.skipif(not triton_runtime.HAS_DESCRIPTORS, reason="Triton 3.4 and newer has them")


def test_all_assumptions_hold_with_the_versions_under_test():
    assert missing() == []


def package(folder, **files):
    for name, text in files.items():
        path = folder / "some_package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


ASSUMED = {"some_package/inside.py": (r"^def inner\b", r"^TABLE\b")}
ELSEWHERE = {"no_such_package/inside.py": ("^x",)}


@pytest.mark.parametrize(
    "sources, as_new_as, text, held, missed",
    (
        (ASSUMED, None, "TABLE = {}\n\ndef inner(x):\n    pass\n", True, False),
        (ASSUMED, None, "TABLE: dict = {}\ndef inner():\n    pass\n", True, False),
        (ASSUMED, None, "TABLE = {}\ndef inner_renamed(x):\n    pass\n", False, True),
        (ASSUMED, None, "import inner, TABLE\n", False, True),
        (ASSUMED, "some_package/__init__.py", None, False, True),
        (ASSUMED, "some_package/of_tomorrow.py", None, False, False),  # what came later
        (ELSEWHERE, None, None, False, False),  # what is not installed
    ),
)
def test_what_does_not_hold_is_told_without_an_import(tmp_path, monkeypatch, sources, as_new_as, text, held, missed):
    assumption = assumptions.Assumption("a table", "nothing is looked up", sources, as_new_as)
    package(tmp_path, __init__="raise RuntimeError('imported')", **({} if text is None else {"inside": text}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(assumptions, "ASSUMPTIONS", (assumption,))
    assumptions._folder.cache_clear()
    assert assumptions.holds(assumption) == held
    assert missing() == ([("a table", "nothing is looked up")] if missed else [])


@needs_descriptors
def test_a_descriptor_has_every_field_that_this_triton_s_own_has(monkeypatch):
    """Triton 3.9 reads one of each that 3.6 does not know."""

    @dataclasses.dataclass
    class Descriptor(triton_runtime.TensorDescriptor):
        of_tomorrow: str = "read at each launch"

    monkeypatch.setattr(triton_runtime, "TensorDescriptor", Descriptor)
    matrices = [random_int8(32, 64, seed=seed) for seed in range(3)]
    blocks = triton_runtime.MatrixBlocks(matrices[0], (16, 32))
    for matrix in matrices:
        descriptor, own = blocks.of(matrix), Descriptor(matrix, list(matrix.shape), [64, 1], [16, 32])
        assert descriptor.base is matrix
        assert type(descriptor) is Descriptor
        assert {**vars(descriptor), "base": None} == {**vars(own), "base": None}


@needs_descriptors
def test_a_matrix_is_not_kept():
    matrix = random_int8(32, 64)
    blocks = triton_runtime.MatrixBlocks(matrix, (16, 32))
    blocks.of(matrix)
    assert not any(value is matrix for value in blocks._fields.values())


@needs_descriptors
def test_what_a_descriptor_becomes_is_made_once_an_address():
    matrices = [random_int8(32, 64, seed=seed) for seed in range(2)]
    blocks, made = triton_runtime.MatrixBlocks(matrices[0], (16, 32)), []

    def expand(descriptor):
        made.append(descriptor.base.data_ptr())
        return descriptor.base.data_ptr(), *descriptor.shape

    addresses = [matrix.data_ptr() for matrix in matrices]
    for _ in range(2):
        for address in addresses:
            assert blocks.at(address, expand) == (address, 32, 64)
    assert made == addresses


class CudaLauncher:
    """As Triton's, of a kernel that reads a descriptor."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "together", "early"

    def __init__(self, launcher):
        tensordesc_meta = ["how"]
        self.launch = lambda *arguments: launcher(tensordesc_meta, *arguments)


def make_tensordesc_arg(descriptor, metadata):
    return [descriptor, metadata]


class Compiled:
    """A kernel as Triton returns it from a launch; calls are kept."""

    def __init__(self):
        self.calls = []
        self.function, self.packed_metadata = "function", "metadata"
        self.run = lambda *arguments: self.calls.append(arguments)


@pytest.fixture
def driver(monkeypatch):
    active = type("Driver", (), {"get_current_device": lambda: 3, "get_current_stream": lambda device: f"of {device}"})
    monkeypatch.setattr(triton_runtime.triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton_runtime, "CompiledKernel", Compiled)


def test_a_direct_launch_says_what_triton_says(driver):
    compiled = Compiled()
    expansions, launch = triton_runtime.direct_launch(compiled, {"A": 7, "B": 8})
    launch(4, 2, "x", "y", "z")
    assert compiled.calls == [(4, 2, 1, "of 3", "function", "metadata", None, None, None, "x", "y", "z", 7, 8)]
    assert expansions is None


def test_a_launch_past_triton_s_launcher_is_given_what_descriptors_become(driver, monkeypatch):
    calls = []
    compiled = Compiled()
    compiled.run = CudaLauncher(lambda *given: calls.append(given))
    monkeypatch.setattr(triton_runtime, "holds", lambda assumption: True)
    (expand,), launch = triton_runtime.direct_launch(compiled, {})
    assert expand("matrix") == ("matrix", "how")
    launch(4, 2, *expand("matrix"), "y")
    settings = "function", "together", "early", None, None, "metadata", None, None, None
    assert calls == [(4, 2, 1, "of 3", *settings, "matrix", "how", "y")]
    compiled.run.global_scratch_size = 1
    assert triton_runtime.direct_launch(compiled, {})[0] is None


def test_a_triton_that_launches_otherwise_launches_itself(driver, monkeypatch):
    assert triton_runtime.direct_launch(object(), {}) == (None, None)
    monkeypatch.setattr(triton_runtime, "holds", lambda assumption: assumption is not assumptions.DIRECT_LAUNCH)
    assert triton_runtime.direct_launch(Compiled(), {}) == (None, None)


def test_gluon_is_used_where_it_is_as_assumed_and_compiled(monkeypatch):
    from kernels.internals import gluon
    from kernels.linear import gemm

    interpreted = triton_runtime.triton.knobs.runtime.interpret
    assert ("ring" in gemm._pipelines()) == gluon.HAS_GLUON == (not interpreted)
    monkeypatch.setattr(assumptions, "holds", lambda assumption: assumption is not assumptions.GLUON)
    again = importlib.util.module_from_spec(gluon.__spec__)
    gluon.__spec__.loader.exec_module(again)
    assert not again.HAS_GLUON and again.gl is None and again.mma_v2 is None


def raised(name, module):
    return type(name, (Exception,), {"__module__": module})("out of it")


@pytest.mark.parametrize(
    "error, unfit",
    (
        (raised("OutOfResources", "triton.runtime.errors"), True),
        (raised("PTXASError", "triton.runtime.errors"), True),
        (raised("OutOfResources", "another.package"), False),
        (raised("CompilationError", "triton.compiler.errors"), True),
        (RuntimeError("PassManager::run failed"), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
        (torch.cuda.OutOfMemoryError("out of memory"), False),
    ),
    ids=repr,
)
def test_errors_of_a_configuration_that_does_not_fit(error, unfit):
    assert triton_runtime.is_unfit(error) == unfit
