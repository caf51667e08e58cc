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
    """The paths a new file may get, numbered as ComfyUI's own save nodes number theirs: from the first
    number after those in the folder.

    ComfyUI's own count is not used. It looks for another name than the file gets where a prefix is no plain path, such
    as `foo/`, and is then always 1.
    """
    folder, filename, *_ = folder_paths.get_save_image_path(filename_prefix, folder_paths.get_output_directory())
    numbered = re.compile(re.escape(os.path.normcase(filename)) + r"_(\d+)(?![^._])")
    names = (numbered.match(os.path.normcase(name)) for name in os.listdir(folder))
    first = 1 + max((int(name[1]) for name in names if name), default=0)
    return (os.path.join(folder, f"{filename}_{number:05}_.{extension}") for number in itertools.count(first))


def saved_file(path: str) -> dict:
    """The ui result of a node that saved a file in the output folder: the file, and a line on the node."""
    subfolder, filename = os.path.split(os.path.relpath(path, folder_paths.get_output_directory()))
    said = f"saved {filename}, {size_text(os.path.getsize(path))}"
    badge = Badge("good", said, os.path.join("output", subfolder))
    return {"saved": [{"filename": filename, "subfolder": subfolder, "type": "output"}], **badges_output(badge)}


def size_text(count: int, beside: int = 0) -> str:
    """A number of bytes as the user reads it, in the unit of the one that it stands `beside`."""
    return f"{count / 1e9:.1f} GB" if max(count, beside) >= 1e9 else f"{count / 1e6:.1f} MB"


def workflow_metadata(hidden: io.HiddenHolder) -> dict[str, str]:
    """The workflow as ComfyUI's save nodes store it, unless the user disabled that."""
    if args.disable_metadata:
        return {}
    metadata = {} if hidden.prompt is None else {"prompt": json.dumps(hidden.prompt)}
    return metadata | {key: json.dumps(value) for key, value in (hidden.extra_pnginfo or {}).items()}
