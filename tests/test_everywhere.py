"""A policy that is applied once holds wherever torch compiles."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dynapolicy as dp
from places import (
    PLACES,
    SETTINGS,
    CountingBackend,
    Seen,
    autograd_thread,
    data_loader,
    exactly,
    first_policy,
    fresh,
    inside,
    leave_keyword,
    leave_patched,
    limit_errors,
    limit_name,
    limits_read,
    new_thread,
    policy_of,
    probe,
    process,
    server,
    settings_read,
    sibling_tasks,
    thread_started_before,
)

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore::dynapolicy.RecompileLimitWarning"),
]

#: Seven declared shapes and a headroom of two: the least that is more than torch's own 8. Every compile costs 20 ms.
LIMIT = 9
RAISED = 10


@pytest.fixture
def policy() -> dp.CompilePolicy:
    """Over the limit, shapes run eager."""
    return policy_of(LIMIT - 2)


@pytest.fixture
def raising() -> dp.CompilePolicy:
    """Over the limit, the call raises."""
    return policy_of(RAISED - 2, on_limit="raise")


def call(body: Any, *args: Any) -> Any:
    """The place where the test itself runs."""
    return body(*args)


def holds(seen: Seen) -> bool:
    """Exactly the limit compiled, the next shape ran eager, all else as asked."""
    assert seen.calls == exactly(LIMIT)
    assert seen.error is None
    return seen.equal and seen.settings == SETTINGS


def holds_raising(seen: Seen) -> bool:
    """Exactly the limit compiled and the next shape raised."""
    assert seen.calls == exactly(RAISED)[:-1]
    assert seen.error is not None
    return seen.equal and seen.settings == SETTINGS


def is_factory(run: Any = call) -> bool:
    """That place reads torch's configuration as if no policy had ever been there."""
    settings = run(settings_read)
    assert run(limits_read)[limit_name()] == 8
    return all(settings[name] != value for name, value in SETTINGS.items())


# -- in this process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
def test_applied_on_main_holds_in_every_place(name: str, policy: dp.CompilePolicy, raising: dp.CompilePolicy) -> None:
    """entries + headroom shapes compile in each place and the next is eager, or raises."""
    with PLACES[name](policy) as run, dp.apply_policy(policy):
        assert holds(run(probe, LIMIT + 1))
    with PLACES[name](raising) as run, dp.apply_policy(raising):
        assert holds_raising(run(probe, RAISED + 1))


@pytest.mark.parametrize("name", [name for name in PLACES if name != "executor_with_initializer"])
def test_applied_in_a_place_holds_everywhere(name: str, policy: dp.CompilePolicy, raising: dp.CompilePolicy) -> None:
    """Whoever applies, main and every other thread compile with it; restored from main, all is as before."""
    with PLACES[name](policy) as run, thread_started_before() as old, new_thread() as new:
        with run(dp.apply_policy, policy):
            assert holds(probe(LIMIT + 1))
            assert holds(old(probe, LIMIT + 1))
            with run(dp.apply_policy, raising):
                assert holds_raising(new(probe, RAISED + 1))
            assert holds(run(probe, LIMIT + 1))
        assert is_factory(run)
        assert is_factory()


def test_an_initializer_alone_puts_it_in_force(policy: dp.CompilePolicy) -> None:
    """Each thread of an executor applies it, and it is one policy: main sees it, and the first handle ends it."""
    handles: list[dp.AppliedPolicy] = []
    with ThreadPoolExecutor(2, initializer=lambda: handles.append(dp.apply_policy(policy))) as pool:
        barrier = threading.Barrier(2)
        for future in [pool.submit(barrier.wait) for _ in range(2)]:
            future.result()
        assert len(handles) == 2
        assert holds(probe(LIMIT + 1))
        assert dp.current_policy() == policy
        for handle in handles:
            handle.restore()
        assert is_factory()


def test_the_places_are_the_threads_they_say() -> None:
    """Autograd's thread and the tasks' thread are others than main."""
    here = threading.get_ident()
    other = [name for name, place in PLACES.items() if name not in {"main_thread", "executor_with_initializer"}]
    for name in other:
        with PLACES[name](None) as run:
            assert run(threading.get_ident) != here, name


