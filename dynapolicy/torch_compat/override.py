"""The process-wide lever: what stands in for the override of one torch setting.

Torch reads a setting as: the override of this context, else the default. Since torch 2.12 the
override is a ``ContextVar``, so no assignment reaches another thread. ``Override`` takes that
variable's place and answers with the policy's value wherever the context holds nothing of its own.

What a context holds is a chain, newest first:

* a plain value: written while nobody watched, before the first policy;
* ``Write``: written under a policy, together with what was read just before;
* ``Frame``: a policy that was applied in this very context, on top of what it found there.

A restored policy only marks its layer as dead. Every context skips dead frames when it reads, so a
restore on one thread is exact on all of them, and no context is ever written from outside.

Torch's ``patch`` ends by writing back what it had read. Such a write is recognised by that value,
and takes the ``Write`` away instead of leaving an override that shadows the next policy.

Before torch 2.12 the same chain lives in one cell for the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import attrs

__all__ = ["Frame", "Layer", "Override", "Write", "install", "is_context_local", "probe"]


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


@attrs.frozen(eq=False)
class Frame:
    """A policy applied in this context; what it found lies below."""

    layer: Layer
    under: Any


class Cell(Protocol):
    """A ``ContextVar``, or one value for the whole process."""

    def get(self) -> Any: ...
    def set(self, value: Any) -> Any: ...
    def reset(self, token: Any) -> None: ...


class ProcessCell:
    """The override of torch before 2.12: one value, seen by every thread."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value

    def set(self, value: Any) -> Any:
        """Write it; the result serves ``reset``."""
        before, self.value = self.value, value
        return before

    def reset(self, token: Any) -> None:
        """Write back what ``set`` replaced."""
        self.value = token


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
        return self._read(self.held())

    def set(self, value: Any) -> Any:
        """Somebody assigns in this context; the result serves ``reset``."""
        return self._cell.set(self._after(self.held(), value))

    def reset(self, token: Any) -> None:
        """Undo one ``set`` of this context."""
        self._cell.reset(token)

    # -- what policies call --------------------------------------------------------------------

    def held(self) -> Any:
        """What this context holds, without the frames of policies that were restored."""
        held = self._cell.get()
        while type(held) is Frame and not held.layer.live:
            held = held.under
        return held

    def own(self) -> Any:
        """The deliberate value of this context, or ``unset`` where it takes what it inherits."""
        held = self.held()
        if type(held) is Write:
            return held.value
        if type(held) is Frame:
            return self.unset if held.layer.of_process else held.layer.values[self]
        return self.unset if same(held, self.base()) else held

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

    def _read(self, held: Any) -> Any:
        if type(held) is Write:
            return held.value
        if type(held) is Frame:
            return self.process if held.layer.of_process else held.layer.values[self]
        return self.process if self._inherits(held) else held

    def _inherits(self, held: Any) -> bool:
        """Nothing is held, or what torch's ``patch`` wrote back before any policy: the factory value."""
        return held is self.unset or (self.process is not self.unset and same(held, self.base()))

    def _after(self, held: Any, value: Any) -> Any:
        if type(held) is Write:
            written_back = value is self.unset or same(value, held.seen)
            return held.under if written_back else attrs.evolve(held, value=value)
        if type(held) is not Frame and self.process is self.unset:
            return value
        if value is self.unset:
            return held if type(held) is Frame else self.unset
        if type(held) is not Frame and not self._inherits(held):
            return self.unset if same(value, self.base()) else value
        read = self._read(held)
        if same(value, read):
            return held
        below = self._without(held, value)
        return Write(value, read, held) if below is held else below

    def _without(self, held: Any, value: Any) -> Any:
        """``held``, less the write below its frames that ``value`` takes back."""
        if type(held) is Frame:
            under = self._without(held.under, value)
            return held if under is held.under else Frame(held.layer, under)
        if type(held) is Write:
            return held.under if same(value, held.seen) else held
        if held is self.unset or same(held, self.base()) or not same(value, self.base()):
            return held
        return self.unset


# -- putting it in torch's place --------------------------------------------------------------------


class _Watched:
    """``user_override`` of an entry of torch before 2.12, which assigns it as a plain attribute."""

    def __get__(self, entry: Any, owner: type | None = None) -> Any:
        return entry.__dict__["dynapolicy_override"].get()

    def __set__(self, entry: Any, value: Any) -> None:
        entry.__dict__["dynapolicy_override"].set(value)


def is_context_local(config: Any) -> bool:
    """Whether a value set on one thread is unseen by others: torch 2.12 and later."""
    try:
        entry = next(iter(config._config.values()))
        return isinstance(entry.user_override, (ContextVar, Override))
    except (AttributeError, StopIteration):
        return False


def _slot(entry: Any) -> Any:
    # Old entries keep the mark for unset on their class.
    there = entry.__dict__.get("dynapolicy_override")
    return entry.user_override if there is None else there


def base_value(entry: Any, unset: Any) -> Callable[[], Any]:
    """How to read what torch answers without any override: its environment's value or its default."""

    def read() -> Any:
        given = entry.env_value_default
        return entry.default if given is unset else given

    return read


def install(entry: Any, unset: Any, make: type[Override] = Override) -> Override:
    """Put an ``Override`` into a configuration entry, or give the one that is there."""
    there = _slot(entry)
    if isinstance(there, Override):
        return there
    base = base_value(entry, unset)
    if isinstance(there, ContextVar):
        made = make(there, unset, base)
        entry.user_override = made
        return made
    made = make(ProcessCell(there), unset, base)
    entry.__dict__["dynapolicy_override"] = made
    watched = type(f"Watched{type(entry).__name__}", (type(entry),), {"user_override": _Watched()})
    entry.__class__ = watched
    return made


class _Probe(Override):
    """Answers only the thread that probes, so that no other thread compiles under a made-up value."""

    def __init__(self, cell: Cell, unset: Any, base: Callable[[], Any]) -> None:
        super().__init__(cell, unset, base)
        self.thread = threading.get_ident()
        self.answer: Any = unset

    def get(self) -> Any:
        return self.answer if threading.get_ident() == self.thread else super().get()

    def set(self, value: Any) -> Any:
        if threading.get_ident() != self.thread:
            return super().set(value)
        self.answer = value
        return None


def probe(config: Any) -> str | None:
    """Try the lever on one entry, on this thread only. None where it works, else what is wrong."""
    name = "recompile_limit" if "recompile_limit" in getattr(config, "_config", ()) else "cache_size_limit"
    try:
        from torch.utils._config_module import _UNSET_SENTINEL as unset

        entry = config._config[name]
        if isinstance(_slot(entry), Override):
            return None
        cls, fields = type(entry), dict(entry.__dict__)
        stand_in = install(entry, unset, _Probe)
        try:
            return _tried(config, name, stand_in)
        finally:
            entry.__class__ = cls
            entry.__dict__.clear()
            entry.__dict__.update(fields)
    except Exception as error:  # noqa: BLE001 - any surprise here means that torch has changed
        return f"{type(error).__name__}: {error}"


def _tried(config: Any, name: str, stand_in: Any) -> str | None:
    wrote, read = 12345, 54321
    setattr(config, name, wrote)
    if stand_in.answer != wrote:
        return f"assigning {name} doesn't go through its override"
    stand_in.answer = read
    if getattr(config, name) != read:
        return f"reading {name} doesn't go through its override"
    stand_in.answer = stand_in.unset
    if getattr(config, name) in (wrote, read):
        return f"{name} has no mark for unset"
    return None
