"""``settings`` of a policy: which names and values may be asked for. Whether torch has them shows when applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import SettingError

__all__ = ["DERIVED", "SECTIONS", "SettingValue", "check_settings"]

SettingValue = bool | int | str

#: Configuration modules that ``settings`` may name, by their prefix.
SECTIONS = ("dynamo", "inductor", "functorch", "compiler")

#: Settings that the policy derives, by every name that some torch gives them.
DERIVED = {
    "recompile_limit": "buckets, floor and ceil",
    "cache_size_limit": "buckets, floor and ceil",
    "accumulated_recompile_limit": "buckets, floor and ceil",
    "accumulated_cache_size_limit": "buckets, floor and ceil",
    "fail_on_recompile_limit_hit": "on_limit",
    "fail_on_cache_limit_hit": "on_limit",
}


def check_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, SettingValue], ...]:
    """Settings in order of their names. Whether torch has them shows when they are applied.

    Raises:
        SettingError: a name in no known section, one that the policy derives, or a value that is
            no int, bool or str.
    """
    for name, value in settings.items():
        section, dot, key = str(name).partition(".")
        if not dot or section not in SECTIONS:
            rule = f"A setting's name begins with {', '.join(f'{one}.' for one in SECTIONS)}"
            raise SettingError(str(name), value, rule, "settings", f'Write it like "dynamo.{name}"')
        if section in ("dynamo", "compiler") and key in DERIVED:
            rule = "The policy derives it and would overwrite it"
            raise SettingError(name, value, rule, "settings", f"Use {DERIVED[key]}")
        if not isinstance(value, (bool, int, str)):
            rule = "Only int, bool and str can be put in force; torch copies lists, dicts and sets into each context"
            raise SettingError(name, value, rule, "settings", "Set it in torch's configuration by hand")
    return tuple(sorted((str(name), value) for name, value in settings.items()))
