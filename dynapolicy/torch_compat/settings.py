"""Torch's settings by name: where each lives, what it takes, and its override."""

from __future__ import annotations

import functools
import importlib
import re
from contextvars import ContextVar
from typing import Any

import attrs

from ..errors import SettingError, SettingWarning, warn
from .capabilities import Capabilities
from .lever import install
from .override import Override

__all__ = ["Setting", "checked", "find", "limit_names", "touch"]

_MODULES = {
    "dynamo": "torch._dynamo.config",
    "inductor": "torch._inductor.config",
    "functorch": "torch._functorch.config",
    "compiler": "torch.compiler.config",
}

#: Warning limits that count CUDA graphs by shape, in shapes. None means that torch never warns.
SHAPE_WARN_LIMITS = (
    "inductor.triton.cudagraph_dynamic_shape_warn_limit",
    "inductor.triton.cudagraph_dynamic_shape_rerecord_limit",
)


@attrs.frozen
class Setting:
    """One setting of the installed torch, aliases resolved.

    Attributes:
        name: as the user wrote it, ``"dynamo.specialize_int"``.
        module: the configuration module that holds it.
        key: its name there, dots included.
    """

    name: str
    module: Any = attrs.field(repr=False)
    key: str

    @property
    def place(self) -> tuple[str, str]:
        """What tells settings apart, whatever their alias."""
        return self.module.__name__, self.key

    def read(self) -> Any:
        """The value in this context, the public way."""
        return functools.reduce(getattr, self.key.split("."), self.module)

    def write(self, value: Any) -> None:
        """Assign in this context, the public way."""
        *path, last = self.key.split(".")
        setattr(functools.reduce(getattr, path, self.module), last, value)

    @property
    def entry(self) -> Any:
        """Torch's entry, or None where this torch keeps none."""
        return getattr(self.module, "_config", {}).get(self.key)

    def override(self) -> Override:
        """What stands in for this setting's override; put there on first use."""
        from torch.utils._config_module import _UNSET_SENTINEL as unset

        return install(self.entry, unset)


def find(name: str) -> Setting | None:
    """The setting called ``name``, or None where the installed torch has none."""
    section, _, key = name.partition(".")
    try:
        module: Any = importlib.import_module(_MODULES[section])
    except ImportError:
        return None
    for _ in range(8):
        setting = Setting(name, module, key)
        alias = getattr(setting.entry, "alias", None)
        if alias is None:
            return setting if _exists(setting) else None
        path, _, key = alias.rpartition(".")
        module = importlib.import_module(path)
    return None


def _exists(setting: Setting) -> bool:
    try:
        setting.read()
    except AttributeError:
        return False
    return True


def limit_names(can: Capabilities) -> tuple[str, str, str]:
    """Recompile limit, accumulated limit and "fail on a hit", as this torch calls them."""
    if can.recompile_limit_names:
        return ("dynamo.recompile_limit", "dynamo.accumulated_recompile_limit", "dynamo.fail_on_recompile_limit_hit")
    return ("dynamo.cache_size_limit", "dynamo.accumulated_cache_size_limit", "dynamo.fail_on_cache_limit_hit")


@functools.cache
def known_names() -> frozenset[str]:
    """Names of the settings that torch 2.6 to 2.15 have, or some of them."""
    from importlib import resources

    text = resources.files(__package__).joinpath("known_settings.txt").read_text("utf-8")
    return frozenset(text.split())


def checked(name: str, value: Any, once: object) -> Setting | None:
    """The setting, ready to be written; None with a warning where this torch lacks it.

    Raises:
        SettingError: no torch has that name, or it takes no such value.
    """
    setting = find(name)
    if setting is None:
        if name not in known_names():
            raise SettingError(name, value, "No torch has such a setting", "settings", _near(name))
        warn(f"This torch has no {name}; the policy leaves it out.", SettingWarning, once=(name, once), stacklevel=5)
        return None
    problem = _problem(setting, value)
    if problem is not None:
        raise SettingError(name, value, problem, "settings", "Give it a value of its own type")
    if _forced(setting):
        warn(
            f"{name} is forced by an environment variable of torch's own, which beats every assignment.",
            SettingWarning,
            once=(name, once),
            stacklevel=5,
        )
        return None
    return setting


def _near(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, known_names(), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(near)}?".rstrip("?") if near else "Correct its name"


def _problem(setting: Setting, value: Any) -> str | None:
    held = getattr(setting.entry, "default", None) if setting.entry is not None else setting.read()
    if isinstance(held, (list, dict, set, tuple)):
        return "It holds a collection, which torch copies into each context"
    annotation = str(getattr(setting.entry, "value_type", ""))
    allowed = set(re.findall(r"\b(?:bool|int|float|str)\b", annotation))
    if held is not None:
        allowed.add(type(held).__name__)
    if "float" in allowed:
        allowed.add("int")
    words = "Literal" in annotation and isinstance(value, str)
    if repr(value) in annotation if words else not allowed or type(value).__name__ in allowed:
        return None
    return f"It takes {annotation if words else ' or '.join(sorted(allowed))}"


def _forced(setting: Setting) -> bool:
    from torch.utils._config_module import _UNSET_SENTINEL as unset

    return getattr(setting.entry, "env_value_force", unset) is not unset


# -- what torch remembers of its settings ------------------------------------------------------------


#: Per context since torch 2.12: whether its hash and its copy of all settings are outdated.
_REMEMBERED = {"_hash_dirty_var": True, "_get_dict_dirty_keys_var": None}


def touch(module: Any) -> None:
    """Settings of ``module`` changed for other contexts too: nothing remembered of them is used again.

    Without this a context would look inductor's caches up under the settings of before. A new
    variable says "outdated" in every context at once, and costs a compiled call nothing: torch
    writes these variables on each call of a function compiled with ``dynamic=False``.
    """
    if hasattr(module, "_is_dirty"):
        module._is_dirty = True
    for name, outdated in _REMEMBERED.items():
        if isinstance(getattr(module, name, None), ContextVar):
            setattr(module, name, ContextVar(name, default=outdated))
