"""Declared buckets from a TOML file, or from an object named ``module:object``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..buckets import ShapeBuckets
from ..errors import BucketError, CeilingError, KnobError, TargetError
from ..policy import CompilePolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # needs no stubs: it has types of its own

__all__ = ["load_policy"]

_KNOBS = ("floor", "ceil", "eager_headroom")
_WAY_OUT = "See docs/testing.md for the format"


def load_policy(source: str) -> CompilePolicy:
    """The policy that a file or an object declares. The environment wins, as it does at run time.

    What goes over the ceiling is not refused here, whatever ``on_limit`` says, so that all of it can be shown.

    Args:
        source: a TOML file, or ``module:object``, where the object is a policy, buckets, or a
            function of no arguments that returns one of them.

    Raises:
        KnobError, BucketError, TargetError: something in it is not allowed; the message says where.
    """
    if ":" in source and not Path(source).exists():
        return _from_object(source)
    return _policy(*_from_file(Path(source)))


def _policy(buckets: Any, knobs: Mapping[str, Any]) -> CompilePolicy:
    try:
        return CompilePolicy.from_env(buckets, **knobs)
    except CeilingError:
        environ = {name: text for name, text in os.environ.items() if name != "DYNAPOLICY_ON_LIMIT"}
        return CompilePolicy.from_env(buckets, **{**knobs, "on_limit": "warn"}, environ=environ)


def _from_object(source: str) -> CompilePolicy:
    module, _, path = source.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        rule = f"It can't be imported: {error}"
        raise TargetError("plan", source, rule, "argument", 'Write it like "package.module:object"') from error
    if callable(found) and not isinstance(found, type) and not hasattr(found, "capture_buckets"):
        found = found()
    return found if isinstance(found, CompilePolicy) else _policy(found, {})


def _from_file(path: Path) -> tuple[dict[str, list[ShapeBuckets]], dict[str, Any]]:
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KnobError("plan", str(path), f"It is no readable TOML file: {error}", "argument", _WAY_OUT) from None
    _check_keys(data, ("target", *_KNOBS, "on_limit"), str(path))
    targets = data.pop("target", [])
    if not isinstance(targets, list) or not targets:
        raise BucketError("target", targets, "At least one [[target]] is needed", str(path), _WAY_OUT)
    buckets: dict[str, list[ShapeBuckets]] = {}
    for target in targets:
        where = f"{path}, target {target.get('name', '?')!r}"
        _check_keys(target, ("name", "buckets"), where)
        if not isinstance(target.get("name"), str):
            raise TargetError("name", target.get("name"), 'A target has a name, "module:qualname"', where, _WAY_OUT)
        found = [_bucket(one, where) for one in target.get("buckets", [])]
        if not found:
            raise BucketError("buckets", [], "A target has at least one bucket", where, _WAY_OUT)
        buckets.setdefault(target["name"], []).extend(found)
    return buckets, data


def _bucket(table: Any, where: str) -> ShapeBuckets:
    if not isinstance(table, dict):
        raise BucketError("buckets", table, "Each is a table of axes, or of shapes", where, _WAY_OUT)
    variants = table.get("variants", 1)
    axes = {name: sizes for name, sizes in table.items() if name not in ("variants", "shapes")}
    try:
        if "shapes" in table:
            _check_keys(table, ("shapes", "variants"), where)
            return ShapeBuckets.of(table["shapes"], variants=variants)
        return ShapeBuckets(variants=variants, **axes)
    except BucketError as error:
        raise BucketError(error.thing, error.value, error.rule, where, error.way_out) from None


def _check_keys(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in allowed:
            raise KnobError(name, table[name], f"Allowed here is {', '.join(allowed)}", where, _WAY_OUT)
