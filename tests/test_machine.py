"""What the machine allows, and what a worker policy makes of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynapolicy import KnobError, KnobWarning, Machine, WorkerError, WorkerPolicy

GB = 1024**3


def tree(root: Path, files: dict[str, object]) -> Path:
    """A tree of small files, as ``/proc`` and ``/sys`` hold them."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


STATUS = {"proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-63", "proc/self/cgroup": "0::/job"}


# -- reading ---------------------------------------------------------------------------------------------


def test_version_2_limits_of_the_group_and_of_all_above_it_are_read(tmp_path: Path) -> None:
    """The least of what the group and its parents allow counts; page cache is free."""
    root = tree(
        tmp_path,
        {
            "proc/self/status": "Cpus_allowed_list:\t0-7,16-23",
            "proc/self/cgroup": "0::/pod/container",
            "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {48 * 1024**2} kB",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-31",
            "sys/fs/cgroup/pod/cpu.max": "400000 100000",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
            "sys/fs/cgroup/pod/memory.max": 8 * GB,
            "sys/fs/cgroup/pod/memory.current": 5 * GB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GB}",
            "sys/fs/cgroup/pod/container/memory.max": "max",
            "sys/fs/cgroup/pod/container/pids.max": 200,
            "sys/fs/cgroup/pod/container/pids.current": 150,
        },
    )
    machine = Machine.read(root, {})
    assert (machine.cpus, machine.host_cpus, machine.cpu_quota) == (16, 32, 4.0)
    assert (machine.memory_limit, machine.memory_free) == (8 * GB, 5 * GB)
    assert (machine.pids_max, machine.pids_used) == (200, 150)


def test_version_1_limits_are_read(tmp_path: Path) -> None:
    """Version 1 has a tree for each controller, and a huge number where there is no limit."""
    root = tree(
        tmp_path,
        {
            "proc/self/status": "Cpus_allowed_list:\t0-15",
            "proc/self/cgroup": "5:pids:/a\n4:memory:/a\n3:cpuset:/a\n2:cpu,cpuacct:/a",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": 250000,
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 2 * GB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": GB,
            "sys/fs/cgroup/pids/a/pids.max": 64,
            "sys/fs/cgroup/pids/a/pids.current": 60,
            "sys/fs/cgroup/cpuset/a/cpuset.cpus": "0-3",
        },
    )
    machine = Machine.read(root, {})
    assert (machine.cpus, machine.host_cpus, machine.cpu_quota) == (16, 4, 2.5)
    assert (machine.memory_limit, machine.memory_free) == (2 * GB, GB)
    assert (machine.pids_max, machine.pids_used) == (64, 60)


def test_a_group_path_of_the_host_is_looked_up_at_the_top(tmp_path: Path) -> None:
    """Inside a container ``/proc/self/cgroup`` may name a folder of the host, which isn't there."""
    root = tree(tmp_path, {"proc/self/cgroup": "0::/host/only", "sys/fs/cgroup/cpu.max": "150000 100000"})
    assert Machine.read(root, {}).cpu_quota == 1.5


@pytest.mark.parametrize("text", ["", "max", "rubbish", "100000", "100000 0", "-1 100000", "1 2 3"])
def test_unreadable_limits_are_no_limits(tmp_path: Path, text: str) -> None:
    """What can't be understood limits nothing, and never raises."""
    files = {"sys/fs/cgroup/cpu.max": text, "sys/fs/cgroup/memory.max": text, "sys/fs/cgroup/pids.max": text}
    machine = Machine.read(tree(tmp_path, {"proc/self/cgroup": "0::/", **files}), {})
    assert machine.cpu_quota is None
    assert WorkerPolicy().plan(machine).workers >= 1


def test_an_empty_tree_is_read(tmp_path: Path) -> None:
    """A system without ``/proc`` and ``/sys`` still has CPUs."""
    machine = Machine.read(tmp_path, {})
    assert machine.cpus >= 1
    assert machine.memory_limit is machine.memory_free is machine.pids_max is None


def test_the_real_machine_is_read() -> None:
    """This one: as many CPUs as this process may run on."""
    machine = Machine.read()
    if hasattr(os, "sched_getaffinity"):
        assert machine.cpus == len(os.sched_getaffinity(0))
    assert machine.platform == sys.platform
    assert not machine.daemonic


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_PROCID": "3"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_PROCID": "0"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "eight"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_share_the_host(tmp_path: Path, environ: dict[str, str], ranks: int) -> None:
    """Each launcher has its own name; SLURM's counts only in a process that srun started."""
    assert Machine.read(tmp_path, environ).local_ranks == ranks


