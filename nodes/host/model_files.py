"""Files of diffusion models, where users keep them: those that ComfyUI lists, and GGUF files, which it does not."""

import os

import folder_paths

_FOLDERS = ("diffusion_models", "unet_gguf")
"""The second is where packs that load GGUF files let users keep them. No pack's list of files is changed here."""


def model_files() -> list[str]:
    """The names of all files, relative to their folders."""
    folders = dict.fromkeys(path for folder in _known_folders() for path in folder_paths.get_folder_paths(folder))
    found = (folder_paths.recursive_search(path, [".git"])[0] for path in folders if os.path.isdir(path))
    gguf = (name for names in found for name in names if name.lower().endswith(".gguf"))
    return sorted({*folder_paths.get_filename_list(_FOLDERS[0]), *gguf})


def model_path(name: str) -> str:
    """Where a file of `model_files` is. Raises FileNotFoundError, as ComfyUI does, where none has that name."""
    paths = (folder_paths.get_full_path(folder, name) for folder in _known_folders())
    return next(filter(None, paths), None) or folder_paths.get_full_path_or_raise(_FOLDERS[0], name)


def _known_folders() -> list[str]:
    return [folder for folder in _FOLDERS if folder in folder_paths.folder_names_and_paths]
