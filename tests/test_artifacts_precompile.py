"""``mode="precompile"``: what torch no longer guards is written down, held against what is there, and said."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import types
import weakref
from types import SimpleNamespace

import pytest
import torch

import dynapolicy as dp
from artifacts_child import Acting, Mode
from dynapolicy.artifacts.guarded import described, told_apart
from dynapolicy.artifacts.precompiled import Precompile
from dynapolicy.errors import ArtifactRefused
from dynapolicy.torch_compat import precompile
from dynapolicy.torch_compat.kept_guards import Kept
from test_artifacts_warm_start import CHILD, content_of, start


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
    # Torch alone takes a stack for each tensor in them.
    assert warm["stacks"]
    assert not any(warm["stacks"])
    assert warm["left"] == [["", False]] * 2
    assert any("__main__: G['helper']" in said for said in warm["said"])
    frozen = any("compilation is frozen" in said for said in warm["said"])
    assert frozen == precompile.recompile_after_hit_raises()


@pytest.mark.skipif(bool(precompile.lacking()), reason="this torch can't precompile")
def test_instances_of_one_module_take_its_package_once(tmp_path):
    """Torch alone builds every guard anew for each instance, and forgets what the one before had."""
    root = tmp_path / "root"
    cold = start(root, "1,2", mode="precompile", instances=3)
    assert (cold["compiled"], cold["right"]) == (2, True)
    warm = start(root, "1,2", mode="precompile", instances=3)
    assert (warm["verdict"], warm["graphs"], warm["compiled"], warm["right"]) == ("warm", 2, 0, True)
    assert warm["builds"] == 2
    # Where a reset forgets what was installed, it is taken once again.
    again = start(root, "1,2", mode="precompile", instances=3, resets=1)
    assert (again["verdict"], again["compiled"], again["right"]) == ("warm", 0, True)
    assert again["builds"] in (2, 4)
    if precompile.recompile_after_hit_raises():
        return
    # Whichever instance compiles a third shape, what is saved has all three.
    more = start(root, "3", mode="precompile", instances=3)
    assert (more["compiled"], more["right"]) == (1, True)
    all_three = start(root, "1,2,3", mode="precompile", instances=3)
    assert (all_three["verdict"], all_three["graphs"], all_three["right"]) == ("warm", 3, True)


POISONED = """
import sys, torch, dynapolicy as dp, artifacts_child as child
torch.manual_seed(0)
torch.set_num_threads(1)
model, x = child.Model(), torch.ones(2, 8)
with torch.no_grad(), dp.warm_start("small", root=sys.argv[1], signature=model, mode="precompile") as start:
    step = torch.compile(model.forward, dynamic=False)
    loaded = [name for name in vars(child) if name.startswith("__compiled_fn_")]
    for name in loaded if "poison" in sys.argv else ():
        @torch._dynamo.disable
        def fails(*inputs):
            raise RuntimeError("poisoned")
        setattr(child, name, fails)
    right = start.first(lambda: torch.allclose(step(x), model(x), atol=1e-5))
print(len(loaded), right, start.verdict, start.record().compiled)
"""

CHOSEN = """
import sys, torch, dynapolicy as dp, artifacts_child as child
torch.manual_seed(0)
torch.set_num_threads(1)
where, act = sys.argv[2], getattr(torch, sys.argv[3])
if where == "global":
    child.helper = act
model, x = child.Model() if where == "global" else child.Acting(act), torch.linspace(-1, 1, 16).view(2, 8)
for place in sys.argv[4:]:
    import torch._dynamo.package
    owner = torch._dynamo.package.DiskDynamoCache if "." in place else torch._dynamo.package
    setattr(owner, place.rpartition(".")[2], lambda *given, **named: [].broken)
with torch.no_grad(), dp.warm_start("small", root=sys.argv[1], signature=model, mode="precompile") as start:
    right = torch.allclose(torch.compile(model.forward, dynamic=False)(x), model(x), atol=1e-5)
print(right, start.verdict)
if sys.argv[4:]:
    print(start)
