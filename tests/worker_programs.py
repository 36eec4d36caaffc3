"""Programs that start compile workers, each run in a process of its own by the tests of workers.

``python worker_programs.py NAME`` prints what it saw as one line of JSON; a line of its child comes before.
"""

from __future__ import annotations

import builtins
import importlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.workers import guardian
from dynapolicy.workers.processes import Family

TWO = dp.WorkerPolicy(compile_threads=2)
MACHINE = dp.Machine(cpus=4)

#: Entrances to torch's circles of imports.
ENTRANCES = (
    *("torch.nn", "torch._dynamo", "torch._inductor", "torch._export", "torch.distributed"),
    *("torch._inductor.compile_fx", "torch.fx.experimental.symbolic_shapes", "torch._dynamo.utils"),
)


needs_triton = pytest.mark.skipif(
    not dp.Machine.read().triton, reason="this torch comes without Triton, so it has no pool of worker processes"
)


# -- what tests call -----------------------------------------------------------------------------------------


def environ(**more: str) -> dict[str, str]:
    """For a child that imports what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore", **more}


def run(name: str, **more: str) -> dict[str, Any]:
    """Everything that a program and its child saw."""
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ(**more), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    saw: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        saw.update(json.loads(line))
    return saw


def until(true: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether that came true, at the latest then."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pids: Any, seconds: float) -> bool:
    """Whether none of these processes runs any more, at the latest then."""
    return until(lambda: not Family(roots=tuple(pids)).members(), seconds)


# -- what programs share -------------------------------------------------------------------------------------


def start_amid_imports(saw: dict[str, Any], policy: dp.WorkerPolicy = TWO) -> dp.Workers:
    """Start while other threads import torch's modules, each in an order of its own, and main compiles at once."""
    errors: list[str] = []
    seed = random.randrange(1000)

    def enter(number: int) -> None:
        names = [*ENTRANCES]
        random.Random(seed + number).shuffle(names)
        for name in names:
            try:
                importlib.import_module(name)
            except BaseException as error:
                errors.append(f"seed {seed}, {name}: {error!r}")

    originals = builtins.__import__, importlib.import_module
    saw["torch_before"] = "torch" in sys.modules
    workers = dp.start_workers(policy, machine=MACHINE)
    saw["torch_at_once"] = "torch" in sys.modules
    saw["ready_at_once"], saw["healthy_at_once"] = workers.ready, workers.healthy
    threads = [threading.Thread(target=enter, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    import torch

    saw["compiled"] = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.ones(2)).tolist()
    for thread in threads:
        thread.join(120)
    saw["deadlock"] = any(thread.is_alive() for thread in threads)
    until(lambda: not any(thread.name == "dynapolicy-workers" for thread in threading.enumerate()))
    saw["put_back"] = (builtins.__import__, importlib.import_module) == originals
    saw["errors"] = errors
    saw["waited"] = workers.wait(120)
    return workers


def pool() -> Any:
    """The pool as torch's compiles get it."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.process_pool()


def threads_read() -> int:
    """``compile_threads`` as a new thread sees it."""
    from torch._inductor import config

    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(config.compile_threads))
    thread.start()
    thread.join()
    return seen[0]


def sidecar_killed() -> None:
    """The process that the others belong to dies, as an out-of-memory killer does it."""
    victim = pool().process
    os.kill(victim.pid, signal.SIGKILL)
    # Its parent can't know before the kernel has it down as dead.
    until(lambda: victim.poll() is not None)


def touch_and_sleep(path: str, seconds: float) -> str:
    """A job of which one can see that it began."""
    Path(path).touch()
    time.sleep(seconds)
    return path


def compile_kernel() -> str:
    """The name of a kernel that is compiled here and now."""
    import triton_kernel

    return triton_kernel.compiled()


def busy(folder: str, jobs: int, seconds: float) -> list[Any]:
    """Jobs at work in both workers, and others waiting."""
    paths = [f"{folder}/{time.monotonic_ns()}-{number}" for number in range(jobs)]
    futures = [pool().submit(touch_and_sleep, path, seconds) for path in paths]
    until(lambda: sum(Path(path).exists() for path in paths) >= 2)
    return futures


# -- the programs --------------------------------------------------------------------------------------------


def faults() -> dict[str, Any]:
    """One pool, and everything that may happen to it."""
    from dynapolicy.workers import keeper

    keeper.MOST_RECOVERIES = 1
    saw: dict[str, Any] = {}
    workers = start_amid_imports(saw)
    folder = os.environ["WORKER_PROGRAMS_FOLDER"]
    saw["ready"], saw["got"], saw["threads"] = workers.ready, workers.report().got, threads_read()
    saw["job"] = pool().submit(os.getpid).result(30) in workers.report().processes

    jobs = busy(folder, 3, 0.3)
    os.kill(next(pid for pid in workers.report().processes if pid != pool().process.pid), signal.SIGKILL)
    saw["worker"] = [bool(job.result(60)) for job in jobs]
    saw["worker_recoveries"] = workers.report().recoveries
    saw["error"] = str(pool().submit(int, "no number").exception(30))

    orphans = workers.report().processes
    sidecar_killed()
    saw["idle"] = {"healthy": workers.healthy, "ready": workers.ready}
    # Larger than a pipe: torch up to 2.13 blocks here for ever.
    jobs = [pool().submit(len, b"x" * 300_000) for _ in range(3)]
    saw["idle"]["jobs"] = [job.result(60) for job in jobs]
    saw["idle"]["recoveries"], saw["idle"]["orphans_gone"] = workers.report().recoveries, gone(orphans, 5)
    saw["healthy"] = workers.healthy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jobs = busy(folder, 3, 0.3)
        sidecar_killed()
        saw["busy"] = [bool(job.result(60)) for job in jobs]
        saw["serial"] = [pool().submit(sum, [number]).result(60) for number in range(3)]
        saw["serial_pid"] = pool().submit(os.getpid).result(10) == os.getpid()
        saw["recover"] = workers.recover()
    saw["said"] = [str(one.message) for one in caught if issubclass(one.category, dp.WorkerWarning)]
    saw["end"] = {"healthy": workers.healthy, "ready": workers.ready, "state": workers.report().state}
    saw["threads_serial"] = threads_read()
    saw["shutdown"] = workers.shutdown(5)
    return saw


def life() -> dict[str, Any]:
    """Start, quiesce, start again, twice, in a child, shutdown while busy."""
    saw: dict[str, Any] = {}
    folder = os.environ["WORKER_PROGRAMS_FOLDER"]
    with start_amid_imports(saw) as workers:
        worker = pool().submit(os.getpid).result(30)
        saw["work_elsewhere"] = worker != os.getpid()
        saw["kernels"] = [pool().submit(compile_kernel).result(60), compile_kernel()]
    saw["quiesced"], saw["healthy"] = gone([worker], 10), workers.healthy
    saw["again"] = pool().submit(sum, [1, 2]).result(60)

    again = dp.start_workers(dp.WorkerPolicy(compile_threads=3), machine=MACHINE)
    saw["twice"] = {"got": again.report().got, "notes": again.report().notes}

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, workers, folder), daemon=True)
    child.start()
    saw["child"] = queue.get(timeout=150)
    child.kill()
    saw["child_left_none"] = gone(saw["child"]["processes"], 15)
    for pid in Family(roots=tuple(saw["child"]["processes"])).members():
        os.kill(pid, signal.SIGKILL)
    saw["after_fork"] = pool().submit(sum, [3, 4]).result(30)

    mine = workers.report().processes
    jobs = [*busy(folder, 3, 1.0), pool().submit(sum, [5, 6])]
    begin = time.monotonic()
    saw["shutdown"] = workers.shutdown(2.0)
    saw["shutdown_seconds"] = time.monotonic() - begin
    saw["none_left"] = gone(mine, 0.2)
    saw["busy"] = [bool(job.result(30)) for job in jobs]
    from torch._inductor import config

    saw["restored"] = (config.compile_threads, threads_read())
    saw["after"] = [workers.ready, workers.wait(1.0), workers.recover(), workers.quiesce(), workers.shutdown(1.0)]
    return saw


def _child(queue: Any, workers: dp.Workers, folder: str) -> None:
    """Forked and daemonic: it asks for what it can't have, gets workers of its own, and is killed while one hangs."""
    guardian.GRACE = 2.0
    asked = dp.start_workers(dp.WorkerPolicy(worker_start="fork"), machine=dp.Machine(cpus=4, daemonic=True))
    saw = {
        "notes": asked.report().notes,
        "before": [workers.ready, workers.wait(0.1), workers.healthy, workers.report().got],
        "recover": workers.recover(),
        "job": pool().submit(sum, [1, 2]).result(60),
        "got": workers.report().got,
    }
    pool().submit(_hang, f"{folder}/hangs")
    saw["hangs"] = until(Path(f"{folder}/hangs").exists)
    saw["processes"] = [*workers.report().processes, workers._site.keeper._guardian.pid]
    queue.put(saw)
    time.sleep(600)


def _hang(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).touch()
    time.sleep(600)


def settings() -> dict[str, Any]:
    """One worker is a setting; an empty variable of torch's is none; what was set by hand wins."""
    saw: dict[str, Any] = {}
    workers = start_amid_imports(saw, dp.WorkerPolicy(compile_threads=1))
    saw["variable"] = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    saw["threads"], saw["healthy"], saw["notes"] = threads_read(), workers.healthy, workers.report().notes
    saw["shutdown"] = workers.shutdown(5)
    saw["restored"] = threads_read()

    with dp.apply_policy(dp.CompilePolicy(settings={"inductor.compile_threads": 1})):
        workers = dp.start_workers(TWO, machine=MACHINE)
        workers.wait(60)
        saw["by_hand"] = {"threads": threads_read(), "notes": workers.report().notes}
        workers.shutdown(5)

    workers = dp.start_workers(dp.WorkerPolicy(compile_threads=1), machine=MACHINE)
    workers.wait(60)
    with dp.apply_policy(dp.CompilePolicy(settings={"inductor.compile_threads": 5})):
        saw["later"] = {"threads": threads_read(), "notes": workers.report().notes}
    workers.shutdown(5)
    if dp.Machine.read().triton:
        from torch._inductor import config

        saw["foreign"] = _foreign()
        if config.worker_start_method is None:
            return saw
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_forked, args=(queue,))
        child.start()
        saw["forked"] = queue.get(timeout=150)
        child.join(30)
        saw["forked"]["none_left"] = gone(saw["forked"]["processes"], 10)
    return saw


