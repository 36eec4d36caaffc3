"""What torch and Triton hash of their own files before the first look-up in a cache."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import Any

from ..no_fork import no_fork

__all__ = ["THREAD", "hash_ahead"]

THREAD = "dynapolicy-keys"

#: Each keeps its answer. Hashing takes half a second, most of it without the interpreter's lock.
_KEYS = (
    ("torch._inductor.codecache", "torch_key"),
    ("torch._inductor.runtime.triton_compat", "triton_key"),
)


def hash_ahead() -> None:
    """Begin to hash on threads, while the caller does something else.

    A look-up that comes before the end hashes for itself, as it would have done anyway.
    """
    # Imported here: torch breaks where threads import parts of it at once.
    import torch._dynamo  # noqa: F401 - first, or some releases can't import the others

    for key in filter(None, (_found(module, name) for module, name in _KEYS)):
        threading.Thread(target=_hash, args=(key,), name=THREAD, daemon=True).start()


def _found(module: str, name: str) -> Any:
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(module), name, None)
    return None


def _hash(key: Callable[[], object]) -> None:
    # Without Triton its key can't be had; what else fails here fails again where torch asks, and is said there.
    # Some releases hold a lock meanwhile, and Triton imports its parts.
    with no_fork(), contextlib.suppress(Exception):
        key()
