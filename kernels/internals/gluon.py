"""What the kernels use of Gluon, Triton's language with explicit layouts, by one name each.

It is experimental, and its names change from release to release. All are None where they are not as assumed, and under
Triton's interpreter, which does not know it.
"""

from typing import Any

import torch

from .insides import GLUON, holds

__all__ = ("HAS_GLUON", "barrier", "commit_copies", "copy_async", "gl", "gluon", "mma_v2", "wait_for_copies")

gluon: Any = None
gl: Any = None
copy_async: Any = None
commit_copies: Any = None
wait_for_copies: Any = None
barrier: Any = None
mma_v2: Any = None

HAS_GLUON = torch.version.hip is None and holds(GLUON)
if HAS_GLUON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
        from triton.knobs import runtime

        HAS_GLUON = not runtime.interpret
        # The older names are those of Triton before 3.9.
        copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
        barrier = getattr(gl, "barrier", None) or gl.thread_barrier
        commit_copies, wait_for_copies = async_copy.commit_group, async_copy.wait_group
    except Exception:  # an experimental module may raise anything, as where the interpreter was switched off late
        HAS_GLUON = False
