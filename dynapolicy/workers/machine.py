"""What the machine lets a process use, as a record. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

__all__ = ["TORCH_START", "TORCH_THREADS", "Machine"]

TORCH_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
TORCH_START = "TORCHINDUCTOR_WORKER_START"


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
