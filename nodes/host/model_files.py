"""Files of diffusion models: those that ComfyUI lists, GGUF files, which it does not, and the demo of this pack."""

import folder_paths

from ..demo.letters import FILE as DEMO

_KINDS = ("diffusion_models", "unet_gguf")  # the second is the folder of packs that load GGUF files


def model_files() -> list[str]:
    """Return the names of all files, relative to their folders. The demo is last: no loader is to begin with it."""
    known = [kind for kind in _KINDS if kind in folder_paths.folder_names_and_paths]
    folders = dict.fromkeys(path for kind in known for path in folder_paths.get_folder_paths(kind))
    names = (name for folder in folders for name in folder_paths.recursive_search(folder, [".git"])[0])
    gguf = (name for name in names if name.lower().endswith(".gguf"))
    return [*sorted({*folder_paths.get_filename_list(_KINDS[0]), *gguf} - {DEMO.name}), DEMO.name]


def model_path(name: str) -> str:
    """Return the path of one of `model_files`. Raises FileNotFoundError, as ComfyUI does, where none has that name."""
    if name == DEMO.name:
        return str(DEMO)
    found = filter(None, (folder_paths.get_full_path(kind, name) for kind in _KINDS))
    return next(found, None) or folder_paths.get_full_path_or_raise(_KINDS[0], name)
