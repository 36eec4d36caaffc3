"""Targets: whatever one can compile leads to the code object that torch really counts on."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import dynapolicy as dp
from dynapolicy.targets import Target, code_named, resolve
from dynapolicy.torch_compat.entries import count, shared_code
from places import CountingBackend

SIX = dp.ShapeBuckets(batch=range(1, 7))


def plain(x: Any) -> Any:
    """A function of this module."""
    return x * 2 + 1


def other(x: Any) -> Any:
    """Another one."""
    return x * 3


def scaled(scale: int, x: Any) -> Any:
    """For ``functools.partial``."""
    return x * scale


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as everybody writes it."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Tripler:
    """An object with ``__call__``."""

    def __call__(self, x: Any) -> Any:
        """Be called."""
        return x * 5

    def method(self, x: Any) -> Any:
        """A method of a plain class."""
        return x * 6

    @staticmethod
    def static(x: Any) -> Any:
        """A static method."""
        return x * 7

    @classmethod
    def of_class(cls, x: Any) -> Any:
        """A class method."""
        return x * 8


def exec_made(module: str = "generated") -> Any:
    """A function without a source file, as code generators make them."""
    names: dict[str, Any] = {"__name__": module}
    exec("def made(x):\n    return x * 4\n", names)
    return names["made"]


def layer_of(torch: Any) -> Any:
    """A module class of this file; made late, because this file imports no torch."""

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x) + 1

    return Layer


def compile_six(torch: Any, compiled: Any) -> None:
    """Call it with six shapes; each result must be right as to its shape."""
    for batch in range(1, 7):
        assert compiled(torch.ones(batch, 4)).shape == (batch, 4)


def kinds(torch: Any) -> dict[str, tuple[Any, Any]]:
    """What is declared, and what is compiled."""
    layer = layer_of(torch)
    module, wrapped = layer(), wrapping(plain)
    one = Tripler()
    return {
        "function": (plain, plain),
        "bound method": (one.method, one.method),
        "method of a class": (Tripler.method, one.method),
        "static method": (Tripler.static, Tripler.static),
        "class method": (Tripler.of_class, Tripler.of_class),
        "module": (module, module),
        "module's forward": (module.forward, module.forward),
        "class": (layer, module),
        "forward of a class": (layer.forward, module),
        "compiled wrapper": (torch.compile(plain, backend="eager"), plain),
        "OptimizedModule": (torch.compile(module, backend="eager"), module),
        "wraps wrapper": (wrapped, wrapped),
        "lambda": (function := lambda x: x + 9, function),
    }


def shared_kinds(torch: Any) -> dict[str, Any]:
    """Targets that torch compiles through one code object of its own."""
    return {
        "partial": functools.partial(scaled, 3),
        "callable object": Tripler(),
        "no_grad": torch.no_grad()(other),
        "inference_mode": torch.inference_mode()(other),
        "Sequential": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()),
    }


KINDS = (
    "function",
    "bound method",
    "method of a class",
    "static method",
    "class method",
    "module",
    "module's forward",
    "class",
    "forward of a class",
    "compiled wrapper",
    "OptimizedModule",
    "wraps wrapper",
    "lambda",
)
SHARED_KINDS = ("partial", "callable object", "no_grad", "inference_mode", "Sequential")


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_the_code_object_that_torch_counts_on(kind: str, torch_ready: Any, counting_backend: Any) -> None:
    """After six compiles torch itself has six entries there, and none on the code that it shares."""
    declared, compiled = kinds(torch_ready)[kind]
    target = resolve(declared)
    compile_six(torch_ready, torch_ready.compile(compiled, backend=counting_backend, dynamic=False))
    assert target.code is not None
    assert not target.shared
    assert (counting_backend.calls, count(target.code), count(shared_code())) == (6, 6, 0)
    assert code_named(target.name, target.line) is target.code


@pytest.mark.parametrize("kind", SHARED_KINDS)
def test_a_target_is_known_to_share_torchs_own_code_object(kind: str, torch_ready: Any, counting_backend: Any) -> None:
    """Six compiles are six entries on the shared code object."""
    target = shared_kinds(torch_ready)[kind]
    compile_six(torch_ready, torch_ready.compile(target, backend=counting_backend, dynamic=False))
    assert resolve(target).shared
    assert (counting_backend.calls, count(shared_code())) == (6, 6)


def test_a_function_that_exec_made_counts_on_its_own_or_the_shared_code(
    torch_ready: Any, counting_backend: Any
) -> None:
    """By the torch; dynapolicy takes it for shared, so that its budget is in the sum where that matters."""
    target = exec_made()
    compile_six(torch_ready, torch_ready.compile(target, backend=counting_backend, dynamic=False))
    found = resolve(target)
    assert found.shared
    assert found.code is target.__code__
    assert sorted([count(target.__code__), count(shared_code())]) == [0, 6]


def test_a_function_that_exec_made_in_a_module_counts_on_its_own(torch_ready: Any, counting_backend: Any) -> None:
    """Where its module has a file, torch takes that for its source."""
    target = exec_made(__name__)
    compile_six(torch_ready, torch_ready.compile(target, backend=counting_backend, dynamic=False))
    assert not resolve(target).shared
    assert (count(target.__code__), count(shared_code())) == (6, 0)


def test_the_same_function_in_many_guises_is_one_target(torch_ready: Any) -> None:
    """Declared as each of them, it is one declaration whose entries add up."""
    layer = layer_of(torch_ready)
    module = layer()
    wrappers = [torch_ready.compile(one, backend="eager") for one in (module, module.forward)]
    guises = [layer, layer.forward, module, module.forward, *wrappers]
    assert len({resolve(guise) for guise in guises}) == 1
    policy = dp.CompilePolicy({guise: [SIX] for guise in guises})
    (one,) = policy.declarations
    assert one.entries == 6 * len(guises)
    assert all(policy.declaration(guise) is one for guise in guises)


def test_wrappers_by_wraps_are_not_what_they_wrap() -> None:
    """They count on their own code, whatever ``__wrapped__`` says."""
    wrapped = wrapping(plain)
    assert resolve(wrapped).code is wrapped.__code__
    assert resolve(wrapped).code is not plain.__code__


# -- targets that share ------------------------------------------------------------------------------------


def three(torch: Any) -> list[Any]:
    """A Sequential, a partial and a callable: with the default limit of 8, six, two and none of six shapes compile."""
    found = shared_kinds(torch)
    return [found["Sequential"], found["partial"], found["callable object"]]


def test_three_that_share_do_not_fit_torchs_default(torch_ready: Any, counting_backend: Any) -> None:
    """Six, two and none: this is what the policy is for."""
    calls = []
    for target in three(torch_ready):
        before = counting_backend.calls
        compile_six(torch_ready, torch_ready.compile(target, backend=counting_backend, dynamic=False))
        calls.append(counting_backend.calls - before)
    assert calls == [6, 2, 0]


@pytest.mark.parametrize("how", ["dynapolicy.compile", "torch.compile"])
def test_three_that_share_all_compile(how: str, torch_ready: Any) -> None:
    """18 of 18: by the sum in the process limit, and by budgets of their own where torch can isolate."""
    targets = three(torch_ready)
    policy = dp.CompilePolicy({target: [SIX] for target in targets}, eager_headroom=0)
    assert policy.limits.recompile_limit == 18
    with dp.apply_policy(policy):
        backends = [CountingBackend() for _ in targets]
        for target, backend in zip(targets, backends, strict=True):
            make = dp.compile if how == "dynapolicy.compile" else torch_ready.compile
            compile_six(torch_ready, make(target, backend=backend, dynamic=False))
    assert [backend.calls for backend in backends] == [6, 6, 6]


def test_isolated_wrappers_count_on_the_same_code_object(torch_ready: Any) -> None:
    """Their budgets are apart, their entries are seen together."""
    if not dp.capabilities().isolate_recompiles:
        pytest.skip("torch before 2.13 can't isolate")
    backends = [CountingBackend(), CountingBackend()]
    policy = dp.CompilePolicy({plain: [SIX]}, eager_headroom=2)
    for backend in backends:
        compile_six(torch_ready, dp.compile(plain, policy=policy, isolate=True, backend=backend))
    assert [backend.calls for backend in backends] == [6, 6]
    assert count(plain.__code__) == 12


def test_limits_of_targets_that_share_are_their_sum(torch_ready: Any) -> None:
    """Each of them gets the sum, and a code object of its own only what it declared."""
    one, two, three_ = three(torch_ready)
    policy = dp.CompilePolicy({one: [SIX], two: [SIX], three_: [SIX], plain: [SIX]}, eager_headroom=2)
    assert [policy.limits_for(target).recompile_limit for target in (one, two, three_, plain)] == [20, 20, 20, 8]
    assert policy.limits.recompile_limit == 20
    assert policy.own_limit(one) == 8


# -- names -----------------------------------------------------------------------------------------------


def test_names_are_module_and_qualname(torch_ready: Any) -> None:
    """Of the code that compiles; a callable object and a partial are named after what runs."""
    here = __name__
    layer = layer_of(torch_ready)
    assert [
        resolve(target).name
        for target in (
            plain,
            Tripler().method,
            Tripler(),
            functools.partial(scaled, 2),
            layer(),
            exec_made(),
            wrapping(plain),
        )
    ] == [
        f"{here}:plain",
        f"{here}:Tripler.method",
        f"{here}:Tripler.__call__",
        f"{here}:scaled",
        f"{here}:layer_of.<locals>.Layer.forward",
        "generated:made",
        f"{here}:plain",
    ]


def test_a_lambda_has_a_stable_name() -> None:
    """Its line tells it from its siblings, and the same lambda made again has the same name."""
    functions = {
        "one": lambda x: x + 1,
        "two": lambda x: x + 2,
    }
    one, two = functions.values()
    names = [resolve(function).name for function in (one, two)]
    assert names[0] != names[1]
    assert [name.rpartition("@")[2] for name in names] == [
        str(function.__code__.co_firstlineno) for function in (one, two)
    ]

    def make() -> Any:
        return lambda x: x + 3

    assert resolve(make()) == resolve(make())
    policy = dp.CompilePolicy({one: [SIX], two: [SIX, SIX]}, eager_headroom=0)
    assert [policy.limits_for(function).recompile_limit for function in (one, two)] == [8, 12]


def test_an_exec_made_function_has_a_stable_name() -> None:
    """The same text executed again is the same target."""
    assert resolve(exec_made()) == resolve(exec_made())
    policy = dp.CompilePolicy({exec_made(): [SIX]})
    assert policy.declaration(exec_made()) is not None


def test_an_ambiguous_qualname_gains_its_line() -> None:
    """Two functions of one name are two declarations with limits of their own."""

    def made(first: bool) -> Any:
        if first:

            def step(x: Any) -> Any:
                return x + 1
        else:

            def step(x: Any) -> Any:
                return x + 2

        return step

    one, two = made(True), made(False)
    policy = dp.CompilePolicy({one: [SIX], two: [SIX, SIX]}, eager_headroom=0)
    lines = sorted(function.__code__.co_firstlineno for function in (one, two))
    assert [declared.name.rpartition("@")[2] for declared in policy.declarations] == [str(line) for line in lines]
    assert [policy.limits_for(function).recompile_limit for function in (one, two)] == [8, 12]
    alone = dp.CompilePolicy({one: [SIX]})
    assert "@" not in alone.declarations[0].name
    assert alone.declaration(two) is None


def test_a_name_and_the_function_it_names_are_one_target() -> None:
    """Declared by name here, by object there, found by either; nothing is imported for a name."""
    name = f"{__name__}:plain"
    policy = dp.CompilePolicy({name: [SIX], plain: [SIX]}, eager_headroom=0)
    (one,) = policy.declarations
    assert one.entries == 12
    for target in (name, plain):
        assert dp.CompilePolicy({name: [SIX]}).declaration(target) is not None
        assert dp.CompilePolicy({plain: [SIX]}).declaration(target) is not None
    dp.CompilePolicy({"no_such_package.anywhere:f": [SIX]})
    assert "no_such_package" not in sys.modules
    assert code_named("no_such_package.anywhere:f", 0) is None


def test_mp_main_counts_as_main() -> None:
    """By name and by object."""
    assert resolve("__mp_main__:step").name == "__main__:step"
    function = exec_made()
    function.__module__ = "__mp_main__"
    assert resolve(function).name == "__main__:made"


def test_a_spawned_child_finds_its_parents_declarations(tmp_path: Any) -> None:
    """A script's own function, declared in its parent under ``__main__``, is declared in the child too."""
    script = tmp_path / "serve.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import dynapolicy as dp

            def step(x):
                return x

            def find(policy, results):
                results.put((__name__, policy.declaration(step).name, policy.limits_for(step).recompile_limit))

            if __name__ == "__main__":
                spawn = multiprocessing.get_context("spawn")
                results = spawn.Queue()
                policy = dp.CompilePolicy({step: dp.ShapeBuckets(batch=range(1, 31))})
                child = spawn.Process(target=find, args=(policy, results))
                child.start()
                print(*results.get())
                child.join()
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["__mp_main__", "__main__:step", "38"]


