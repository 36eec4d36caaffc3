"""``compile``, and what it compiled."""

from __future__ import annotations

import types
import weakref
from typing import Any

import attrs

from .errors import BucketWarning, RecompileLimitWarning, warn
from .locks import lock
from .policy import CompilePolicy
from .targets import Target, resolve
from .torch_compat.capabilities import Capabilities, capabilities
from .torch_compat.entries import shared_code

__all__ = ["Compiled", "compile", "compiled", "needed"]


@attrs.frozen(eq=False)
class Compiled:
    """One wrapper that ``compile`` made.

    Attributes:
        target: what was compiled.
        code: the code object that torch counts on.
        wrapper: torch's own object, weakly.
        isolated: a budget of its own was asked for.
        limit: that budget, in entries; 0 where nothing was declared.
        keyword: ``recompile_limit`` as torch.compile got it, or None.
    """

    target: Target
    code: types.CodeType
    wrapper: weakref.ref[Any]
    isolated: bool
    limit: int
    keyword: int | None


_made: list[Compiled] = []


def compiled() -> list[Compiled]:
    """Wrappers that ``compile`` made and that are still in use."""
    with lock:
        _made[:] = [one for one in _made if one.wrapper() is not None]
        return list(_made)


def needed(can: Capabilities) -> tuple[int, int]:
    """What live isolated wrappers add up to: least recompile limit and accumulated limit, in entries.

    Where torch can't isolate they share one count, and the sum must fit the plain limit.
    """
    sums: dict[types.CodeType, int] = {}
    for one in compiled():
        if one.isolated:
            sums[one.code] = sums.get(one.code, 0) + one.limit
    most = max(sums.values(), default=0)
    return (0, most) if can.isolate_recompiles else (most, 4 * most)


def compile(  # noqa: A001 - torch's own name for it
    target: Any = None,
    *,
    policy: CompilePolicy | None = None,
    isolate: bool = False,
    dynamic: bool | None = False,
    **options: Any,
) -> Any:
    """``torch.compile`` with the policy's keywords; gives torch's own object.

    Args:
        target: what to compile. Without it, the result is a decorator.
        policy: whose keywords; where not given, those of the policy in force.
        isolate: a budget of its own for this wrapper, where torch can (2.13 and later).
        dynamic: as in ``torch.compile``; declared buckets bind only with ``False``.
        options: everything else goes to ``torch.compile`` and wins over the policy.

    Raises:
        TargetError: ``target`` can't be compiled.
    """
    if target is None:
        return lambda found: compile(found, policy=policy, isolate=isolate, dynamic=dynamic, **options)
    import torch

    from .apply import current_policy
    from .holding import refresh

    policy = policy or current_policy()
    keywords: dict[str, Any] = {}
    what = resolve(target)
    if policy is not None:
        can = capabilities()
        # Torch counts all targets of this kind together; a region of their own parts them again.
        isolate = isolate or (what.shared and what.code is None and can.isolate_recompiles)
        keywords = policy.compile_kwargs(target, isolate=isolate)
        _say_what_does_not_bind(policy, what, dynamic)
    keywords.update(options)
    wrapper = torch.compile(target, dynamic=dynamic, **keywords)
    keyword = keywords.get("recompile_limit")
    _remember(wrapper, what, policy, isolate, keyword)
    refresh()
    _say_what_stops_short(policy, what, keyword)
    return wrapper


def _remember(wrapper: Any, what: Target, policy: CompilePolicy | None, isolate: bool, keyword: int | None) -> None:
    declared = policy is not None and policy.declaration(what) is not None
    limit = policy.own_limit(what) if policy is not None and declared else 0
    with lock:
        made = Compiled(what, what.code or shared_code(), weakref.ref(wrapper), isolate and declared, limit, keyword)
        _made.append(made)


def _say_what_does_not_bind(policy: CompilePolicy, what: Target, dynamic: bool | None) -> None:
    if dynamic is not False and policy.declaration(what) is not None:
        warn(
            f"{what.name} is compiled with dynamic={dynamic}: torch may fold its shapes into fewer entries, and its "
            "declared buckets don't bind. Pass dynamic=False.",
            BucketWarning,
            once=("dynamic", what.name),
            stacklevel=3,
        )


def _say_what_stops_short(policy: CompilePolicy | None, what: Target, keyword: int | None) -> None:
    """A budget that the settings of this context don't bear: nothing would say so later."""
    wanted = keyword
    if wanted is None and policy is not None and not policy.disabled and policy.declaration(what) is not None:
        wanted = policy.limits_for(what).recompile_limit
    if wanted is None:
        return
    from .torch_compat.settings import find, limit_names

    plain, accumulated, _ = limit_names(capabilities())
    rules = {accumulated: "torch's accumulated limit, which no keyword lifts"}
    if keyword is None:
        rules = {plain: "torch's recompile limit, and no keyword was passed", **rules}
    for name, meaning in rules.items():
        setting = find(name)
        allowed = setting.read() if setting is not None else wanted
        if wanted > allowed:
            warn(
                f"{what.name} needs {wanted} cache entries, but here {meaning}, stops it at {allowed}. "
                "Call apply_policy() first.",
                RecompileLimitWarning,
                once=("short", what.name, wanted),
                stacklevel=3,
            )
            return
