"""Putting an ``Override`` in torch's place, and trying out whether this torch lets one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .override import Cell, Override, ProcessCell

__all__ = ["install", "is_context_local", "probe"]


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
            entry.__dict__.update(fields)
            for added in entry.__dict__.keys() - fields.keys():
                del entry.__dict__[added]
    except Exception as error:  # any surprise here means that torch has changed
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
