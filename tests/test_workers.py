"""Compile workers that are killed, and where there is nothing to start. Real processes, real kills."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from dynapolicy import KnobWarning, Machine, WorkerPolicy, start_workers
from dynapolicy.workers.jobs import MOST_TRIES, Job, Jobs, LocalPool
from dynapolicy.workers.keeper import MOST_RECOVERIES
from dynapolicy.workers.processes import Family
from worker_programs import environ, gone, needs_triton, run

GB = 1024**3


# -- faults, one pool for all of them -------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that starts workers and kills them in turn."""
    return run("faults", WORKER_PROGRAMS_FOLDER=str(tmp_path_factory.mktemp("faults")))


@needs_triton
def test_the_start_is_in_the_background(faults: dict[str, Any]) -> None:
    """The call returns before torch is imported, while the program imports and compiles on its own thread."""
    assert (faults["torch_before"], faults["torch_at_once"]) == (False, False)
    assert (faults["ready_at_once"], faults["healthy_at_once"]) == (False, True)
    assert (faults["waited"], faults["ready"]) == (True, True)
    assert (faults["got"], faults["threads"], faults["job"]) == (2, 2, True)


@needs_triton
def test_other_threads_may_import_torch_meanwhile(faults: dict[str, Any]) -> None:
    """In any order, and main compiles at once: no ImportError, no deadlock, and Python's own functions are back."""
    assert faults["errors"] == []
    assert not faults["deadlock"]
    assert faults["compiled"] == [2.0, 2.0]
    assert faults["put_back"]


@needs_triton
def test_a_killed_worker_costs_no_job(faults: dict[str, Any]) -> None:
    """Its jobs are handed in again; the pool is the same."""
    assert faults["worker"] == [True] * 3
    assert faults["worker_recoveries"] == 0


@needs_triton
def test_a_job_that_fails_by_itself_fails_for_its_owner(faults: dict[str, Any]) -> None:
    """That is no fault of the pool's."""
    assert "no number" in faults["error"]


@needs_triton
def test_a_sidecar_that_is_killed_while_idle_is_started_again(faults: dict[str, Any]) -> None:
    """It is seen at once, jobs larger than a pipe don't block, and its orphans don't linger."""
    assert faults["idle"] == {
        "healthy": False,
        "ready": False,
        "jobs": [300_000] * 3,
        "recoveries": 1,
        "orphans_gone": True,
    }
    assert faults["healthy"]


@needs_triton
def test_a_sidecar_that_is_killed_while_compiling_costs_no_job(faults: dict[str, Any]) -> None:
    """No hang and no error. This was one time too many, so they finish in this process."""
    assert faults["busy"] == [True] * 3


@needs_triton
def test_after_the_last_recovery_kernels_compile_in_this_process(faults: dict[str, Any]) -> None:
    """Serial, said once, and every thread sees it."""
    assert MOST_RECOVERIES == 3  # the program makes do with 1
    assert (faults["serial"], faults["serial_pid"], faults["recover"]) == ([0, 1, 2], True, False)
    assert len(faults["said"]) == 1
    assert "died 2 times" in faults["said"][0]
    assert faults["end"] == {"healthy": False, "ready": False, "state": "serial"}
    assert faults["threads_serial"] == 1
    assert faults["shutdown"]


# -- where nothing is started -----------------------------------------------------------------------------


def test_without_triton_nothing_is_started_and_it_says_so() -> None:
    """Not even torch is imported; every method is harmless."""
    saw = run("nothing")
    assert saw["calls"] == [False, False, True, False, True, True]
    assert "Triton is not installed" in saw["notes"][-1]
    assert not saw["torch"]


def test_disabled_by_the_operator_nothing_is_started() -> None:
    """``DYNAPOLICY_DISABLE=1`` holds here too, and is said."""
    policy = WorkerPolicy.from_env(environ={"DYNAPOLICY_DISABLE": "1"})
    with pytest.warns(KnobWarning, match="DYNAPOLICY_DISABLE=1"):
        workers = start_workers(policy, machine=Machine(cpus=4))
    assert (workers.ready, workers.healthy, workers.wait(1.0)) == (False, True, False)
    assert workers.shutdown(1.0)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"memory.max": 2 * GB, "memory.current": GB // 2}, "1 worker: free memory 1.5 GB at 1024 MB a worker"),
        ({"pids.max": 60, "pids.current": 55}, "1 worker: pids.max 60 with 55 in use"),
    ],
)
def test_a_tight_group_gets_no_pool(tmp_path: Path, files: dict[str, int], why: str) -> None:
    """A limit of 2 GB, a ``pids.max`` that is close: kernels compile in this process."""
    for name, number in {**files, "cpuset.cpus.effective": "0-63"}.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Cpus_allowed_list:\t0-63\n")
    plan = WorkerPolicy().plan(Machine.read(tmp_path, {}))
    assert plan.why == why
    assert not plan.pool


