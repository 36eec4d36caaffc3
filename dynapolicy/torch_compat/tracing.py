"""What torch traced, and which guards it dropped, watched while it compiles."""

from __future__ import annotations

import functools
import logging
import sys
import types
from typing import Any

from .stand_in import StandIn

__all__ = ["DroppedGuards", "TracedCode"]


class TracedCode:
    """Collects every code object that torch traces, inlined ones included, until ``stop``."""

    def __init__(self) -> None:
        from torch._dynamo import symbolic_convert

        self.codes: dict[types.CodeType, str] = {}
        translator: Any = vars(symbolic_convert)["InstructionTranslatorBase"]
        original: Any = translator.run
        codes = self.codes

        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            codes[self.f_code] = str(self.f_globals.get("__name__", ""))
            return original(self, *args, **kwargs)

        self._stand_in = StandIn(translator, "run", run)

    def stop(self) -> None:
        """Watch no longer; somebody who wrapped it since keeps their wrapper."""
        self._stand_in.stop()


class DroppedGuards(logging.Filter):
    """Collects guards that torch drops in precompile mode, from the one place where it says so: its log.

    The log line is kept back: it names an expression and nothing one could act on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str, Any]] = []
        self._logger = logging.getLogger("torch._dynamo.guards")
        self._logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record of a dropped guard, with the object that was guarded."""
        if "is dropped with caching_precompile" not in str(record.msg) or not isinstance(record.args, tuple):
            return True
        kind, name = (*record.args, "", "")[:2]
        self.found.append((str(kind), str(name() if callable(name) else name), *_guarded()))
        return False

    def stop(self) -> None:
        """Watch no longer."""
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
