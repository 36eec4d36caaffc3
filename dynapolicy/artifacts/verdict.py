"""What a start turned out to be, told from torch's counters alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs

from ..torch_compat.artifacts import CacheCounts

if TYPE_CHECKING:
    from .manifest import Manifest
    from .precompiled import NoPrecompile

__all__ = ["Verdict", "WarmStartRecord", "judge", "recorded"]

Verdict = Literal["warm", "partial", "cold", "refused", "loaded"]


@attrs.frozen(kw_only=True)
class WarmStartRecord:
    """How a start went, JSON-ready through ``attrs.asdict``.

    Attributes:
        verdict: ``"warm"``: everything came from artifacts. ``"partial"``: some of it. ``"cold"``:
            nothing. ``"refused"``: nothing, because the artifacts that are there were not used.
            ``"loaded"``: artifacts are there, and nothing asked for a graph yet.
        reason: why, in words; empty where everything came from artifacts.
        graphs: graphs that were asked for so far.
        from_artifacts: of these, what was not compiled.
        compiled: of these, what was.
        kernels_compiled: C++ kernels that the compiler built in spite of artifacts.
        entries: artifacts in the bundle that was loaded.
        bytes: of the bundle that was loaded.
        load_seconds: for reading, checking, hashing and loading.
        seconds: from the start to the first good batch, or until now.
    """

    name: str
    mode: str
    verdict: Verdict
    reason: str
    graphs: int
    from_artifacts: int
    compiled: int
    kernels_compiled: int
    entries: int
    bytes: int
    load_seconds: float
    seconds: float

    def __str__(self) -> str:
        if self.verdict in ("warm", "partial"):
            said = f"{self.from_artifacts} of {self.graphs} graphs from artifacts, {self.compiled} compiled"
            return f"{self.verdict}: {said}, {self.seconds:.1f} s" + (f": {self.reason}" if self.reason else "")
        compiled = f", {self.compiled} compiled" if self.compiled else ""
        return f"{self.verdict}: {self.reason}{compiled}"


def judge(
    counted: CacheCounts, *, loaded: bool, refused: str, missing: str, packaged: int, kernels: int
) -> tuple[Verdict, str, int, int]:
    """Verdict, reason, graphs from artifacts and graphs compiled.

    Args:
        refused: why the artifacts were not used; empty where they were, or where there are none.
        missing: why there are none.
        packaged: graphs in the packages that torch took whole, in precompile mode.
        kernels: C++ kernels built since the start.
    """
    compiled = counted.misses + counted.bypassed
    if not loaded:
        return ("refused" if refused else "cold"), refused or missing, 0, compiled
    hits = counted.hits + packaged
    if not hits and not compiled:
        return "loaded", "no graph was asked for yet", 0, 0
    if not hits:
        return "cold", "artifacts are loaded, and nothing that was asked for is in them", 0, compiled
    reasons = [f"{counted.misses} graphs were not in the artifacts"] if counted.misses else []
    reasons += [f"{counted.bypassed} graphs can't be cached"] if counted.bypassed else []
    reasons += [f"the C++ compiler ran for {kernels} kernels"] if kernels else []
    return ("partial" if reasons else "warm"), ", ".join(reasons), hits, compiled


def recorded(
    counted: CacheCounts,
    manifest: Manifest | None,
    *,
    refused: str,
    missing: str,
    precompile: NoPrecompile,
    new_kernels: int,
    load_seconds: float,
    seconds: float,
    **fields: Any,
) -> WarmStartRecord:
    """The record of a start, from what torch counted since it began.

    Args:
        manifest: of the artifacts that were loaded.
        new_kernels: C++ kernels built since the start; nobody expects none where nothing was loaded.
    """
    kernels = new_kernels if manifest else 0
    packaged = precompile.graphs(counted)
    verdict, reason, hits, compiled = judge(
        counted, loaded=manifest is not None, refused=refused, missing=missing, packaged=packaged, kernels=kernels
    )
    return WarmStartRecord(
        verdict=verdict,
        reason=", ".join(filter(None, (reason, precompile.note))),
        graphs=hits + compiled,
        from_artifacts=hits,
        compiled=compiled,
        kernels_compiled=kernels,
        entries=sum(manifest.entries.values()) if manifest else 0,
        bytes=manifest.size if manifest else 0,
        load_seconds=round(load_seconds, 3),
        seconds=round(seconds, 3),
        **fields,
    )
