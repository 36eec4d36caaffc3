"""Starting compile workers early, and the handle to them."""

from __future__ import annotations

from types import TracebackType

import attrs

from ..errors import KnobWarning, warn
from ..locks import lock
from ..torch_compat.capabilities import unset_empty_threads
from .machine import Machine
from .plan import WorkerPlan
from .policy import WorkerPolicy
from .site import Site, site_of

__all__ = ["WorkerReport", "Workers", "start_workers"]


@attrs.frozen
class WorkerReport:
    """What was asked, what there is, and why.

    Attributes:
        asked: compile threads that the policy asks for; None leaves it to the machine.
        planned: what that came to on this machine.
        got: workers of the pool that is there, or None where there is none.
        start: how workers are started.
        state: ``"starting"``, ``"started"``, ``"nothing"`` to start, ``"serial"`` (given up), ``"failed"``,
            ``"ended"``, or ``"unstarted"`` in a child that was forked amid the start.
        ready: the workers have answered.
        healthy: nothing is known to be wrong.
        why: the limit that decided, in one line.
        bounds: every limit that was looked at.
        notes: everything else that a reader should know.
        recoveries: how often a dead pool was started again.
        processes: ids of the pool's processes.
    """

    asked: int | None
    planned: int
    got: int | None
    start: str
    state: str
    ready: bool
    healthy: bool
    why: str
    bounds: tuple[str, ...]
    notes: tuple[str, ...]
    recoveries: int
    processes: tuple[int, ...]


class Workers:
    """What ``start_workers`` gives: the process's compile workers. Every method may be called from any thread.

    A context manager that quiesces the workers at its end, so that none is left when CUDA graphs are
    captured; a later compile starts them again.

    Attributes:
        policy: what was asked.
        plan: what it came to on this machine.
    """

    def __init__(self, policy: WorkerPolicy, plan: WorkerPlan, site: Site) -> None:
        self.policy = policy
        self.plan = plan
        self._site = site

    @property
    def ready(self) -> bool:
        """The workers have answered; compiles use them from now on. Never blocks.

        False for ever where there is nothing to start: one worker, or no Triton.
        """
        return self._site.ready

    @property
    def healthy(self) -> bool:
        """Nothing is known to be wrong, also where there is nothing to start. Never blocks."""
        return self._site.healthy

    def wait(self, timeout: float = 120.0) -> bool:
        """Whether the workers are ready within ``timeout`` seconds. Never raises.

        Comes back at once, with False, where there is nothing to start.
        """
        return self._site.wait(timeout)

    def recover(self) -> bool:
        """Start the workers again if they are dead; whether there are any.

        Compiles do it by themselves. After three times kernels compile in this process, which is said once.
        """
        return self._site.recover()

    def quiesce(self) -> bool:
        """End the workers until a compile needs them again; whether that could be done.

        Torch 2.6 and 2.7 can only end the whole pool, which is done where no compile is at work.
        """
        return self._site.quiesce()

    def shutdown(self, timeout: float = 10.0) -> bool:
        """End the workers for good, by force where need be; whether none is left after ``timeout`` seconds.

        Ends only what ``start_workers`` started: a pool that was there before stays. A compile that is
        at work finishes in this process. Settings are put back to what they were.
        """
        return self._site.shutdown(timeout)

    def report(self) -> WorkerReport:
        """What was asked, what there is, and why."""
        site = self._site
        notes = (*self.plan.notes, *site.notes, *site.conflicts)
        if site.plan != self.plan and site.plan.pool:
            notes += (f"workers were started before, {site.plan.workers} of them, and stay: shut them down first",)
        return WorkerReport(
            asked=self.policy.compile_threads,
            planned=self.plan.workers,
            got=site.got,
            start=self.plan.start,
            state=site.state,
            ready=site.ready,
            healthy=site.healthy,
            why=self.plan.why,
            bounds=tuple(f"{max(1, one.most)}: {one.why}" for one in self.plan.bounds),
            notes=notes,
            recoveries=0 if site.keeper is None else site.keeper.recoveries,
            processes=tuple(site.processes),
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.quiesce()

    def __repr__(self) -> str:
        return f"<Workers: {self._site.state}, {self.plan.why}>"


def start_workers(policy: WorkerPolicy | None = None, *, machine: Machine | None = None) -> Workers:
    """Start torch's compile workers in the background: imports and all. Returns at once.

    Call it first, then load weights, then warm up::

        with dp.start_workers():
            model = load()
            dp.warm_up(step, buckets, make_inputs)

    Without Triton nothing is started, since only Triton's kernels compile in worker processes. An
    empty ``TORCHINDUCTOR_COMPILE_THREADS`` is unset, since torch's configuration can't be imported with it.

    Args:
        policy: how many and how; ``WorkerPolicy.from_env()`` where not given.
        machine: what the machine allows; ``Machine.read()`` where not given.

    Raises:
        KnobError: a variable holds what is not allowed.
        WorkerError: the workers can't be started the way that was asked for.
    """
    policy = WorkerPolicy.from_env() if policy is None else policy
    plan = policy.plan(Machine.read() if machine is None else machine)
    emptied = unset_empty_threads()
    if policy.disabled:
        warn(f"{plan.notes[-1]}.", KnobWarning, once=("disabled", policy))

    def settle(site: Site) -> None:
        if emptied:
            site.notes.append("an empty TORCHINDUCTOR_COMPILE_THREADS was unset: torch can't be imported with it")
        # One worker is a setting to put in force, though nothing is started; no Triton is nothing at all.
        if plan.pool or plan.serial:
            site.begin()

    with lock:
        return Workers(policy, plan, site_of(plan, settle))
