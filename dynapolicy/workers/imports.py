"""Importing torch's modules on a background thread without harm to the others. Pure.

Torch's packages import each other in circles. Two threads that enter such a circle at different places
wait for each other's module locks; Python sees the deadlock and hands one of them a half-made module,
which ends in an ImportError where the program least expects it. So while the background is at it, threads
take turns: each waits before it begins to load a module of torch or Triton, when it holds no lock of one.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..locks import lock

__all__ = ["ImportGate", "gate", "others_compile"]

_ROOTS = frozenset({"torch", "triton"})
_COMPILERS = ("torch._dynamo.", "torch._inductor.")

#: Seconds that a thread waits at most for another one's imports.
_PATIENCE = 60.0
_LOOK_EVERY = 0.01


class ImportGate:
    """While it is up, threads load modules of torch one after the other. Loaded modules stay free for all.

    It stands in for ``builtins.__import__`` and ``importlib.import_module``, and puts them back.
    """

    def __init__(self) -> None:
        self._users = 0
        self._waiting = 0
        self._turn = threading.RLock()
        # Bound once, so that what is put in place can be told from what others put there.
        self._ours = (self._stand_in, self._module_stand_in)
        self._pythons = (builtins.__import__, importlib.import_module)

    def put_up(self) -> None:
        """From now on threads take turns."""
        with lock:
            self._users += 1
            if self._users == 1 and builtins.__import__ is not self._ours[0]:
                self._pythons = (builtins.__import__, importlib.import_module)
                builtins.__import__, importlib.import_module = self._ours

    def take_down(self) -> None:
        """Put Python's own functions back, unless somebody else stands there by now."""
        with lock:
            self._users -= 1
            if self._users == 0 and builtins.__import__ is self._ours[0]:
                builtins.__import__ = self._pythons[0]
            if self._users == 0 and importlib.import_module is self._ours[1]:
                importlib.import_module = self._pythons[1]

    @contextmanager
    def step(self, *, polite: bool = False) -> Iterator[Callable[[], bool]]:
        """A turn of the background's; gives what says whether another thread waits for it.

        Args:
            polite: let those first that wait already. A lock is no queue, so they wouldn't be by themselves.
        """
        deadline = time.monotonic() + _PATIENCE
        # A thread that was importing before the gate was put up has no turn, but locks: it comes first.
        while ((polite and self._waiting) or _others_load()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        turn = self._turn
        got = turn.acquire(timeout=_PATIENCE)
        try:
            yield lambda: self._waiting > 0
        finally:
            if got:
                turn.release()

    def in_child(self) -> None:
        """After a fork: whoever had a turn or waited is not here."""
        self._turn, self._waiting = threading.RLock(), 0
        while self._users:
            self.take_down()

    def _stand_in(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - as Python calls it
        locals: Mapping[str, object] | None = None,  # noqa: A002 - as Python calls it
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        original = self._pythons[0]
        # Every import statement of every thread comes by: those that load nothing go on at once.
        if self._users and (level or fromlist or name not in sys.modules):
            full = _absolute(name, (globals or {}).get("__package__"), level)
            if _loads(full, fromlist or ()):
                return self._in_turn(original, name, globals, locals, fromlist, level)
        return original(name, globals, locals, fromlist, level)

    def _module_stand_in(self, name: str, package: str | None = None) -> Any:
        original, bare = self._pythons[1], name.lstrip(".")
        if self._users and _loads(_absolute(bare, package, len(name) - len(bare)), ()):
            return self._in_turn(original, name, package)
        return original(name, package)

    def _in_turn(self, load: Callable[..., Any], *args: object) -> Any:
        # Who is amid such an import has its turn, or has locks from before.
        if _loading(sys._getframe(2)):  # noqa: SLF001 - documented
            return load(*args)
        turn = self._turn
        if not turn.acquire(blocking=False):
            with lock:
                self._waiting += 1
            got = turn.acquire(timeout=_PATIENCE)
            with lock:
                self._waiting -= 1
            if not got:
                return load(*args)
        try:
            return load(*args)
        finally:
            turn.release()


#: The one of this process.
gate = ImportGate()


def _absolute(name: str, package: object, level: int) -> str:
    if not level or not isinstance(package, str):
        return name
    base = package.rsplit(".", level - 1)[0]
    return f"{base}.{name}" if name else base


def _loads(name: str, wanted: Sequence[str]) -> bool:
    """Whether importing that loads a module of torch or Triton that isn't there."""
    if name.partition(".")[0] not in _ROOTS:
        return False
    module = sys.modules.get(name)
    if module is None:
        return True
    return any(one not in vars(module) and f"{name}.{one}" not in sys.modules for one in wanted)


def _loading(frame: FrameType | None) -> bool:
    """Whether a module of torch or Triton is being run on this stack."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            name = frame.f_globals.get("__name__")
            if isinstance(name, str) and name.partition(".")[0] in _ROOTS:
                return True
        frame = frame.f_back
    return False


def _others() -> list[FrameType]:
    """What each other thread runs right now."""
    frames = sys._current_frames()  # noqa: SLF001 - documented
    return [frame for thread, frame in frames.items() if thread != threading.get_ident()]


def _others_load() -> bool:
    # Innermost in Python's own importer: about to run a module, which may be one of torch's.
    return any(one.f_code.co_filename.startswith("<frozen importlib") or _loading(one) for one in _others())


def others_compile() -> bool:
    """Whether another thread runs code of torch's compiler right now."""
    return any(_compiles(one) for one in _others())


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False
