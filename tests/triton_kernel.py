"""A kernel for a GPU, compiled where there may be none."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_one(x, y, n, size: tl.constexpr):
    """To each of ``n`` numbers."""
    place = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + place, tl.load(x + place, mask=place < n) + 1, mask=place < n)


def compiled() -> str:
    """Its name in Triton's cache, where it lies now."""
    types = {"x": "*fp32", "y": "*fp32", "n": "i32", "size": "constexpr"}
    return str(triton.compile(ASTSource(add_one, types, {"size": 128}), target=GPUTarget("cuda", 90, 32)).hash)