# -- the guardian, without torch --------------------------------------------------------------------------

GUARDED = """
import signal, subprocess, sys, time
from dynapolicy.workers import guardian
guardian.GRACE = 0.5
code = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
pool = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stdout=subprocess.PIPE)
pool.stdout.readline()
guard = guardian.Guardian([str(part) for part in pool.args])
print(pool.pid, guard.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
guard.end()
print(pool.poll(), guard._process.returncode, flush=True)
pool.kill()
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
@pytest.mark.parametrize("end", ["wait", "return"])
def test_a_guardian_ends_what_a_killed_program_left(tmp_path: Path, end: str) -> None:
    """After the grace nothing is left, itself included; where its pool was ended in order, it only goes."""
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(tmp_path), end], stdout=subprocess.PIPE, text=True, env=environ()
    ) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        if end == "return":
            assert program.stdout.readline().split() == ["None", str(-signal.SIGKILL)]
        else:
            program.kill()
    assert gone(pids, 10)


def test_a_family_is_found_by_its_command_line_and_below(tmp_path: Path) -> None:
    """And nobody else is: not this process, not a child of another name."""
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(command, stdout=subprocess.PIPE) as mine:
        assert mine.stdout is not None
        below = int(mine.stdout.readline())
        members = Family(tuple(command)).members() if Path("/proc").is_dir() else [mine.pid, below]
        other.kill()
        mine.kill()
    os.kill(below, signal.SIGKILL)
    assert members == [mine.pid, below]


# -- jobs, without torch ----------------------------------------------------------------------------------


class Pool:
    """A pool that dies or loses its worker when told to."""

    def __init__(self, says: BaseException | None = None) -> None:
        self.alive, self.says, self.taken = True, says, 0

    def submit(self, call: Any) -> Future[Any]:
        self.taken += 1
        future: Future[Any] = Future()
        if self.says is not None:
            future.set_exception(self.says)
        elif self.alive:
            future.set_result(call())
        return future


def test_a_job_that_kills_every_worker_is_given_up() -> None:
    """Handed in again a few times, then its owner gets the pool's error: it isn't run here."""
    pool, again = Pool(BrokenProcessPool("worker died")), []

    def rescue(job: Job) -> None:
        again.append(job.tries)
        if job.hopeless:
            job.give_up()
        else:
            jobs.send(job)

    jobs = Jobs(pool.submit, lambda: True, rescue)
    with pytest.raises(BrokenProcessPool, match="worker died"):
        jobs.submit(os.getpid).result(10)
    assert again == list(range(1, MOST_TRIES + 1))
    assert jobs.open == 0


def test_a_pool_that_dies_in_silence_loses_no_job() -> None:
    """Old torch never answers; the watch notices."""
    pool = Pool()
    jobs = Jobs(lambda call: Future(), lambda: pool.alive, Job.run_here)
    future = jobs.submit(sum, [1, 2])
    assert not future.done()
    pool.alive = False
    assert future.result(10) == 3


def test_a_job_is_answered_once() -> None:
    """Also where the pool's answer and its death come together, from many threads."""
    pool = Pool()
    jobs = Jobs(pool.submit, lambda: pool.alive, Job.run_here)
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(jobs.submit, abs, -number) for number in range(200)]
        pool.alive = False
        assert [future.result(10).result(10) for future in futures] == list(range(200))
    assert jobs.open == 0


def test_a_job_that_runs_here_gives_a_copy() -> None:
    """As from a pool: what it returns has been pickled."""
    value = {"a": [1]}
    result = LocalPool().submit(lambda: value).result(1)
    assert result == value
    assert result is not value
    assert isinstance(LocalPool().submit(pickle.loads, b"").exception(1), EOFError)
