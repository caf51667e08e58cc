"""What a file holds, and what the user says to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BRANCHES = ("conditional", "unconditional")


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a file.

    Attributes:
        name: of the file, for messages.
        tensors: by name; nobody else holds this dict.
        metadata: the file's, in strings.
        branch: which model is wanted, one of BRANCHES. Only a file that holds both has a choice.
        base: reads the checkpoint that completes a file which is only a part of a model; None where none is named.
            Raises ValueError naming that file.
        architecture: the class of models that ComfyUI takes the tensors for; None until all of the file is read.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    branch: str = BRANCHES[0]
    base: "Callable[[], Checkpoint] | None" = None
    architecture: Any = None
