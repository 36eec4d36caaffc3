"""``doctor``: try each kind of thread, task and process on this machine."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator

import attrs

from ..apply import apply_policy, current_policy
from ..policy import CompilePolicy
from ..records import Records
from ..torch_compat.capabilities import Capabilities, capabilities
from ..torch_compat.settings import find, limit_names
from . import places
from .probe import Seen, probe, quiet

__all__ = ["PlaceRecord", "doctor"]

#: Shapes that a probe tries: more than torch allows by itself, few enough to be quick.
_MOST_SHAPES = 12

_APPLY_THERE = "Apply the policy there as well: this torch has no process-wide lever"
_INITIALIZER = "Pass the initializer: initializer=dynapolicy.apply_policy, initargs=(policy,)"
_WORKER_INIT = "Pass worker_init_fn=dynapolicy.initializer(policy)"


@attrs.frozen
class PlaceRecord:
    """One kind of place.

    Attributes:
        place: what it is.
        seen: the recompile limit that it reads, in entries; None where the probe failed.
        asked: the limit that the policy asks for, in entries.
        compiled: how many of the probe's shapes compiled there.
        declared: how many shapes the probe declared and tried.
        ok: it reads at least what was asked, and all of them compiled.
        advice: what to do, empty where all is well.
    """

    place: str
    seen: int | None
    asked: int
    compiled: int
    declared: int
    ok: bool
    advice: str


Probe = tuple[str, Callable[[], Seen], str]


def doctor(
    policy: CompilePolicy | None = None,
    *,
    initializer: bool = True,
    capabilities: Capabilities | None = None,
) -> Records[PlaceRecord]:
    """Compile in every kind of place on this machine, with the policy in force, and say where it falls short.

    Takes up to a minute: children import torch. The policy is applied for that time if it isn't in
    force; other code's cache entries stay.

    Args:
        policy: where not given, the one in force, else one from the environment. One that asks for no
            more than torch allows by itself would prove nothing; four entries more are asked for then.
        initializer: new processes get the policy through their initializer. False shows what happens
            to a program that forgot it.
        capabilities: what torch can do, for tests; the installed torch's where not given.
    """
    can = capabilities or _installed()
    policy = policy or current_policy() or CompilePolicy.from_env()
    if policy.disabled:
        variable = next(one.variable for one in policy.knobs if one.name == "disable")
        advice = f"Unset {variable}: while it is 1, no policy is applied"
        return Records([PlaceRecord("every place", None, policy.limits.recompile_limit, 0, 0, ok=False, advice=advice)])
    policy = _telling(policy, can)
    asked = policy.limits.recompile_limit
    shapes = min(asked, _MOST_SHAPES)
    before = places.Waiting()
    try:
        with quiet():
            rows = list(_child_that_forgot(asked, shapes))
            apply = functools.partial(apply_policy, policy, capabilities=can)
            with apply():
                rows += [_row(*one, asked, shapes) for one in _probes(apply, shapes, before, initializer=initializer)]
    finally:
        before.end()
    return Records(rows)


def _installed() -> Capabilities:
    return capabilities()


def _telling(policy: CompilePolicy, can: Capabilities) -> CompilePolicy:
    setting = find(limit_names(can)[0])
    usual = int(getattr(setting.entry, "default", 8)) if setting is not None else 8
    if policy.limits.recompile_limit > usual:
        return policy
    return CompilePolicy(floor=usual + 4, on_limit=policy.on_limit)


def _child_that_forgot(asked: int, shapes: int) -> Iterator[PlaceRecord]:
    """A worker process in which nobody applied anything: known for sure, so it is said."""
    if multiprocessing.parent_process() is not None and current_policy() is None:
        yield _row("this child process, as it was", lambda: probe(shapes), _INITIALIZER, asked, shapes)


def _probes(apply: Callable[[], object], shapes: int, before: places.Waiting, *, initializer: bool) -> Iterator[Probe]:
    def body() -> Seen:
        return probe(shapes)

    given = apply if initializer else None
    suffix = "with initializer" if initializer else "without initializer"
    # The first compile of the process is on this thread: some releases crash otherwise.
    yield "main thread", body, "Nothing reaches this thread: apply the policy here"
    # Children are started early, so that they import torch while the rest is tried.
    methods = multiprocessing.get_all_start_methods()
    children = {one: places.process(one, shapes, given) for one in ("spawn", "forkserver") if one in methods}
    if "fork" in methods:
        yield "fork", places.process("fork", shapes, None), "Apply the policy before the fork, or pass the initializer"
    yield "new thread", functools.partial(places.new_thread, body), _APPLY_THERE
    yield "thread started before", functools.partial(before.run, body), _APPLY_THERE
    yield "ThreadPoolExecutor", functools.partial(places.executor, body), _INITIALIZER
    yield (
        "ThreadPoolExecutor with initializer",
        functools.partial(places.executor_with_initializer, body, apply),
        _APPLY_THERE,
    )
    yield (
        "run_in_executor",
        functools.partial(places.run_in_executor, body),
        "Give the loop an executor with initializer=dynapolicy.apply_policy, initargs=(policy,), or use to_thread",
    )
    yield "to_thread", functools.partial(places.to_thread, body), _APPLY_THERE
    yield (
        "sibling task",
        functools.partial(places.sibling_task, body, apply),
        "Apply the policy before the event loop starts, or in each task",
    )
    yield (
        "autograd thread",
        functools.partial(places.autograd_thread, body),
        "Compile with dynapolicy.compile, whose keyword travels to that thread",
    )
    yield "DataLoader worker", functools.partial(places.data_loader, shapes, given), _WORKER_INIT
    for method, wait in children.items():
        yield f"{method} {suffix}", wait, _INITIALIZER


def _row(place: str, run: Callable[[], Seen], advice: str, asked: int, shapes: int) -> PlaceRecord:
    try:
        seen = run()
    except Exception as error:  # noqa: BLE001 - one broken place must not hide the others
        problem = f"The probe failed: {type(error).__name__}: {error}"
        return PlaceRecord(place, None, asked, 0, shapes, ok=False, advice=problem)
    ok = seen.limit >= asked and seen.compiled == shapes
    return PlaceRecord(place, seen.limit, asked, seen.compiled, shapes, ok=ok, advice="" if ok else advice)
