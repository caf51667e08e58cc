"""What Kernel Benchmark's JSON says of the user and the machine: nothing."""

import getpass
import json
import platform
from pathlib import Path

import pytest

from kernels.benchmark.anonymous import anonymous
from kernels.benchmark.health import Health
from kernels.benchmark.outcome import Outcome
from kernels.benchmark.shape_results import LinearShape, ShapeResult, notes

SECRET = ("alice", "smith", "models", "secret", "workstation", "o'neil")
PATHS = (
    "[Errno 2] No such file or directory: '/home/alice smith/models/secret.safetensors'",
    "cannot open /home/alice/secret.so: undefined symbol, see ~/models or ./secret",
    "cannot import name 'ops' from 'nunchaku' (/home/alice/venv/nunchaku/__init__.py)",
    r"DLL load failed: C:\Users\Alice Smith\models\secret.dll not found",
    r"could not read '\\workstation\share\secret.json'",
    "C:/Users/alice/secret: denied; error:/home/alice/secret",
    'file "/home/o\'neil/models/secret one.so" is no library',
    "at file:///home/alice/secret.html and models/secret/one.gguf and models/secret.gguf",
)
KEPT = (
    "\\* not captured in a CUDA graph: a loop of calls, the host's launches included.",
    "Left out (there is no such kernel here): flash; cuDNN (4352 x 4608 x 4608).",
    "INT8/bf16, 1.5/2.0 s/it and n/a; 31.5 % (±0.3), e.g. `pip install bitsandbytes`.",
    "Exact attention, 24 heads of 128: PyTorch's choice is the fastest, 2.00 x ComfyUI's choice.",
)


@pytest.mark.parametrize("text", PATHS)
def test_no_path_is_left(text):
    without = anonymous(text, frozenset())
    assert "<path>" in without and not any(secret in without.lower() for secret in SECRET)


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_path_stays(text):
    assert anonymous([{"notes": (text, 1.5, None)}], frozenset()) == [{"notes": [text, 1.5, None]}]


def test_names_go_wherever_they_stand():
    names = frozenset({"alice", "alice smith", "box"})
    said = "Alice Smith on box.lan: malice in a boxed alice"
    assert anonymous({"box": [said]}, names) == {"box": ["<name> on <name>.lan: malice in a boxed <name>"]}
    here = [getpass.getuser(), Path.home().name, platform.node()]
    assert anonymous([f"by {name}, here" for name in here]) == ["by <name>, here"] * len(here)


def test_the_json_of_a_run_has_none():
    result = ShapeResult(LinearShape("qkv", 8, 8), 4, absent={"nf4": f"{Path.home()}/bnb.so is not there"})
    sentence = f"The choice could not be stored ([Errno 13] Permission denied: '{Path.home() / 'a folder'}')."
    machine = {"card": "a card", "date": "d"}
    outcome = Outcome(machine, Health(None, None), [result], [], None, [sentence], notes([result]))
    (section, _) = outcome.sections(None)
    content = json.loads(section["copied"])
    assert section["copied"] == outcome.as_json() and str(Path.home()) in section["summary"][0]
    assert content["environment"] == machine
    assert content["sentences"] == ["The choice could not be stored ([Errno 13] Permission denied: <path>)."]
    assert content["shapes"][0]["absent"] == {"nf4": "<path> is not there"}
    assert content["notes"] == ["Left out (<path> is not there): nf4."]
