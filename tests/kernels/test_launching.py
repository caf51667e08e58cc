"""Launches are found again where Triton would have compiled the same, and only there."""

import itertools

import torch

from kernels.triton_kernels.launching import Launcher


def test_a_launch_is_for_what_triton_compiles_for():
    launcher = Launcher(None, lambda *form: ({}, {}))
    x = torch.zeros(64, dtype=torch.float16)
    known = [
        launcher.prepared((1,), [x, x], (32, 0.5)),
        launcher.prepared((2,), [x, x], (32, 0.5)),
        launcher.prepared((1,), [x, x.bfloat16()], (32, 0.5)),
        launcher.prepared((1,), [x[1:], x], (32, 0.5)),  # begins elsewhere than on 16 bytes
        launcher.prepared((1,), [x, x[1:]], (32, 0.5)),
        launcher.prepared((1,), [x, x], (33, 0.5)),
        launcher.prepared((1,), [x, x], (1, 0.5)),
        launcher.prepared((1,), [x, x], (1 << 31, 0.5)),
        Launcher(None, launcher.build).prepared((1,), [x, x], (32, 0.5)),
    ]
    assert not [pair for pair in itertools.combinations(known, 2) if pair[0] is pair[1]]
    other = torch.ones(128, dtype=torch.float16)
    assert launcher.prepared((1,), [other, other[8:]], (48, 0.25)) is known[0]
    assert launcher.prepared((1,), [other, other], (65, 0.5)) is known[5]