def test_an_unpicklable_target_still_works() -> None:
    """Only its name is kept, so the policy travels, and finds the target again where it is."""
    threads: list[Any] = []

    def local(x: Any) -> Any:
        return x if threads is None else x + 1

    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        pickle.dumps(local)
    policy = dp.CompilePolicy({local: [SIX, SIX], (lambda x: x): [SIX]}, eager_headroom=0)
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again.limits_for(local).recompile_limit == 12
    assert isinstance(resolve(local), Target)


def test_a_target_is_not_kept_alive() -> None:
    """A policy that outlives its model holds none of it."""
    import gc
    import weakref

    function = exec_made()
    gone = weakref.ref(function)
    policy = dp.CompilePolicy({function: [SIX]})
    del function
    gc.collect()
    assert gone() is None
    assert policy.declarations[0].entries == 6


# -- modules and engines -----------------------------------------------------------------------------------


def test_a_module_compiles_in_place_with_the_policys_keywords(torch_ready: Any, counting_backend: Any) -> None:
    """``module.compile(**policy.compile_kwargs(module))`` compiles all twelve batch sizes on every torch."""
    module = layer_of(torch_ready)()
    policy = dp.CompilePolicy({type(module): dp.ShapeBuckets(batch=range(1, 13))}, eager_headroom=0)
    keywords = policy.compile_kwargs(module)
    assert keywords == ({"recompile_limit": 12} if dp.capabilities().recompile_limit_keyword else {})
    applied = None if keywords else dp.apply_policy(policy)
    module.compile(backend=counting_backend, dynamic=False, **keywords)
    expected = [module.forward(torch_ready.ones(batch, 4)) for batch in range(1, 13)]
    for batch, value in enumerate(expected, start=1):
        assert torch_ready.equal(module(torch_ready.ones(batch, 4)), value)
    if applied is not None:
        applied.restore()
    assert (counting_backend.calls, count(type(module).forward.__code__)) == (12, 12)


