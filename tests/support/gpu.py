"""Memory of a card that other tests' processes use too."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from filelock import FileLock, Timeout

MOST_SECONDS = 600


@contextmanager
def needs_gpu_memory(gib: float) -> Iterator[None]:
    """Run what takes so much of the card's memory once that is free, and beside no other such test of any process.

    Skips the test on a card that has less. Fails it where so much is not free within ten minutes.
    """
    has = torch.cuda.get_device_properties(0).total_memory / 2**30
    if has < gib:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory, this card has {has:.0f}")
    end, free = monotonic() + MOST_SECONDS, 0.0
    try:
        with FileLock(Path(tempfile.gettempdir(), f"int8_dit_gpu_memory_{getpass.getuser()}"), timeout=MOST_SECONDS):
            while free < gib:
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info()[0] / 2**30
                if free < gib and monotonic() > end:
                    pytest.fail(f"needs {gib:.0f} GiB of GPU memory; for ten minutes others left {free:.0f} free")
                sleep(free < gib)
            yield
            torch.cuda.empty_cache()
    except Timeout:
        pytest.fail(f"needs {gib:.0f} GiB of GPU memory; for ten minutes another test like it held the card")
