"""``freeze``: after warm-up nothing compiles any more."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, get_args

from ..errors import FrozenError, KnobError, RestoreError
from ..locks import lock
from ..torch_compat.stance import Stop

__all__ = ["Frozen", "freeze", "frozen_mode"]

Mode = Literal["eager", "raise"]

_frozen: list[Frozen] = []


class Frozen:
    """Compilation is stopped for the process. A context manager; ``restore()`` does the same.

    Attributes:
        mode: ``"eager"`` or ``"raise"``.
    """

    def __init__(self, mode: Mode, stop: Stop) -> None:
        self.mode = mode
        self._stop = stop

    def restore(self) -> None:
        """Compile again, from any thread.

        Raises:
            RestoreError: twice, or before a freeze that came later; nothing changes.
        """
        with lock:
            if self not in _frozen:
                raise RestoreError("freeze", self.mode, "It is restored already", "call", "Restore it once")
            if _frozen[-1] is not self:
                rule = "Another freeze came after it"
                raise RestoreError("freeze", self.mode, rule, "call", "Restore that one first")
            self._stop.end()
            _frozen.pop()

    def __enter__(self) -> Frozen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "in force" if self in _frozen else "restored"
        note = "; calls that run eager for it can't be counted" if self.mode == "eager" else ""
        return f"<Frozen: mode {self.mode!r}, {state}{note}>"


def freeze(mode: Mode = "eager") -> Frozen:
    """Stop compilation for all compiled code of the process, on every thread. Call it after warm-up.

    What is compiled keeps running compiled. First compiles stop as well, also those of other
    libraries. It hits no limit and exhausts nothing: after ``restore()`` everything compiles again.

    Args:
        mode: ``"eager"`` runs what isn't compiled as plain Python; torch offers no way to count such
            calls. ``"raise"`` makes them an error that names the function and its shapes.

    Raises:
        KnobError: another mode.
        RuntimeError: torch's, inside a compiled call.
    """
    if mode not in get_args(Mode):
        raise KnobError("freeze", mode, 'The mode is "eager" or "raise"', "argument", "Pass one of them")
    with lock:
        made = Frozen(mode, Stop(_explain if mode == "raise" else None))
        _frozen.append(made)
    return made


def frozen_mode() -> Mode | None:
    """How the process is frozen now, or None."""
    return _frozen[-1].mode if _frozen else None


def _explain(frame: Any) -> FrozenError:
    code = frame.f_code
    name = f"{frame.f_globals.get('__name__', '?')}:{getattr(code, 'co_qualname', code.co_name)}"
    shapes = ", ".join(f"{key}={_shape(value)}" for key, value in frame.f_locals.items() if _shape(value) is not None)
    rule = f"{code.co_filename}:{code.co_firstlineno} is not compiled for it, and nothing compiles after freeze()"
    return FrozenError(name, shapes or "no tensor", rule, "call", "Warm it up with this shape before freeze()")


def _shape(value: Any) -> Any:
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return value if isinstance(value, int) else None
