"""The files of a cache folder: gathered for a bundle, and put into a new folder."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .envelope import Entry

__all__ = ["gather", "unpack"]

#: Worth nothing to another process: locks, and files that are being written.
_SKIPPED_FOLDERS = ("locks", "tmp")
_SKIPPED_ENDS = (".lock", ".tmp")
#: Bytes from which several writers help; for small files they only wait for each other.
_LARGE = 1 << 20
#: Triton's lists of the files of a kernel, each named by its whole path. Elsewhere Triton would find none of them.
_LIST = "__grp__"
#: What a kernel was on the way to its binary, which is what runs; Triton needs none of it where the binary is there.
_BINARY = (".cubin", ".hsaco")
_ON_THE_WAY = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")


def gather(root: Path, skip: Sequence[str] = ()) -> list[Entry]:
    """Every file below ``root`` that a start needs, by its path there; so are the files that Triton's lists name.

    Args:
        skip: folders below ``root``, as paths, that are left out.
    """
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [
            one for one in folders if not one.startswith(_SKIPPED_FOLDERS) and (here / one).as_posix() not in skip
        ]
        compiled = any(name.endswith(_BINARY) for name in files)
        skipped = (*_SKIPPED_ENDS, *_ON_THE_WAY) if compiled else _SKIPPED_ENDS
        for name in files:
            path = Path(folder, name)
            if name.endswith(skipped) or path.is_symlink():
                continue
            # A file may be removed between being listed and being read.
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if name.startswith(_LIST):
                    content = _renamed(content, lambda listed: _below(listed, root), left_out=skipped)
                found.append(Entry("file", (here / name).as_posix(), content))
    return found


def unpack(entries: Iterable[Entry], root: Path) -> None:
    """Write every entry below ``root`` that is not there. Keys were checked when the envelope was parsed.

    Raises:
        OSError: a file can't be written, or something else is in its place.
    """
    files = [(f"{root}/{entry.key}", _here(entry, root)) for entry in entries]
    for folder in {path.rpartition("/")[0] for path, _ in files}:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in files:
        if len(file[1]) < _LARGE:
            _write(file)
    if large := [file for file in files if len(file[1]) >= _LARGE]:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(_write, large))


def _here(entry: Entry, root: Path) -> bytes | memoryview:
    if not entry.key.rpartition("/")[2].startswith(_LIST):
        return entry.content
    return _renamed(bytes(entry.content), lambda listed: str(root / listed))


def _below(path: str, root: Path) -> str:
    try:
        return Path(path).relative_to(root).as_posix()
    except ValueError:
        return path


def _renamed(content: bytes, name: Callable[[str], str], left_out: tuple[str, ...] = ()) -> bytes:
    """A list with every path in it named anew; what is no such list stays as it is.

    Args:
        left_out: ends of files that are named no more: since 3.8 Triton takes no list of which a file is missing.
    """
    try:
        listed = json.loads(content)
        kept = {file: path for file, path in listed["child_paths"].items() if not file.endswith(left_out)}
        listed["child_paths"] = {file: name(path) for file, path in kept.items()}
        return json.dumps(listed).encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        return content


def _write(file: tuple[str, bytes | memoryview]) -> None:
    """Never through a link, and never over a file that is there."""
    path, content = file
    try:
        with open(path, "xb", opener=_private) as opened:
            opened.write(content)
    except FileExistsError:
        # What autotuning found is in torch's blob too, and torch may be first.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o700)
