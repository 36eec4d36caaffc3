"""Every test starts on a clean torch and leaves nothing in force.

That is done in hooks, not in a fixture, so that tests under ``@given`` need no exception. A test that
needs torch takes the fixture ``torch_ready``; the others never import it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from typing import Any

import pytest

from places import CountingBackend, compile_once, end_policies, limits_read

_BEFORE: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget what earlier tests compiled and what they were warned of."""
    if "torch._dynamo.eval_frame" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    if "dynapolicy.errors" in sys.modules:
        sys.modules["dynapolicy.errors"]._said.clear()
    item.stash[_BEFORE] = limits_read()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """After the last fixture has ended, fail the test that left a policy or a changed limit behind."""
    result = yield
    left = end_policies()
    if left:
        pytest.fail(f"the test left in force: {left}", pytrace=False)
    before, after = item.stash[_BEFORE], limits_read()
    changed = {name: (value, after[name]) for name, value in before.items() if value != after[name]}
    if changed:
        _write_back({name: value for name, (value, _) in changed.items()})
        pytest.fail(f"the test changed settings (before, after): {changed}", pytrace=False)
    return result


def _write_back(values: dict[str, Any]) -> None:
    import torch._dynamo

    for name, value in values.items():
        setattr(torch._dynamo.config, name, value)


@pytest.fixture(scope="session")
def torch_ready() -> Any:
    """torch, after a first compile on the main thread.

    Torch 2.10 and 2.11 crash when the first compile of a process is on another thread and main
    compiles after ``torch._dynamo.reset()``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        compile_once()
    return torch


@pytest.fixture
def counting_backend(torch_ready: Any) -> CountingBackend:
    """A backend that counts its calls, one for each cache entry, and runs the graph as it is."""
    return CountingBackend()
