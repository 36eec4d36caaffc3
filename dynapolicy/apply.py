"""Putting a policy in force, and taking it back."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Literal, Protocol

import attrs

from .compiled import needed
from .errors import BucketWarning, KnobWarning, RestoreError, ScopeWarning, SettingWarning, TooLateWarning, warn
from .layers import Ask, ProcessStack, Standing, asks_of, push_here
from .locks import lock
from .policy import CompilePolicy
from .targets import code_named
from .torch_compat.capabilities import Capabilities, capabilities
from .torch_compat.entries import compiled_something, count, matmul_precision, set_matmul_precision, shared_code
from .torch_compat.override import Layer
from .torch_compat.settings import find, limit_names

__all__ = ["AppliedPolicy", "Initializer", "apply_policy", "current_policy", "initializer", "refresh"]

Scope = Literal["process", "context"]

_process = ProcessStack()

#: Policies applied in this context or in one it was copied from, the newest last.
_here: ContextVar[tuple[Standing, ...]] = ContextVar("dynapolicy.here", default=())


class AppliedPolicy:
    """A policy that ``apply_policy`` put in force. A context manager; ``restore()`` does the same.

    Attributes:
        policy: the policy.
        scope: where it holds: ``"process"``, ``"context"``, or ``"none"`` where it is disabled.
    """

    def __init__(self, policy: CompilePolicy, scope: str, held: _Held | None) -> None:
        self.policy = policy
        self.scope = scope
        self._held = held
        self._entered = False
        self._restored = False

    def restore(self) -> None:
        """Put every setting back to what was found, ``unset`` included.

        A handle that added nothing, because an equal policy was in force, restores nothing.

        Raises:
            RestoreError: twice, out of order, or a context's policy from elsewhere; nothing changes.
        """
        if self._held is None:
            return
        with lock:
            if self._restored:
                raise self._refused("It is restored already", "Restore a policy once")
            problem = self._held.take_back()
            if problem is not None:
                raise self._refused(*problem)
            self._restored = True

    def _refused(self, rule: str, way_out: str) -> RestoreError:
        return RestoreError("applied policy", repr(self.policy), rule, f"scope {self.scope}", way_out)

    def __enter__(self) -> AppliedPolicy:
        if self._entered:
            raise self._refused("It is entered already", "Call apply_policy() again for another block")
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._restored else "in force"
        return f"<AppliedPolicy: {state}, scope {self.scope}, {self.policy!r}>"


def current_policy() -> CompilePolicy | None:
    """The policy in force in this context, or None."""
    here = _standing_here()
    standing = here or _process.standing
    return standing[-1].policy if standing else None


def _standing_here() -> list[Standing]:
    return [one for one in _here.get() if one.layer.live]


def apply_policy(
    policy: CompilePolicy | None = None,
    *,
    scope: Scope = "process",
    exact: bool = False,
    capabilities: Capabilities | None = None,
) -> AppliedPolicy:
    """Put a policy in force: at start-up, as an executor's initializer, or in a ``with`` block.

    Args:
        policy: the policy; where not given, the one in force in this process, else one from the
            environment, with a warning that it declares no buckets.
        scope: ``"process"``: every thread and task, present and future. ``"context"``: this thread
            or task only, on torch 2.12 and later; before that it holds for the process, and says so.
        exact: lower the two limits as well; otherwise they are only raised.
        capabilities: what torch can do, for tests; the installed torch's where not given.

    Raises:
        SettingError: a setting is refused; nothing was changed.
    """
    can = capabilities or _installed()
    if policy is None:
        policy = current_policy() or _from_environment()
    if policy.disabled:
        variable = next(one.variable for one in policy.knobs if one.name == "disable")
        warn(f"{variable}=1: no policy is applied.", KnobWarning, once=("disabled", policy))
        return AppliedPolicy(policy, "none", None)
    with lock:
        return _apply(policy, _real_scope(scope, can), exact, can)


def _installed() -> Capabilities:
    return capabilities()


def _from_environment() -> CompilePolicy:
    warn(
        "No policy is in force in this process and none was given: no buckets are declared, so every code object "
        "gets the floor. Pass a policy to apply_policy().",
        BucketWarning,
        stacklevel=3,
    )
    return CompilePolicy.from_env()


def _real_scope(scope: Scope, can: Capabilities) -> Scope:
    if scope == "context" and not can.context_local_config:
        message = "Before torch 2.12 a setting holds for the whole process: the policy is applied process-wide."
        warn(message, ScopeWarning, stacklevel=3)
        return "process"
    if scope == "process" and can.context_local_config and not can.process_lever:
        message = "This torch has no process-wide lever: the policy holds in this context only. Apply it in each thread."
        warn(message, ScopeWarning, stacklevel=3)
        return "context"
    return scope


def _apply(policy: CompilePolicy, scope: Scope, exact: bool, can: Capabilities) -> AppliedPolicy:
    top = _equal_in_force(policy, scope, exact)
    if top is not None:
        if scope == "process":
            push_here(top.asks, top.layer)
        return AppliedPolicy(policy, scope, None)
    asks = asks_of(policy, can, exact=exact, raises=_raises())
    _say_too_late(policy, can)
    kind = _ByAssignment if not can.process_lever else _InContext if scope == "context" else _InProcess
    held = kind(policy, asks, exact)
    refresh()
    return AppliedPolicy(policy, scope, held)


def _equal_in_force(policy: CompilePolicy, scope: Scope, exact: bool) -> Standing | None:
    standing = (scope == "context" and _standing_here()) or _process.standing
    top = standing[-1] if standing else None
    return top if top is not None and (top.policy, top.exact) == (policy, exact) else None


def _raises() -> bool:
    return any(one.policy.on_limit == "raise" for one in (*_process.standing, *_standing_here()))


def refresh() -> None:
    """Put in force what live isolated wrappers need on top of the policies."""
    with lock:
        standing = (*_process.standing, *_standing_here())
        if not standing:
            return
        can = capabilities()
        extra = _extra(can)
        _process.settle(extra)
        for one in _standing_here():
            for ask in extra:
                values = one.layer.values
                override = ask.setting.override()
                values[override] = ask.over(values.get(override, override.base()))


def _extra(can: Capabilities) -> list[Ask]:
    limit, accumulated, _ = limit_names(can)
    found = zip((limit, accumulated), needed(can), strict=True)
    return [Ask(setting, value, True) for name, value in found if value and (setting := find(name))]


def _say_too_late(policy: CompilePolicy, can: Capabilities) -> None:
    limit = find(limit_names(can)[0])
    before = limit.read() if limit is not None else 0
    for one in policy.declarations:
        code = shared_code() if one.shared else code_named(one.name, one.line)
        entries = count(code) if code is not None else 0
        if entries >= before and entries < policy.limits.recompile_limit:
            warn(
                f"{one.name} has {entries} cache entries already, and the limit was {before}. If it was hit, torch "
                "compiles nothing new for it, whatever the limit is now. Call dynapolicy.recover() on it, and apply "
                "the policy before the first compile.",
                TooLateWarning,
                once=("late", one.name),
                stacklevel=4,
            )


# -- ways of putting it in force, each with its way back ----------------------------------------------

Problem = tuple[str, str] | None


class _Held(Protocol):
    """A policy in force. Making one puts it there."""

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


class _InProcess:
    """Every context: the process's values of the overrides."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        self.precision = _Precision(policy)
        self.standing = Standing(policy, asks, Layer({}, of_process=True), exact)
        _process.standing.append(self.standing)
        push_here(asks, self.standing.layer)
        self.precision.put()

    def take_back(self) -> Problem:
        if _process.standing[-1] is not self.standing:
            return f"{_process.standing[-1].policy!r} was applied after it", "Restore that one first"
        _process.standing.pop()
        self.standing.layer.live = False
        _process.settle(_extra(capabilities()))
        self.precision.take_back()
        return None


