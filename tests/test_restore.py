"""A restore is exact: examples. The law is in ``test_restore_machine``."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynapolicy import (
    AppliedPolicy,
    CompilePolicy,
    RestoreError,
    SettingError,
    apply_policy,
    capabilities,
    current_policy,
)
from dynapolicy.torch_compat.settings import Setting, find, limit_names

pytestmark = pytest.mark.usefixtures("torch_ready")

SPECIALIZE = "dynamo.specialize_int"


def setting(name: str) -> Setting:
    """A setting that every torch has."""
    found = find(name)
    assert found is not None
    return found


def limit() -> Setting:
    """The recompile limit, as this torch calls it."""
    return setting(limit_names(capabilities())[0])


def elsewhere(call: Callable[[], Any]) -> Any:
    """The result of a call on a new thread, or its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def needs_context_scope() -> None:
    """Skip where torch has one value for the whole process."""
    if not capabilities().context_local_config:
        pytest.skip("torch before 2.12 has no settings of a context")


# -- what is found is what is left ------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"dynamo.no_such_setting": 1}, {"dynamo.recompile_limits": 9}, {SPECIALIZE: "yes"}])
def test_a_rejected_policy_changes_nothing(bad: dict[str, Any]) -> None:
    """One bad setting among good ones: no limit, no good setting and no override is touched, here or elsewhere."""
    before = (limit().override().get(), setting(SPECIALIZE).override().get())
    good = {SPECIALIZE: not setting(SPECIALIZE).read(), "inductor.max_autotune": True}
    with pytest.raises(SettingError):
        apply_policy(CompilePolicy(floor=90, on_limit="raise", settings={**good, **bad}))
    assert (limit().override().get(), setting(SPECIALIZE).override().get()) == before
    assert current_policy() is None
    assert elsewhere(limit().read) == limit().read() == 8


def test_the_default_never_lowers() -> None:
    """Neither torch's own limits nor what somebody else raised, here or on another thread."""
    with limit().module.patch(**{limit().key: 64}), apply_policy(CompilePolicy(floor=1)):
        assert limit().read() == 64
    with apply_policy(CompilePolicy(floor=40)), apply_policy(CompilePolicy(floor=20)):
        assert limit().read() == elsewhere(limit().read) == 40
    with apply_policy(CompilePolicy(floor=2)):
        assert limit().read() == elsewhere(limit().read) == 8


def test_exact_lowers() -> None:
    """Asked for, the limits come down to the policy's, also over what somebody else raised."""
    with limit().module.patch(**{limit().key: 64}):
        with apply_policy(CompilePolicy(floor=3), exact=True):
            assert limit().read() == elsewhere(limit().read) == 3
        assert limit().read() == 64


def test_an_exact_policy_over_another_lowers_and_gives_back() -> None:
    """Nesting says which one holds."""
    with apply_policy(CompilePolicy(floor=40)):
        with apply_policy(CompilePolicy(floor=20), exact=True):
            assert elsewhere(limit().read) == 20
        assert elsewhere(limit().read) == 40


def test_a_value_found_is_put_back_whatever_it_is() -> None:
    """An explicit value comes back as that value, an unset one as unset."""
    one = setting(SPECIALIZE)
    override = one.override()
    factory = one.read()
    for asked in (True, False):
        with apply_policy(CompilePolicy(settings={SPECIALIZE: asked})):
            assert one.read() is elsewhere(one.read) is asked
        assert override.value() is factory
        with one.module.patch(specialize_int=not factory):
            with apply_policy(CompilePolicy(settings={SPECIALIZE: asked})):
                assert one.read() is asked
            assert one.read() is not factory


# -- handles ---------------------------------------------------------------------------------------------


def test_twice_and_out_of_order_are_errors_that_change_nothing() -> None:
    """The error names the policy in the way, and the order can still be kept."""
    outer = apply_policy(CompilePolicy(floor=20))
    inner = apply_policy(CompilePolicy(floor=30))
    with pytest.raises(RestoreError, match=r"recompile_limit 30.* was applied after it"):
        outer.restore()
    assert elsewhere(limit().read) == 30
    inner.restore()
    with pytest.raises(RestoreError, match="restored already"):
        inner.restore()
    assert elsewhere(limit().read) == 20
    outer.restore()
    assert elsewhere(limit().read) == 8


