"""A test that hits a recompile limit, or leaves a setting changed, fails with the audit in its report.

Off unless a test asks for the fixture ``dynapolicy_guard`` or the ini option ``dynapolicy_guard`` is
true. Loading the plugin imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import attrs
import pytest

__all__ = ["dynapolicy_guard", "pytest_addoption", "pytest_runtest_call"]

_OPTION = "dynapolicy_guard"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    text = "fail every test that hits a recompile limit or leaves a torch.compile setting changed"
    parser.addini(_OPTION, text, type="bool", default=False)


@pytest.fixture
def dynapolicy_guard() -> None:
    """The test fails where it hits a recompile limit or leaves a torch.compile setting changed."""


@attrs.frozen
class _Before:
    """How things were when the test began.

    Attributes:
        mark: hits seen so far.
        counted: hits that torch counted so far, also those without a name.
        settings: each setting that a policy governs; empty while torch isn't imported.
    """

    mark: int
    counted: int
    settings: dict[str, Any]

    @classmethod
    def now(cls) -> _Before:
        from .watch import last_hit

        return cls(last_hit(), _counted(), _settings())


def _torch_compiles() -> bool:
    # Guarding a test that needs no torch must not import it.
    return "torch._dynamo.config" in sys.modules and "torch._dynamo.utils" in sys.modules


def _counted() -> int:
    from .torch_compat.hits import hits_counted

    return hits_counted() if _torch_compiles() else 0


def _settings() -> dict[str, Any]:
    from .holding import in_force
    from .observe.per_setting import effective

    if not _torch_compiles():
        return {}
    policies = [repr(one.policy) for one in in_force()]
    return {"policies in force": policies, **{one.setting: one.value for one in effective()}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch a guarded test."""
    if _OPTION not in getattr(item, "fixturenames", ()) and not item.config.getini(_OPTION):
        return (yield)
    from .torch_compat.override import Layer
    from .watch import unwatch, watch

    own = Layer({}, of_process=True)
    watch(own)
    before = _Before.now()
    try:
        result = yield
    except BaseException:
        problems = _problems(before)
        if problems:
            item.add_report_section("call", "dynapolicy", _report(problems))
        raise
    finally:
        own.live = False
        unwatch()
    problems = _problems(before)
    if problems:
        pytest.fail(_report(problems), pytrace=False)
    return result


def _problems(before: _Before) -> list[str]:
    from .watch import hits_since, message

    hits = [message(hit) for hit in hits_since(before.mark)]
    if not hits and _counted() > before.counted:
        hits = ["A recompile limit was hit; torch's logger is silenced, so it can't be named."]
    after = _settings()
    found = before.settings or _untouched(after)
    return hits + [
        f"The test left a setting changed: {name} was {found.get(name)!r}, and is {value!r}."
        for name, value in after.items()
        if found.get(name) != value
    ]


def _untouched(after: dict[str, Any]) -> dict[str, Any]:
    """What torch has by itself, where the test was the first to import it."""
    from .torch_compat.settings import find

    found = {name: setting for name in after if "." in name and (setting := find(name))}
    return {"policies in force": [], **{name: getattr(one.entry, "default", None) for name, one in found.items()}}


def _report(problems: list[str]) -> str:
    from .observe.per_code import audit

    return "\n".join([*problems, "", str(audit())])