class _OfContext:
    """What belongs to one context: only there it can be taken back."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        if policy.float32_matmul_precision is not None:
            message = "float32_matmul_precision holds for the whole process; a policy of one context leaves it alone."
            warn(message, ScopeWarning, once=("precision", policy), stacklevel=5)
        self.standing = Standing(policy, asks, Layer({}, of_process=False), exact)
        self.token: Token[Any] = _here.set((*_standing_here(), self.standing))

    def take_back(self) -> Problem:
        here = _standing_here()
        if self.standing in here and here[-1] is not self.standing:
            return f"{here[-1].policy!r} was applied after it", "Restore that one first"
        try:
            _here.reset(self.token)
        except ValueError:
            return "It belongs to another thread or task", "Restore it where it was applied"
        self.standing.layer.live = False
        return None


class _InContext(_OfContext):
    """This context: a frame on top of what it holds."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        super().__init__(policy, asks, exact)
        for ask in asks:
            override = ask.setting.override()
            self.standing.layer.values[override] = ask.over(override.value())
            override.push(self.standing.layer)

    def take_back(self) -> Problem:
        problem = super().take_back()
        if problem is None:
            _process.settle(_extra(capabilities()))
        return problem


class _ByAssignment(_OfContext):
    """No lever: plain assignment, and the previous value assigned again."""

    def __init__(self, policy: CompilePolicy, asks: tuple[Ask, ...], exact: bool) -> None:
        super().__init__(policy, asks, exact)
        self.before = [(ask.setting, ask.setting.read()) for ask in asks]
        for ask, (_, found) in zip(asks, self.before, strict=True):
            ask.setting.write(ask.over(found))

    def take_back(self) -> Problem:
        problem = super().take_back()
        if problem is None:
            for setting, found in self.before:
                setting.write(found)
        return problem


@attrs.frozen
class Initializer:
    """Applies a policy and ignores its arguments; picklable, so that it reaches spawned workers."""

    policy: CompilePolicy

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Put the policy in force in the process or thread that calls."""
        apply_policy(self.policy)


def initializer(policy: CompilePolicy) -> Initializer:
    """For places that pass arguments of their own, such as ``DataLoader(worker_init_fn=...)``."""
    return Initializer(policy)
