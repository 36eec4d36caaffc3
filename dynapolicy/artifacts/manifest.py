"""The manifest: what a bundle of artifacts is for and what it holds, in fields that people can read."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from ..errors import ArtifactRefused

__all__ = ["FORMAT", "Manifest", "Part", "differences", "digest_of", "hashes_of"]

#: Raised when a reader of today could misread what is written.
FORMAT = 3

#: Bytes hashed at a time: large enough for little overhead, small enough for all cores to share a bundle.
CHUNK = 4 << 20


def canonical(value: Any) -> bytes:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def digest_of(value: Any) -> str:
    """sha256 of a JSON-ready value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def hashes_of(data: bytes | memoryview) -> tuple[str, ...]:
    """sha256 of each chunk. Chunks are hashed on several threads, because hashing lets others run."""
    view = memoryview(data)
    chunks = [view[at : at + CHUNK] for at in range(0, len(view), CHUNK)]
    if len(chunks) <= 1:
        return tuple(map(_sha256, chunks))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(_sha256, chunks))


def _sha256(chunk: memoryview) -> str:
    return hashlib.sha256(chunk).hexdigest()


@attrs.frozen
class Part:
    """One data file of a bundle.

    Attributes:
        kind: ``"blob"``, torch's own envelope, or ``"files"``, the rest of its cache folder.
        size: in bytes.
        sha256: of each 4 MiB.
    """

    kind: str
    size: int
    sha256: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, data: bytes) -> Part:
        """Describe ``data``."""
        return cls(kind, len(data), hashes_of(data))

    @property
    def file(self) -> str:
        """Its name. It follows from the content, so that a file once written never changes."""
        return f"{digest_of([self.kind, self.size, *self.sha256])[:32]}.{self.kind}"

    def check(self, data: bytes) -> None:
        """Hold ``data`` against size and hashes.

        Raises:
            ArtifactRefused: it is not what was saved.
        """
        if len(data) != self.size:
            raise ArtifactRefused(f"{self.file} has {len(data)} bytes, {self.size} were saved")
        if hashes_of(data) != self.sha256:
            raise ArtifactRefused(f"{self.file} is not what was saved: its sha256 differs")


@attrs.frozen(kw_only=True)
class Manifest:
    """What a bundle is for and what it holds.

    Attributes:
        fit: the fields that must match, each readable.
        saved: when, in seconds since 1970.
        entries: how many artifacts of each kind.
        traced: sha256 of each source file that was traced, by module.
        guards: guards that torch dropped, in precompile mode.
        toolchain: what the C++ compiler answered about itself.
        keys: what torch and Triton hashed of their own files.
        cpu: the instruction set that its C++ was compiled for; empty where it holds none.
    """

    name: str
    mode: str
    fit: dict[str, Any]
    parts: tuple[Part, ...]
    saved: float
    entries: dict[str, int] = attrs.Factory(dict)
    traced: dict[str, str] = attrs.Factory(dict)
    guards: tuple[dict[str, Any], ...] = ()
    toolchain: dict[str, Any] = attrs.Factory(dict)
    keys: dict[str, Any] = attrs.Factory(dict)
    cpu: str = ""
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(part.size for part in self.parts)

    def to_bytes(self, key: bytes | None) -> bytes:
        """JSON, with a hash of everything else, and an HMAC where there is a key."""
        body = attrs.asdict(self)
        body["sha256"] = digest_of(body)
        body["hmac"] = _sign(body, key) if key else ""
        return json.dumps(body, sort_keys=True, indent=1).encode("ascii") + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, key: bytes | None) -> Manifest:
        """Read what ``to_bytes`` wrote.

        Raises:
            ArtifactRefused: no manifest, damaged, of another format, or not signed with ``key``.
        """
        try:
            body = json.loads(data)
            signature = body.pop("hmac")
            if body["format"] != FORMAT:
                raise ArtifactRefused(f"the manifest has format {body['format']!r}, this version reads {FORMAT}")
            if key and not hmac.compare_digest(str(signature), _sign(body, key)):
                raise ArtifactRefused("the manifest is not signed with this ARTIFACT_KEY")
            if body.pop("sha256") != digest_of(body):
                raise ArtifactRefused("the manifest is damaged: its sha256 differs")
            return _checked(body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ArtifactRefused("the manifest is damaged") from None


def _sign(body: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, canonical(body), hashlib.sha256).hexdigest()


#: Fields that must be of one JSON type, so that nothing later meets another.
_TYPES: dict[str, Any] = {
    "name": str,
    "mode": str,
    "fit": dict,
    "parts": list,
    "saved": (int, float),
    "entries": dict,
    "traced": dict,
    "guards": list,
    "toolchain": dict,
    "keys": dict,
    "cpu": str,
}


def _checked(body: dict[str, Any]) -> Manifest:
    for name, kind in _TYPES.items():
        if not isinstance(body[name], kind) or isinstance(body[name], bool):
            raise TypeError
    parts = tuple(_part(one) for one in body.pop("parts"))
    guards = tuple(_guard(one) for one in body.pop("guards"))
    return Manifest(parts=parts, guards=guards, **body)


def _part(data: Mapping[str, Any]) -> Part:
    part = Part(data["kind"], data["size"], tuple(data["sha256"]))
    good = part.kind in ("blob", "files") and type(part.size) is int and part.size >= 0
    if not good or len(data) != 3 or not all(type(one) is str for one in part.sha256):
        raise TypeError
    return part


def _guard(data: Mapping[str, Any]) -> dict[str, Any]:
    texts = ("guard", "name", "scope", "object", "entry")
    good = all(type(data[one]) is str for one in texts) and type(data["rebindable"]) is bool
    if not good or len(data) != len(texts) + 1:
        raise TypeError
    return dict(data)


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The fields that differ, each as ``"field saved -> here"``."""
    names = [*here, *(name for name in saved if name not in here)]
    return [
        f"{name} {_shown(saved.get(name))} -> {_shown(here.get(name))}"
        for name in names
        if saved.get(name) != here.get(name)
    ]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else "nothing" if value is None else json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