"""


def printed(code, root, *words):
    """What such a start said."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, root, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILD.parent), str(CHILD.parents[1])])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.split()


@pytest.mark.skipif(bool(precompile.lacking()), reason="this torch can't precompile")
def test_another_function_of_torch_s_in_a_global_is_refused_once(tmp_path):
    """Which one it is depends on a configuration, while no source changes."""
    root = tmp_path / "root"
    assert printed(CHOSEN, root, "global", "sin") == ["True", "cold"]
    assert printed(CHOSEN, root, "global", "cos") == ["True", "refused"]
    assert printed(CHOSEN, root, "global", "cos") == ["True", "warm"]


@pytest.fixture(scope="module")
def acting(tmp_path_factory):
    """The artifacts of a model that was given ``sin``."""
    if lacking := precompile.lacking():
        pytest.skip(lacking)
    root = tmp_path_factory.mktemp("acting") / "root"
    assert printed(CHOSEN, root, "attribute", "sin") == ["True", "cold"]
    return root


@pytest.fixture
def root(acting, tmp_path):
    """A copy, which a test may add to."""
    return shutil.copytree(acting, tmp_path / "root")


def test_another_function_in_an_attribute_is_compiled_and_the_next_start_is_warm(root):
    """A configuration chose another one, while no source changed: what is there is not taken."""
    assert printed(CHOSEN, root, "attribute", "cos") == ["True", "cold"]
    assert printed(CHOSEN, root, "attribute", "cos") == ["True", "warm"]


@pytest.mark.parametrize("place", ["load_guard_manager", "DiskDynamoCache.load"])
def test_what_torch_cannot_load_is_traced_again_and_the_program_runs(root, place):
    """A function with defaults in an attribute is such on some releases; here it fails on all."""
    right, verdict, *said = printed(CHOSEN, root, "attribute", "sin", place)
    assert (right, verdict) == ("True", "warm")
    assert " ".join(said).startswith("warm: 1 of 1 graphs from artifacts, 0 compiled")
    assert "torch can't load Acting.forward: AttributeError: " in " ".join(said)


#: Instances that share a code object and do other things, told apart by what torch drops its guards on.
SHARED = """
import sys, torch, dynapolicy as dp, artifacts_child as child
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 16).view(2, 8)
models = [(made, x) for made in (child.Acting(torch.sin), child.Acting(torch.cos))]
models += [(child.Moded(mode), x) for mode in child.Mode]
models += [(child.Asked(), x, mode) for mode in child.Mode]
models += [(child.Sine(), x), (child.Cosine(), x)]
# Two instances, of which each compiles another shape.
models += [(child.Acting(torch.tanh), x[:1]), (child.Acting(torch.tanh), x[:, :4])]
late = child.Acting(torch.sigmoid)

def right(step, model, *inputs):
    return torch.allclose(step(*inputs), model(*inputs), atol=1e-5)

with torch.no_grad(), dp.warm_start("small", root=sys.argv[1], mode="precompile") as start:
    steps = [torch.compile(model.forward, dynamic=False) for model, *_ in models]
    good = [right(step, *one) for _ in range(2) for step, one in zip(steps, models)]
    start.save()
    # What the save has written is not taken for what was there before.
    good.append(right(torch.compile(late.forward, dynamic=False), late, x))
    record = start.record()
    models[0][0].act = getattr(torch, sys.argv[2])
    good.append(right(steps[0], models[0][0], x))
print(all(good), len(good), record.verdict, record.graphs, record.compiled)
"""


@pytest.mark.skipif(bool(precompile.lacking()), reason="this torch can't precompile")
def test_instances_that_share_code_and_do_other_things_are_told_apart(tmp_path):
    """A function in an attribute, an enum's member in one and in an argument, a decorator's closure, and rebinding."""
    root = tmp_path / "root"
    assert printed(SHARED, root, "exp") == ["True", "22", "cold", "11", "11"]
    assert printed(SHARED, root, "exp") == ["True", "22", "warm", "12", "0"]
    # One that was never compiled: compiled now, or eager where this torch can't.
    assert printed(SHARED, root, "tan") == ["True", "22", "warm", "12", "0"]