DAEMON = """
import multiprocessing, sys
from dynapolicy import Machine
def main(queue): queue.put((Machine.read().daemonic, Machine.read().main_guard))
if {guard}:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=main, args=(queue,), daemon=True)
    child.start(); print(queue.get()); child.join()
"""


@pytest.mark.parametrize(("guard", "seen"), [('__name__ == "__main__"', True), ("True", False)])
def test_a_daemonic_process_and_a_main_guard_are_seen(tmp_path: Path, guard: str, seen: bool) -> None:
    """Both are read where they are asked for."""
    script = tmp_path / "program.py"
    script.write_text(DAEMON.format(guard=guard))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=child_env())
    assert done.stdout.strip() == f"(True, {seen})"


def test_dash_c_has_no_main_guard() -> None:
    """``python -c`` and a notebook have no file that a spawned worker could import."""
    code = "from dynapolicy import Machine\nif __name__ == '__main__': print(Machine.read().main_guard)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_env())
    assert done.stdout.strip() == "False"


def child_env() -> dict[str, str]:
    """For a child that imports what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# -- planning --------------------------------------------------------------------------------------------


def machine(**fields: Any) -> Machine:
    """A large machine, but for what is given."""
    return Machine(**{"cpus": 64, "host_cpus": 64, **fields})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cpu_quota": 64.0, "local_ranks": 8}, "8 workers: CPU quota 64.0 shared by 8 local ranks"),
        ({"cpu_quota": 6.5}, "6 workers: CPU quota 6.5"),
        ({"cpu_quota": 0.5}, "1 worker: CPU quota 0.5"),
        ({"cpus": 3}, "3 workers: CPU affinity of 3"),
        ({"local_ranks": 4}, "16 workers: 64 CPUs shared by 4 local ranks"),
        ({"cpus": 8, "local_ranks": 8}, "8 workers: 64 CPUs shared by 8 local ranks"),
        ({"cpus": 8, "host_cpus": None, "local_ranks": 2}, "4 workers: 8 CPUs shared by 2 local ranks"),
        ({"memory_limit": 2 * GB}, "2 workers: memory limit 2.0 GB at 1024 MB a worker"),
        ({"memory_limit": 2 * GB, "memory_free": GB}, "1 worker: free memory 1.0 GB at 1024 MB a worker"),
        ({"pids_max": 100, "pids_used": 80}, "5 workers: pids.max 100 with 80 in use"),
        ({"pids_max": 100, "pids_used": 99}, "1 worker: pids.max 100 with 99 in use"),
        ({"platform": "win32"}, "1 worker: torch compiles serially on Windows"),
        ({}, "32 workers: torch's own most, 32"),
    ],
)
def test_the_plan_says_which_limit_bound(fields: dict[str, Any], why: str) -> None:
    """One line: how many, which limit, and who shares it."""
    assert WorkerPolicy().plan(machine(**fields)).why == why


def test_what_is_asked_is_a_bound_as_well() -> None:
    """Asking for more than the machine bears gives what it bears; asking for less gives that."""
    assert WorkerPolicy(compile_threads=4).plan(machine()).why == "4 workers: compile_threads=4"
    assert WorkerPolicy(compile_threads=48).plan(machine()).workers == 48
    assert WorkerPolicy(compile_threads=48).plan(machine(cpu_quota=2.0)).why == "2 workers: CPU quota 2.0"


def test_the_environment_wins_over_arguments_and_is_clamped() -> None:
    """The knobs are read like all others."""
    environ = {"DYNAPOLICY_COMPILE_THREADS": "99999", "DYNAPOLICY_WORKER_MEMORY_MB": "2048"}
    with pytest.warns(KnobWarning, match=r"DYNAPOLICY_COMPILE_THREADS='99999' is outside 1 \.\.\. 1024"):
        policy = WorkerPolicy.from_env(compile_threads=4, environ=environ)
    assert (policy.compile_threads, policy.worker_memory_mb) == (1024, 2048)
    plan = WorkerPolicy.from_env(environ={"DYNAPOLICY_COMPILE_THREADS": "4"}).plan(machine())
    assert plan.why == "4 workers: DYNAPOLICY_COMPILE_THREADS=4"


def test_all_bad_variables_are_in_one_error() -> None:
    """As with a compile policy."""
    environ = {"DYNAPOLICY_COMPILE_THREADS": "many", "DYNAPOLICY_WORKER_START": "thread"}
    with pytest.raises(KnobError, match=r"DYNAPOLICY_COMPILE_THREADS.*DYNAPOLICY_WORKER_START"):
        WorkerPolicy.from_env(environ=environ)


def test_torchs_own_variable_wins_and_what_it_beat_is_shown() -> None:
    """``TORCHINDUCTOR_COMPILE_THREADS`` is the operator's word, over the knob and over the machine."""
    plan = WorkerPolicy(compile_threads=4).plan(machine(torch_threads=" 6 "))
    assert (plan.workers, plan.why) == (6, "6 workers: TORCHINDUCTOR_COMPILE_THREADS=' 6 ' wins")
    assert "without it 4: compile_threads=4" in plan.notes
    assert WorkerPolicy().plan(machine(torch_threads="0")).workers == 1


