"""Which warm starts are open: torch has one cache folder and one key tag for the whole process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar

from ..errors import ArtifactError
from ..locks import lock

__all__ = ["opened"]

#: Names by a key of each start: the process that opened it, and a number.
_open: dict[tuple[int, object], str] = {}
#: Keys of those that this context is inside of.
_around: ContextVar[frozenset[tuple[int, object]]] = ContextVar("around", default=frozenset())


def opened(name: str) -> Callable[[], None]:
    """Count a start as open. Returns what ends that.

    Raises:
        ArtifactError: another start is open that this one is not inside of: on another thread, in another task.
    """
    key = (os.getpid(), object())
    with lock:
        # What was open in the process that this one was forked from is open around all of this one.
        for other in _open.keys() - _around.get():
            if other[0] == os.getpid():
                rule = (
                    f"warm_start({_open[other]!r}) is open elsewhere in this process, and torch has one cache for both"
                )
                way_out = "Enter one block around all models, or one after the other has ended"
                raise ArtifactError("warm_start", name, rule, "with", way_out)
        _open[key] = name
    _around.set(_around.get() | {key})

    def close() -> None:
        with lock:
            _open.pop(key, None)
        _around.set(_around.get() - {key})

    return close
