"""The files of a cache folder: gathered for a bundle, and put into a new folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .envelope import Entry

__all__ = ["gather", "unpack"]

#: Worth nothing to another process: locks, and files that are being written.
_SKIPPED_FOLDERS = ("locks", "tmp")
_SKIPPED_ENDS = (".lock", ".tmp")
#: Several writers help once the files are many or large.
_MANY_BYTES = 32 << 20


def gather(root: Path, skip: Sequence[str] = ()) -> list[Entry]:
    """Every file below ``root``, by its path there.

    Args:
        skip: folders below ``root``, as paths, that are left out.
    """
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [
            one for one in folders if not one.startswith(_SKIPPED_FOLDERS) and (here / one).as_posix() not in skip
        ]
        for name in files:
            path = Path(folder, name)
            if name.endswith(_SKIPPED_ENDS) or path.is_symlink():
                continue
            # A file may be removed between being listed and being read.
            with contextlib.suppress(OSError):
                found.append(Entry("file", (here / name).as_posix(), path.read_bytes()))
    return found


def unpack(entries: Iterable[Entry], root: Path) -> None:
    """Write every entry below ``root``. Keys were checked when the envelope was parsed.

    Raises:
        OSError: a file can't be written.
    """
    files = list(entries)
    for folder in {(root / entry.key).parent for entry in files}:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(entry: Entry) -> None:
        # Never through a link, and never over a file that is there.
        path = root / entry.key
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
            file.write(entry.content)

    if sum(len(entry.content) for entry in files) < _MANY_BYTES:
        for entry in files:
            write(entry)
        return
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, files))
