"""What policies ask of torch's settings, and the stack of those that are in force."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from .errors import SettingError
from .policy import CompilePolicy
from .torch_compat.capabilities import Capabilities
from .torch_compat.override import Layer, Override, same
from .torch_compat.settings import SHAPE_WARN_LIMITS, Setting, checked, find, limit_names, touch

__all__ = ["Ask", "ProcessStack", "asks_of", "push_here"]


@attrs.frozen
class Ask:
    """A value that a policy asks for one setting.

    Attributes:
        raising: never lowers what it finds.
    """

    setting: Setting
    value: Any
    raising: bool

    def over(self, found: Any) -> Any:
        """The value to put in force where ``found`` was read."""
        return max(self.value, found) if self.raising else self.value

    def satisfied_by(self, value: Any) -> bool:
        """Whether a context that reads ``value`` needs nothing from this ask."""
        return same(self.over(value), value)


def asks_of(policy: CompilePolicy, can: Capabilities, *, exact: bool, raises: bool) -> tuple[Ask, ...]:
    """Everything a policy asks of this torch, checked; nothing is written yet.

    Args:
        exact: limits may be lowered too.
        raises: a policy that is in force already makes hitting a limit an error.

    Raises:
        SettingError: a setting that no torch has or that takes no such value, or torch's
            ``suppress_errors`` together with ``on_limit="raise"``.
    """
    limit, accumulated, fail = limit_names(can)
    wanted: list[tuple[str, Any, bool]] = [
        (limit, policy.limits.recompile_limit, not exact),
        (accumulated, policy.limits.accumulated_recompile_limit, not exact),
    ]
    if policy.on_limit == "raise" or raises:
        wanted.append((fail, policy.on_limit == "raise", False))
    asks = [Ask(setting, value, raising) for name, value, raising in wanted if (setting := find(name))]
    asks += _shape_warn_limits(policy)
    asks += _settings(policy)
    _refuse_suppressed_errors(policy)
    return tuple(asks)


def _shape_warn_limits(policy: CompilePolicy) -> list[Ask]:
    entries = max((one.entries for one in policy.declarations), default=0)
    found = [setting for name in SHAPE_WARN_LIMITS if (setting := find(name))]
    # None means that torch never warns or stops; a number would be a new limit.
    return [Ask(one, entries, True) for one in found if isinstance(one.read(), int) and one.read() < entries]


def _settings(policy: CompilePolicy) -> list[Ask]:
    asks: dict[tuple[str, str], Ask] = {}
    for name, value in policy.settings:
        setting = checked(name, value, policy)
        if setting is None:
            continue
        before = asks.setdefault(setting.place, Ask(setting, value, False))
        if not same(before.value, value):
            rule = f"{before.setting.name} is the same setting, and asks for {before.value!r}"
            raise SettingError(name, value, rule, "settings", "Keep one of the two")
    return list(asks.values())


def _refuse_suppressed_errors(policy: CompilePolicy) -> None:
    if policy.on_limit != "raise" or "dynamo.suppress_errors" in dict(policy.settings):
        return
    setting = find("dynamo.suppress_errors")
    if setting is not None and setting.read():
        rule = 'It swallows the error that on_limit="raise" asks for'
        way_out = 'Unset it (or TORCHDYNAMO_SUPPRESS_ERRORS), or use on_limit="warn"'
        raise SettingError("dynamo.suppress_errors", True, rule, "torch's configuration", way_out)


@attrs.define(eq=False)
class Standing:
    """A policy in force: what it asks, and the layer that its frames refer to."""

    policy: CompilePolicy
    asks: tuple[Ask, ...]
    layer: Layer
    exact: bool


class ProcessStack:
    """Policies that hold in every context of the process, the newest last. Change it under ``locks.lock``."""

    def __init__(self) -> None:
        self.standing: list[Standing] = []
        self._touched: dict[Override, Setting] = {}

    def settle(self, extra: Iterable[Ask]) -> None:
        """Put into every override what the policies in force come to, each on top of the ones before.

        Args:
            extra: what compiled wrappers need on top, while any policy is in force.
        """
        values: dict[Override, Any] = {}
        asks = [ask for one in self.standing for ask in one.asks]
        for ask in (*asks, *extra) if self.standing else ():
            override = ask.setting.override()
            self._touched[override] = ask.setting
            values[override] = ask.over(values.get(override, override.base()))
        for override in self._touched:
            override.process = values.get(override, override.unset)
        for module in {setting.module for setting in self._touched.values()}:
            touch(module)


def push_here(asks: Iterable[Ask], layer: Layer) -> None:
    """Let a process-wide layer win over deliberate values of this very context."""
    for ask in asks:
        override = ask.setting.override()
        own = override.own()
        if own is not override.unset and not ask.satisfied_by(own):
            override.push(layer)
            touch(ask.setting.module)
