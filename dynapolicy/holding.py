"""The policies that hold now, and the ways of putting one in force and taking it back."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Protocol

from .compiled import needed
from .errors import ScopeWarning, SettingWarning, TooLateWarning, warn
from .layers import Ask, ProcessStack, Standing, push_here
from .locks import lock
from .policy import CompilePolicy
from .torch_compat.capabilities import Capabilities, capabilities
from .torch_compat.entries import compiled_something, matmul_precision, set_matmul_precision
from .torch_compat.override import Layer
from .torch_compat.settings import find, limit_names, touch

__all__ = ["ByAssignment", "Held", "InContext", "InProcess", "in_force", "process", "refresh", "standing_here"]

#: Policies of the whole process.
process = ProcessStack()

#: Policies applied in this context or in one it was copied from, the newest last.
_here: ContextVar[tuple[Standing, ...]] = ContextVar("dynapolicy.here", default=())


def standing_here() -> list[Standing]:
    """Policies of this context alone, the newest last."""
    return [one for one in _here.get() if one.layer.live]


def in_force() -> list[Standing]:
    """Everything applied that this context reads, the newest last."""
    return [*process.standing, *standing_here()]


def refresh() -> None:
    """Put in force what live isolated wrappers need on top of the policies."""
    with lock:
        if not in_force():
            return
        can = capabilities()
        extra = _extra(can)
        process.settle(extra)
        for one in standing_here():
            for ask in extra:
                values = one.layer.values
                override = ask.setting.override()
                values[override] = ask.over(values.get(override, override.base()))


def _extra(can: Capabilities) -> list[Ask]:
    limit, accumulated, _ = limit_names(can)
    found = zip((limit, accumulated), needed(can), strict=True)
    return [Ask(setting, value, True) for name, value in found if value and (setting := find(name))]


Problem = tuple[str, str] | None


class Held(Protocol):
    """A policy in force. Making one puts it there."""

    standing: Standing

    def take_back(self) -> Problem:
        """Restore what was found, or change nothing and say why and what to do instead."""


class _Precision:
    """The precision of float32 matrix products: one value for the process, put back if it is still ours."""

    def __init__(self, policy: CompilePolicy) -> None:
        self.asked = policy.float32_matmul_precision
        self.before = matmul_precision() if self.asked is not None else None
        if self.asked is None:
            return
        if self.before is None:
            message = "Torch can't read its float32 matmul precision back (it was set per backend); it is left alone."
            warn(message, SettingWarning, once="precision", stacklevel=6)
        elif self.before != self.asked and compiled_something():
            message = (
                f"float32_matmul_precision changes to {self.asked!r} after something compiled: every graph that "
                "is called again gets another cache entry."
            )
            warn(message, TooLateWarning, once=("precision", self.asked), stacklevel=6)

    def put(self) -> None:
        if self.asked is not None and self.before is not None:
            set_matmul_precision(self.asked)

    def take_back(self) -> None:
        if self.before is not None and matmul_precision() == self.asked:
            set_matmul_precision(self.before)


class InProcess:
    """Every context: the process's values of the overrides."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        self.precision = _Precision(policy)
        self.standing = Standing(policy, asks, Layer({}, of_process=True), exact)
        process.standing.append(self.standing)
        push_here(asks, self.standing.layer)
        self.precision.put()

    def take_back(self) -> Problem:
        """Restore, unless a newer policy stands on this one."""
        if process.standing[-1] is not self.standing:
            return f"{process.standing[-1].policy!r} was applied after it", "Restore that one first"
        process.standing.pop()
        self.standing.layer.live = False
        process.settle(_extra(capabilities()))
        self.precision.take_back()
        return None


class _OfContext:
    """What belongs to one context: only there it can be taken back."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        if policy.float32_matmul_precision is not None:
            message = "float32_matmul_precision holds for the whole process; a policy of one context leaves it alone."
            warn(message, ScopeWarning, once=("precision", policy), stacklevel=5)
        self.standing = Standing(policy, asks, Layer({}, of_process=False), exact)
        self.token: Token[Any] = _here.set((*standing_here(), self.standing))

    def take_back(self) -> Problem:
        """Restore, in the context that applied it and newest first."""
        here = standing_here()
        if self.standing in here and here[-1] is not self.standing:
            return f"{here[-1].policy!r} was applied after it", "Restore that one first"
        try:
            _here.reset(self.token)
        except ValueError:
            return "It belongs to another thread or task", "Restore it where it was applied"
        self.standing.layer.live = False
        return None


class InContext(_OfContext):
    """This context: a frame on top of what it holds."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        super().__init__(policy, asks, exact)
        for ask in asks:
            override = ask.setting.override()
            self.standing.layer.values[override] = ask.over(override.value())
            override.push(self.standing.layer)
            touch(ask.setting.module)

    def take_back(self) -> Problem:
        """Restore: the frames die with their layer."""
        problem = super().take_back()
        if problem is None:
            for ask in self.standing.asks:
                touch(ask.setting.module)
            process.settle(_extra(capabilities()))
        return problem


class ByAssignment(_OfContext):
    """No lever: plain assignment, and the previous value assigned again."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        super().__init__(policy, asks, exact)
        self.before = [(ask.setting, ask.setting.read()) for ask in asks]
        for ask, (_, found) in zip(asks, self.before, strict=True):
            ask.setting.write(ask.over(found))

    def take_back(self) -> Problem:
        """Restore: assign what was read before."""
        problem = super().take_back()
        if problem is None:
            for setting, found in self.before:
                setting.write(found)
        return problem
