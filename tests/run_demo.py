"""See the pack at work on a CPU: python3 tests/run_demo.py [--keep-open] [--output DIR]

Starts a real ComfyUI with this pack and a tiny diffusion transformer that draws letters and digits. Through the API it
draws a text with the original model, quantizes the model to INT8, and draws the text again with the same seed from the
saved file.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support import workflows
from support.environment import Environment, prepare, run_script, say
from support.server import GLYPH_MODEL, TESTS, ComfyServer, ExecutionFailed, PromptRejected, ServerError, serve
from support.workflows import GLYPH_TEXT, Prompt

WORKFLOW = "int8_glyphs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw glyphs with a diffusion transformer in its original form and in INT8."
    )
    parser.add_argument("--keep-open", action="store_true", help="leave ComfyUI running until Ctrl-C")
    parser.add_argument(
        "--output", type=Path, default=Path("int8-dit-demo"), metavar="DIR", help="default: ./int8-dit-demo"
    )
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    # The server is stopped on the way out, so a plain kill has to take that way too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    environment = prepare()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="int8-dit-demo-") as base:
        say("starting ComfyUI on the CPU")
        with serve(environment, Path(base)) as server:
            run(environment, server, output)
            if arguments.keep_open:
                keep_open(server)


def run(environment: Environment, server: ComfyServer, output: Path) -> None:
    """The demo itself; leaves its pictures in ``output``."""
    say(f"drawing {GLYPH_TEXT} with the original model")
    prompt = Prompt()
    images = workflows.glyph_images(prompt, workflows.stock_model(prompt))
    report(read(environment, server, server.queue(prompt)[images]["images"], output / "original.png"), GLYPH_MODEL)

    say("calibrating, quantizing to INT8, saving")
    prompt = Prompt()
    save = workflows.save_model(prompt, workflows.calibrated_model(prompt, workflows.stock_model(prompt)))
    int8_file = server.saved_path(server.queue(prompt)[save])
    int8_name = int8_file.name

    say(f"drawing it again, same seed, with {int8_name} in INT8")
    prompt = Prompt()
    images = workflows.glyph_images(prompt, workflows.int8_model(prompt, int8_name))
    report(read(environment, server, server.queue(prompt)[images]["images"], output / "int8.png"), int8_file)

    say(f"pictures: {output / 'original.png'}, {output / 'int8.png'}")


def read(environment: Environment, server: ComfyServer, images: list[dict], strip: Path) -> str:
    """Save the images of an output node as one strip, and return the characters that can be read from it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, image["filename"]) for image in images]
        for file, image in zip(files, images, strict=True):
            file.write_bytes(server.view(**image))
        reader = [environment.python, TESTS / "glyphs" / "read.py", strip, *files]
        return subprocess.run(reader, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def report(text: str, file: Path) -> None:
    """Say what a model drew, and how large its file is."""
    right = sum(drawn == wanted for drawn, wanted in zip(text, GLYPH_TEXT, strict=False))
    say(f"  reads {text}: {right} of {len(GLYPH_TEXT)} glyphs right, model file {file.stat().st_size / 1e6:.1f} MB")


def keep_open(server: ComfyServer) -> None:
    """Leave the server to the user until Ctrl-C."""
    say(f"ComfyUI runs at {server.url}")
    say(f"open Templates > glyph_nodes > {WORKFLOW}; Ctrl-C here ends it")
    try:
        server.process.wait()
        raise ServerError(f"ComfyUI ended by itself\n{server.log_tail()}")
    except KeyboardInterrupt:
        say("stopping")


if __name__ == "__main__":
    run_script(main, ServerError, PromptRejected, ExecutionFailed)