def test_a_sibling_task_sees_what_another_task_applied(policy: dp.CompilePolicy) -> None:
    """Two tasks that both ran before: one applies, the other compiles, a third thread restores."""
    with sibling_tasks() as (first, second):
        handle = first(dp.apply_policy, policy)
        assert holds(second(probe, LIMIT + 1))
        assert second(dp.current_policy) == policy
        with new_thread() as run:
            run(handle.restore)
        assert is_factory(second)
        assert is_factory(first)


@pytest.mark.parametrize("where", ["handler", "executor"])
def test_a_server_whose_lifespan_applied(where: str, policy: dp.CompilePolicy, raising: dp.CompilePolicy) -> None:
    """Requests over a socket compile in their handlers' tasks, and in the loop's executor."""
    with server(policy) as ask:
        assert holds(ask(where, LIMIT + 1))
    with server(raising) as ask:
        assert holds_raising(ask(where, RAISED + 1))
    assert is_factory()


def test_it_survives_reset(torch_ready: Any, policy: dp.CompilePolicy) -> None:
    """``torch._dynamo.reset()`` drops what is compiled, not the policy."""
    with dp.apply_policy(policy), thread_started_before() as run:
        assert holds(run(probe, LIMIT + 1))
        torch_ready._dynamo.reset()
        assert holds(probe(LIMIT + 1))
        run(torch_ready._dynamo.reset)
        assert holds(run(probe, LIMIT + 1))


@pytest.mark.parametrize("leave", [leave_patched, leave_keyword])
@pytest.mark.parametrize("before", [True, False])
def test_what_torch_wrote_back_on_a_thread_shadows_nothing(leave: Any, before: bool, policy: dp.CompilePolicy) -> None:
    """Torch's ``patch`` and keyword leave explicit overrides: before the policy, or under an earlier one."""
    with thread_started_before() as run:
        if before:
            run(leave)
            leave()
        else:
            with dp.apply_policy(policy_of(30)):
                run(leave)
                leave()
        with dp.apply_policy(policy):
            assert holds(run(probe, LIMIT + 1))
            assert holds(probe(LIMIT + 1))
            run(leave)
            assert holds(run(probe, LIMIT + 1))
        assert is_factory(run)
        assert is_factory()


