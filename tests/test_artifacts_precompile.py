"""``mode="precompile"``: what torch no longer guards is written down, held against what is there, and said."""

from __future__ import annotations

import sys
import types

import pytest

import dynapolicy as dp
from dynapolicy.artifacts.precompiled import Precompile, described
from dynapolicy.errors import ArtifactRefused
from dynapolicy.torch_compat import precompile
from test_artifacts_warm_start import content_of, start


def one(x):
    return x + 1


def other(x):
    return x + 2


def test_a_restart_traces_nothing_and_says_what_nobody_guards(tmp_path):
    """Results equal eager's; the function that a guard looked at is named; older torch refuses with a reason."""
    root = tmp_path / "root"
    cold = start(root, "1,2", mode="precompile")
    assert cold["right"]
    if precompile.lacking():
        assert (cold["verdict"], "can't precompile" in cold["reason"]) == ("refused", True)
        return
    assert cold["verdict"] == "cold"
    guards = content_of(root)[2].manifest.guards
    assert [(one["scope"], one["name"], one["rebindable"]) for one in guards] == [("__main__", "G['helper']", True)]
    warm = start(root, "1,2", mode="precompile")
    assert (warm["verdict"], warm["graphs"], warm["compiled"], warm["right"]) == ("warm", 2, 0, True)
    # Torch alone builds loaded guards twice, for a filter that has nothing left to drop.
    assert warm["builds"] == 2
    assert warm["left"] == [["", False]] * 2
    assert any("__main__: G['helper']" in said for said in warm["said"])
    frozen = any("compilation is frozen" in said for said in warm["said"])
    assert frozen == precompile.recompile_after_hit_raises()


@pytest.fixture
def mode():
    """Precompile mode in force, where this torch has it."""
    if lacking := precompile.lacking():
        pytest.skip(lacking)
    made = Precompile()
    yield made
    made.stop()


def test_a_rebound_name_is_refused_by_name(mode, monkeypatch):
    """A global that stands for another function than when it was traced."""
    module = types.ModuleType("served")
    module.step = one
    monkeypatch.setitem(sys.modules, "served", module)
    guard = {"scope": "served", "name": "G['step']", "object": described(one), "rebindable": True}
    mode.check([guard])
    module.step = other
    with pytest.raises(ArtifactRefused, match=r"G\['step'\] in served: .*one .* -> .*other"):
        mode.check([guard])
    del module.step
    with pytest.raises(ArtifactRefused, match="nothing"):
        mode.check([guard])


def test_two_functions_that_torch_cannot_tell_apart_are_an_error(mode):
    """One qualname on one line of two files: torch would run one for the other."""
    import torch

    made = []
    for file in ("first.py", "second.py"):
        scope = {}
        exec(compile("def step(x): return x + 1", file, "exec"), scope)
        made.append(scope["step"])
    torch.compile(made[0], backend="eager")
    with pytest.raises(dp.ArtifactError, match=r"first\.py and in second\.py"):
        torch.compile(made[1], backend="eager")


def test_an_object_is_described_by_what_it_does():
    """The same in every process, another for another body, and nothing for torch's own."""
    import torch

    assert described(one) != described(other)
    assert described(one).startswith(f"function {__name__}:one ")
    assert described(torch.relu) is None
    assert described(torch) is None
    assert described(len) is None
    assert described(dp) == "module dynapolicy"
