"""Who could have written a file? Artifacts are code, so this is asked before a byte of one is used."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import ArtifactRefused

__all__ = ["check_folder", "is_noexec", "is_world_writable", "is_writable", "make_private", "read"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: Windows has neither owners nor modes in this sense; its access lists are the operator's.
_POSIX = hasattr(os, "geteuid")


def check_folder(folder: Path, root: Path) -> None:
    """Only this user and root can have written in ``folder`` and in every folder above it.

    Folders above ``root`` may be links, since many systems have some; below it a link is refused.

    Raises:
        ArtifactRefused: names the folder, and what is wrong with it.
    """
    try:
        for one in _chain(folder):
            _check_one(one, os.lstat(one), link_allowed=one in root.parents)
        for one in _chain(Path(os.path.realpath(folder))):
            _check_one(one, os.lstat(one), link_allowed=False)
    except OSError as error:
        raise ArtifactRefused(f"{error.filename or folder} can't be looked at: {error.strerror}") from None


def _chain(folder: Path) -> Iterator[Path]:
    absolute = Path(os.path.abspath(folder))  # noqa: PTH100 - it must not follow links
    yield from reversed((absolute, *absolute.parents))


def _check_one(path: Path, found: os.stat_result, *, link_allowed: bool) -> None:
    if stat.S_ISLNK(found.st_mode):
        if not link_allowed:
            raise ArtifactRefused(f"{path} is a symbolic link")
        _check_owner(path, found)
        return
    if not stat.S_ISDIR(found.st_mode):
        raise ArtifactRefused(f"{path} is no folder")
    _check_owner(path, found)
    # In a sticky folder, such as /tmp, others can add names but not replace ours.
    if _POSIX and found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise ArtifactRefused(f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w it")


def _check_owner(path: Path, found: os.stat_result) -> None:
    if _POSIX and found.st_uid not in (0, os.geteuid()):
        raise ArtifactRefused(f"{path} belongs to user {found.st_uid}, not to this one or root")


def read(path: Path, most: int) -> bytes:
    """The bytes of a regular file that only this user and root can have written.

    Args:
        most: the largest size that is accepted, in bytes.

    Raises:
        FileNotFoundError: it is not there.
        ArtifactRefused: a link, a special file, another owner, loose modes, or larger than ``most``.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else f"can't be opened: {error.strerror}"
        raise ArtifactRefused(f"{path} {what}") from None
    with os.fdopen(handle, "rb") as file:
        # What is open is what is checked: a name could be given to another file in between.
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactRefused(f"{path} is no regular file")
        _check_owner(path, found)
        if _POSIX and found.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(found.st_mode)
            raise ArtifactRefused(f"{path} can be written by others (mode {mode:o}): chmod go-w it")
        if found.st_size > most:
            raise ArtifactRefused(f"{path} has {found.st_size} bytes, {most} were expected")
        try:
            return file.read(most + 1)
        except OSError as error:
            raise ArtifactRefused(f"{path} can't be read: {error.strerror}") from None


def make_private(folder: Path) -> None:
    """Make a folder and what is missing above it, each for this user alone, whatever the umask.

    Raises:
        OSError: it can't be made.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def is_writable(folder: Path) -> bool:
    """Whether new files can be made in ``folder``; it is made where it is missing."""
    try:
        make_private(folder)
        probe = folder / f".probe-{os.getpid()}-{os.urandom(4).hex()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError:
        return False
    return True


def is_noexec(folder: Path) -> bool:
    """Whether compiled code can't be loaded from ``folder``."""
    flag = getattr(os, "ST_NOEXEC", 0)
    try:
        return bool(flag and os.statvfs(folder).f_flag & flag)
    except OSError:
        return False


def is_world_writable(folder: Path) -> bool:
    """Whether everybody can write in ``folder``."""
    try:
        return _POSIX and bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
