"""What a workflow says of itself in a new file's metadata: beside what loaders read there, never in its place."""

from collections.abc import Mapping

_ELSEWHERE = "workflow."
# ComfyUI reads these of a model file; all that begins so is this pack's.
_READ = ("config", "format", "tae_latent_channels", "_quantization_metadata")
_OWN = "int8_dit_"


def with_workflow(own: Mapping[str, str], workflow: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a new file: the pack's entries, and those of a workflow, which may have any keys.

    Keys that mean something to a loader get a prefix. So do all with a dot, such as `general.alignment`: GGUF's own
    have one.
    """
    entries = {}
    for key, text in workflow.items():
        is_read = key in own or key in _READ or key.startswith(_OWN) or "." in key
        # JSON may have half a character in a key, and no file can.
        entries[(_ELSEWHERE + key if is_read else key).encode(errors="replace").decode()] = text
    return {**entries, **own}
