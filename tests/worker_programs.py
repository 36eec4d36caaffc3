"""Programs that start compile workers, each run in a process of its own by ``test_workers``.

``python worker_programs.py NAME`` prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import dynapolicy as dp
from dynapolicy import worker_site
from dynapolicy.processes import Family

TWO = dp.WorkerPolicy(compile_threads=2)
MACHINE = dp.Machine(cpus=4)


def start(policy: dp.WorkerPolicy = TWO) -> tuple[dp.Workers, float]:
    """Start, and how long that call took."""
    begin = time.perf_counter()
    workers = dp.start_workers(policy, machine=MACHINE)
    return workers, time.perf_counter() - begin


def pool() -> Any:
    """The pool as torch's compiles get it."""
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.process_pool()


def sidecar_killed() -> None:
    """The process that the others belong to dies, as an out-of-memory killer does it."""
    victim = pool().process
    os.kill(victim.pid, signal.SIGKILL)
    # Its parent can't know before the kernel has it down as dead.
    while victim.poll() is None:
        time.sleep(0.01)


def gone(pids: Any, seconds: float) -> bool:
    """Whether none of these processes runs any more, at the latest then."""
    deadline = time.monotonic() + seconds
    while Family(roots=tuple(pids)).members():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def threads_read() -> int:
    """``compile_threads`` as a new thread sees it."""
    from torch._inductor import config

    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(config.compile_threads))
    thread.start()
    thread.join()
    return seen[0]


def faults() -> dict[str, Any]:
    """One pool, and everything that may happen to it."""
    worker_site.MOST_RECOVERIES = 2
    workers, seconds = start()
    saw: dict[str, Any] = {"start": seconds, "ready_at_once": workers.ready, "healthy_at_once": workers.healthy}
    import torch

    torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.ones(2))
    saw["waited"] = workers.wait(120)
    saw["ready"], saw["report"] = workers.ready, workers.report().state
    saw["got"], saw["threads"] = workers.report().got, threads_read()
    saw["job"] = pool().submit(os.getpid).result(30) in workers.report().processes

    orphans = workers.report().processes
    sidecar_killed()
    saw["idle"] = {"healthy": workers.healthy, "ready": workers.ready}
    # Larger than a pipe: torch up to 2.13 blocks here for ever.
    jobs = [pool().submit(len, b"x" * 300_000) for _ in range(3)]
    saw["idle"]["jobs"] = [job.result(60) for job in jobs]
    saw["idle"]["recoveries"], saw["idle"]["orphans_gone"] = workers.report().recoveries, gone(orphans, 5)

    jobs = [pool().submit(time.sleep, 0.4) for _ in range(3)] + [pool().submit(sum, [1, 2])]
    time.sleep(0.2)
    os.kill(next(pid for pid in workers.report().processes if pid != pool().process.pid), signal.SIGKILL)
    saw["worker"] = [job.result(60) for job in jobs]
    saw["worker_recoveries"] = workers.report().recoveries
    bad = pool().submit(int, "no number")
    saw["error"] = str(bad.exception(30))

    jobs = [pool().submit(time.sleep, 0.4) for _ in range(3)] + [pool().submit(sum, [1, 2])]
    sidecar_killed()
    saw["busy"] = [job.result(60) for job in jobs]
    saw["busy_recoveries"], saw["healthy"] = workers.report().recoveries, workers.healthy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sidecar_killed()
        saw["serial"] = [pool().submit(sum, [number]).result(60) for number in range(3)]
        saw["serial_pid"] = pool().submit(os.getpid).result(10) == os.getpid()
        saw["recover"] = workers.recover()
    saw["said"] = [str(one.message) for one in caught if issubclass(one.category, dp.WorkerWarning)]
    saw["end"] = {"healthy": workers.healthy, "ready": workers.ready, "state": workers.report().state}
    saw["threads_serial"] = threads_read()
    saw["shutdown"] = workers.shutdown(5)
    return saw