def test_entering_twice_is_an_error() -> None:
    """One handle is one block."""
    with apply_policy(CompilePolicy(floor=20)) as applied:
        with pytest.raises(RestoreError, match="entered already"):
            applied.__enter__()
        assert limit().read() == 20


def test_an_equal_policy_adds_no_layer() -> None:
    """An executor's initializer on ten threads is no ten layers, and restoring one of its handles does nothing."""
    policy = CompilePolicy(floor=20)
    again = CompilePolicy.from_env(environ={"DYNAPOLICY_FLOOR": "20"})
    handles: list[AppliedPolicy] = []
    together = threading.Barrier(10)

    def start() -> None:
        together.wait()
        handles.append(apply_policy(again))

    with apply_policy(policy) as applied:
        with ThreadPoolExecutor(10) as pool:
            for one in [pool.submit(start) for _ in range(10)]:
                one.result()
        for one in handles:
            one.restore()
            one.restore()
        assert len(handles) == 10
        assert elsewhere(limit().read) == 20
        applied_again = apply_policy(policy)
    applied_again.restore()
    assert applied.scope == "process"
    assert elsewhere(limit().read) == 8


# -- case 15: applied here, restored there ---------------------------------------------------------------


def test_a_fixture_applies_in_one_task_and_restores_in_another() -> None:
    """An asynchronous generator whose halves run in different tasks, as fixtures of test frameworks do."""

    async def fixture() -> AsyncIterator[AppliedPolicy]:
        with apply_policy(CompilePolicy(floor=30)) as applied:
            yield applied

    async def main() -> None:
        generator = fixture()
        await asyncio.create_task(generator.__anext__())
        assert await asyncio.create_task(asyncio.to_thread(limit().read)) == 30
        with pytest.raises(StopAsyncIteration):
            await asyncio.create_task(generator.__anext__())

    asyncio.run(main())
    assert limit().read() == elsewhere(limit().read) == 8


def test_a_block_is_entered_on_one_thread_and_left_on_another() -> None:
    """Process scope belongs to no thread."""
    block = apply_policy(CompilePolicy(floor=30))
    elsewhere(block.__enter__)
    assert limit().read() == 30
    elsewhere(lambda: block.__exit__(None, None, None))
    assert limit().read() == elsewhere(limit().read) == 8


def test_a_context_scope_from_elsewhere_is_refused_and_changes_nothing() -> None:
    """Another thread and another task get a clear error; the owner can still restore."""
    needs_context_scope()
    applied = apply_policy(CompilePolicy(floor=30), scope="context")

    async def restore_in_a_task() -> None:
        applied.restore()

    for attempt in (lambda: elsewhere(applied.restore), lambda: asyncio.run(restore_in_a_task())):
        with pytest.raises(RestoreError, match="another thread or task"):
            attempt()
        assert limit().read() == 30
    assert elsewhere(limit().read) == 8
    applied.restore()
    assert limit().read() == 8


def test_a_context_scope_holds_there_alone() -> None:
    """Other threads and the tasks of before do not see it, tasks that are born in it do."""
    needs_context_scope()

    async def main() -> tuple[int, int, int]:
        go, done = asyncio.Event(), asyncio.Event()

        async def before() -> int:
            await go.wait()
            return int(limit().read())

        async def owner() -> int:
            with apply_policy(CompilePolicy(floor=30), scope="context"):
                go.set()
                done.set()
                return int(await asyncio.create_task(asyncio.to_thread(limit().read)))

        waiting = asyncio.create_task(before())
        return await asyncio.create_task(owner()), await waiting, limit().read()

    assert asyncio.run(main()) == (30, 8, 8)


def test_an_equal_policy_of_a_context_wins_over_what_was_written_there() -> None:
    """Where the process has it in force already, no layer is added, but its values hold in this context again."""
    needs_context_scope()
    policy = CompilePolicy(floor=30)
    with apply_policy(policy), limit().module.patch(**{limit().key: 10}):
        assert limit().read() == 10
        apply_policy(policy, scope="context").restore()
        assert limit().read() == 30