@pytest.mark.parametrize("leave", [leave_patched, leave_keyword])
def test_while_another_threads_backward_compiles(leave: Any, torch_ready: Any, policy: dp.CompilePolicy) -> None:
    """A lazy backward compile that is pending elsewhere changes nothing."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch, pending, go_on = torch_ready, threading.Event(), threading.Event()

    def backward_compiler(graph: Any, inputs: list[Any]) -> Any:
        pending.set()
        assert go_on.wait(60)
        return make_boxed_func(graph.forward)

    def train() -> None:
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward_compiler
        )
        compiled = torch.compile(lambda x: (x * x).sum(), backend=backend, dynamic=False)
        compiled(torch.ones(3, requires_grad=True)).backward()

    with thread_started_before() as run:
        run(leave)
        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            assert pending.wait(60)
            with dp.apply_policy(policy):
                assert holds(run(probe, LIMIT + 1))
                assert holds(probe(LIMIT + 1))
        finally:
            go_on.set()
            trainer.join()


# -- in other processes --------------------------------------------------------------------------------


def in_a_child(run: Any, raising: dp.CompilePolicy) -> None:
    """The policy of the parent or the initializer holds, and one that is applied inside the child."""
    seen = run(probe, LIMIT + 1)
    assert seen.where[0] != os.getpid()
    assert holds(seen)
    here, new, after = run(inside, raising, RAISED + 1)
    assert holds_raising(here)
    assert holds_raising(new)
    assert after.calls == [*range(1, LIMIT + 1), *[LIMIT] * (RAISED + 1 - LIMIT)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_process(method: str, policy: dp.CompilePolicy, raising: dp.CompilePolicy) -> None:
    """A fork child inherits; spawned ones get it from their initializer."""
    with dp.apply_policy(policy), process(method, policy) as run:
        in_a_child(run, raising)
    assert is_factory()


def both(policy: dp.CompilePolicy) -> tuple[Any, ...]:
    """Both looks of ``in_a_child`` in one call, for places that start a process each."""
    return probe(LIMIT + 1), inside(policy, RAISED + 1)


def test_the_first_policy_of_a_process(policy: dp.CompilePolicy) -> None:
    """A spawned child without an initializer has torch's 8; what torch wrote back there shadows no policy.

    The process is a new one because values that are written once dynapolicy has seen a policy are
    told apart in another way.
    """
    with dp.apply_policy(policy), process("spawn", None) as run:
        before, within, after = run(first_policy, policy, LIMIT + 1)
    assert before.calls[-1] == 8
    assert all(holds(seen) for seen in within)
    assert [seen.calls[-1] for seen in after] == [8, 8, 8]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_worker(method: str, policy: dp.CompilePolicy, raising: dp.CompilePolicy) -> None:
    """``dp.initializer`` applies in the worker; the parent has no policy."""
    with data_loader(method, policy) as run:
        results = iter(run(both, raising))
    in_a_child(lambda *_: next(results), raising)
    assert is_factory()


def test_a_fork_child_of_a_thread(policy: dp.CompilePolicy) -> None:
    """A child that another thread forks, and that restores nothing, compiles under the policy as well."""
    with dp.apply_policy(policy), thread_started_before() as started, process("fork", policy) as run:
        assert holds(started(run, probe, LIMIT + 1))


# -- cases from the field --------------------------------------------------------------------------------


def test_case_11_a_worker_does_not_poison_main(torch_ready: Any) -> None:
    """12 entries on main under 64, one new shape on a worker: it compiles there, and main still compiles."""
    backend, function = CountingBackend(), fresh()
    compiled = torch_ready.compile(function, backend=backend, dynamic=False)
    with dp.apply_policy(policy_of(56, 8)), thread_started_before() as run:
        for size in range(2, 14):
            compiled(torch_ready.ones(size))
        assert backend.calls == 12
        run(compiled, torch_ready.ones(20))
        assert backend.calls == 13
        assert torch_ready.equal(compiled(torch_ready.ones(21)), function(torch_ready.ones(21)))
        assert backend.calls == 14


def test_case_16_failing_loudly_reaches_the_caller_of_a_worker(torch_ready: Any, raising: dp.CompilePolicy) -> None:
    """An executor's future carries torch's exception, class and all."""

    def beyond(torch: Any) -> None:
        compiled = torch.compile(fresh(), backend="eager", dynamic=False)
        for size in range(2, 2 + RAISED + 1):
            compiled(torch.ones(size))

    with dp.apply_policy(raising), ThreadPoolExecutor(1) as pool, pytest.raises(limit_errors()):
        pool.submit(beyond, torch_ready).result()


def test_every_place_reads_the_same_values(torch_ready: Any, policy: dp.CompilePolicy) -> None:
    """Torch's own configuration gives the policy's value, also under its old name, and 8 afterwards."""
    with thread_started_before() as run, autograd_thread() as engine:
        with dp.apply_policy(policy):
            for place in (run, engine, call):
                values = place(limits_read)
                assert values[limit_name()] == values["cache_size_limit"] == LIMIT
                assert place(settings_read) == SETTINGS
        for place in (run, engine, call):
            assert place(limits_read)["cache_size_limit"] == 8


# -- the probes can fail ----------------------------------------------------------------------------------


@pytest.fixture
def limit_of_64(torch_ready: Any) -> Iterator[None]:
    """What people do without a policy."""
    with torch_ready._dynamo.config.patch({limit_name(): 64}):
        yield


@pytest.mark.usefixtures("limit_of_64")
def test_without_a_policy_a_new_thread_does_not_see_it() -> None:
    """The same probe finds 8 where torch's configuration is of each context, else all."""
    assert probe(20).calls[-1] == 20
    with new_thread() as run:
        assert run(probe, 20).calls[-1] == (8 if dp.capabilities().context_local_config else 20)


def test_a_huge_constant_is_found_out(policy: dp.CompilePolicy) -> None:
    """More than what was declared fails the check that all these tests make."""
    with dp.apply_policy(policy_of(2, 500)), pytest.raises(AssertionError):
        holds(probe(LIMIT + 1))


# -- many at once -------------------------------------------------------------------------------------------


