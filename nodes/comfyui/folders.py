"""Where ComfyUI keeps files."""

import os
from collections.abc import Sequence

import folder_paths
from comfy.cli_args import args


def folders_of(kind: str) -> list[str]:
    """The folders of a kind of model, such as "diffusion_models"; none of a kind that ComfyUI does not know."""
    return folder_paths.get_folder_paths(kind) if kind in folder_paths.folder_names_and_paths else []


def listed_names(kind: str) -> list[str]:
    """The files of a kind that ComfyUI offers, relative to their folders."""
    return folder_paths.get_filename_list(kind)


def all_names(folder: str) -> list[str]:
    """Every file below a folder, relative to it."""
    return folder_paths.recursive_search(folder, [".git"])[0] if os.path.isdir(folder) else []


def path_of(kinds: Sequence[str], name: str) -> str:
    """Where the file with this name is, in the first of these kinds that has it.

    Raises FileNotFoundError, as ComfyUI does, where none has it.
    """
    known = (kind for kind in kinds if kind in folder_paths.folder_names_and_paths)
    found = next(filter(None, (folder_paths.get_full_path(kind, name) for kind in known)), None)
    return found or folder_paths.get_full_path_or_raise(kinds[0], name)


def add_kind(kind: str, extensions: set[str]) -> None:
    """Let ComfyUI look for a kind of file of this pack in the folder of that name, where models are and in the output
    folder."""
    for base in (folder_paths.models_dir, output_folder()):
        folder_paths.add_model_folder_path(kind, os.path.join(base, kind))
    folder_paths.folder_names_and_paths[kind] = (folder_paths.folder_names_and_paths[kind][0], extensions)


def output_folder() -> str:
    """ComfyUI's output folder."""
    return folder_paths.get_output_directory()


def output_place(filename_prefix: str) -> tuple[str, str]:
    """The folder, which is there then, and the beginning of a file's name that a prefix of the user's stands for."""
    folder, filename, _, _, _ = folder_paths.get_save_image_path(filename_prefix, output_folder())
    return folder, filename


def keeps_workflow() -> bool:
    """Whether saved files are to hold the workflow; the user can start ComfyUI without."""
    return not args.disable_metadata