@pytest.mark.skipif(bool(precompile.lacking()), reason="this torch can't precompile")
def test_a_function_that_came_poisoned_is_compiled_again_and_the_next_start_is_healthy(tmp_path):
    """A reset alone leaves precompiled functions in force on some releases."""
    root = tmp_path / "root"
    assert printed(POISONED, root) == ["0", "True", "cold", "1"]
    assert printed(POISONED, root) == ["1", "True", "warm", "0"]
    assert printed(POISONED, root, "poison") == ["1", "True", "refused", "1"]
    # A kernel that inductor asks for once in a process is built and added now.
    assert printed(POISONED, root) in (["1", "True", "partial", "0"], ["1", "True", "warm", "0"])
    assert printed(POISONED, root) == ["1", "True", "warm", "0"]


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
    guard = {"scope": "served", "name": "G['step']", "object": described(one), "rebindable": True, "entry": ""}
    mode.check([guard])
    module.step = other
    with pytest.raises(ArtifactRefused, match=r"G\['step'\] in served: .*one .* -> .*other"):
        mode.check([guard])
    del module.step
    with pytest.raises(ArtifactRefused, match="nothing"):
        mode.check([guard])


def test_what_an_argument_leads_to_is_refused_where_nobody_can_tell_it_apart(mode):
    """Two instances of one class are described the same."""
    guard = {"scope": "served", "name": "L['self'].act", "object": "instance of some:Act", "rebindable": False}
    with pytest.raises(ArtifactRefused, match=r"L\['self'\]\.act in served was instance of some:Act.*the default mode"):
        mode.check([{**guard, "entry": ""}])
    # Where it could be told apart, it is put back, and nothing is refused.
    mode.check([{**guard, "object": "function some:act 0", "entry": "abc"}])
    with pytest.raises(ArtifactRefused, match="no code"):
        mode.check([{**guard, "name": "L['self'", "entry": "abc"}])


def test_a_guard_that_is_put_back_keeps_nothing_alive():
    """It outlives the model it was made for, as the cache entry does; no later object passes for that one."""
    first = Acting(one)
    by_identity = Kept("L['self']", "", told_apart, first)
    by_description = Kept("L['self'].act", described(one), told_apart, one)
    assert by_identity.wrong({"self": first}) == by_description.wrong({"self": first}) == ""
    assert by_identity.wrong({"self": Acting(one)}) == "another object"
    assert by_description.wrong({"self": Acting(other)}) == described(other)
    assert by_description.wrong({}) == "nothing"
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    nobody = SimpleNamespace(act=None)
    assert by_identity.wrong({"self": None}) == by_description.wrong({"self": nobody}) == "another object"
    # What can't be referred to weakly is held: a number, for one.
    assert Kept("L['x']", "", told_apart, 7).wrong({"x": 7}) == ""


def test_two_functions_that_torch_cannot_tell_apart_are_an_error(mode):
    """One qualname on one line of two files: torch would run one for the other."""
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
    assert described(one) != described(other)
    assert described(one).startswith(f"function {__name__}:one ")
    with_defaults = [lambda x, n=n, *, f=f: f(x) * n for n, f in ((1, one), (2, one), (2, other), (2, other))]
    assert len(set(map(described, with_defaults))) == 3
    with_defaults[0].__defaults__ = (with_defaults[0],)
    assert described(with_defaults[0]) not in map(described, with_defaults[1:])
    assert described(torch.sin) != described(torch.cos)
    assert described(torch.nn.functional.relu) != described(torch.nn.functional.gelu)
    assert described(torch.nn.functional.max_pool1d) != described(torch.nn.functional.max_pool2d)
    assert described(len) == "builtin builtins:len"
    assert described(dp) == "module dynapolicy"
    assert described(Mode.SIN) == "member artifacts_child:Mode.SIN"
    assert told_apart(Mode.SIN) != told_apart(Mode.COS)
    assert (described(Acting(one)), told_apart(Acting(one))) == ("instance of artifacts_child:Acting", "")