def restore_when_it_is_on_top(applied: dp.AppliedPolicy) -> None:
    """Others apply on top at any time; an early restore is an error that changes nothing."""
    while True:
        try:
            return applied.restore()
        except dp.RestoreError:
            time.sleep(0.001)


def churn(limit: int, stop: threading.Event) -> int:
    """Apply, look, restore, until told to stop."""
    turns = 0
    while not stop.is_set():
        applied = dp.apply_policy(policy_of(limit - 2))
        # Torch before 2.12 has one override for all threads, and each thread's policy is at least in that.
        assert limits_read()[limit_name()] >= limit
        restore_when_it_is_on_top(applied)
        turns += 1
    return turns


def look_in_child(limit: int) -> None:
    """In a fork child no lock is held, and a policy holds on all of its threads."""
    before = limits_read()[limit_name()]
    with dp.apply_policy(policy_of(limit - 2)), new_thread() as run:
        assert run(limits_read)[limit_name()] == limit
        dp.compile(fresh(), backend="eager")
    assert limits_read()[limit_name()] == before


def forked(body: Any, *args: Any) -> int:
    """Exit status of a bare ``os.fork`` child, which is given 60 s."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body(*args)
            status = 0
        finally:
            os._exit(status)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def test_many_threads_apply_and_restore_at_once_also_around_a_fork() -> None:
    """Nothing is lost, no child inherits a held lock, and everything is as before at the end."""
    stop = threading.Event()
    with thread_started_before() as old, ThreadPoolExecutor(6) as pool:
        turns = [pool.submit(churn, limit, stop) for limit in range(20, 26)]
        try:
            codes = [forked(look_in_child, 100) for _ in range(8)]
        finally:
            stop.set()
        assert codes == [0] * 8
        assert all(one.result() > 0 for one in turns)
        assert is_factory()
        assert is_factory(old)
        assert dp.current_policy() is None


def test_equal_policies_on_many_threads_add_no_layers(policy: dp.CompilePolicy) -> None:
    """Ten initializers at once are one policy: the first handle ends it."""
    first = dp.apply_policy(policy)
    barrier = threading.Barrier(10)

    def initialize() -> dp.AppliedPolicy:
        barrier.wait()
        return dp.apply_policy(policy_of(LIMIT - 2))

    with ThreadPoolExecutor(10) as pool:
        handles = [one.result() for one in [pool.submit(initialize) for _ in range(10)]]
        for handle in handles:
            handle.restore()
        assert pool.submit(limits_read).result()[limit_name()] == LIMIT
        first.restore()
        assert is_factory()
        assert is_factory(lambda body: pool.submit(body).result())


def test_tasks_apply_and_restore_while_others_compile(policy: dp.CompilePolicy) -> None:
    """Two tasks of a loop and a thread under three nested policies; each restore gives the one before."""
    with sibling_tasks() as (first, second), thread_started_before() as run:
        outer = first(dp.apply_policy, policy_of(18))
        inner = second(dp.apply_policy, policy_of(28))
        assert run(probe, 31).calls == [*range(1, 31), 30]
        with pytest.raises(dp.RestoreError):
            first(outer.restore)
        run(inner.restore)
        assert first(probe, 21).calls == [*range(1, 21), 20]
        second(outer.restore)
        assert is_factory(first)
        with first(dp.apply_policy, policy):
            assert holds(second(probe, LIMIT + 1))


def inductor_key() -> Any:
    """What inductor looks its caches up by."""
    import torch._inductor.config

    return torch._inductor.config.get_hash()


def test_inductors_cache_key_follows_the_policy_on_every_thread(policy: dp.CompilePolicy) -> None:
    """Torch remembers the hash of its settings in each context; a policy that another thread applies renews it."""
    with thread_started_before() as run:
        before = inductor_key()
        assert run(inductor_key) == before
        for _ in range(2):
            with dp.apply_policy(policy):
                within = inductor_key()
                assert run(inductor_key) == within != before
                with run(dp.apply_policy, dp.CompilePolicy(settings={"inductor.max_fusion_size": 5})):
                    assert run(inductor_key) == inductor_key() != within
                assert run(inductor_key) == inductor_key() == within
            assert run(inductor_key) == inductor_key() == before
