"""Files that nodes write into ComfyUI's output folder."""

import itertools
import json
import os
import re
from collections.abc import Iterator

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io

from .notices import Badge, badges_output


def output_paths(filename_prefix: str, extension: str = "safetensors") -> Iterator[str]:
    """Return the paths that a new file may get, numbered like ComfyUI's, from the first after those in the folder.

    ComfyUI's own count is always 1 where a prefix is no plain path, such as `foo/`: it looks for another name.
    """
    folder, filename, *_ = folder_paths.get_save_image_path(filename_prefix, folder_paths.get_output_directory())
    numbered = re.compile(re.escape(os.path.normcase(filename)) + r"_(\d+)(?![^._])")
    names = (numbered.match(os.path.normcase(name)) for name in os.listdir(folder))
    first = 1 + max((int(name[1]) for name in names if name), default=0)
    return (os.path.join(folder, f"{filename}_{number:05}_.{extension}") for number in itertools.count(first))


def saved_file(path: str) -> dict:
    """The ui result of a node that saved a file in the output folder: the file and a badge."""
    subfolder, filename = os.path.split(os.path.relpath(path, folder_paths.get_output_directory()))
    said = f"saved {filename}, {size_text(os.path.getsize(path))}"
    badge = Badge("good", said, os.path.join("output", subfolder))
    return {"saved": [{"filename": filename, "subfolder": subfolder, "type": "output"}], **badges_output(badge)}


def size_text(count: int, beside: int = 0) -> str:
    """A number of bytes for the user, in the unit of the larger one that it stands `beside`."""
    return f"{count / 1e9:.1f} GB" if max(count, beside) >= 1e9 else f"{count / 1e6:.1f} MB"


def workflow_metadata(hidden: io.HiddenHolder) -> dict[str, str]:
    """The workflow as ComfyUI's save nodes store it; nothing if the user disabled that."""
    if args.disable_metadata:
        return {}
    metadata = {} if hidden.prompt is None else {"prompt": json.dumps(hidden.prompt)}
    return metadata | {key: json.dumps(value) for key, value in (hidden.extra_pnginfo or {}).items()}