# -- at once -----------------------------------------------------------------------------------------------


def test_many_threads_apply_and_restore_at_once() -> None:
    """Whatever the order, in the end nothing is in force; a refused restore is tried again."""
    together = threading.Barrier(8)

    def work(number: int) -> None:
        together.wait()
        for turn in range(15):
            applied = apply_policy(CompilePolicy(floor=100 + 20 * number + turn))
            assert limit().read() >= 100 + 20 * number + turn
            for _ in range(100_000):
                try:
                    applied.restore()
                except RestoreError:
                    continue
                break

    with ThreadPoolExecutor(8) as pool:
        for one in [pool.submit(work, number) for number in range(8)]:
            one.result()
    assert current_policy() is None
    assert limit().read() == elsewhere(limit().read) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_amid_changes_leaves_no_lock_behind() -> None:
    """While other threads apply and restore, forked children can apply and restore too."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            with apply_policy(CompilePolicy(floor=50)):
                pass

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        statuses = [_child() for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert statuses == [0] * 5


def _child() -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with apply_policy(CompilePolicy(floor=200)):
                status = 0 if limit().read() == 200 and elsewhere(limit().read) == 200 else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- what torch remembers of its settings --------------------------------------------------------------


def _remembered(config: Any) -> tuple[Any, Any, Any, Any]:
    portable = config.save_config_portable().get("max_autotune")
    return config.get_hash(), config.save_config(), portable, config.get_config_copy()["max_autotune"]


class Elsewhere:
    """One long-lived thread, so that what torch remembers for it is from before."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, call: Callable[[], Any]) -> Any:
        return self._pool.submit(call).result()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_hash_of_all_settings_follows_a_policy_from_another_thread(where: str) -> None:
    """Inductor looks its caches up by it: it changes with the policy and is the old one afterwards, on every thread."""
    config = setting("inductor.max_autotune").module
    reader = Elsewhere() if where == "elsewhere" else lambda call: call()
    writer = (lambda call: call()) if where == "elsewhere" else elsewhere
    asked = not setting("inductor.max_autotune").read()
    before = reader(lambda: _remembered(config))
    applied = writer(lambda: apply_policy(CompilePolicy(settings={"inductor.max_autotune": asked})))
    during = reader(lambda: _remembered(config))
    writer(applied.restore)
    assert during[2:] == (asked, asked)
    assert during[0] != before[0]
    assert during[1] != before[1]
    assert reader(lambda: _remembered(config)) == before


def test_the_hash_of_all_settings_follows_a_policy_of_this_context() -> None:
    """The same for a policy that holds in one context only, also on a thread that remembered before."""
    needs_context_scope()
    config = setting("inductor.max_autotune").module
    asked = not setting("inductor.max_autotune").read()
    policy = CompilePolicy(settings={"inductor.max_autotune": asked})
    before = _remembered(config)
    with apply_policy(policy, scope="context"):
        during = _remembered(config)
    assert during[2:] == (asked, asked)
    assert during[0] != before[0]
    assert during[1] != before[1]
    assert _remembered(config) == before


def test_a_patch_to_the_factory_value_is_tight_over_a_value_set_by_hand() -> None:
    """Entering a patch writes a value of its own, also one that was read here before."""
    before = limit().read()
    limit().write(30)
    try:
        with apply_policy(CompilePolicy(floor=20)):
            assert limit().read() == 30
            with limit().module.patch({limit().key: before}):
                assert limit().read() == before
            assert limit().read() == 30
    finally:
        limit().write(before)


def test_the_factory_value_set_by_hand_does_not_shadow_the_next_policy() -> None:
    """With no policy in force it is no override; a policy that another thread applies is seen here."""
    before = limit().read()
    with apply_policy(CompilePolicy(floor=20)):
        limit().write(30)
    limit().write(before)
    with ThreadPoolExecutor(1) as thread:
        applied = thread.submit(apply_policy, CompilePolicy(floor=40)).result()
    assert limit().read() == 40
    applied.restore()