def test_an_empty_variable_of_torchs_counts_as_unset() -> None:
    """Torch can't read it; it asks for nothing."""
    assert WorkerPolicy().plan(machine(cpus=5, torch_threads="")).workers == 5


@pytest.mark.parametrize("text", ["abc", "-1", "1.5"])
def test_a_variable_of_torchs_that_is_no_number_is_an_error(text: str) -> None:
    """Torch would fail later, at an import."""
    with pytest.raises(KnobError, match="TORCHINDUCTOR_COMPILE_THREADS"):
        WorkerPolicy().plan(machine(torch_threads=text))


def test_fork_is_never_chosen_by_itself() -> None:
    """Only where it was asked for."""
    for fields in ({}, {"daemonic": True}, {"triton": False}, {"local_ranks": 8}, {"main_guard": False}):
        assert WorkerPolicy().plan(machine(**fields)).start == "subprocess"
    assert WorkerPolicy(worker_start="fork").plan(machine()).start == "fork"
    assert WorkerPolicy().plan(machine(torch_start="fork")).start == "fork"


def test_spawn_without_a_main_guard_is_refused() -> None:
    """Every spawned worker would run the program anew."""
    with pytest.raises(WorkerError, match="no main guard") as caught:
        WorkerPolicy(worker_start="spawn").plan(machine(main_guard=False))
    assert pickle.loads(pickle.dumps(caught.value)).way_out == caught.value.way_out
    assert WorkerPolicy(worker_start="spawn").plan(machine()).start == "spawn"


def test_a_daemonic_process_uses_subprocess() -> None:
    """It may have no children of multiprocessing's kind, and says why it uses another."""
    plan = WorkerPolicy(worker_start="spawn").plan(machine(daemonic=True, main_guard=False))
    assert plan.start == "subprocess"
    assert plan.notes == ("spawn is not possible in a daemonic process, so subprocess is used",)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"triton": False}, "Triton is not installed"),
        ({"compile_worker": True}, "one of torch's own compile workers"),
        ({"cpus": 1}, "with one worker kernels compile in this process"),
    ],
)
def test_where_nothing_is_started_the_plan_says_why(fields: dict[str, Any], note: str) -> None:
    """No pool, and a note."""
    plan = WorkerPolicy().plan(machine(**fields))
    assert not plan.pool
    assert note in plan.notes[-1]


def test_a_worker_policy_is_frozen_hashable_and_equal_by_its_settings() -> None:
    """Where a value came from doesn't count."""
    one, other = WorkerPolicy(compile_threads=4), WorkerPolicy.from_env(environ={"DYNAPOLICY_COMPILE_THREADS": "4"})
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == WorkerPolicy.from_json(one.to_json()) == one
    with pytest.raises(KnobError, match="no worker policy"):
        WorkerPolicy.from_json("{}")
    with pytest.raises(KnobError):
        WorkerPolicy(compile_threads=0)


# -- without torch ---------------------------------------------------------------------------------------


def test_a_launcher_plans_where_there_is_no_torch() -> None:
    """Machine, policy and plan are pure."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dynapolicy as dp\n"
        "print(dp.WorkerPolicy(compile_threads=3).plan(dp.Machine(cpus=8)).why)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=child_env())
    assert done.stdout.strip() == "3 workers: compile_threads=3"
