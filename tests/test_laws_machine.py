"""Laws of the worker plan: what holds on every machine."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

from dynapolicy import Machine, WorkerPolicy
from dynapolicy.workers.plan import PIDS_PER_WORKER
from strategies import LAW

MB = 1024**2

counts = st.one_of(st.integers(1, 40), st.integers(1, 4096))
sizes = st.one_of(st.integers(0, 64).map(lambda gb: gb * 1024 * MB), st.integers(0, 2**45))
pids = st.one_of(st.integers(0, 200), st.integers(0, 10**6))
quotas = st.one_of(st.floats(0.01, 40), st.floats(0.01, 4096)).map(lambda cpus: round(cpus, 2))


def or_none(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


machines = st.builds(
    Machine,
    cpus=counts,
    host_cpus=or_none(counts),
    cpu_quota=or_none(quotas),
    memory_limit=or_none(sizes),
    memory_free=or_none(sizes),
    pids_max=or_none(pids),
    pids_used=pids,
    local_ranks=st.one_of(st.sampled_from([1, 2, 8]), st.integers(1, 300)),
    triton=st.booleans(),
    daemonic=st.booleans(),
)
policies = st.builds(
    WorkerPolicy, compile_threads=or_none(st.integers(1, 1024)), worker_memory_mb=st.integers(64, 8192)
)

#: Each resource that may grow, and by what.
RESOURCES = {
    "cpus": counts,
    "host_cpus": counts,
    "cpu_quota": quotas,
    "memory_limit": sizes,
    "memory_free": sizes,
    "pids_max": pids,
}


def per_rank(policy: WorkerPolicy, machine: Machine) -> dict[str, float]:
    """What each resource bears for one rank, worked out apart from the plan."""
    host = machine.cpus if machine.host_cpus is None else machine.host_cpus
    memory = policy.worker_memory_mb * MB
    bears: dict[str, float] = {"affinity": machine.cpus, "host": host / machine.local_ranks}
    if machine.local_ranks == 1:
        del bears["host"]
    if machine.cpu_quota is not None:
        bears["quota"] = machine.cpu_quota / machine.local_ranks
    if machine.memory_limit is not None:
        bears["limit"] = machine.memory_limit / memory / machine.local_ranks
    if machine.memory_free is not None:
        bears["free"] = machine.memory_free / memory / machine.local_ranks
    if machine.pids_max is not None:
        left = max(0, machine.pids_max - machine.pids_used)
        bears["pids"] = left / PIDS_PER_WORKER / machine.local_ranks
    if policy.compile_threads is not None:
        bears["asked"] = policy.compile_threads
    return bears


@LAW
@given(policies, machines)
def test_never_under_one_and_never_over_any_single_bound(policy: WorkerPolicy, machine: Machine) -> None:
    """One worker is the least; more than one only where every resource bears them."""
    workers = policy.plan(machine).workers
    assert workers >= 1
    for name, most in per_rank(policy, machine).items():
        assert workers == 1 or workers <= most, name


@LAW
@given(policies, machines)
def test_all_ranks_together_are_never_over_the_host(policy: WorkerPolicy, machine: Machine) -> None:
    """One worker for each rank is the least there can be."""
    workers, ranks = policy.plan(machine).workers, machine.local_ranks
    if workers == 1:
        return
    if machine.host_cpus is not None and ranks > 1:
        assert workers * ranks <= machine.host_cpus
    if machine.cpu_quota is not None:
        assert workers * ranks <= machine.cpu_quota
    if machine.memory_free is not None:
        assert workers * ranks * policy.worker_memory_mb * MB <= machine.memory_free


@LAW
@given(policies, machines, st.sampled_from(sorted(RESOURCES)), st.data())
def test_more_of_a_resource_never_gives_fewer_workers(
    policy: WorkerPolicy, machine: Machine, name: str, data: st.DataObject
) -> None:
    """Monotone in each resource; no limit at all is the most of it."""
    less, more = sorted([data.draw(RESOURCES[name]), data.draw(RESOURCES[name])])
    poor = policy.plan(attrs.evolve(machine, **{name: less})).workers
    rich = policy.plan(attrs.evolve(machine, **{name: more})).workers
    assert poor <= rich
    if name not in ("cpus", "host_cpus"):
        assert rich <= policy.plan(attrs.evolve(machine, **{name: None})).workers


@LAW
@given(policies, machines)
def test_the_bound_that_is_named_is_the_least(policy: WorkerPolicy, machine: Machine) -> None:
    """What the plan names is what bound."""
    plan = policy.plan(machine)
    assert plan.bound.most == min(one.most for one in plan.bounds)
    assert plan.workers == max(1, plan.bound.most)
    assert plan.pool == (plan.workers > 1 and machine.triton)


@LAW
@given(policies, machines, st.integers(2, 16))
def test_more_ranks_never_give_more_workers_to_each(policy: WorkerPolicy, machine: Machine, factor: int) -> None:
    """What is shared by more is less for each."""
    crowded = attrs.evolve(machine, local_ranks=machine.local_ranks * factor)
    assert policy.plan(crowded).workers <= policy.plan(machine).workers


@LAW
@given(policies)
def test_a_policy_survives_json(policy: WorkerPolicy) -> None:
    """``from_json`` is the inverse of ``to_json``."""
    assert WorkerPolicy.from_json(policy.to_json()) == policy
