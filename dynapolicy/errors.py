"""What can go wrong, each kind with a class of its own.

Every error keeps what it is about as fields and travels through ``pickle``, because it may be raised
in an executor's worker process and read in its parent.
"""

from __future__ import annotations

import warnings

from .locks import lock

__all__ = [
    "ArtifactError",
    "ArtifactRefused",
    "ArtifactWarning",
    "BucketError",
    "BucketWarning",
    "CeilingError",
    "CeilingWarning",
    "DynapolicyError",
    "DynapolicyWarning",
    "FrozenError",
    "KnobError",
    "KnobWarning",
    "RecompileLimitWarning",
    "RecoverError",
    "RestoreError",
    "ScopeWarning",
    "SettingError",
    "SettingWarning",
    "TargetError",
    "TooLateWarning",
    "UnsupportedTorchWarning",
    "WarmUpError",
    "WorkerError",
    "WorkerWarning",
]


class DynapolicyError(Exception):
    """Base of all errors of this library.

    Attributes:
        thing: what the error is about, by the name its user knows.
        value: the offending value.
        rule: what would have been allowed.
        source: where the value came from.
        way_out: what to do.
    """

    def __init__(self, thing: str, value: object, rule: str, source: str, way_out: str) -> None:
        # A value that can't travel would lose the whole error on its way out of a worker process.
        value = value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
        super().__init__(thing, value, rule, source, way_out)
        self.thing = thing
        self.value = value
        self.rule = rule
        self.source = source
        self.way_out = way_out

    def __str__(self) -> str:
        value = repr(self.value)
        if len(value) > 80:
            value = f"{value[:60]}... ({len(value)} characters)"
        return f"{self.thing}: got {value} ({self.source}). {self.rule}. {self.way_out}."


class KnobError(DynapolicyError, ValueError):
    """A knob's value, from the environment or an argument, is not allowed."""


class BucketError(DynapolicyError, ValueError):
    """A declared shape is no shape: an empty axis, a size under 1, a bool."""


class TargetError(DynapolicyError, TypeError):
    """A target is nothing that ``torch.compile`` could compile."""


class SettingError(DynapolicyError, ValueError):
    """A name or value in ``settings`` that can't be put in force."""


class CeilingError(DynapolicyError, ValueError):
    """More entries are declared than CEIL allows, and ``on_limit`` is ``"raise"``."""


class RestoreError(DynapolicyError, RuntimeError):
    """A policy is restored out of order, twice, or from a context that doesn't own it."""


class RecoverError(DynapolicyError, RuntimeError):
    """``recover`` can't act here: it was called inside a compiled call."""


class ArtifactError(DynapolicyError, RuntimeError):
    """Artifacts were asked for in a way that can't work; a bundle that doesn't fit is no error."""


class ArtifactRefused(RuntimeError):  # noqa: N818 - a verdict: the start goes on without the artifact
    """An artifact is not used; the text says why. Never leaves ``warm_start``."""


class WorkerError(DynapolicyError, ValueError):
    """Compile workers can't be started the way that was asked for."""


class FrozenError(DynapolicyError, RuntimeError):
    """Something would compile after ``freeze("raise")``."""


class WarmUpError(DynapolicyError, RuntimeError):
    """A step failed while it was warmed up; the message names the shape."""


class DynapolicyWarning(UserWarning):
    """Base of all warnings of this library."""


class KnobWarning(DynapolicyWarning):
    """A knob's value was clamped, or the operator disabled the policy."""


class ArtifactWarning(DynapolicyWarning):
    """Artifacts were refused or not saved, or lie where they are not safe."""


class CeilingWarning(DynapolicyWarning):
    """More entries are declared than CEIL allows: the rest runs eager."""


class BucketWarning(DynapolicyWarning):
    """Declared buckets don't bind, or none are declared."""


class SettingWarning(DynapolicyWarning):
    """A setting can't be put in force on this torch."""


class ScopeWarning(DynapolicyWarning):
    """A policy holds in another scope than was asked for."""


class TooLateWarning(DynapolicyWarning):
    """A policy was applied after the limit it raises was already reached."""


class UnsupportedTorchWarning(DynapolicyWarning):
    """The installed torch lacks something, or has it in a shape that isn't known."""


class RecompileLimitWarning(DynapolicyWarning):
    """A code object hit a recompile limit, or will."""


class WorkerWarning(DynapolicyWarning):
    """Compile workers are not as asked: they died too often, or nothing is started."""


_said: set[object] = set()


def warn(message: str, category: type[DynapolicyWarning], *, once: object = None, stacklevel: int = 2) -> None:
    """Warn; with ``once``, only the first time in this process for that key."""
    if once is not None:
        key = (category, once)
        with lock:
            if key in _said:
                return
            _said.add(key)
    warnings.warn(message, category, stacklevel=stacklevel + 1)
