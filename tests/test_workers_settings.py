"""Compile workers and what others have set or started; and workers that are forked."""

from __future__ import annotations

import os
from typing import Any

import pytest

from worker_programs import needs_triton, run


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that asks for one worker, then for others by hand, then beside torch's own, then for forked ones."""
    folder = str(tmp_path_factory.mktemp("settings"))
    return run("settings", TORCHINDUCTOR_COMPILE_THREADS="", WORKER_PROGRAMS_FOLDER=folder)


def test_one_worker_is_put_in_force_and_an_empty_variable_breaks_nothing(settings: dict[str, Any]) -> None:
    """Every thread reads 1, the empty variable is gone, and shutdown puts back what was there."""
    assert not settings["waited"]
    assert settings["variable"] is None
    assert (settings["errors"], settings["deadlock"], settings["put_back"]) == ([], False, True)
    assert settings["threads"] == 1
    assert settings["healthy"]
    assert any("an empty TORCHINDUCTOR_COMPILE_THREADS was unset" in note for note in settings["notes"])
    assert settings["shutdown"]
    assert settings["restored"] == min(32, len(os.sched_getaffinity(0)))


def test_a_policys_setting_wins_over_the_plan_and_is_reported(settings: dict[str, Any]) -> None:
    """It was asked for by hand, in the very words of torch."""
    assert settings["by_hand"]["threads"] == 1
    assert settings["by_hand"]["notes"][-1] == "inductor.compile_threads=1 of a policy in force wins over 2"


def test_a_policy_that_is_applied_later_is_reported(settings: dict[str, Any]) -> None:
    """The workers stay as they are; the report says that another number is read."""
    assert settings["later"]["threads"] == 5
    assert "inductor.compile_threads reads 5 here, not 1" in settings["later"]["notes"][-1]


# -- somebody else's pool, and forked workers ---------------------------------------------------------------


@needs_triton
def test_a_pool_of_another_size_is_reported_and_left_alone(settings: dict[str, Any]) -> None:
    """Whoever came first decides; only what start_workers started is ended."""
    foreign = settings["foreign"]
    assert foreign["got"] == 3
    assert any("a pool of 3 workers was there already" in note for note in foreign["notes"])
    assert foreign["shutdown"]
    assert foreign["theirs"]


@needs_triton
def test_forked_workers_survive_a_kill_and_end_with_their_process(settings: dict[str, Any]) -> None:
    """Torch calls a pool with one dead worker broken: another takes its place."""
    forked = settings.get("forked")
    if forked is None:
        pytest.skip("this torch knows one way to start workers, and no fork")
    assert (forked["waited"], forked["job"]) == (True, 3)
    assert forked["killed"] == [True, True]
    assert forked["healthy"]
    assert forked["processes"]
    assert forked["none_left"]
