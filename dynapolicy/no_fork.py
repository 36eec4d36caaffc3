"""Work on a thread that a fork waits for: a child inherits its locks, and nobody who lets go of them."""

from __future__ import annotations

# The last to register with a fork is the first to be called. Who waits for the work of others must hold no lock
# by then that this work may need, so these two, which hold one through a fork, are imported before.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_fork"]

#: Seconds that a fork waits.
_PATIENCE = 60.0

_changed = threading.Condition()
#: How often each thread is inside.
_inside: dict[int, int] = {}


@contextmanager
def no_fork() -> Iterator[None]:
    """No other thread forks meanwhile; this one may."""
    me = threading.get_ident()
    with _changed:
        _inside[me] = _inside.get(me, 0) + 1
    try:
        yield
    finally:
        with _changed:
            _inside[me] -= 1
            if not _inside[me]:
                del _inside[me]
            _changed.notify_all()


def _before() -> None:
    _changed.acquire()
    me = threading.get_ident()
    _changed.wait_for(lambda: not _inside.keys() - {me}, _PATIENCE)


def _after() -> None:
    _changed.release()


def _in_child() -> None:
    global _changed  # noqa: PLW0603 - those who wait for it don't exist here
    _changed = threading.Condition()
    for other in _inside.keys() - {threading.get_ident()}:
        del _inside[other]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
