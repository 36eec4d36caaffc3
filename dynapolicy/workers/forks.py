"""What a fork and the end of the process mean for imports and pools in the background."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .imports import gate

__all__ = ["end_with_process", "importing", "look_after"]

#: Seconds that a fork waits for imports in the background.
_FORK_WAITS = 60.0

#: Seconds that the end of the process may wait for the end of a pool.
_AT_EXIT = 5.0

_amid = threading.RLock()
_called: list[tuple[Callable[[], None], Callable[[float], object]]] = []
_ends = 0


@contextmanager
def importing() -> Iterator[None]:
    """Imports that a fork waits for, since a child would inherit the locks of half-made modules."""
    with _amid:
        yield


def look_after(in_child: Callable[[], None], end: Callable[[float], object]) -> None:
    """Have these called, and no longer those of before.

    Args:
        in_child: in forked children.
        end: at the end of a process that called ``end_with_process``, with the seconds that it may take.
    """
    _register()
    _called[:] = [(in_child, end)]


def end_with_process() -> None:
    """There is something to end with this process, before torch waits for it. Call it as often as you like."""
    global _ends  # noqa: PLW0603 - once for each process
    if _ends == os.getpid():
        return
    from multiprocessing import util

    _ends = os.getpid()
    atexit.register(_at_exit)
    # Processes that multiprocessing started leave without ``atexit``.
    util.Finalize(None, _at_exit, exitpriority=1000)


def _at_exit() -> None:
    for _, end in _called:
        end(_AT_EXIT)


@functools.cache
def _register() -> None:
    # The last to register is the first to be called. Who waits for imports must hold no lock by then
    # that an import may need, so these two, which hold one through a fork, are registered before.
    for name in ("logging", "concurrent.futures.thread"):
        importlib.import_module(name)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_in_child)


def _before_fork() -> None:
    _amid.acquire(timeout=_FORK_WAITS)


def _after_fork() -> None:
    with suppress(RuntimeError):  # it was not to be had in time
        _amid.release()


def _after_in_child() -> None:
    global _amid  # noqa: PLW0603 - its owner doesn't exist here
    _amid = threading.RLock()
    gate.in_child()
    for in_child, _ in _called:
        in_child()
