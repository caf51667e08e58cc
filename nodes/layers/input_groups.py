"""Which linears of a diffusion model read the same input: they are smoothed alike."""

from collections.abc import Callable, Iterable

# Attribute names under one parent, in the order of the calls, as in ComfyUI's models. The q of a cross attention reads
# another tensor than k and v, which `alike` tells.
_GROUPS = (
    ("w1", "w3"),  # Lumina, Z-Image, Ideogram 4, HiDream
    ("gate_proj", "up_proj"),  # Flux 2, Ernie, ACE-Step
    ("gate", "up"),  # Krea 2
    ("linear_1", "linear_3"),  # OmniGen 2
    ("layer1", "linear_gate"),  # Cosmos
    ("proj_in_gate", "proj_in"),  # SeedVR
    ("c_fc1", "c_fc2"),  # AuraFlow
    ("q", "k", "v"),  # Wan, CogVideoX
    ("k_img", "v_img"),  # Wan
    ("wq", "wk", "wv", "gate"),  # Krea 2
    ("q_proj", "k_proj", "v_proj"),  # Cosmos Predict 2, Anima, ACE-Step
    ("to_q", "to_k", "to_v"),  # Qwen-Image, Ernie, LTX-Video, ACE-Step
    ("add_q_proj", "add_k_proj", "add_v_proj"),  # Qwen-Image
    ("to_q_t", "to_k_t", "to_v_t"),  # HiDream
    ("to_query", "to_key", "to_value"),  # Kandinsky 5
    ("img_to_q", "img_to_k", "img_to_v"),  # Boogu
    ("instruct_to_q", "instruct_to_k", "instruct_to_v"),  # Boogu
    ("w1q", "w1k", "w1v"),  # AuraFlow
    ("w2q", "w2k", "w2v"),  # AuraFlow
)


def same_input_groups(names: Iterable[str], alike: Callable[[str, str], bool]) -> list[list[str]]:
    """The groups of two or more linears that read the same input, going by their names and by `alike`.

    Args:
        names: dotted module paths of the linears that count.
        alike: an equivalence that splits what the names put together: whether two linears belong to one group.

    Returns:
        Lists of `names`, each in the order of the calls.
    """
    children: dict[str, set[str]] = {}
    for name in names:
        parent, dot, child = name.rpartition(".")
        children.setdefault(parent + dot, set()).add(child)
    groups = []
    for prefix, present in children.items():
        for group in _GROUPS:
            rest = [prefix + child for child in group if child in present]
            while rest:
                members = [name for name in rest if alike(name, rest[0])]
                rest = [name for name in rest if name not in members]
                if len(members) > 1:
                    groups.append(members)
    return groups
