"""Under which name inductor keeps what autotuning a Triton kernel found."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

__all__ = ["AutotuneNames"]

_TAG = "TORCH_COMPILE_CACHE_KEY_TAG"
_ANY_FILE = "/folder/kernel.py"


class AutotuneNames:
    """Makes this process name the results of autotuning as compile workers do, until ``stop``.

    The name holds torch's cache key tag. A worker has the environment's; where this process holds another,
    it would look for a result under a name that nobody wrote, and autotune again on every start.
    """

    def __init__(self) -> None:
        import torch.compiler.config
        from torch._inductor.runtime import autotune_cache

        self._cache: Any = vars(autotune_cache)["AutotuneCache"]
        self._found: Any = vars(self._cache).get("_prepare_key")
        self._ours: Any = staticmethod(_name_of_workers)
        self.in_force = isinstance(self._found, staticmethod) and (
            self._found(_ANY_FILE) == _name(_ANY_FILE, torch.compiler.config.cache_key_tag)
        )
        # Where torch names them in another way, its own way stays: results are right, and autotuned anew.
        if self.in_force:
            self._cache._prepare_key = self._ours

    def stop(self) -> None:
        """Give torch its own back."""
        if self.in_force and vars(self._cache)["_prepare_key"] is self._ours:
            self._cache._prepare_key = self._found


def _name_of_workers(filename: str) -> str:
    return _name(filename, os.environ.get(_TAG, ""))


def _name(filename: str, tag: str) -> str:
    return hashlib.sha256(f"{Path(filename).name}:{tag}".encode()).hexdigest()
