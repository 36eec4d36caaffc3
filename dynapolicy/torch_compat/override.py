"""The process-wide lever: what stands in for the override of one torch setting.

Torch reads a setting as: the override of this context, else the default. Since torch 2.12 the
override is a ``ContextVar``, so no assignment reaches another thread. ``Override`` takes that
variable's place and answers with the policy's value wherever the context holds nothing of its own.

What a context holds is a chain, newest first:

* a plain value: written while nobody watched, before the first policy of the process;
* ``Write``: written since then, together with what was read just before;
* ``Frame``: a policy that was applied in this very context, on top of what it found there.

A restored policy only marks its layer as dead. Every context skips dead frames when it reads, so a
restore on one thread is exact on all of them, and no context is ever written from outside.

Torch's ``patch`` ends by writing back what it had read. Such a write is recognised by that value,
and takes the ``Write`` away, wherever in the chain it is, instead of leaving an override that
shadows the next policy. So patches and policies may begin and end in any order. A patch that begins
is told apart by its frame, since it may write any value, also one that was read before.

Before torch 2.12 the same chain lives in one cell for the whole process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs

__all__ = ["Cell", "Frame", "Layer", "Override", "ProcessCell", "Write", "same"]

#: Torch's module of configurations.
_TORCHS = "torch.utils._config_module"

#: Patches that may be open at once. Past it a write takes the place of the last one, so that
#: a loop of assignments doesn't grow a chain.
_MOST_WRITES = 32


class Layer:
    """One applied policy: what it asks of each setting, and whether it still holds.

    Attributes:
        live: cleared by restore; contexts notice when they read next.
        values: the value of each setting.
        of_process: the values hold in every context, not only where the layer was put.
    """

    def __init__(self, values: dict[Override, Any], *, of_process: bool) -> None:
        self.live = True
        self.values = values
        self.of_process = of_process


@attrs.frozen(eq=False)
class Write:
    """A value that this context wrote, what it had read before, and what lies below."""

    value: Any
    seen: Any
    under: Any

    @property
    def changes_nothing(self) -> bool:
        """The value was there already: the context goes on to take what it inherits."""
        return same(self.value, self.seen)


@attrs.frozen(eq=False)
class Frame:
    """A policy applied in this context; what it found lies below."""

    layer: Layer
    under: Any


class Cell(Protocol):
    """A ``ContextVar``, or one value for the whole process."""

    def get(self) -> Any:
        """The value."""

    def set(self, value: Any) -> Any:
        """Write it."""


class ProcessCell:
    """The override of torch before 2.12: one value, seen by every thread."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value

    def set(self, value: Any) -> Any:
        """Write it."""
        self.value = value


def same(one: Any, other: Any) -> bool:
    """Equal and of one type: ``True`` is not ``1`` in a configuration."""
    return type(one) is type(other) and bool(one == other)


class Override:
    """Stands where torch keeps the override of one setting; torch calls ``get``, ``set`` and ``reset``.

    Attributes:
        unset: torch's own mark for "no override".
        process: the value for contexts that hold nothing of their own, or ``unset``.
    """

    def __init__(self, cell: Cell, unset: Any, base: Callable[[], Any]) -> None:
        self._cell = cell
        self.unset = unset
        self.base = base
        self.process = unset

    # -- what torch calls ----------------------------------------------------------------------

    def get(self) -> Any:
        """The override of this context as torch shall see it."""
        top = self._top()
        if type(top) is Write:
            return top.value
        if type(top) is Frame:
            return self.process if top.layer.of_process else top.layer.values[self]
        return self.process if self._inherits(top) else top

    def set(self, value: Any) -> Any:
        """Somebody assigns in this context; the result serves ``reset``."""
        before = self._cell.get()
        self._cell.set(self._after(before, value))
        return before

    def reset(self, token: Any) -> None:
        """Undo everything since a ``set`` of this context, but the policies that came meanwhile."""
        known = _layers(token)
        since = [layer for layer in _layers(self._cell.get()) if layer not in known]
        self._cell.set(_on_top(since, token))

    # -- what policies call --------------------------------------------------------------------

    def held(self) -> Any:
        """What this context holds, without the frames of policies that were restored."""
        held = self._cell.get()
        while type(held) is Frame and not held.layer.live:
            held = held.under
        return held

    def own(self) -> Any:
        """The deliberate value of this context, or ``unset`` where it takes what it inherits."""
        top = self._top()
        if type(top) is Write:
            return top.value
        if type(top) is Frame:
            return self.unset if top.layer.of_process else top.layer.values[self]
        return self.unset if same(top, self.base()) else top

    def value(self) -> Any:
        """What a read in this context gives."""
        read = self.get()
        return self.base() if read is self.unset else read

    def process_value(self) -> Any:
        """What a context reads that holds nothing of its own."""
        return self.base() if self.process is self.unset else self.process

    def push(self, layer: Layer) -> None:
        """Put a policy on top of what this context holds."""
        self._cell.set(Frame(layer, self.held()))

    # -- the rules -----------------------------------------------------------------------------

    def _top(self) -> Any:
        """What decides here: the newest write that changed something, or policy that is in force."""
        held = self._cell.get()
        while (type(held) is Frame and not held.layer.live) or (type(held) is Write and held.changes_nothing):
            held = held.under
        return held

    def _inherits(self, held: Any) -> bool:
        """Nothing is held, or what torch's ``patch`` wrote back before any policy: the factory value."""
        return held is self.unset or (self.process is not self.unset and same(held, self.base()))

    def _after(self, held: Any, value: Any) -> Any:
        """What this context holds after ``value`` was assigned."""
        if _patch_begins():
            return Write(value, self.value(), held)
        layers, writes = [], 0
        at = held
        while type(at) in (Frame, Write):
            if type(at) is Frame:
                layers.append(at.layer)
            elif value is self.unset or same(value, at.seen):
                return _on_top(layers, at.under)
            else:
                writes += 1
            at = at.under
        if value is self.unset or (not writes and self._ends_plain(at, value)) or self._ends_all(layers, value):
            return _on_top(layers, self.unset)
        if type(held) is Write and writes >= _MOST_WRITES:
            return attrs.evolve(held, value=value)
        return Write(value, self.value(), held)

    def _ends_plain(self, plain: Any, value: Any) -> bool:
        """A patch that was entered before the first policy writes the factory value back."""
        return plain is not self.unset and same(value, self.base()) and not same(plain, self.base())

    def _ends_all(self, layers: list[Layer], value: Any) -> bool:
        """With no policy in force the factory value is no override: left there, it would shadow the next policy."""
        in_force = self.process is not self.unset or any(layer.live for layer in layers)
        return not in_force and same(value, self.base())


def _patch_begins() -> bool:
    """Whether torch's ``patch``, or its faster kin, is being entered above this call."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith((__package__, _TORCHS)):
        if frame.f_code.co_name in ("__enter__", "change"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _on_top(layers: Iterable[Layer], under: Any) -> Any:
    """``under``, below the frames of those layers that are in force; the newest comes first."""
    for layer in reversed([one for one in layers if one.live]):
        under = Frame(layer, under)
    return under


def _layers(held: Any) -> list[Layer]:
    """The policies that a chain holds frames of, the newest first."""
    found = []
    while type(held) in (Frame, Write):
        if type(held) is Frame:
            found.append(held.layer)
        held = held.under
    return found
