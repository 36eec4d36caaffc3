"""Cache entries: what torch compiled for a code object."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable

__all__ = ["compiled_something", "count", "dynamo_ready", "matmul_precision", "set_matmul_precision", "shared_code"]


@functools.cache
def shared_code() -> types.CodeType:
    """The code object that torch puts around callables without a frame of their own."""
    from torch._dynamo import external_utils

    inner: Callable[[], None] = external_utils.wrap_inline(lambda: None)
    return inner.__code__


def count(code: types.CodeType) -> int:
    """Cache entries of a code object, over all wrappers. Source: ``torch._dynamo.eval_frame``."""
    from torch._dynamo import eval_frame

    return len(eval_frame._debug_get_cache_entry_list(code))


def dynamo_ready() -> bool:
    """Whether ``torch._dynamo`` is imported, so that something may have compiled."""
    return "torch._dynamo.eval_frame" in sys.modules


def compiled_something() -> bool:
    """Whether anything compiled in this process, as far as torch's counters tell."""
    from torch._dynamo.utils import counters

    return bool(counters["frames"]["ok"])


def matmul_precision() -> str | None:
    """Torch's precision of float32 matrix products, or None where it can't be read.

    Since torch 2.9 a per-backend precision can be set, and mixing both ways makes the read raise.
    """
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def set_matmul_precision(precision: str) -> None:
    """Set it for the whole process."""
    import torch

    torch.set_float32_matmul_precision(precision)
