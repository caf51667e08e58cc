"""Feed-forwards whose second linear ComfyUI up to 0.39 computes itself, with the activation before it and past the
linear's own forward (its `linear_input_act`): those of Wan, LTX-Video and MiniMax. Later ones give it the activation.
"""

from typing import Any

import torch

from .steps import project_activated


def wan(feed_forward: Any, core: Any, x: torch.Tensor) -> torch.Tensor:
    return project_activated(feed_forward[2], feed_forward[0](x), "gelu_tanh")


def ltx_video(feed_forward: Any, core: Any, x: torch.Tensor) -> torch.Tensor:
    return project_activated(feed_forward.net[2], feed_forward.net[0].proj(x), "gelu_tanh")


def minimax(feed_forward: Any, core: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = feed_forward.fc1(x).chunk(2, dim=-1)
    return project_activated(feed_forward.fc2, gate, "silu", up)
