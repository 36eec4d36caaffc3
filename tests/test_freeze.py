"""After ``freeze`` nothing compiles, on any thread, until it is restored."""

from __future__ import annotations

from typing import Any

import pytest

import dynapolicy as dp
from places import CountingBackend, new_thread

pytestmark = pytest.mark.usefixtures("torch_ready")


def area(x: Any, factor: int = 2) -> Any:
    """Compiled in these tests."""
    return x * factor


def test_eager_compiles_nothing_more_on_any_thread(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """What is compiled stays so, everything else runs eager with the right results, and nothing is exhausted."""
    step = dp.compile(area, backend=counting_backend)
    step(torch_ready.ones(2))
    with dp.freeze() as frozen, new_thread() as run:
        for size in range(2, 14):
            for call in (step, lambda x: run(step, x)):
                assert torch_ready.equal(call(torch_ready.ones(size)), area(torch_ready.ones(size)))
        assert counting_backend.calls == 1
        assert "can't be counted" in repr(frozen)
    for size in range(2, 10):
        step(torch_ready.ones(size))
    assert counting_backend.calls == 8


def test_first_compiles_of_undeclared_code_stop_as_well(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """It holds for all compiled code of the process, as documented."""
    with dp.freeze():
        dp.compile(lambda x: x - 1, backend=counting_backend)(torch_ready.ones(2))
    assert counting_backend.calls == 0


@pytest.mark.parametrize("thread", [False, True], ids=["main", "worker"])
def test_raise_names_the_function_and_its_shapes(
    counting_backend: CountingBackend, torch_ready: Any, thread: bool
) -> None:
    """An unseen shape is an error on every thread; what was warmed up runs on."""
    step = dp.compile(area, backend=counting_backend)
    step(torch_ready.ones(2, 4))
    with dp.freeze("raise"), new_thread() as run:
        here = run if thread else (lambda function, *args: function(*args))
        here(step, torch_ready.ones(2, 4))
        with pytest.raises(dp.FrozenError, match=rf"{__name__}:area.*x=\(3, 4\).*factor=2.*test_freeze.py:") as caught:
            here(step, torch_ready.ones(3, 4))
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, RuntimeError)
    step(torch_ready.ones(3, 4))
    assert counting_backend.calls == 2


def test_it_works_as_a_call(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """``freeze()`` holds at once, and ``restore`` ends it, also from another thread."""
    step = dp.compile(area, backend=counting_backend)
    frozen = dp.freeze()
    step(torch_ready.ones(2))
    assert counting_backend.calls == 0
    with new_thread() as run:
        run(frozen.restore)
    step(torch_ready.ones(2))
    assert counting_backend.calls == 1


def test_restoring_out_of_order_or_twice_changes_nothing(counting_backend: CountingBackend, torch_ready: Any) -> None:
    """Errors that say what to do; the process stays frozen."""
    outer, inner = dp.freeze(), dp.freeze("raise")
    with pytest.raises(dp.RestoreError, match="that one first"):
        outer.restore()
    step = dp.compile(area, backend=counting_backend)
    with pytest.raises(dp.FrozenError):
        step(torch_ready.ones(2))
    inner.restore()
    with pytest.raises(dp.RestoreError, match="already"):
        inner.restore()
    step(torch_ready.ones(2))
    assert counting_backend.calls == 0
    outer.restore()


def test_a_wrong_mode_is_an_error() -> None:
    """Nothing is frozen then."""
    with pytest.raises(dp.KnobError, match='"eager" or "raise"'):
        dp.freeze("maybe")  # type: ignore[arg-type]
    assert not [row for row in dp.effective() if row.setting == "freeze"]


def test_it_is_refused_inside_a_compiled_call(torch_ready: Any) -> None:
    """Torch refuses there, and nothing is frozen afterwards."""
    refused: list[RuntimeError] = []

    @torch_ready._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator, unused-ignore]
    def try_to() -> None:
        try:
            dp.freeze()
        except RuntimeError as error:
            refused.append(error)

    def broken(x: Any) -> Any:
        y = x + 1
        try_to()
        return y * 2

    torch_ready.compile(broken, backend="eager")(torch_ready.ones(2))
    assert not [row for row in dp.effective() if row.setting == "freeze"]
    assert len(refused) == 1
