"""``effective``: what each setting is here, in the process, and what the policy asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from ..actions.freezing import frozen_mode
from ..apply import current_policy
from ..compiled import needed
from ..holding import in_force
from ..layers import Ask
from ..policy import CompilePolicy
from ..records import Records
from ..torch_compat.capabilities import Capabilities, capabilities
from ..torch_compat.entries import matmul_precision
from ..torch_compat.hits import LOGGER, can_be_named
from ..torch_compat.override import same
from ..torch_compat.settings import Setting, find, limit_names

__all__ = ["SettingRecord", "effective"]


@attrs.frozen
class SettingRecord:
    """One setting.

    Attributes:
        setting: its name, ``"dynamo.recompile_limit"``.
        value: what this context reads, and compiles with.
        process_default: what a context reads that nobody has touched; None where that can't be told.
        asked: what the policies in force ask for, None where none asks.
        verdict: ``in force``, ``raised by another``, ``shadowed``, ``not asked``, ``not available``,
            or ``unseen`` where hits or calls can't be observed.
        why: one sentence.
    """

    setting: str
    value: Any
    process_default: Any
    asked: Any
    verdict: str
    why: str


def effective() -> Records[SettingRecord]:
    """Report every setting that a policy governs, as this thread and task sees it. Changes nothing."""
    can = capabilities()
    asks: dict[tuple[str, str], list[Ask]] = {}
    for standing in in_force():
        for ask in standing.asks:
            asks.setdefault(ask.setting.place, []).append(ask)
    limits = [setting for name in limit_names(can) if (setting := find(name))]
    for setting in limits:
        asks.setdefault(setting.place, [])
    # What isolated wrappers add up to is in force on top of the policies.
    for setting, value in zip(limits, needed(can), strict=False):
        if value and asks[setting.place]:
            asks[setting.place].append(Ask(setting, value, True))
    first = {setting.place: setting for setting in limits}
    rows = [_row(first[place] if place in first else found[0].setting, found, can) for place, found in asks.items()]
    rows.sort(key=lambda row: row.setting not in {setting.name for setting in limits})
    policy = current_policy()
    return Records((*rows, *_precision(policy), *_missing(policy), *_observation()))


def _row(setting: Setting, asks: list[Ask], can: Capabilities) -> SettingRecord:
    value = setting.read()
    default = _process_default(setting, can)
    if not asks:
        why = "No policy asks for it" if in_force() else "No policy is in force here"
        return SettingRecord(setting.name, value, default, None, "not asked", why)
    asked = asks[0].value
    for ask in asks[1:]:
        asked = ask.over(asked)
    verdict, why = _verdict(setting, value, default, asked, raising=asks[-1].raising)
    return SettingRecord(setting.name, value, default, asked, verdict, why)


def _process_default(setting: Setting, can: Capabilities) -> Any:
    if can.process_lever:
        return setting.override().process_value()
    # Without the lever a fresh context reads what torch has by itself, unless settings are process-wide.
    return getattr(setting.entry, "default", None) if can.context_local_config else setting.read()


def _verdict(setting: Setting, value: Any, default: Any, asked: Any, *, raising: bool) -> tuple[str, str]:
    if same(value, asked):
        if same(default, asked):
            return "in force", "Every context that sets nothing of its own reads it"
        return "in force", "It holds in this context; others read the process default"
    if raising and value > asked:
        if setting.entry is not None and value == getattr(setting.entry, "default", None):
            return "raised by another", "Torch's own default is higher, and a policy lowers nothing without exact=True"
        return "raised by another", "Somebody asked for more, and a policy lowers nothing without exact=True"
    if same(default, asked):
        return "shadowed", "This thread or task was given a value of its own, which wins here"
    return "shadowed", "The policy doesn't reach this thread or task: apply it here"


def _precision(policy: CompilePolicy | None) -> Iterator[SettingRecord]:
    asked = policy.float32_matmul_precision if policy is not None else None
    if asked is None:
        return
    value = matmul_precision()
    if value is None:
        verdict, why = "not available", "It was set per backend, and torch can't read it back"
    elif value == asked:
        verdict, why = "in force", "It is one value for the whole process"
    else:
        verdict, why = "shadowed", "Somebody set it after the policy, or the policy holds in one context only"
    yield SettingRecord("float32_matmul_precision", value, value, asked, verdict, why)


def _missing(policy: CompilePolicy | None) -> Iterator[SettingRecord]:
    for name, value in policy.settings if policy is not None else ():
        if find(name) is None:
            yield SettingRecord(name, None, None, value, "not available", "This torch has no such setting")


def _observation() -> Iterator[SettingRecord]:
    """Where something happens that nobody could see."""
    if not can_be_named():
        why = f"The logger {LOGGER} is silenced: a hit of a limit can't be named, audit() can only count entries"
        yield SettingRecord(f"logger {LOGGER}", "silenced", None, "WARNING", "unseen", why)
    mode = frozen_mode()
    if mode is not None:
        why = "Nothing new compiles in this process"
        if mode == "eager":
            why += "; calls that run eager for it can't be counted"
        yield SettingRecord("freeze", mode, mode, mode, "unseen" if mode == "eager" else "in force", why)
