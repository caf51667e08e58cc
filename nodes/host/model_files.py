"""Files of diffusion models: those that ComfyUI lists, GGUF files, which it does not, and the demo of this pack."""

from ..comfyui.folders import all_names, folders_of, listed_names, path_of
from ..demo.letters import FILE as DEMO

_KINDS = ("diffusion_models", "unet_gguf")
"""The second is where packs that load GGUF files let users keep them. No pack's list of files is changed here."""


def model_files() -> list[str]:
    """The names of all files, relative to their folders. The demo is last: no loader is to begin with it."""
    folders = dict.fromkeys(path for kind in _KINDS for path in folders_of(kind))
    gguf = (name for folder in folders for name in all_names(folder) if name.lower().endswith(".gguf"))
    return [*sorted({*listed_names(_KINDS[0]), *gguf} - {DEMO.name}), DEMO.name]


def model_path(name: str) -> str:
    """Where a file of `model_files` is. Raises FileNotFoundError, as ComfyUI does, where none has that name."""
    return str(DEMO) if name == DEMO.name else path_of(_KINDS, name)
