"""Importing torch's modules on a background thread without harm to the others. Pure.

Torch's packages import each other in circles. Two threads that enter such a circle at different places
wait for each other's module locks; Python sees the deadlock and hands one of them a half-made module,
which ends in an ImportError where the program least expects it. So while the background imports, other
threads wait before they load a module of torch, as they would wait for that module itself.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["ImportGate"]

#: Python's own module that every load of a module goes through, and what it calls for that.
_python: dict[str, Any] = vars(importlib.import_module("importlib._bootstrap"))
_LOAD = "_find_and_load"

#: Seconds that another thread waits at most.
_PATIENCE = 60.0
_LOOK_EVERY = 0.05


class ImportGate:
    """While it is entered, only this thread loads modules of torch. Modules that are loaded stay free for all."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._open = threading.Event()
        self._load: Any = None

    def __enter__(self) -> ImportGate:
        self._owner = threading.get_ident()
        while True:
            self._load = _python[_LOAD]
            _python[_LOAD] = self
            # A thread that is amid such an import holds its locks: it comes first.
            if not _somebody_loads():
                return self
            self._remove()
            time.sleep(_LOOK_EVERY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        self._open.set()

    def _remove(self) -> None:
        if _python[_LOAD] is self:
            _python[_LOAD] = self._load

    def __call__(self, name: str, *rest: Any) -> Any:
        """A module is to be loaded, on whatever thread."""
        if threading.get_ident() != self._owner and name.partition(".")[0] == "torch":
            deadline = time.monotonic() + _PATIENCE
            while not self._owner_waits_for_me() and time.monotonic() < deadline:
                if _python[_LOAD] is not self or self._open.wait(_LOOK_EVERY):
                    break
        return self._load(name, *rest)

    def _owner_waits_for_me(self) -> bool:
        """This thread loads something that the background needs as well."""
        held = None
        with suppress(Exception):  # Python's own bookkeeping differs by version
            held = _python["_blocking_on"].get(self._owner)
        locks = held if isinstance(held, list) else [held]
        return any(getattr(lock, "owner", None) == threading.get_ident() for lock in locks)


def _somebody_loads() -> bool:
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch"
    )
