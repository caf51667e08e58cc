"""Files that nodes write into ComfyUI's output folder."""

import json
import os

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import io


def output_path(filename_prefix: str) -> tuple[str, dict]:
    """The path of a new safetensors file, numbered as ComfyUI's own save nodes number theirs, and the node's ui result
    that names it."""
    folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
        filename_prefix, folder_paths.get_output_directory()
    )
    filename = f"{filename}_{counter:05}_.safetensors"
    return os.path.join(folder, filename), {"saved": [{"filename": filename, "subfolder": subfolder, "type": "output"}]}


def workflow_metadata(hidden: io.HiddenHolder) -> dict[str, str]:
    """The workflow as ComfyUI's save nodes store it, unless the user disabled that."""
    if args.disable_metadata:
        return {}
    metadata = {} if hidden.prompt is None else {"prompt": json.dumps(hidden.prompt)}
    return metadata | {key: json.dumps(value) for key, value in (hidden.extra_pnginfo or {}).items()}
