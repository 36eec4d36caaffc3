"""Saves while the program runs, so that a preemption loses nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..torch_compat.artifacts import counts

__all__ = ["Saver"]

#: Seconds between two looks at torch's counters, and how long they must stand still before a save.
LOOK = 1.0
QUIET = 5.0


class Saver:
    """A thread that calls ``save`` whenever something was compiled and nothing has been since."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynapolicy-saver", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        seen = saved = counts()
        since = time.monotonic()
        while not self._over.wait(LOOK):
            now = counts()
            if now != seen:
                seen, since = now, time.monotonic()
            elif seen != saved and time.monotonic() - since >= QUIET:
                self._save()
                saved = seen

    def stop(self) -> None:
        """End the thread, after a save that runs."""
        self._over.set()
        self._thread.join()
