"""Fake tensor modes without the stack of whoever made them, while a package is installed.

Torch makes a mode for each tensor in guards that it loads and one for each graph, and keeps its stack for a message
of which nobody will be in need. Taking a stack looks at every source file in it.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from .stand_in import StandIn

__all__ = ["ModesWithoutStacks"]

_STACKS = "traceback"


class ModesWithoutStacks:
    """Spares a thread the stacks while it installs a package, until ``stop``; nothing where torch takes none."""

    def __init__(self) -> None:
        from torch._dynamo import package
        from torch._subclasses import fake_tensor

        self._stand_ins = []
        if vars(fake_tensor).get(_STACKS) is traceback:
            stacks = _Stacks()
            installer: Any = vars(package)["CompilePackage"]
            self._stand_ins = [
                StandIn(fake_tensor, _STACKS, stacks),
                StandIn(installer, "install", stacks.spared(installer.install)),
            ]

    def stop(self) -> None:
        """Take stacks again."""
        for one in self._stand_ins:
            one.stop()


class _Stacks(threading.local):
    """Python's ``traceback``, with empty stacks for a thread that installs a package."""

    installing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def extract_stack(self, f: types.FrameType | None = None, limit: int | None = None) -> traceback.StackSummary:
        return traceback.StackSummary() if self.installing else traceback.extract_stack(f or sys._getframe(1), limit)

    def spared(self, install: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(install)
        def install_without_stacks(*args: Any, **kwargs: Any) -> None:
            self.installing = True
            try:
                install(*args, **kwargs)
            finally:
                self.installing = False

        return install_without_stacks
