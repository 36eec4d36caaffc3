"""Under which name inductor keeps what autotuning a Triton kernel found."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from .stand_in import StandIn

__all__ = ["AutotuneNames", "key_tag_of_environment"]

_NAME = "_prepare_key"
_ANY_FILE = "/folder/kernel.py"


class AutotuneNames:
    """Makes this process name the results of autotuning as compile workers do, until ``stop``.

    The name holds torch's cache key tag. A worker has the environment's; where this process holds another,
    it would look for a result under a name that nobody wrote, and autotune again on every start.
    """

    def __init__(self) -> None:
        import torch.compiler.config
        from torch._inductor.runtime import autotune_cache

        cache: Any = vars(autotune_cache)["AutotuneCache"]
        found: Any = vars(cache).get(_NAME)
        known = isinstance(found, staticmethod) and (
            found(_ANY_FILE) == _name(_ANY_FILE, torch.compiler.config.cache_key_tag)
        )
        # Where torch names them in another way, its own way stays: results are right, and autotuned anew.
        self._stand_in = StandIn(cache, _NAME, staticmethod(_name_of_workers)) if known else None

    def stop(self) -> None:
        """Give torch its own back."""
        if self._stand_in is not None:
            self._stand_in.stop()


def key_tag_of_environment() -> str:
    """Torch's cache key tag in a process that sets none by itself."""
    return os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")


def _name_of_workers(filename: str) -> str:
    return _name(filename, key_tag_of_environment())


def _name(filename: str, tag: str) -> str:
    return hashlib.sha256(f"{Path(filename).name}:{tag}".encode()).hexdigest()
