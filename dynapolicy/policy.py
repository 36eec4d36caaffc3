"""The policy: declared buckets and knobs in, recompile limits out. Pure and frozen."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import attrs

from .asked import SettingValue, check_settings
from .declare import Declaration, collect
from .derivation import Derivation, RecompileLimits
from .errors import CeilingError, CeilingWarning, KnobError, SettingError, warn
from .knob_table import Value, rows_of
from .knobs import KnobValue, from_records, read_knobs, settle_bounds
from .targets import Target, resolve

__all__ = ["CompilePolicy"]


@attrs.frozen(init=False, repr=False)
class CompilePolicy:
    """What a program wants of torch.compile. Arguments as given, no environment: see ``from_env``.

    Args:
        buckets: targets and their buckets, or an object with ``capture_buckets()``, or several of those.
        floor: the least recompile limit, in entries.
        ceil: the largest recompile limit, in entries.
        eager_headroom: entries kept free for shapes that nobody declared.
        on_limit: ``"warn"``, or ``"raise"`` to make a hit limit an error.
        float32_matmul_precision: ``"highest"``, ``"high"``, ``"medium"``; None leaves torch alone.
        settings: other configuration, such as ``{"dynamo.specialize_int": False}``; int, bool or str.

    Raises:
        KnobError: a knob's value is not allowed.
        BucketError, TargetError, SettingError: a declaration is not allowed.
        CeilingError: more entries than ``ceil`` and ``on_limit="raise"``.
    """

    declarations: tuple[Declaration, ...]
    settings: tuple[tuple[str, SettingValue], ...]
    _values: tuple[KnobValue, ...]

    def __init__(
        self,
        buckets: Any = None,
        *,
        floor: int | None = None,
        ceil: int | None = None,
        eager_headroom: int | None = None,
        on_limit: str | None = None,
        float32_matmul_precision: str | None = None,
        settings: Mapping[str, SettingValue] | None = None,
    ) -> None:
        arguments = _arguments(floor, ceil, eager_headroom, on_limit, float32_matmul_precision)
        self._fill(buckets, settings, read_knobs({}, arguments, "DYNAPOLICY_", rows_of("policy")))

    @classmethod
    def from_env(
        cls,
        buckets: Any = None,
        *,
        floor: int | None = None,
        ceil: int | None = None,
        eager_headroom: int | None = None,
        on_limit: str | None = None,
        float32_matmul_precision: str | None = None,
        settings: Mapping[str, SettingValue] | None = None,
        prefix: str = "DYNAPOLICY_",
        environ: Mapping[str, str] | None = None,
    ) -> CompilePolicy:
        """Like the constructor, but the environment wins over arguments. Numbers are clamped.

        Args:
            prefix: what the variables' names begin with.
            environ: the environment; ``os.environ`` where not given.

        Raises:
            KnobError: one error for all variables and arguments that are not allowed.
        """
        arguments = _arguments(floor, ceil, eager_headroom, on_limit, float32_matmul_precision)
        values = read_knobs(os.environ if environ is None else environ, arguments, prefix, rows_of("policy"))
        policy = cls.__new__(cls)
        policy._fill(buckets, settings, values)  # noqa: SLF001 - it is this very class
        return policy

    def _fill(self, buckets: Any, settings: Mapping[str, Any] | None, values: dict[str, KnobValue]) -> None:
        values = settle_bounds(values)
        checked = check_settings(settings or {})
        if values["on_limit"].value == "raise" and dict(checked).get("dynamo.suppress_errors"):
            raise SettingError(
                "dynamo.suppress_errors",
                True,
                'It would swallow the error that on_limit="raise" asks for',
                "settings",
                'Drop it, or use on_limit="warn"',
            )
        self.__attrs_init__(collect(buckets), checked, tuple(values.values()))
        self._check_ceiling()

    def _check_ceiling(self) -> None:
        for name, entries in self._derivation.over_ceiling():
            rule = f"CEIL allows {self.ceil} of the {entries} declared entries, {entries - self.ceil} would run eager"
            variable = self._record("ceil").variable
            way_out = f"Raise {variable}, or declare fewer shapes"
            if self.on_limit == "raise":
                raise CeilingError(name, entries, rule, self._record("ceil").source, way_out)
            warn(f"{name}: {rule}. {way_out}.", CeilingWarning, stacklevel=4)

    # -- knobs ---------------------------------------------------------------------------------

    def _record(self, name: str) -> KnobValue:
        return next(record for record in self._values if record.name == name)

    def _number(self, name: str) -> int:
        value = self._record(name).value
        return int(value) if value is not None else 0

    @property
    def knobs(self) -> tuple[KnobValue, ...]:
        """Every knob: its value, and where it came from."""
        return self._values

    @property
    def floor(self) -> int:
        """The least recompile limit, in entries."""
        return self._number("floor")

    @property
    def ceil(self) -> int:
        """The largest recompile limit, in entries."""
        return self._number("ceil")

    @property
    def eager_headroom(self) -> int:
        """Entries kept free for undeclared shapes."""
        return self._number("eager_headroom")

    @property
    def on_limit(self) -> str:
        """``"warn"`` or ``"raise"``."""
        return str(self._record("on_limit").value)

    @property
    def float32_matmul_precision(self) -> str | None:
        """``"highest"``, ``"high"``, ``"medium"``, or None."""
        value = self._record("float32_matmul_precision").value
        return None if value is None else str(value)

    @property
    def disabled(self) -> bool:
        """The operator's way out: applying this policy does nothing."""
        return self._record("disable").value == "1"

    # -- derivation ----------------------------------------------------------------------------

    @property
    def _derivation(self) -> Derivation:
        return Derivation(self.declarations, self.floor, self.ceil, self.eager_headroom)

    @property
    def limits(self) -> RecompileLimits:
        """The process's limits: those of the code object that needs most, FLOOR where none is declared."""
        return self._derivation.limits()

    def declaration(self, target: Any) -> Declaration | None:
        """What was declared for a target, or None."""
        wanted = target if isinstance(target, Target) else resolve(target)
        return next((one for one in self.declarations if one.matches(wanted)), None)

    def limits_for(self, target: Any) -> RecompileLimits:
        """The limits of one code object; the process's where it was not declared.

        Targets that share torch's own code object need the sum of what all of them declared.
        """
        found = self.declaration(target)
        return self.limits if found is None else self._derivation.limits_with(found)

    def own_limit(self, target: Any) -> int:
        """The limit of one target alone, in entries: its budget where torch isolates it."""
        found = self.declaration(target)
        limits = self.limits if found is None else self._derivation.limits_of(found.entries)
        return limits.recompile_limit

    def compile_kwargs(self, target: Any, isolate: bool = False) -> dict[str, Any]:
        """Keywords for ``torch.compile(target, ...)`` that the installed torch takes.

        ``{}`` for an undeclared target, and before torch 2.12, which has no such keyword: there the
        process's limit holds. ``isolate=True`` gives each wrapper a budget of its own since torch
        2.13; where torch can't isolate it passes no keyword.
        """
        if self.disabled or self.declaration(target) is None:
            return {}
        from .torch_compat import capabilities  # the one place that may need torch

        can = capabilities()
        if isolate:
            if not can.isolate_recompiles:
                return {}
            return {"recompile_limit": self.own_limit(target), "isolate_recompiles": True}
        return {"recompile_limit": self.limits_for(target).recompile_limit} if can.recompile_limit_keyword else {}

    # -- out and in ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        limit = self.limits.recompile_limit
        return f"<CompilePolicy: {len(self.declarations)} targets, recompile_limit {limit}, on_limit {self.on_limit!r}>"

    def to_json(self) -> str:
        """Everything the policy holds, as JSON text; ``from_json`` is its inverse."""
        return json.dumps(
            {
                "declarations": [one.to_json() for one in self.declarations],
                "settings": dict(self.settings),
                "knobs": [attrs.asdict(record) for record in self._values],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> CompilePolicy:
        """Read what ``to_json`` wrote.

        Raises:
            KnobError: the text holds no policy.
        """
        try:
            data = json.loads(text)
            declarations = tuple(Declaration.from_json(one) for one in data["declarations"])
            values = from_records(data["knobs"], rows_of("policy"))
            settings = check_settings(dict(data["settings"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"It is no policy in JSON: {error}"
            raise KnobError("from_json", text, rule, "argument", "Pass what to_json() gave") from None
        policy = cls.__new__(cls)
        policy.__attrs_init__(declarations, settings, values)
        return policy


def _arguments(
    floor: Value, ceil: Value, eager_headroom: Value, on_limit: Value, float32_matmul_precision: Value
) -> dict[str, Value]:
    return {
        "floor": floor,
        "ceil": ceil,
        "eager_headroom": eager_headroom,
        "on_limit": on_limit,
        "float32_matmul_precision": float32_matmul_precision,
    }
