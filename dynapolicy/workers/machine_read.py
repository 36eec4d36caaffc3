"""Reading the real machine: affinity, cgroups of both versions, memory, and the launcher's variables."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .machine import TORCH_START, TORCH_THREADS, Machine

__all__ = ["read"]

#: Launchers' names for the number of ranks on this host: torchrun, MPI's, and SLURM's, which sets its
#: own in every shell of an allocation, so that it counts only in a process that srun started.
_RANKS = (
    ("LOCAL_WORLD_SIZE", ""),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    ("MV2_COMM_WORLD_LOCAL_SIZE", ""),
    ("MPI_LOCALNRANKS", ""),
    ("PALS_LOCAL_SIZE", ""),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID"),
    ("SLURM_NTASKS_PER_NODE", "SLURM_PROCID"),
    ("SLURM_TASKS_PER_NODE", "SLURM_PROCID"),
)

#: Version 1 writes "no limit" as a number near the largest of 64 bits.
_NO_LIMIT = 1 << 60

_V1 = {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes", "pids": "pids.max", "cpuset": "cpuset.cpus"}

_MAIN_GUARD = re.compile(r"^\s*if\b.*\b__name__\b", re.MULTILINE)


def read(root: str | os.PathLike[str], environ: Mapping[str, str]) -> Machine:
    """See ``Machine.read``."""
    top = Path(root)
    groups = _Groups(top)
    cpus = _affinity(top)
    total, available = _meminfo(top)
    limits = [*groups.memory_limits()]
    free = [limit - used for limit, used in limits] + ([available] if available is not None else [])
    sizes = [limit for limit, _ in limits] + ([total] if total is not None else [])
    pids = min(groups.pids(), key=lambda pair: pair[0] - pair[1], default=(None, 0))
    ranks, variable = _local_ranks(environ)
    return Machine(
        cpus=cpus,
        host_cpus=min((one for one in (groups.cpuset(), os.cpu_count()) if one), default=None)
        if top == Path("/")
        else groups.cpuset(),
        cpu_quota=min(groups.cpu_quotas(), default=None),
        memory_limit=min(sizes, default=None),
        memory_free=max(0, min(free)) if free else None,
        pids_max=pids[0],
        pids_used=pids[1],
        local_ranks=ranks,
        local_ranks_variable=variable,
        platform=sys.platform,
        triton=_installed("triton"),
        daemonic=_daemonic(),
        main_guard=_main_guard(),
        # Torch sets this in the workers that it spawns, so that they start no pool of their own.
        compile_worker=environ.get("TORCH_WARM_POOL") == "0" and _spawned(),
        torch_threads=environ.get(TORCH_THREADS),
        torch_start=environ.get(TORCH_START),
    )


class _Groups:
    """The cgroups this process is in, of both versions: its own and all above it, which limit it as well."""

    def __init__(self, top: Path) -> None:
        self._mount = top / "sys/fs/cgroup"
        self._paths = _membership(_text(top / "proc/self/cgroup") or "0::/")

    def cpu_quotas(self) -> Iterator[float]:
        """Quotas in CPUs."""
        for folder in self._folders(""):
            quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
            yield from _quota(quota, period)
        for folder in self._folders("cpu"):
            quota, period = _text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""
            yield from _quota(quota, period)

    def memory_limits(self) -> Iterator[tuple[int, int]]:
        """Limits and what is used of each, in bytes. The page cache that the kernel would give up is not used."""
        for controller, limit_name, used_name, cache in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for folder in self._folders(controller):
                limit = _number(folder / limit_name)
                if limit is not None and limit < _NO_LIMIT:
                    found = re.search(rf"^{cache} (\d+)", _text(folder / "memory.stat") or "", re.MULTILINE)
                    used = (_number(folder / used_name) or 0) - (int(found[1]) if found else 0)
                    yield limit, max(0, used)

    def pids(self) -> Iterator[tuple[int, int]]:
        """Limits of processes and threads, and how many there are."""
        for controller in ("", "pids"):
            for folder in self._folders(controller):
                most = _number(folder / "pids.max")
                if most is not None:
                    yield most, _number(folder / "pids.current") or 0

    def cpuset(self) -> int | None:
        """CPUs of the nearest group that names them."""
        for controller, names in (
            ("", ("cpuset.cpus.effective",)),
            ("cpuset", ("cpuset.effective_cpus", "cpuset.cpus")),
        ):
            for folder in self._folders(controller):
                for name in names:
                    count = _count_list(_text(folder / name) or "")
                    if count:
                        return count
        return None

    def _folders(self, controller: str) -> Iterator[Path]:
        """The group's folder and those above it, for a controller of version 1, or "" for version 2."""
        for mount in self._mounts(controller):
            path = self._paths.get(controller, "/").strip("/")
            while path:
                # Inside a container the path may be the host's, which isn't there.
                if (mount / path).is_dir():
                    yield mount / path
                path = path.rpartition("/")[0]
            yield mount

    def _mounts(self, controller: str) -> Iterator[Path]:
        if not controller:
            yield self._mount
            yield self._mount / "unified"
            return
        for entry in sorted(self._mount.glob(f"*{controller}*")):
            if controller in entry.name.split(",") and not entry.is_symlink():
                yield entry


def _membership(text: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number:
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _quota(quota: str, period: str) -> Iterator[float]:
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return
    if math.isfinite(cpus) and cpus > 0:
        yield round(cpus, 2)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path) or ""
    return int(text) if text.isascii() and text.isdigit() else None


def _count_list(text: str) -> int:
    """How many CPUs ``0-3,8`` names."""
    count = 0
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            count += int(last or first) - int(first) + 1
    return count


def _affinity(top: Path) -> int:
    status = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(top / "proc/self/status") or "", re.MULTILINE)
    if status and (count := _count_list(status[1])):
        return count
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _meminfo(top: Path) -> tuple[int | None, int | None]:
    text = _text(top / "proc/meminfo") or ""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    return (int(total) * 1024 if total else None), (int(available) * 1024 if available else None)


def _local_ranks(environ: Mapping[str, str]) -> tuple[int, str]:
    for name, needs in _RANKS:
        text = environ.get(name, "")
        # SLURM writes "8(x2),4": eight on each of two hosts. Which is this one isn't said, so the most counts.
        numbers = [int(one) for one in re.findall(r"(?:^|,)\s*(\d{1,9})(?:\(x\d+\))?\s*(?=,|$)", text)]
        if numbers and max(numbers) > 0 and (not needs or needs in environ):
            return max(numbers), name
    return 1, ""


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _process() -> object:
    # Where nobody imported multiprocessing, it did not start this process.
    module = sys.modules.get("multiprocessing.process")
    return None if module is None else module.current_process()


def _daemonic() -> bool:
    return bool(getattr(_process(), "daemon", False))


def _spawned() -> bool:
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _main_guard() -> bool:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return path is not None and bool(_MAIN_GUARD.search(_text(Path(path)) or ""))
