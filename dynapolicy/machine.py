"""How many compile workers, and started how: the worker policy and what the machine allows. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from .errors import KnobError, WorkerError
from .knob_table import knob, rows_of
from .knobs import KnobValue, clamp, parse, read_knobs

__all__ = ["Bound", "Machine", "WorkerPlan", "WorkerPolicy"]

#: Torch never starts more compile workers than this by itself.
TORCH_MOST = 32

#: What one worker takes of ``pids.max``, which counts threads: itself, its watchdog, and a compiler it runs.
PIDS_PER_WORKER = 4

TORCH_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
TORCH_START = "TORCHINDUCTOR_WORKER_START"

_MB = 1024 * 1024
_GB = 1024 * _MB


@attrs.frozen(kw_only=True)
class Machine:
    """What this process may use. None where nothing limits it or nothing could be read.

    Attributes:
        cpus: CPUs of this process's affinity.
        host_cpus: CPUs that all local ranks share: those of the container or of the host.
        cpu_quota: the cgroup's quota, in CPUs.
        memory_limit: the cgroup's limit or the host's memory, in bytes.
        memory_free: what is free of it, in bytes; page cache counts as free.
        pids_max: the cgroup's limit of processes and threads.
        pids_used: how many of them exist.
        local_ranks: ranks of one job on this host.
        local_ranks_variable: the environment variable that says so.
        platform: ``sys.platform``.
        triton: Triton is installed. Without it torch compiles nothing in processes.
        daemonic: a daemonic process of ``multiprocessing``, which may have no children of its kind.
        main_guard: ``__main__`` is a file that guards its program with ``if __name__ == "__main__"``.
        compile_worker: this process is itself one of torch's compile workers.
        torch_threads: the text of ``TORCHINDUCTOR_COMPILE_THREADS``.
        torch_start: the text of ``TORCHINDUCTOR_WORKER_START``.
    """

    cpus: int
    host_cpus: int | None = None
    cpu_quota: float | None = None
    memory_limit: int | None = None
    memory_free: int | None = None
    pids_max: int | None = None
    pids_used: int = 0
    local_ranks: int = 1
    local_ranks_variable: str = ""
    platform: str = "linux"
    triton: bool = True
    daemonic: bool = False
    main_guard: bool = True
    compile_worker: bool = False
    torch_threads: str | None = None
    torch_start: str | None = None

    @classmethod
    def read(cls, root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None) -> Machine:
        """The machine this process runs on; never raises, and takes a few milliseconds.

        Args:
            root: where ``proc`` and ``sys`` are found; tests use trees of their own.
            environ: the environment; ``os.environ`` where not given.
        """
        from .machine_read import read

        return read(root, os.environ if environ is None else environ)


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


@attrs.frozen(init=False, repr=False)
class WorkerPolicy:
    """How torch's compile workers shall be. Arguments as given, no environment: see ``from_env``.

    Args:
        compile_threads: the most workers; None leaves it to what the machine bears. Fewer are
            used where the machine bears fewer.
        worker_start: ``"subprocess"`` is safe with threads and a live CUDA context, ``"fork"`` is
            not, ``"spawn"`` imports ``__main__`` again. Torch 2.6 knows only the first.
        worker_memory_mb: memory that one worker may need, in MB.

    Raises:
        KnobError: a value is not allowed.
    """

    _values: tuple[KnobValue, ...]

    def __init__(
        self,
        *,
        compile_threads: int | None = None,
        worker_start: str | None = None,
        worker_memory_mb: int | None = None,
    ) -> None:
        arguments = _arguments(compile_threads, worker_start, worker_memory_mb)
        self._fill({}, arguments, "DYNAPOLICY_")

    @classmethod
    def from_env(
        cls,
        *,
        compile_threads: int | None = None,
        worker_start: str | None = None,
        worker_memory_mb: int | None = None,
        prefix: str = "DYNAPOLICY_",
        environ: Mapping[str, str] | None = None,
    ) -> WorkerPolicy:
        """Like the constructor, but the environment wins over arguments. Numbers are clamped.

        Torch's own ``TORCHINDUCTOR_COMPILE_THREADS`` wins over both, in ``plan``.

        Args:
            prefix: what the variables' names begin with.
            environ: the environment; ``os.environ`` where not given.

        Raises:
            KnobError: one error for all variables and arguments that are not allowed.
        """
        arguments = _arguments(compile_threads, worker_start, worker_memory_mb)
        policy = cls.__new__(cls)
        policy._fill(os.environ if environ is None else environ, arguments, prefix)  # noqa: SLF001 - one of this class
        return policy

    def _fill(self, environ: Mapping[str, str], arguments: Mapping[str, object], prefix: str) -> None:
        rows = (*rows_of("workers"), knob("disable"))
        self.__attrs_init__(tuple(read_knobs(environ, arguments, prefix, rows).values()))

    def _record(self, name: str) -> KnobValue:
        return next(record for record in self._values if record.name == name)

    @property
    def knobs(self) -> tuple[KnobValue, ...]:
        """Every knob: its value, and where it came from."""
        return self._values

    @property
    def compile_threads(self) -> int | None:
        """The most workers, or None."""
        value = self._record("compile_threads").value
        return None if value is None else int(value)

    @property
    def worker_start(self) -> str:
        """``"subprocess"``, ``"fork"`` or ``"spawn"``."""
        return str(self._record("worker_start").value)

    @property
    def worker_memory_mb(self) -> int:
        """Memory that one worker may need, in MB."""
        return int(self._record("worker_memory_mb").value or 1)

    @property
    def disabled(self) -> bool:
        """The operator's way out: starting workers does nothing."""
        return self._record("disable").value == "1"

    def plan(self, machine: Machine) -> WorkerPlan:
        """How many workers on this machine, started how, and which limit decided.

        ``TORCHINDUCTOR_COMPILE_THREADS`` wins where it is valid; an empty one counts as unset.

        Raises:
            KnobError: a variable of torch's own holds what torch couldn't read.
            WorkerError: ``"spawn"`` without a main guard.
        """
        start, notes = self._start(machine)
        bounds = tuple(self._bounds(machine))
        bound = min(bounds, key=lambda one: one.most)
        workers = max(1, bound.most)
        given = _torch_threads(machine)
        if given is not None:
            notes += (f"without it {workers}: {bound.why}",)
            bound = Bound(given, f"{TORCH_THREADS}={machine.torch_threads!r} wins")
            workers = given
        nothing = self._nothing(machine)
        serial = workers == 1 and not nothing
        if serial:
            nothing = "no pool is started: with one worker kernels compile in this process"
        notes += (nothing,) if nothing else ()
        return WorkerPlan(workers, start, not nothing, bound, bounds, serial, notes)

    def _start(self, machine: Machine) -> tuple[str, tuple[str, ...]]:
        start, source, thing = self.worker_start, self._record("worker_start").source, "worker_start"
        text = (machine.torch_start or "").strip()
        if text:
            start, source, thing = str(parse(knob("worker_start"), text, TORCH_START)), "environment", TORCH_START
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

    def _bounds(self, machine: Machine) -> Iterator[Bound]:
        ranks = max(1, machine.local_ranks)
        shared = f" shared by {ranks} local ranks" if ranks > 1 else ""
        per = f" at {self.worker_memory_mb} MB a worker"
        if machine.cpu_quota is not None:
            yield Bound(int(machine.cpu_quota / ranks), f"CPU quota {machine.cpu_quota}{shared}")
        if ranks > 1:
            # Ranks that are pinned have an affinity each; what they share is the container or the host.
            host = machine.cpus if machine.host_cpus is None else machine.host_cpus
            yield Bound(host // ranks, f"{host} CPUs{shared}")
        yield Bound(machine.cpus, f"CPU affinity of {machine.cpus}")
        for name, size in (("memory limit", machine.memory_limit), ("free memory", machine.memory_free)):
            if size is not None:
                most = size // ranks // (self.worker_memory_mb * _MB)
                yield Bound(most, f"{name} {size / _GB:.1f} GB{per}{shared}")
        if machine.pids_max is not None:
            left = max(0, machine.pids_max - machine.pids_used)
            used = f"pids.max {machine.pids_max} with {machine.pids_used} in use"
            yield Bound(left // ranks // PIDS_PER_WORKER, used + shared)
        if machine.platform == "win32":
            yield Bound(1, "torch compiles serially on Windows")
        asked = self._record("compile_threads")
        if asked.value is None:
            yield Bound(TORCH_MOST, f"torch's own most, {TORCH_MOST}")
        else:
            name = asked.variable if asked.source == "environment" else asked.name
            yield Bound(int(asked.value), f"{name}={asked.value}")

    def _nothing(self, machine: Machine) -> str:
        """Why there is nothing to start, whatever the number; empty where there is something."""
        if self.disabled:
            return f"nothing is started: {self._record('disable').variable}=1"
        if machine.compile_worker:
            return "nothing is started: this process is one of torch's own compile workers"
        if not machine.triton:
            return "nothing is started: Triton is not installed, and only its kernels compile in worker processes"
        return ""

    # -- out and in ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        threads = "any" if self.compile_threads is None else self.compile_threads
        return f"<WorkerPolicy: compile_threads {threads}, {self.worker_start}, {self.worker_memory_mb} MB a worker>"

    def to_json(self) -> str:
        """Everything the policy holds, as JSON text; ``from_json`` is its inverse."""
        return json.dumps({"knobs": [attrs.asdict(record) for record in self._values]})

    @classmethod
    def from_json(cls, text: str) -> WorkerPolicy:
        """Read what ``to_json`` wrote.

        Raises:
            KnobError: the text holds no worker policy.
        """
        try:
            values = tuple(KnobValue(**record) for record in json.loads(text)["knobs"])
            names = {record.name for record in values}
            missing = {row.name for row in (*rows_of("workers"), knob("disable"))} - names
            if missing:
                raise KeyError(*missing)
        except (ValueError, KeyError, TypeError) as error:
            rule = f"It is no worker policy in JSON: {error}"
            raise KnobError("from_json", text, rule, "argument", "Pass what to_json() gave") from None
        policy = cls.__new__(cls)
        policy.__attrs_init__(values)
        return policy


def _arguments(compile_threads: Any, worker_start: Any, worker_memory_mb: Any) -> dict[str, Any]:
    return {
        "compile_threads": compile_threads,
        "worker_start": worker_start,
        "worker_memory_mb": worker_memory_mb,
    }


def _torch_threads(machine: Machine) -> int | None:
    row = knob("compile_threads")
    number = parse(row, machine.torch_threads or "", TORCH_THREADS)
    return None if number is None else clamp(row, int(number))
