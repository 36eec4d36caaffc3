"""Whether a bundle that is there can be used here, and if not, why."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ..errors import ArtifactRefused
from ..torch_compat import artifacts as compat
from . import workdirs
from .bundling import Content, opened
from .fit import changed_sources
from .manifest import Manifest, differences
from .store import Bundle, Store

__all__ = ["check_fit", "check_usable", "usable", "why_missing"]


def check_fit(manifest: Manifest, fit: dict[str, Any]) -> None:
    """Hold every field against this process's.

    Raises:
        ArtifactRefused: names the fields that differ, with both values.
    """
    if differing := differences(manifest.fit, fit):
        raise ArtifactRefused("; ".join(differing))


def check_usable(manifest: Manifest, identity: str, state: Path) -> None:
    """What no field says: quarantine, the CPU of its C++, and the sources that were traced.

    Raises:
        ArtifactRefused: says which.
    """
    why = workdirs.quarantined(state, identity)
    if why is not None:
        raise ArtifactRefused(f"quarantined: {why}")
    if manifest.cpu and manifest.cpu != compat.cpu_instructions():
        raise ArtifactRefused(f"cpu {manifest.cpu} -> {compat.cpu_instructions()}")
    if changed := changed_sources(manifest.traced):
        raise ArtifactRefused(f"traced sources changed: {', '.join(changed)}")


def usable(store: Store, bundle: Bundle, state: Path) -> tuple[Content, Manifest | None]:
    """What is there to be added to. A bundle that can't be used is replaced instead."""
    with contextlib.suppress(FileNotFoundError, ArtifactRefused):
        found = store.load(bundle)
        check_usable(found.manifest, found.identity, state)
        return opened(found), found.manifest
    return Content(), None


def why_missing(store: Store, name: str, mode: str, fit: dict[str, Any]) -> str:
    """Why nothing fits: what differs from the newest bundle of this name."""
    others = []
    for one in store.bundles(name):
        with contextlib.suppress(OSError, ArtifactRefused):
            others.append(store.manifest(one)[0])
    if not others:
        return f"no artifacts of {name!r} in {store.root}"
    newest = max(others, key=lambda manifest: manifest.saved)
    if newest.mode != mode:
        return f"no artifacts: mode {newest.mode} -> {mode}"
    return f"no artifacts: {'; '.join(differences(newest.fit, fit))}"
