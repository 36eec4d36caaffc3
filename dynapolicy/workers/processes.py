"""Finding and ending processes that belong to one pool, and no others. Pure, and needs nothing but Python itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Family", "end"]

_PROC = Path("/proc")

#: Seconds between two looks at those that are being killed.
_LOOK_EVERY = 0.02


class Family(NamedTuple):
    """Processes of one pool: those with its very command line, those named by id, and all below them.

    Forked workers keep the command line of the process that forked them, also once that one is dead
    and their parent is another. Where there is no ``/proc``, only the ids are known.
    """

    command: tuple[str, ...] = ()
    roots: tuple[int, ...] = ()

    def members(self) -> list[int]:
        """Ids of the members that are alive, each parent before its children."""
        table = dict(_table())
        if not table:
            return [pid for pid in self.roots if _exists(pid)]
        command = b"".join(os.fsencode(part) + b"\0" for part in self.command)
        found = [pid for pid, (_, line) in table.items() if (command and line == command) or pid in self.roots]
        for pid in found:  # grows while it is walked
            found += [child for child, (parent, _) in table.items() if parent == pid and child not in found]
        return [pid for pid in found if pid in table and pid != os.getpid()]


def _table() -> Iterator[tuple[int, tuple[int, bytes]]]:
    try:
        names = [entry.name for entry in _PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return
    for name in names:
        try:
            # "pid (name) state parent ...", and the name may hold blanks and brackets.
            state, parent = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            line = (_PROC / name / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if state not in (b"Z", b"X"):
            yield int(name), (int(parent), line)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def end(family: Callable[[], Family], timeout: float, *, first: Sequence[int] = ()) -> bool:
    """Kill a family until nobody of it is left; says whether that was reached within ``timeout`` seconds.

    Args:
        family: asked again each time, since a process that is being killed may still start others.
        timeout: seconds.
        first: those to kill first, because they start the others.
    """
    deadline = time.monotonic() + timeout
    while members := family().members():
        for pid in sorted(members, key=lambda one: one not in first):
            with suppress(OSError):
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_EVERY)
    return True
