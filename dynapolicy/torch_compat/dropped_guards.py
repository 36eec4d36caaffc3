"""Guards that torch drops in precompile mode: collected, and put back where they start from an argument."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from .kept_guards import Describe, Kept, entry_of, put_back
from .stand_in import StandIn

__all__ = ["Dropped", "DroppedGuards"]


class Dropped(NamedTuple):
    """A guard that torch dropped.

    Attributes:
        kind: torch's name for the guard's type.
        name: the expression that it looked at, from ``G`` (globals) or ``L`` (arguments and closure cells).
        scope: the module whose globals they are.
        value: what it was.
        entry: what tells the cache entry, where the guard was put back; otherwise empty.
    """

    kind: str
    name: str
    scope: str
    value: Any
    entry: str = ""


class DroppedGuards(logging.Filter):
    """Collects guards that torch drops in precompile mode, from the one place where it says so: its log.

    The log line is kept back: it names an expression and nothing one could act on.

    Args:
        described: describes what an object does; empty where another one may look the same.
        keep: called with each guard that is put back, and what tells its cache entry.
    """

    def __init__(self, described: Describe, keep: Callable[[str, Kept], None]) -> None:
        super().__init__()
        from torch._dynamo import guards

        self.found: list[Dropped] = []
        self._described, self._keep = described, keep
        self._of_this: list[Dropped] = []
        manager: Any = vars(guards)["CheckFunctionManager"]
        self._stand_in = StandIn(manager, "__init__", self._guarding(manager.__init__))
        self._logger = logging.getLogger("torch._dynamo.guards")
        self._logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record of a dropped guard, with the object that was guarded."""
        if "is dropped with caching_precompile" not in str(record.msg) or not isinstance(record.args, tuple):
            return True
        kind, name = (*record.args, "", "")[:2]
        self._of_this.append(Dropped(str(kind), str(name() if callable(name) else name), *_guarded()))
        return False

    def _guarding(self, build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def guarding(manager: Any, code: types.CodeType, graph: Any, *args: Any, **kwargs: Any) -> None:
            # Torch compiles one graph at a time.
            self._of_this = []
            build(manager, code, graph, *args, **kwargs)
            found = [again for one in self._of_this if (again := self._again(one)) is not None]
            kept = [one for one in found if not one.wrong(graph.local_scope)]
            if kept:
                put_back(manager.guard_manager, kept)
            entry = entry_of(getattr(manager, "guards_state", None))
            for one in kept:
                self._keep(entry, one)
            names = {one.name for one in kept}
            self.found += [one._replace(entry=entry if one.name in names else "") for one in self._of_this]

        return guarding

    def _again(self, dropped: Dropped) -> Kept | None:
        # Arguments and closure cells are other things in each call, globals hardly ever.
        if "L[" not in dropped.name:
            return None
        with contextlib.suppress(SyntaxError):
            return Kept(dropped.name, self._described(dropped.value), self._described, dropped.value)
        return None

    def stop(self) -> None:
        """Watch no longer."""
        self._stand_in.stop()
        self._logger.removeFilter(self)


def _guarded() -> tuple[str, Any]:
    """Module and object of the guard that torch is just about to drop, from the frames that drop it."""
    frame: types.FrameType | None = sys._getframe()
    value: Any = None
    while frame is not None:
        if frame.f_code.co_name == "guard_filter_fn" and "g" in frame.f_locals:
            value = getattr(frame.f_locals["g"], "value", None)
        scope = getattr(frame.f_locals.get("output_graph"), "global_scope", None)
        if isinstance(scope, dict):
            return str(scope.get("__name__", "")), value
        frame = frame.f_back
    return "", value
