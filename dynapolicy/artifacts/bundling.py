"""From what a process compiled to a bundle, and back."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from ..errors import ArtifactRefused
from ..torch_compat import artifacts as compat
from .cachefiles import gather, unpack
from .envelope import FILES, Entry, pack, parse
from .manifest import Manifest, Part
from .store import Loaded

__all__ = ["Content", "collect", "manifest_of", "merged", "opened", "put"]

#: Folders that torch's own blob brings back.
_IN_BLOB = ("inductor/fxgraph", "inductor/aotautograd", "inductor/dynamo")


#: Kinds of graphs, by their names and by the numbers that torch 2.7 gives them.
_SEVERAL = frozenset({"inductor", "aot_autograd", "0", "2"})


@attrs.frozen
class Content:
    """What a bundle holds: torch's own artifacts, and the other files of its cache folder."""

    artifacts: tuple[Entry, ...] = ()
    files: tuple[Entry, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing was compiled."""
        return not self.artifacts and not any("/fxgraph/" in one.key for one in self.files)

    def same_as(self, other: Content) -> bool:
        """Whether both hold the same entries."""
        return {*map(_place, self.artifacts)} == {*map(_place, other.artifacts)} and (
            {*map(_place, self.files)} == {*map(_place, other.files)}
        )

    def counted(self) -> dict[str, int]:
        """How many artifacts of each kind."""
        counts = Counter(f"kind {one.kind}" if one.kind.isdigit() else one.kind for one in self.artifacts)
        return {**dict(sorted(counts.items())), "files": len(self.files)}

    @property
    def cpu_code(self) -> bool:
        """Whether it holds C++ that was compiled for this CPU."""
        return any(one.key.startswith("inductor/") and one.key.endswith(".so") for one in self.files)


def _place(entry: Entry) -> tuple[str, str, bytes]:
    return entry.kind, entry.key, hashlib.sha256(entry.content).digest()


def collect(folder: Path) -> Content:
    """What this process compiled, or took from its cache folder, so far."""
    layout = compat.layout()
    with compat.no_compile():
        blob = compat.save_blob() if layout is not None else None
        files = gather(folder, skip=_IN_BLOB if layout is not None else ())
    artifacts = parse(blob, layout) if blob is not None and layout is not None else []
    return Content(tuple(artifacts), tuple(files))


def opened(loaded: Loaded) -> Content:
    """The entries of a bundle, every key checked.

    Raises:
        ArtifactRefused: the envelope is not one that this torch writes, or a key leaves the folder.
    """
    layout = compat.layout()
    blob, files = loaded.parts.get("blob"), loaded.parts.get("files")
    if blob is not None and layout is None:
        raise ArtifactRefused("it holds torch's own artifacts, which this torch can't read")
    artifacts = parse(blob, layout) if blob is not None and layout is not None else []
    return Content(tuple(artifacts), tuple(parse(files, FILES)) if files is not None else ())


def put(loaded: Loaded, content: Content, folder: Path) -> None:
    """Bring a checked bundle into this process's cache folder.

    Raises:
        ArtifactRefused: torch can't read its own artifacts, or a file can't be written.
    """
    try:
        # Both are mostly waiting for the disk. Leaving the block waits for the files, whatever torch says.
        with ThreadPoolExecutor(1) as pool:
            files = pool.submit(unpack, content.files, folder)
            blob = loaded.parts.get("blob")
            if blob is not None and not compat.load_blob(blob):
                raise ArtifactRefused("torch can't read the artifacts")
            files.result()
    except ArtifactRefused:
        raise
    except Exception as error:
        # A start goes on cold, whatever torch or the disk has against the artifact.
        raise ArtifactRefused(f"loading failed: {type(error).__name__}: {error}") from error


def merged(
    there: Content, mine: Content, loaded_keys: frozenset[tuple[str, str]], newer: frozenset[str] = frozenset()
) -> Content:
    """Both, so that a run which used a part of a bundle never narrows it.

    The key of a graph can stand for several that differ in their guards. What was compiled under a key
    that was loaded is such another graph; otherwise two processes compiled the same, and one is kept.
    All other kinds have one content per key, which says when it was made and so always differs.

    Args:
        loaded_keys: kind and key of what this process loaded.
        newer: kinds of which torch keeps one content per key: the newest holds what the others hold.
    """
    replaced = {(one.kind, one.key) for one in mine.artifacts if one.kind in newer}
    artifacts = {_place(one): one for one in there.artifacts if (one.kind, one.key) not in replaced}
    known = {key[:2] for key in artifacts}
    for one in mine.artifacts:
        if (one.kind, one.key) not in known or (one.kind in _SEVERAL and (one.kind, one.key) in loaded_keys):
            artifacts.setdefault(_place(one), one)
    files = {one.key: one for one in (*mine.files, *there.files)}
    return Content(tuple(artifacts.values()), tuple(files.values()))


def manifest_of(content: Content, **fields: Any) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a bundle with that content, and its data files by kind."""
    layout = compat.layout()
    parts = {"files": pack(content.files, FILES)}
    if layout is not None and content.artifacts:
        parts["blob"] = pack(content.artifacts, layout)
    cpu = compat.cpu_instructions() if content.cpu_code else ""
    return (
        Manifest(
            parts=tuple(Part.of(kind, data) for kind, data in sorted(parts.items())),
            saved=time.time(),
            entries=content.counted(),
            cpu=cpu,
            **fields,
        ),
        parts,
    )
