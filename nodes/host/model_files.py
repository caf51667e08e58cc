"""Files of diffusion models, where users keep them: those that ComfyUI lists, and GGUF files, which it does not."""

from ..comfyui.folders import all_names, folders_of, listed_names, path_of

_KINDS = ("diffusion_models", "unet_gguf")
"""The second is where packs that load GGUF files let users keep them. No pack's list of files is changed here."""


def model_files() -> list[str]:
    """The names of all files, relative to their folders."""
    folders = dict.fromkeys(path for kind in _KINDS for path in folders_of(kind))
    gguf = (name for folder in folders for name in all_names(folder) if name.lower().endswith(".gguf"))
    return sorted({*listed_names(_KINDS[0]), *gguf})


def model_path(name: str) -> str:
    """Where a file of `model_files` is. Raises FileNotFoundError, as ComfyUI does, where none has that name."""
    return path_of(_KINDS, name)
