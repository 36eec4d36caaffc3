"""Putting a policy in force, and taking it back."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

import attrs

from .errors import BucketWarning, KnobWarning, RestoreError, ScopeWarning, TooLateWarning, warn
from .holding import ByAssignment, Held, InContext, InProcess, in_force, process, refresh, standing_here
from .layers import Standing, asks_of, push_here
from .locks import lock
from .policy import CompilePolicy
from .targets import code_named
from .torch_compat.capabilities import Capabilities, capabilities
from .torch_compat.entries import count, shared_code
from .torch_compat.settings import find, limit_names
from .watch import unwatch, watch

__all__ = ["AppliedPolicy", "Initializer", "apply_policy", "current_policy", "initializer"]

Scope = Literal["process", "context"]


class AppliedPolicy:
    """A policy that ``apply_policy`` put in force. A context manager; ``restore()`` does the same.

    Attributes:
        policy: the policy.
        scope: where it holds: ``"process"``, ``"context"``, or ``"none"`` where it is disabled.
    """

    def __init__(self, policy: CompilePolicy, scope: str, held: Held | None) -> None:
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
            unwatch()

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
    standing = standing_here() or process.standing
    return standing[-1].policy if standing else None


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
        message = "This torch has no process-wide lever: the policy holds in this context. Apply it in each thread."
        warn(message, ScopeWarning, stacklevel=3)
        return "context"
    return scope


def _apply(policy: CompilePolicy, scope: Scope, exact: bool, can: Capabilities) -> AppliedPolicy:
    top = _equal_in_force(policy, scope, exact)
    if top is not None:
        push_here(top.asks, top.layer)
        return AppliedPolicy(policy, scope, None)
    asks = asks_of(policy, can, exact=exact, raises=_raises())
    _say_too_late(policy, can)
    kind = ByAssignment if not can.process_lever else InContext if scope == "context" else InProcess
    held = kind(policy, asks, exact)
    refresh()
    watch(held.standing.layer)
    return AppliedPolicy(policy, scope, held)


def _equal_in_force(policy: CompilePolicy, scope: Scope, exact: bool) -> Standing | None:
    standing = (scope == "context" and standing_here()) or process.standing
    top = standing[-1] if standing else None
    return top if top is not None and (top.policy, top.exact) == (policy, exact) else None


def _raises() -> bool:
    return any(one.policy.on_limit == "raise" for one in in_force())


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


@attrs.frozen
class Initializer:
    """Applies a policy and ignores its arguments; picklable, so that it reaches spawned workers."""

    policy: CompilePolicy

    def __call__(self, *_: Any, **__: Any) -> None:
        """Put the policy in force in the process or thread that calls."""
        apply_policy(self.policy)


def initializer(policy: CompilePolicy) -> Initializer:
    """For places that pass arguments of their own, such as ``DataLoader(worker_init_fn=...)``."""
    return Initializer(policy)