class Slot:
    """A part of an engine that knows its CUDA-graph configurations."""

    def __init__(self, batches: list[int], tokens: list[int]) -> None:
        self.batches, self.tokens = batches, tokens

    def capture(self, x: Any) -> Any:
        """What is compiled; all slots share its code object."""
        return x + len(self.tokens)

    def capture_buckets(self) -> dict[Any, Any]:
        """Each configuration is one set of buckets."""
        return {self.capture: [dp.ShapeBuckets(batch=self.batches, tokens=self.tokens)]}


def test_an_engine_hands_over_its_capture_buckets(torch_ready: Any, counting_backend: Any) -> None:
    """Two slots that share one capture method add up, and each of their shapes compiles."""
    slots = [Slot([1, 2], [4, 8]), Slot([3, 4, 5], [4, 8, 16])]

    class Engine:
        def capture_buckets(self) -> Any:
            return [*slots, {other: SIX}]

    policy = dp.CompilePolicy(Engine(), eager_headroom=0)
    assert policy == dp.CompilePolicy([*slots, {other: [SIX]}], eager_headroom=0)
    assert policy.limits_for(slots[0].capture).recompile_limit == 4 + 9
    assert policy.limits_for(other).recompile_limit == 8
    with dp.apply_policy(policy):
        for slot in slots:
            step = dp.compile(slot.capture, backend=counting_backend)
            for shape in next(iter(slot.capture_buckets().values()))[0]:
                step(torch_ready.ones(shape["batch"], shape["tokens"]))
    assert (counting_backend.calls, count(Slot.capture.__code__)) == (13, 13)


def test_buckets_of_an_optimizer_come_from_its_parameters(torch_ready: Any) -> None:
    """Each distinct parameter shape is an entry, a scalar parameter too."""
    model = torch_ready.nn.Sequential(*[torch_ready.nn.Linear(4, width) for width in (4, 5, 5)])
    model.register_parameter("scale", torch_ready.nn.Parameter(torch_ready.tensor(1.0)))
    assert dp.ShapeBuckets.of_parameters(model).entries == 5
    assert dp.ShapeBuckets.of_parameters(model.parameters()) == dp.ShapeBuckets.of_parameters(model)


def test_the_name_of_nothing_compiled_is_no_warning() -> None:
    """Resolving a target warns of nothing and calls nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(Tripler()).shared