def life() -> dict[str, Any]:
    """Start, quiesce, start again, fork, twice, shutdown while busy."""
    from torch._inductor import config

    before = config.compile_threads
    saw: dict[str, Any] = {}
    with start()[0] as workers:
        saw["waited"] = workers.wait(120)
        pool().submit(os.getpid).result(30)
        busy = [pid for pid in workers.report().processes if pid != pool().process.pid]
    saw["quiesced"], saw["healthy"] = bool(busy) and gone(busy, 10), workers.healthy
    saw["again"] = pool().submit(sum, [1, 2]).result(60)

    again = dp.start_workers(dp.WorkerPolicy(compile_threads=3), machine=MACHINE)
    saw["twice"] = {"got": again.report().got, "notes": again.report().notes}

    child = os.fork()
    if not child:
        inside = {
            "ready": workers.ready,
            "wait": workers.wait(0.1),
            "healthy": workers.healthy,
            "got": workers.report().got,
            "recover": workers.recover(),
            "own": pool().submit(sum, [1, 2]).result(60),
            "size": workers.report().got,
            "own_pid": pool().process.pid,
            "shutdown": workers.shutdown(5),
        }
        print(json.dumps({"child": inside}), flush=True)
        os._exit(0)
    saw["child_exit"] = os.waitpid(child, 0)[1]
    saw["after_fork"] = pool().submit(sum, [3, 4]).result(30)

    mine = workers.report().processes
    jobs = [pool().submit(time.sleep, 1.0) for _ in range(3)] + [pool().submit(sum, [5, 6])]
    time.sleep(0.2)
    begin = time.monotonic()
    saw["shutdown"] = workers.shutdown(2.0)
    saw["shutdown_seconds"] = time.monotonic() - begin
    saw["none_left"] = gone(mine, 0.2)
    saw["busy"] = [job.result(30) for job in jobs]
    saw["restored"] = (before, config.compile_threads, threads_read())
    saw["after"] = [workers.ready, workers.wait(1.0), workers.recover(), workers.quiesce(), workers.shutdown(1.0)]
    return saw


def foreign() -> dict[str, Any]:
    """Somebody's pool of another size is there already."""
    from torch._inductor import config

    config.compile_threads = 3
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    AsyncCompile.warm_pool()
    theirs = pool()
    workers, _ = start()
    while workers.report().state == "starting":
        time.sleep(0.05)
    saw: dict[str, Any] = {"got": workers.report().got, "notes": workers.report().notes}
    saw["shutdown"] = workers.shutdown(5)
    saw["theirs"] = pool() is theirs and theirs.process.poll() is None
    shutdown_compile_workers()
    return saw


def _daemonic(queue: Any, method: str) -> None:
    workers = dp.start_workers(
        dp.WorkerPolicy(compile_threads=2, worker_start=method), machine=dp.Machine(cpus=4, daemonic=True)
    )
    queue.put((workers.wait(120), workers.report().processes, workers.report().notes))


def daemonic() -> dict[str, Any]:
    """In a daemonic process, that asks for what it can't have, and that leaves nothing when it ends."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_daemonic, args=(queue, "fork"), daemon=True)
    child.start()
    ready, pids, notes = queue.get(timeout=150)
    child.join(30)
    return {"ready": ready, "processes": len(pids), "notes": notes, "none_left": gone(pids, 10)}


def forked() -> dict[str, Any]:
    """Workers started by fork, which torch 2.6 can't: it starts its own kind."""
    workers = dp.start_workers(dp.WorkerPolicy(compile_threads=2, worker_start="fork"), machine=MACHINE)
    saw: dict[str, Any] = {"waited": workers.wait(120), "job": pool().submit(sum, [1, 2]).result(30)}
    jobs = [pool().submit(time.sleep, 0.3) for _ in range(2)]
    mine = workers.report().processes
    os.kill(mine[-1], signal.SIGKILL)
    saw["killed"] = [job.result(60) for job in jobs]
    saw["healthy"] = workers.healthy
    mine = workers.report().processes
    saw["shutdown"], saw["none_left"] = workers.shutdown(5), gone(mine, 0.2)
    return saw


def parent() -> dict[str, Any]:
    """Waits to be killed with its workers at work."""
    workers, _ = start()
    waited = workers.wait(120)
    for _ in range(2):
        pool().submit(time.sleep, 3.0)
    time.sleep(0.3)
    print(json.dumps({"waited": waited, "processes": workers.report().processes}), flush=True)
    time.sleep(600)
    return {}


def serial() -> dict[str, Any]:
    """One worker is a setting; an empty variable of torch's is none."""
    workers = dp.start_workers(dp.WorkerPolicy(compile_threads=1), machine=MACHINE)
    waited = workers.wait(120)
    saw = {"waited": waited, "variable": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"), "threads": threads_read()}
    saw["healthy"], saw["notes"] = workers.healthy, workers.report().notes
    saw["shutdown"] = workers.shutdown(5)
    saw["restored"] = threads_read()
    return saw


def nothing() -> dict[str, Any]:
    """No Triton: nothing is started, and torch isn't even imported."""
    begin = time.perf_counter()
    with dp.start_workers(TWO, machine=dp.Machine(cpus=4, triton=False)) as workers:
        seconds = time.perf_counter() - begin
        calls = [workers.ready, workers.wait(60.0), workers.healthy, workers.recover(), workers.quiesce()]
    calls += [workers.shutdown(1.0)]
    notes = workers.report().notes
    return {"seconds": seconds, "calls": calls, "notes": notes, "torch": "torch" in sys.modules}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
