"""What a worker policy comes to on a machine: each limit, the least of them, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from ..errors import WorkerError
from ..knob_table import knob
from ..knobs import clamp, parse
from .machine import TORCH_START, TORCH_THREADS, Machine

if TYPE_CHECKING:
    from .policy import WorkerPolicy

__all__ = ["Bound", "WorkerPlan", "plan_for"]

#: Torch never starts more compile workers than this by itself.
TORCH_MOST = 32

#: What one worker takes of ``pids.max``, which counts threads: itself, its watchdog, and a compiler it runs.
PIDS_PER_WORKER = 4

_MB = 1024 * 1024
_GB = 1024 * _MB


@attrs.frozen
class Bound:
    """The most workers that one resource bears, and how it came to that, in words."""

    most: int
    why: str


@attrs.frozen
class WorkerPlan:
    """What a policy comes to on a machine.

    Attributes:
        workers: compile threads, as torch calls them; 1 means that kernels compile in this process.
        start: ``"subprocess"``, ``"fork"`` or ``"spawn"``.
        pool: there is a pool of processes to start.
        bound: which limit decided.
        bounds: every limit that was looked at.
        serial: there is no pool, because one worker is no worker.
        notes: what else a reader should know.
    """

    workers: int
    start: str
    pool: bool
    bound: Bound
    bounds: tuple[Bound, ...]
    serial: bool = False
    notes: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """One line: ``8 workers: CPU quota 64.0 shared by 8 local ranks``."""
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}: {self.bound.why}"


def plan_for(policy: WorkerPolicy, machine: Machine) -> WorkerPlan:
    """See ``WorkerPolicy.plan``."""
    start, notes = _start(policy, machine)
    bounds = tuple(_bounds(policy, machine))
    bound = min(bounds, key=lambda one: one.most)
    workers = max(1, bound.most)
    given = parse(knob("compile_threads"), machine.torch_threads or "", TORCH_THREADS)
    if given is not None:
        notes += (f"without it {workers}: {bound.why}",)
        workers = clamp(knob("compile_threads"), int(given))
        bound = Bound(workers, f"{TORCH_THREADS}={machine.torch_threads!r} wins")
    nothing = _nothing(policy, machine)
    serial = workers == 1 and not nothing
    if serial:
        nothing = "no pool is started: with one worker kernels compile in this process"
    notes += (nothing,) if nothing else ()
    return WorkerPlan(workers, start, not nothing, bound, bounds, serial, notes)


def _start(policy: WorkerPolicy, machine: Machine) -> tuple[str, tuple[str, ...]]:
    start, source, thing = policy.worker_start, policy.record("worker_start").source, "worker_start"
    given = parse(knob("worker_start"), machine.torch_start or "", TORCH_START)
    if given is not None:
        start, source, thing = str(given), "environment", TORCH_START
    if start == "subprocess":
        return start, ()
    if machine.daemonic:
        return "subprocess", (f"{start} is not possible in a daemonic process, so subprocess is used",)
    if start == "spawn" and not machine.main_guard:
        rule = (
            "Each spawned worker imports __main__ again, and this one has no main guard "
            "(a script without it, a notebook, python -c): every worker would run the program anew"
        )
        way_out = 'Use "subprocess", or put the program under if __name__ == "__main__"'
        raise WorkerError(thing, start, rule, source, way_out)
    return start, ()


def _bounds(policy: WorkerPolicy, machine: Machine) -> Iterator[Bound]:
    ranks = max(1, machine.local_ranks)
    shared = f" shared by {ranks} local ranks" if ranks > 1 else ""
    if machine.cpu_quota is not None:
        yield Bound(int(machine.cpu_quota / ranks), f"CPU quota {machine.cpu_quota}{shared}")
    if ranks > 1:
        # Ranks that are pinned have an affinity each; what they share is the container or the host.
        host = machine.cpus if machine.host_cpus is None else machine.host_cpus
        yield Bound(host // ranks, f"{host} CPUs{shared}")
    yield Bound(machine.cpus, f"CPU affinity of {machine.cpus}")
    for name, size in (("memory limit", machine.memory_limit), ("free memory", machine.memory_free)):
        if size is not None:
            most = size // ranks // (policy.worker_memory_mb * _MB)
            yield Bound(most, f"{name} {size / _GB:.1f} GB at {policy.worker_memory_mb} MB a worker{shared}")
    if machine.pids_max is not None:
        left = max(0, machine.pids_max - machine.pids_used)
        used = f"pids.max {machine.pids_max} with {machine.pids_used} in use"
        yield Bound(left // ranks // PIDS_PER_WORKER, used + shared)
    if machine.platform == "win32":
        yield Bound(1, "torch compiles serially on Windows")
    asked = policy.record("compile_threads")
    if asked.value is None:
        yield Bound(TORCH_MOST, f"torch's own most, {TORCH_MOST}")
    else:
        name = asked.variable if asked.source == "environment" else asked.name
        yield Bound(int(asked.value), f"{name}={asked.value}")


def _nothing(policy: WorkerPolicy, machine: Machine) -> str:
    """Why there is nothing to start, whatever the number; empty where there is something."""
    if policy.disabled:
        return f"nothing is started: {policy.record('disable').variable}=1"
    if machine.compile_worker:
        return "nothing is started: this process is one of torch's own compile workers"
    if not machine.triton:
        return "nothing is started: Triton is not installed, and only its kernels compile in worker processes"
    return ""
