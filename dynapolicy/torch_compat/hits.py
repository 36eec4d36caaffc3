"""A hit of a recompile limit, read from the one record that torch logs for it."""

from __future__ import annotations

import logging
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import attrs

from .capabilities import capabilities
from .codes import resumed
from .settings import find, limit_names

__all__ = ["LIMIT_ERRORS", "LOGGER", "Hit", "can_be_named", "hits_counted", "limit_errors", "read_hit"]

#: Where torch logs hits, a stable name since torch 2.0.
LOGGER = "torch._dynamo.convert_frame"

_MESSAGE = "torch._dynamo hit config."
_FUNCTION = re.compile(r"'(?P<name>.*)' \((?P<file>.*):(?P<line>\d+)\)")


@attrs.frozen(eq=False)
class Hit:
    """Torch wanted one cache entry more than a limit allows.

    Attributes:
        code: the code object; that of the function where a resume function hit. None where unknown.
        name: ``"module:qualname"``, or the bare name where nothing more is known.
        setting: the limit that was hit, by torch's name.
        limit: its value, in cache entries.
        reason: the last guard that failed, in torch's words.
        error: what torch raises for this hit, None where it goes on in eager.
    """

    code: types.CodeType | None
    name: str
    file: str
    line: int
    setting: str
    limit: int
    reason: str
    error: type[Exception] | None


def read_hit(record: logging.LogRecord) -> Hit | None:
    """The hit that a log record tells of, or None for any other record. Call it where torch logged it."""
    if not str(record.msg).startswith(_MESSAGE) or not isinstance(record.args, tuple) or len(record.args) < 4:
        return None
    setting, limit, function, reason = record.args[:4]
    compiling = _compiling()
    code = compiling.get("code")
    if isinstance(code, types.CodeType):
        code = resumed(code)
        name = f"{compiling.get('globals', {}).get('__name__', '?')}:{getattr(code, 'co_qualname', code.co_name)}"
        file, line = code.co_filename, code.co_firstlineno
    else:
        code, name, file, line = None, *_from_text(str(function))
    error = _error(bool(compiling.get("one_graph")))
    return Hit(code, name, file, line, str(setting), int(str(limit)), _first_line(str(reason)), error)


def _compiling() -> dict[str, Any]:
    """Locals of the frame in which torch decides about the limit; empty where torch has changed."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == LOGGER:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _from_text(function: str) -> tuple[str, str, int]:
    found = _FUNCTION.match(function)
    return (found["name"], found["file"], int(found["line"])) if found else (function, "?", 0)


def _first_line(reason: str) -> str:
    return " ".join(reason.split("\n", 1)[0].split())


def _error(one_graph: bool) -> type[Exception] | None:
    from torch._dynamo import exc

    fails = find(limit_names(capabilities())[2])
    if fails is not None and fails.read():
        return exc.FailOnRecompileLimitHit
    if not one_graph:
        return None
    # Before torch 2.7 a whole graph raises another class than the setting does.
    return limit_errors()[0 if capabilities().recompile_limit_names else -1]


def limit_errors() -> tuple[type[Exception], ...]:
    """Classes that the installed torch raises at a limit."""
    from torch._dynamo import exc

    names = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


if TYPE_CHECKING:
    #: ``limit_errors()``, worked out when it is read, so that importing this needs no torch.
    LIMIT_ERRORS: tuple[type[Exception], ...]


def __getattr__(name: str) -> Any:
    if name == "LIMIT_ERRORS":
        return limit_errors()
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def can_be_named() -> bool:
    """Whether torch logs hits at all: somebody may have silenced that logger."""
    return logging.getLogger(LOGGER).isEnabledFor(logging.WARNING)


def hits_counted() -> int:
    """Hits that torch counted, without a name, also where its logger is silenced."""
    from torch._dynamo.utils import counters

    return sum(times for why, times in counters["unimplemented"].items() if _is_limit(str(why)))


def _is_limit(why: str) -> bool:
    return "limit exceeded" in why or "_limit reached" in why
