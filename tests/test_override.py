"""What stands in for the override of one setting, by itself: no torch, a ``ContextVar`` and a factory value of 8."""

from __future__ import annotations

import contextvars
from typing import Any

from dynapolicy.torch_compat.override import Layer, Override, ProcessCell

UNSET = object()
FACTORY = 8


def made(plain: Any = UNSET) -> Override:
    """An override over what the context held before: nothing, or a plain value."""
    cell: contextvars.ContextVar[Any] = contextvars.ContextVar("cell", default=UNSET)
    if plain is not UNSET:
        cell.set(plain)
    return Override(cell, UNSET, lambda: FACTORY)


def frame(override: Override, value: int | None = None) -> Layer:
    """A policy applied in this context: of the process, or with a value of its own."""
    layer = Layer({} if value is None else {override: value}, of_process=value is None)
    override.push(layer)
    return layer


def test_a_context_that_holds_nothing_reads_the_process_value() -> None:
    """Also one that holds the factory value, which torch's ``patch`` wrote back before."""
    for override in (made(), made(plain=FACTORY)):
        override.process = 64
        assert override.value() == 64
        override.process = UNSET
        assert override.value() == FACTORY


def test_a_deliberate_plain_value_wins_over_the_process() -> None:
    """What somebody set before the first policy stands, until a policy is applied in that context."""
    override = made(plain=50)
    override.process = 64
    assert override.value() == 50
    layer = frame(override)
    assert override.value() == 64
    layer.live = False
    assert override.value() == 50


def test_a_tight_value_under_a_policy_stays_tight() -> None:
    """Writing the factory value under a policy counts: a keyword of torch's own does that."""
    for override in (made(), made(plain=FACTORY)):
        override.process = 64
        override.set(FACTORY)
        assert override.value() == FACTORY
        override.set(64)
        assert override.value() == 64


def test_a_patch_that_began_before_the_first_policy_leaves_nothing() -> None:
    """It writes the factory value back over a plain value, below the policy's frame or without one."""
    for framed in (False, True):
        override = made(plain=50)
        override.process = 64
        if framed:
            frame(override)
        override.set(FACTORY)
        assert override.value() == 64
        assert override.own() is UNSET


def test_nested_patches_end_below_a_policy_one_by_one() -> None:
    """The policy that was applied inside both stays on top while each of them ends."""
    override = made()
    override.set(50)
    override.set(60)
    override.process = 70
    layer = frame(override)
    for written_back in (50, FACTORY):
        override.set(written_back)
        assert override.value() == 70
    layer.live = False
    override.process = UNSET
    assert override.get() is UNSET


def test_a_patch_that_writes_back_what_a_restored_policy_asked_leaves_nothing() -> None:
    """Also one that had patched the very value that the policy asked for."""
    for value in (30, 64):
        override = made()
        override.process = 64
        override.set(value)
        override.process = UNSET
        override.set(64)
        assert override.get() is UNSET


def test_a_value_that_was_there_already_changes_nothing() -> None:
    """Assigning what is read anyway does not pin the context to it."""
    override = made()
    override.process = 64
    override.set(64)
    override.process = 100
    assert override.value() == 100
    assert override.own() is UNSET


def test_true_is_not_one() -> None:
    """A bool and an int that compare equal are different values of a configuration."""
    override = made()
    override.process = True
    override.set(1)
    assert override.get() is not True


def test_resetting_keeps_the_policies_that_came_meanwhile() -> None:
    """Torch 2.15 ends some patches by the token of their first write."""
    override = made()
    token = override.set(50)
    layer = frame(override, 70)
    override.set(90)
    override.reset(token)
    assert override.value() == 70
    layer.live = False
    assert override.get() is UNSET


def test_resetting_brings_no_restored_policy_back() -> None:
    """A policy that was restored meanwhile stays restored."""
    override = made()
    layer = frame(override, 70)
    token = override.set(50)
    layer.live = False
    override.reset(token)
    assert override.get() is UNSET


def test_unsetting_ends_the_last_write() -> None:
    """Torch's quick patches write the mark for "unset" back."""
    override = made()
    override.set(50)
    layer = frame(override, 70)
    override.set(UNSET)
    assert override.value() == 70
    layer.live = False
    assert override.get() is UNSET


def test_a_loop_of_assignments_holds_no_more_and_more() -> None:
    """The chain of writes is bounded, and the last value is read."""
    override = made()
    for number in range(1000, 6000):
        override.set(number)
    assert override.value() == 5999
    held, depth = override.held(), 0
    while held is not UNSET:
        held, depth = held.under, depth + 1
    assert depth < 100


def test_applying_and_restoring_again_and_again_holds_no_more_and_more() -> None:
    """Frames of restored policies are dropped when the next one comes."""
    override = made(plain=50)
    for _ in range(1000):
        frame(override).live = False
    assert override.held() == 50


def test_every_thread_reads_one_cell_where_torch_has_one() -> None:
    """Before torch 2.12 the chain lives in one cell, and the rules are the same."""
    override = Override(ProcessCell(UNSET), UNSET, lambda: FACTORY)
    override.process = 64
    contextvars.Context().run(override.set, 30)
    assert override.value() == 30
    override.set(64)
    assert override.value() == 64
    assert override.own() is UNSET
