"""The envelope that torch's cache artifacts travel in: parsed, checked and written without torch.

Torch reads a blob with a reader that trusts every length in it: a truncated blob makes torch 2.7 loop
for ever, and a key such as ``../x`` is written outside the cache folder. Nothing here trusts a length
or a key.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import posixpath
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import attrs

from ..errors import ArtifactRefused

__all__ = ["FILES", "Entry", "Layout", "pack", "parse", "safe_key"]

#: Torch writes this number first, whatever the rest looks like.
_VERSION = 1
_WORD = 8
_CHECKSUM = 4
#: Longer keys are no file names.
_LONGEST_KEY = 4096


class Entry(NamedTuple):
    """One artifact: what kind it is, its key (a path below the cache folder), and its bytes."""

    kind: str
    key: str
    content: bytes | memoryview


@attrs.frozen
class Layout:
    """How one torch writes the envelope.

    Attributes:
        checksum: four bytes of crc32 come first.
        base64: texts are base64.
        grouped: kind and number of entries, then the entries; otherwise each entry names its kind
            by a number.
    """

    checksum: bool
    base64: bool
    grouped: bool


#: Plain files below a folder, in an envelope of our own.
FILES = Layout(checksum=False, base64=False, grouped=True)


def safe_key(key: str) -> bool:
    """Whether a key, taken as a path, stays below the folder it is joined to, on every system."""
    parts = key.split("/")
    return (
        0 < len(key) <= _LONGEST_KEY
        and key.isprintable()
        and "\\" not in key
        and not posixpath.isabs(key)
        and not (len(key) > 1 and key[1] == ":" and key[0].isalpha())
        and not any(part in ("", ".", "..") for part in parts)
    )


class _Reader:
    def __init__(self, data: bytes | memoryview, layout: Layout) -> None:
        self._data = memoryview(data)
        self._layout = layout
        self.at = _CHECKSUM if layout.checksum else 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise ArtifactRefused(f"the envelope ends at byte {len(self._data)}, in the middle of an entry")
        self.at += size
        return self._data[self.at - size : self.at]

    def word(self) -> int:
        return int.from_bytes(self.take(_WORD), "big")

    def text(self) -> str:
        raw = bytes(self.take(self.word()))
        try:
            return (base64.b64decode(raw, validate=True) if self._layout.base64 else raw).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            raise ArtifactRefused("the envelope holds a key that is no text") from None


def parse(data: bytes | memoryview, layout: Layout) -> list[Entry]:
    """Every entry of an envelope. Contents are views of ``data``.

    Raises:
        ArtifactRefused: truncated, of another layout, or with a key that leaves the cache folder.
    """
    reader = _Reader(data, layout)
    if reader.left < _WORD or reader.word() != _VERSION:
        raise ArtifactRefused("the envelope is not one that this torch writes")
    entries: list[Entry] = []
    while reader.left:
        entries += _group(reader) if layout.grouped else [_entry(reader, str(reader.word()))]
    for entry in entries:
        if not safe_key(entry.key):
            raise ArtifactRefused(f"the envelope holds the key {entry.key[:80]!r}, which is outside the cache folder")
    return entries


def _group(reader: _Reader) -> list[Entry]:
    kind, count = reader.text(), reader.word()
    # Every entry takes two words at least: a larger count is a lie, and not worth a loop.
    if count * 2 * _WORD > reader.left:
        raise ArtifactRefused(f"the envelope promises {count} entries and is too short for them")
    return [_entry(reader, kind) for _ in range(count)]


def _entry(reader: _Reader, kind: str) -> Entry:
    return Entry(kind, reader.text(), reader.take(reader.word()))


def pack(entries: Iterable[Entry], layout: Layout) -> bytes:
    """The envelope of ``entries``; ``parse`` is its inverse, up to the order of kinds."""
    parts = [_VERSION.to_bytes(_WORD, "big"), *_body(sorted(entries, key=lambda one: one[:2]), layout)]
    if not layout.checksum:
        return b"".join(parts)
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((checksum.to_bytes(_CHECKSUM, "big"), *parts))


def _body(entries: list[Entry], layout: Layout) -> Iterator[bytes | memoryview]:
    for kind, same in itertools.groupby(entries, key=lambda one: one.kind):
        group = list(same)
        if layout.grouped:
            yield _text(kind, layout) + len(group).to_bytes(_WORD, "big")
        for one in group:
            prefix = b"" if layout.grouped else int(kind).to_bytes(_WORD, "big")
            yield prefix + _text(one.key, layout) + len(one.content).to_bytes(_WORD, "big")
            yield one.content


def _text(text: str, layout: Layout) -> bytes:
    raw = text.encode("utf-8")
    raw = base64.b64encode(raw) if layout.base64 else raw
    return len(raw).to_bytes(_WORD, "big") + raw
