"""What a user sees of two versions of this pack, compared: a move that changes nothing must change nothing of it.

    python tests/studies/same_outputs.py write FOLDER [--tree DIR] --comfyui PATH
    python tests/studies/same_outputs.py compare FOLDER OTHER

`write` runs a real ComfyUI server on the CPU with the pack in DIR (by default this one). It keeps what the server tells
the frontend of each node, the files that the nodes save, sampled images, the lines and tables on the nodes, their
errors, the log of the pack and the example workflows. Times, dates and versions are masked. It takes two minutes.
A busy machine may not split a forward into its parts: then the benchmark's table is shorter.
"""

import argparse
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).resolve().parents[2]
TEXT = "INT8"
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K")
# Widgets of Quantize to INT8 beside those that the tests' prompts set.
QUANTIZED = {
    "smooth": {},
    "rotate": {"method": "rotate"},
    "best per layer": {"method": "best per layer", "search_alpha": True},
    "GPTQ": {"method": "best per layer", "rounding": "calibrated"},
    "protected in bf16": {"protected_in": "bf16"},
    "foldable": {"smooth_only_foldable": True, "protected_in": "bf16"},
}
# What differs from run to run: times, dates, machine, places.
_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+)?"), "DATE"),
    (re.compile(r"(?<![\w.])\d+(\.\d+)?(e[-+]?\d+)? ?(ms|s|GB/s|TOPS|TFLOPS|MB|x|×)(?![\w])"), "NUMBER"),
    (re.compile(r"/[\w./-]*/(?=[\w.-]+)"), ""),
)
# What the pack says in the log, and not where in its files an error passed.
_LOG = re.compile(r"^(?!  File |.*Native ops|.* seconds: ).*int8", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def masked(text: str) -> str:
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def masked_numbers(value: Any) -> Any:
    """A JSON value without what a measurement makes of it."""
    if isinstance(value, str) and value.startswith("{"):  # what Copy JSON copies
        value = json.loads(value)
    if isinstance(value, dict):
        return {masked(key): masked_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        # Whether the machine was steady is no output of the pack's, nor is the order, the fastest first.
        kept = (masked_numbers(entry) for entry in value if "not steady" not in str(entry)[-80:])
        return sorted(kept, key=json.dumps)
    return masked(re.sub(r"\d+(\.\d+)?", "N", value)) if isinstance(value, str) else type(value).__name__


def measured(entries: Any) -> Any:
    """What a node that measures shows, without what was fastest."""
    tables = [entry for entry in entries if isinstance(entry, dict) and "rows" in entry]
    for table in tables:
        table["rows"] = [row[:1] for row in table["rows"]]
    return masked_numbers(entries)


def content(path: Path) -> dict[str, Any]:
    """A saved file: its size, and what is in it without the workflow, which names the pack's folder."""
    data = path.read_bytes()
    found: dict[str, Any] = {"bytes": len(data)}
    if path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        found |= {"header": header, "values": hashlib.sha256(data[8 + length :]).hexdigest()}
    else:
        found["sha256"] = hashlib.sha256(data).hexdigest()
    return found


def pixels_of(image: bytes) -> str:
    """A hash of an image's pixels: in its file ComfyUI also notes when the model's file was written."""
    with Image.open(io.BytesIO(image)) as opened:
        return f"{opened.size} {hashlib.sha256(opened.tobytes()).hexdigest()}"


class Kept:
    """What was found, each under a name of its own."""

    def __init__(self, server: Any) -> None:
        self.server, self.found = server, {}

    def run(self, name: str, prompt: dict) -> dict[str, dict]:
        """Run a prompt; keep its error, or of each node that shows something what it shows."""
        from support.server import ExecutionFailed, PromptRejected

        try:
            results = self.server.queue(prompt)
        except (ExecutionFailed, PromptRejected) as error:
            self.found[f"{name}: error"] = masked(str(error))
            return {}
        for node, shown in results.items():
            for kind, entries in shown.items():
                key = f"{name}: {prompt[node]['class_type']} {node} {kind}"
                if kind == "images":
                    self.found[key] = [pixels_of(self.server.view(**image)) for image in entries]
                elif kind == "saved":
                    self.found[key] = content(self.server.saved_path(shown))
                elif kind != "latents":
                    self.found[key] = (
                        measured(entries) if "benchmark" in name else json.loads(masked(json.dumps(entries)))
                    )
        return results


def prompts(kept: Kept) -> None:
    """All that is run, file by file."""
    from support import workflows
    from support.workflows import Prompt, link

    def drawn(name: str, **loader: object) -> None:
        """Images of a file, and the line on the loader."""
        prompt = Prompt()
        model = link(prompt.add("LoadINT8DiT", **{"kernel": "fused int8", **loader}))
        workflows.glyph_images(prompt, model, text=TEXT, steps=4)
        kept.run(name, prompt)

    def saved(name: str, node: str, model: Any, prompt: Any, **inputs: object) -> str | None:
        saver = prompt.add(node, model=model, filename_prefix=f"diffusion_models/{name}", **inputs)
        results = kept.run(f"saved {name}", prompt)
        return kept.server.saved_path(results[saver]).name if saver in results else None

    for kernel in ("fused int8", "auto", "bf16"):
        drawn(f"glyphs, {kernel}", model_name=workflows.GLYPH_MODEL, kernel=kernel)
    files = {}
    for name, widgets in QUANTIZED.items():
        prompt = Prompt()
        model = workflows.calibrated_model(prompt, workflows.stock_model(prompt), text=TEXT, steps=3, **widgets)
        prompt.add("PreviewAny", source=link(model[0], 2))
        prompt.add("PreviewImage", images=link(model[0], 1))
        files[name] = saved(name, "SaveINT8DiT", model, prompt, fold=name == "foldable")
    prompt = Prompt()
    files["native"] = saved(
        "native", "SaveINT8DiT", workflows.uncalibrated_model(prompt, workflows.stock_model(prompt)), prompt, fold=False
    )
    for name, file in files.items():
        drawn(f"from {name}", model_name=file)
    for kind in GGUF_TYPES:
        prompt = Prompt()
        file = saved(kind, "SaveGGUFDiT", workflows.stock_model(prompt), prompt, type=kind)
        for memory in ("INT8", "as stored"):
            drawn(f"from {kind} {memory}", model_name=file, memory=memory)
    prompt = Prompt()
    model = link(prompt.add("ApplyFusedINT8Kernel", model=workflows.stock_model(prompt, files["native"])))
    workflows.glyph_images(prompt, model, text=TEXT, steps=4)
    kept.run("applied, auto", prompt)
    prompt = Prompt()
    applied = {"model": workflows.stock_model(prompt, files["native"]), "kernel": "fused int8"}
    workflows.glyph_images(prompt, link(prompt.add("ApplyFusedINT8Kernel", **applied)), text=TEXT, steps=4)
    kept.run("applied", prompt)
    drawn("INT8 attention", model_name=files["native"], attention="INT8 (comfy-kitchen)")
    prompt = Prompt()
    recorded, calibration = workflows.recorded_model(prompt, workflows.stock_model(prompt), text=TEXT, steps=3)
    workflows.save_calibration(prompt, calibration)
    saved("recorded", "SaveINT8DiT", recorded, prompt, fold=False)
    prompt = Prompt()
    model = workflows.int8_model(prompt, files["native"])
    benchmark = workflows.kernel_benchmark(prompt, tokens=16, model=model)
    results = kept.run("benchmark", prompt)
    if benchmark in results:
        overview = results[benchmark]["int8_benchmark"][0]
        kept.found["benchmark JSON"] = masked_numbers(json.loads(kept.server.view(**overview["download"])))
    folder = kept.server.base / "models" / "diffusion_models"
    whole = (kept.server.base / "output" / "diffusion_models" / files["native"]).read_bytes()
    for name, data in (("cut", whole[:-1000]), ("empty", b""), ("text", b"{}"), ("html", b"<!doctype html>")):
        (folder / f"{name}.safetensors").write_bytes(data)
        drawn(f"damaged, {name}", model_name=f"{name}.safetensors")


def write(folder: Path, tree: Path, comfyui: Path) -> None:
    sys.path.insert(0, str(tree / "tests"))
    import tempfile

    from support.environment import Environment
    from support.server import serve

    with tempfile.TemporaryDirectory() as base, serve(Environment(Path(sys.executable), comfyui), Path(base)) as server:
        kept = Kept(server)
        infos = json.loads(server.get("/object_info"))
        kept.found["object_info"] = {k: v for k, v in infos.items() if v["python_module"] == "custom_nodes.int8_dit"}
        prompts(kept)
        lines = _COLOR.sub("", server.log.read_text(errors="replace")).splitlines()
        kept.found["log"] = sorted({masked(line) for line in lines if _LOG.search(line)})
    examples = sorted((tree / "example_workflows").glob("*.json"))
    kept.found["workflows"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in examples}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outputs.json").write_text(json.dumps(kept.found, indent=1, sort_keys=True))
    print(f"{len(kept.found)} outputs in {folder}")


def compare(folder: Path, other: Path) -> int:
    """Print what differs; the number of those outputs."""
    one, two = (json.loads((each / "outputs.json").read_text()) for each in (folder, other))
    different = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    for name in different:
        print(f"{name}\n  {str(one.get(name))[:400]}\n  {str(two.get(name))[:400]}")
    print(f"{len(one.keys() | two.keys()) - len(different)} outputs are equal, {len(different)} are not")
    return len(different)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--tree", type=Path, default=HERE)
    parser.add_argument("--comfyui", type=Path)
    arguments = parser.parse_args()
    if arguments.do == "compare":
        sys.exit(bool(compare(arguments.folder, arguments.other)))
    write(arguments.folder, arguments.tree.resolve(), arguments.comfyui)


if __name__ == "__main__":
    main()
