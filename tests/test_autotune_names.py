"""A compile worker and a warm start give the result of autotuning a kernel the same name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import dynapolicy as dp

pytestmark = [
    pytest.mark.filterwarnings("ignore:Artifacts are kept in:dynapolicy.ArtifactWarning"),
    pytest.mark.filterwarnings("ignore:Something compiled before:dynapolicy.TooLateWarning"),
]
KERNEL = "/some/folder/ab/cabcdef.py"
WORKER = f"""
import torch._dynamo
from torch._inductor.runtime.autotune_cache import AutotuneCache
print(AutotuneCache._prepare_key({KERNEL!r}))
"""


def named_by_a_worker(**environment):
    """What a process calls it that has torch's settings from the environment alone, as compile workers do."""
    ran = subprocess.run(
        [sys.executable, "-c", WORKER],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return ran.stdout.split()[-1]


@pytest.fixture
def named():
    """What this process calls it now."""
    import torch._dynamo  # noqa: F401 - first, or torch can't import the next
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    return lambda: AutotuneCache._prepare_key(KERNEL)


@pytest.mark.parametrize("tag", ["", "mine"])
def test_a_result_that_a_worker_saved_is_found_under_a_held_key_tag(tag, named, tmp_path, monkeypatch):
    """The tag of a warm start is this process's alone, and the name of a result holds the tag."""
    import torch

    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", tag)
    before = named()
    with dp.warm_start("names", root=tmp_path / "root"):
        assert torch.compiler.config.cache_key_tag.startswith("dynapolicy-")
        assert named() == named_by_a_worker(TORCH_COMPILE_CACHE_KEY_TAG=tag)
    assert named() == before


def test_names_of_another_making_are_left_to_torch(named, tmp_path, monkeypatch):
    """A torch that names them in a way nobody knows here keeps its own way."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    monkeypatch.setattr(AutotuneCache, "_prepare_key", staticmethod(lambda filename: f"new {filename}"))
    with dp.warm_start("names", root=tmp_path / "root"):
        assert named() == f"new {KERNEL}"


def test_a_wrapper_of_somebody_else_stays(named, tmp_path, monkeypatch):
    """What was wrapped meanwhile is not taken away on leaving."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    theirs = staticmethod(lambda filename: "theirs")
    # What stays is put there before ours is: undoing the second would leave ours in torch.
    monkeypatch.setattr(AutotuneCache, "_prepare_key", vars(AutotuneCache)["_prepare_key"])
    with dp.warm_start("names", root=tmp_path / "root"):
        monkeypatch.setattr(AutotuneCache, "_prepare_key", theirs)
    assert named() == "theirs"
