"""The life of compile workers: quiesced, beside a child that is killed with its own, shut down while busy."""

from __future__ import annotations

import os
from typing import Any

import pytest

from worker_programs import needs_triton, run


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that goes through a pool's life."""
    folder = tmp_path_factory.mktemp("life")
    return run("life", WORKER_PROGRAMS_FOLDER=str(folder), TRITON_CACHE_DIR=str(folder / "triton"))


@needs_triton
def test_other_threads_may_import_torch_while_workers_start(life: dict[str, Any]) -> None:
    """As in ``test_workers``, in another order."""
    assert (life["errors"], life["deadlock"], life["put_back"]) == ([], False, True)


@needs_triton
def test_workers_are_quiesced_after_warm_up_and_come_back(life: dict[str, Any]) -> None:
    """None is left at the end of the block, and a later compile starts them again."""
    assert (life["waited"], life["work_elsewhere"]) == (True, True)
    assert (life["quiesced"], life["healthy"]) == (True, True)
    assert life["again"] == 3


@needs_triton
def test_a_kernel_that_a_worker_compiled_is_found_by_its_program(life: dict[str, Any]) -> None:
    """Both take one assembler. Torch 2.11's own workers take another, and autotuning compiled each choice twice."""
    by_a_worker, by_the_program = life["kernels"]
    assert by_a_worker == by_the_program


@needs_triton
def test_started_twice_the_first_size_stays(life: dict[str, Any]) -> None:
    """The report says so."""
    assert life["twice"]["got"] == 2
    assert "workers were started before, 2 of them" in life["twice"]["notes"][-1]


@needs_triton
def test_a_forked_daemonic_child_has_workers_of_its_own(life: dict[str, Any]) -> None:
    """The parent's are neither used nor ended there; asking for fork, which it can't have, it gets the default."""
    child = life["child"]
    assert child["before"] == [False, False, True, None]
    assert (child["recover"], child["job"], child["got"]) == (True, 3, 2)
    assert "fork is not possible in a daemonic process" in child["notes"][0]


@needs_triton
def test_nothing_is_alive_65_seconds_after_the_parent_was_killed(life: dict[str, Any]) -> None:
    """Also where a worker hangs in a job and ignores SIGTERM; the child takes 2 s of grace for 20."""
    assert life["child"]["hangs"]
    assert len(life["child"]["processes"]) == 4  # sidecar, two workers, guardian
    assert life["child_left_none"]
    assert life["after_fork"] == 7  # its own parent's workers are as before


@needs_triton
def test_shutdown_ends_a_busy_pool_in_time(life: dict[str, Any]) -> None:
    """No process is left, what was at work finishes here, settings are as before."""
    assert life["shutdown"]
    assert life["shutdown_seconds"] < 4
    assert life["none_left"]
    assert life["busy"] == [True] * 4
    here, elsewhere = life["restored"]
    assert here == elsewhere == min(32, len(os.sched_getaffinity(0)))
    assert life["after"] == [False, False, False, True, True]
