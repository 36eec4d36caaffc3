"""``doctor`` tries every kind of place, and its failing rows are exactly those where torch falls short."""

from __future__ import annotations

import json
import time
from typing import Any

import attrs
import pytest

import dynapolicy as dp
from dynapolicy.observe.per_place import PlaceRecord
from dynapolicy.records import Records
from dynapolicy.torch_compat.entries import count
from places import CountingBackend, limits_read

pytestmark = pytest.mark.usefixtures("torch_ready")

#: Where torch 2.12 and later don't see what another thread or task set.
UNSEEN = {
    "new thread",
    "thread started before",
    "ThreadPoolExecutor",
    "run_in_executor",
    "sibling task",
    "autograd thread",
}


def kept(x: Any) -> Any:
    """Compiled before the doctor comes."""
    return x * 5


def declared() -> dp.CompilePolicy:
    """A limit of eighteen."""
    return dp.CompilePolicy({kept: dp.ShapeBuckets(batch=tuple(range(1, 11)))})


@pytest.fixture(scope="module")
def healthy(torch_ready: Any) -> tuple[Records[PlaceRecord], float, dict[str, Any]]:
    """One run for all tests of a policy that holds: the rows, their seconds, and what was there before."""
    torch_ready._dynamo.reset()
    backend = CountingBackend()
    step = torch_ready.compile(kept, backend=backend, dynamic=False)
    step(torch_ready.ones(3))
    before = {"entries": count(kept.__code__), "limits": limits_read()}
    start = time.perf_counter()
    rows = dp.doctor(declared())
    seconds = time.perf_counter() - start
    after = {"entries": count(kept.__code__), "limits": limits_read()}
    step(torch_ready.ones(3))
    return rows, seconds, {"before": before, "after": after, "compiles": backend.calls}


def test_a_policy_holds_in_every_place(healthy: Any) -> None:
    """All kinds of thread, task and process are there, read the limit, and compile."""
    rows = healthy[0]
    places = {row.place for row in rows}
    assert places >= UNSEEN | {
        "main thread",
        "ThreadPoolExecutor with initializer",
        "to_thread",
        "DataLoader worker",
        "spawn with initializer",
    }
    for row in rows:
        assert (row.seen, row.asked, row.compiled, row.declared, row.ok, row.advice) == (18, 18, 12, 12, True, ""), row


def test_it_takes_less_than_a_minute(healthy: Any) -> None:
    """On two cores with torch's CPU build; other work beside it gets as much again."""
    assert healthy[1] < 120


def test_it_leaves_everything_as_it_was(healthy: Any) -> None:
    """Other code's entries stay, and so do all limits; nothing is in force afterwards."""
    facts = healthy[2]
    assert facts["before"] == facts["after"]
    assert facts["before"]["entries"] == 1
    assert facts["compiles"] == 1
    assert dp.current_policy() is None


def test_rows_are_json_ready(healthy: Any) -> None:
    """The fields of the contract."""
    plain = healthy[0].to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain[0]) == {"place", "seen", "asked", "compiled", "declared", "ok", "advice"}


def test_without_the_lever_exactly_torchs_rows_turn_red() -> None:
    """Children are left to their initializers; a forgotten one is a red row that says so."""
    can = attrs.evolve(dp.capabilities(), process_lever=False)
    rows = dp.doctor(declared(), capabilities=can, initializer=False)
    red = {row.place for row in rows if not row.ok}
    children = {row.place for row in rows if row.place.startswith(("spawn", "forkserver"))}
    assert red - children == (UNSEEN if can.context_local_config else set())
    assert red >= children
    for row in rows:
        assert row.ok is (row.advice == "")
        if not row.ok:
            assert (row.seen, row.compiled) == (8, 8)
        if row.place in children:
            assert "initializer=dynapolicy.apply_policy, initargs=(policy,)" in row.advice


def test_a_disabled_policy_is_said_and_nothing_is_tried() -> None:
    """The operator's way out is no fault of any place."""
    policy = dp.CompilePolicy.from_env(environ={"DYNAPOLICY_DISABLE": "1"})
    (row,) = dp.doctor(policy)
    assert not row.ok
    assert "DYNAPOLICY_DISABLE" in row.advice
