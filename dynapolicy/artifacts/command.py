"""``artifacts``: what is kept, whether it is whole, and what can go."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import filelock

from ..commands.output import complain, print_json, print_table
from ..errors import ArtifactError, ArtifactRefused
from . import workdirs
from .envelope import FILES, parse
from .start import open_store
from .store import Bundle, Store

__all__ = ["add_arguments", "run"]

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``artifacts`` takes."""
    parser.add_argument("action", choices=("ls", "verify", "prune"), help="list, check every byte, or remove")
    parser.add_argument("name", nargs="?", help="only bundles of this name")
    parser.add_argument("--dir", help="where they are kept; DYNAPOLICY_ARTIFACT_DIR wins")
    parser.add_argument("--prefix", default="DYNAPOLICY_", help="what the variables' names begin with")
    parser.add_argument("--older-than", help="prune what was saved longer ago: 12h, 30d, 4w")
    parser.add_argument("--max-size", help="prune the oldest until the rest has at most this size: 500M, 20G")


def run(arguments: argparse.Namespace) -> int:
    """Do it: 0 fine, 1 something is damaged or could not be removed.

    Raises:
        ArtifactError: an age or size that is none, or ``prune`` without a limit: exit status 2.
    """
    store = open_store(arguments.dir, prefix=arguments.prefix)
    if arguments.action == "prune":
        return _prune(store, arguments)
    records = [_record(store, one, whole=arguments.action == "verify") for one in store.bundles(arguments.name)]
    _show(records, ["bundle", "state", "torch", "gpu", "mode", "entries", "bytes", "saved", "why"], arguments)
    return int(any(one["state"] == "refused" for one in records))


def _show(records: list[dict[str, Any]], columns: list[str], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(records)
    elif records:
        print_table(columns, [[_text(name, one[name]) for name in columns] for one in records])
    else:
        complain("no artifacts")


def _text(name: str, value: Any) -> str:
    if name == "saved" and value:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    return "" if value is None else str(value)


def _record(store: Store, bundle: Bundle, *, whole: bool) -> dict[str, Any]:
    """A bundle as the command shows it; ``whole`` checks every byte, not only the manifest."""
    record: dict[str, Any] = {
        "bundle": bundle.id,
        "state": "kept",
        "torch": None,
        "gpu": None,
        "mode": None,
        "entries": None,
        "bytes": None,
        "saved": None,
        "why": None,
    }
    try:
        manifest, identity = store.manifest(bundle)
        record |= {"torch": manifest.fit.get("torch"), "gpu": manifest.fit.get("gpu"), "mode": manifest.mode}
        record |= {"entries": sum(manifest.entries.values()), "bytes": manifest.size, "saved": manifest.saved}
        if whole:
            parts = store.load(bundle).parts
            if "files" in parts:
                parse(parts["files"], FILES)
            record["state"] = "whole"
        why = workdirs.quarantined(store.root, identity)
        if why is not None:
            record |= {"state": "quarantined", "why": why}
    except (ArtifactRefused, OSError) as error:
        record |= {"state": "refused", "why": str(error)}
    return record


# -- prune ---------------------------------------------------------------------------------------------


def _amount(option: str, text: str | None, units: dict[str, int]) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]?)b?", text.strip().lower())
    if found is None or found[2] not in units:
        rule = f"It is a number with one of {', '.join(filter(None, units))}"
        raise ArtifactError(option, text, rule, "argument", f"Write it like 30{list(units)[-2].upper()}")
    return float(found[1]) * units[found[2]]


def _prune(store: Store, arguments: argparse.Namespace) -> int:
    age = _amount("--older-than", arguments.older_than, _AGES)
    size = _amount("--max-size", arguments.max_size, _SIZES)
    if age is None and size is None:
        rule = "prune needs a limit"
        raise ArtifactError("prune", None, rule, "argument", "Pass --older-than or --max-size")
    records = []
    failed = False
    for bundle in _doomed(store.bundles(arguments.name), age, size):
        why = _remove(store, bundle)
        failed |= why not in (None, "in use")
        records.append({"bundle": bundle.id, "state": "kept" if why else "removed", "why": why})
    with contextlib.suppress(OSError, filelock.Timeout):
        workdirs.sweep(store.root)
    _show(records, ["bundle", "state", "why"], arguments)
    return int(failed)


def _doomed(bundles: list[Bundle], age: float | None, size: float | None) -> list[Bundle]:
    """What is too old, and then the oldest until the rest is small enough."""
    dated = sorted(((_saved(one.folder), _size(one.folder), one) for one in bundles), key=lambda row: row[0])
    left = sum(row[1] for row in dated)
    doomed = []
    for saved, bytes_, bundle in dated:
        if (age is not None and time.time() - saved > age) or (size is not None and left > size):
            doomed.append(bundle)
            left -= bytes_
    return doomed


def _saved(folder: Path) -> float:
    # The manifest's own word for it could be a lie; this is also there when it is damaged.
    return (folder / "manifest.json").stat().st_mtime


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _remove(store: Store, bundle: Bundle) -> str | None:
    """Remove a bundle that nobody writes or uses; else say why not."""
    try:
        with store.writing(bundle, patience=0):
            if bundle.id in workdirs.in_use(store.root):
                return "in use"
            store.remove(bundle)
    except filelock.Timeout:
        return "in use"
    except OSError as error:
        return str(error)
    return None if not bundle.folder.exists() else "it can't be removed"
