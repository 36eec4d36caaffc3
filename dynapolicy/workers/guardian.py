"""A small process that outlives the program and ends what the program left behind. Pure.

Torch's sidecar and its workers look after their parents once a minute, one after the other, and a
worker that hangs in a kernel keeps the sidecar waiting. Whoever is killed can't clean up after itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .processes import Family, end

__all__ = ["GRACE", "Guardian"]

#: Seconds that a pool has to end by itself once its program is gone.
GRACE = 20.0

_LOOK_EVERY = 1.0
_KILLING = 20.0

#: Run without site-packages, so that it takes a few MB and starts at once.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from dynapolicy.workers.guardian import watch; watch(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])"
)


class Guardian:
    """Watches over this process for the pool whose sidecar has that command line."""

    def __init__(self, command: Sequence[str]) -> None:
        root = str(Path(__file__).parents[2])
        # Its own session: a Ctrl-C is meant for the program, and the guardian comes after that.
        self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-S", "-E", "-s", "-c", _PROGRAM, root, str(os.getpid()), str(GRACE), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def end(self) -> None:
        """The pool is gone, so there is nothing left to guard."""
        self._process.kill()
        self._process.wait()


def watch(parent: int, grace: float, command: Sequence[str]) -> None:
    """Wait until the parent is gone, give its pool some time, and end what is left of it.

    Args:
        parent: id of the process to outlive.
        grace: seconds.
        command: command line of the sidecar, which its workers share.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    family, deadline = Family(tuple(command)), time.monotonic() + grace
    while family.members() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
    end(lambda: family, _KILLING)
