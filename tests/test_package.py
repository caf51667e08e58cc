"""What the ComfyUI registry gets: the files of the package, the pack that loads from them alone, what is said of it."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement

from support.registry_scan import findings

tomllib = pytest.importorskip("tomllib")  # Python 3.11 and newer

PROJECT = Path(__file__).resolve().parents[1]
MOST_BYTES = 4 << 20
HELP = Path("web", "docs")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
# None of these is in ComfyUI's requirements, or ComfyUI says that it is not essential.
OPTIONAL = ("triton", "matplotlib", "kornia", "bitsandbytes", "gguf")
LOADS_ALONE = """
import asyncio, json, logging, sys
comfyui, package, models, *missing = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing))
logging.basicConfig(level=logging.WARNING)
sys.path.insert(0, comfyui)
from comfy.cli_args import args
args.cpu = True
import folder_paths, nodes, torch
folder_paths.add_model_folder_path("diffusion_models", models)
stock = set(nodes.NODE_CLASS_MAPPINGS)
assert asyncio.run(nodes.load_custom_node(package))
own = {name: node for name, node in nodes.NODE_CLASS_MAPPINGS.items() if name not in stock}
for node in own.values():
    node.GET_NODE_INFO_V1() if hasattr(node, "GET_NODE_INFO_V1") else node.INPUT_TYPES()
model = own["LoadINT8DiT"].execute("glyph_dit.safetensors", "fused int8").result[0]
linear = model.get_model_object("diffusion_model.joint_blocks.0.x_block.attn.qkv")
x = torch.randn(4, linear.in_features)
exact = torch.nn.functional.linear(x, linear.weight.dequantize().float(), linear.bias.float())
print(json.dumps({"nodes": sorted(own), "error": float((linear(x) - exact).norm() / exact.norm())}))
"""


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"what is packed is what git tracks, and git says: {done.stderr.strip()}")
    return {line for line in done.stdout.splitlines() if (PROJECT / line).exists()}


@pytest.fixture(scope="module")
def tracked():
    return git("ls-files")


@pytest.fixture(scope="module")
def packed(tracked):
    """The files of the package: tracked ones that .comfyignore does not name, by git's own reading of its patterns."""
    return tracked - git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore")


@pytest.fixture(scope="module")
def comfyui():
    if "COMFYUI_PATH" not in os.environ:
        pytest.skip("COMFYUI_PATH is not set (tests/run_tests.py sets it)")
    return Path(os.environ["COMFYUI_PATH"]).resolve()


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_is_small(packed, tmp_path):
    with zipfile.ZipFile(tmp_path / "node.zip", "w", zipfile.ZIP_DEFLATED) as package:
        for name in packed:
            package.write(PROJECT / name, name)
    assert (tmp_path / "node.zip").stat().st_size < MOST_BYTES


@pytest.mark.skipif(not importlib.util.find_spec("comfy_cli"), reason="comfy-cli is not installed")
def test_comfy_cli_packs_the_same_files(packed, tmp_path, monkeypatch):
    from comfy_cli.file_utils import zip_files

    monkeypatch.chdir(PROJECT)
    zip_files(str(tmp_path / "node.zip"))
    with zipfile.ZipFile(tmp_path / "node.zip") as package:
        assert set(package.namelist()) == packed


def test_all_that_runs_is_packed(tracked, packed):
    assert not {name for name in tracked - packed if not name.startswith((".", "tests/"))}
    assert {"__init__.py", "LICENSE", "README.md", "pyproject.toml", "requirements.txt", "web/int8_dit.js"} <= packed


def _folder_of_links(page):
    """The frontend takes the links of a help page in any language from the folder of the English one."""
    folder = Path(page).parent
    return HELP if HELP in folder.parents else folder


def test_no_page_of_the_package_links_what_is_not_in_it(packed):
    pages = [name for name in packed if name.endswith(".md")]
    links = {
        os.path.normpath(_folder_of_links(page) / link): page
        for page in pages
        for link in LINK.findall((PROJECT / page).read_text(encoding="utf-8"))
    }
    assert len(links) > 5
    assert not {link: page for link, page in links.items() if link not in packed}


def test_the_registry_reports_nothing(packed):
    texts = {name: (PROJECT / name) for name in packed if name.endswith((".py", ".js"))}
    assert len(texts) > 100
    assert not findings({name: path.read_text(encoding="utf-8") for name, path in texts.items()})


def test_there_are_files_alone_in_the_package_and_none_that_python_made(packed):
    assert not [name for name in packed if (PROJECT / name).is_symlink() or not (PROJECT / name).is_file()]
    assert not [name for name in packed if "__pycache__" in name or name.endswith((".pyc", ".so", ".dll", ".exe"))]


def contents(folder):
    """What is in a folder: each file with a hash of what it holds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_package_loads_alone_and_without_optional_modules(packed, comfyui, tmp_path):
    """It writes nothing into its own folder, while it is loaded and while a model runs."""
    package = tmp_path / "int8-dit"
    for name in packed:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, package / name)
    before = contents(package)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", LOADS_ALONE, comfyui, package, PROJECT / "tests" / "data", *OPTIONAL],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert {"LoadINT8DiT", "QuantizeToINT8SmoothQuant", "INT8KernelBenchmark"} <= set(loaded["nodes"])
    assert 0 < loaded["error"] < 0.02
    assert done.stderr.count("Triton is not installed") == 1
    assert len(before) == len(packed) and contents(package) == before


def test_installing_replaces_nothing_of_comfyui(project, comfyui):
    """Its packages are not named again, whatever the version, so that no installer has a reason to touch them."""
    lines = (comfyui / "requirements.txt").read_text(encoding="utf-8").splitlines()
    brought = {Requirement(line).name for line in lines if line.strip() and not line.startswith("#")} | {"triton"}
    assert "torch" in brought
    assert not {Requirement(entry).name for entry in project["project"]["dependencies"]} & brought


@pytest.mark.parametrize("kind, width, height", (("Icon", 400, 400), ("Banner", 1260, 540)))
def test_pictures_lie_where_the_registry_is_told(project, tracked, kind, width, height):
    raw = project["project"]["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
    url = project["tool"]["comfy"][kind]
    assert url.startswith(raw) and url.removeprefix(raw) in tracked
    picture = ElementTree.parse(PROJECT / url.removeprefix(raw)).getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert (picture.get("width"), picture.get("height")) == (str(width), str(height))


def test_the_changelog_has_an_entry_for_this_version(project):
    headings = re.findall(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert project["project"]["version"] in headings