def _foreign() -> dict[str, Any]:
    """Somebody's pool of another size is there already."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    shutdown_compile_workers()
    config.compile_threads = 3
    AsyncCompile.warm_pool()
    theirs = pool()
    workers = dp.start_workers(TWO, machine=MACHINE)
    until(lambda: workers.report().state != "starting")
    saw: dict[str, Any] = {"got": workers.report().got, "notes": workers.report().notes}
    saw["shutdown"] = workers.shutdown(5)
    saw["theirs"] = pool() is theirs and theirs.process.poll() is None
    theirs.process.kill()
    shutdown_compile_workers()
    return saw


def _forked(queue: Any) -> None:
    """Workers started by fork. Nobody shuts them down."""
    workers = dp.start_workers(dp.WorkerPolicy(compile_threads=2, worker_start="fork"), machine=MACHINE)
    saw: dict[str, Any] = {"waited": workers.wait(120), "job": pool().submit(sum, [1, 2]).result(30)}
    jobs = busy(os.environ["WORKER_PROGRAMS_FOLDER"], 2, 0.3)
    os.kill(workers.report().processes[-1], signal.SIGKILL)
    saw["killed"] = [bool(job.result(60)) for job in jobs]
    saw["healthy"], saw["processes"] = workers.healthy, workers.report().processes
    queue.put(saw)


def nothing() -> dict[str, Any]:
    """No Triton: nothing is started, and torch isn't even imported."""
    with dp.start_workers(TWO, machine=dp.Machine(cpus=4, triton=False)) as workers:
        calls = [workers.ready, workers.wait(60.0), workers.healthy, workers.recover(), workers.quiesce()]
    calls += [workers.shutdown(1.0)]
    return {"calls": calls, "notes": workers.report().notes, "torch": "torch" in sys.modules}


if __name__ == "__main__":
    # Workers find their jobs under this module's own name.
    import worker_programs

    print(json.dumps(getattr(worker_programs, sys.argv[1])()), flush=True)
