"""Where bundles of artifacts lie, and how one is saved and loaded so that nobody ever sees half of one.

A bundle is a folder ``<root>/<name>/<digest>`` with a manifest and data files that are named after
their content. A save writes data files first and the manifest last, each under a temporary name that
is flushed and renamed; what the manifest names is there, whenever the power goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import attrs
import filelock

from ..errors import ArtifactError, ArtifactRefused
from . import trust
from .manifest import Manifest, Part, digest_of

__all__ = ["Bundle", "Loaded", "Store", "bundle_id", "write_json"]

MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 64 << 20
#: Seconds to wait for another writer of the same bundle before the save is given up.
_PATIENCE = 60.0
#: A reader meets a vanished data file when a writer replaced the bundle meanwhile; then it reads anew.
_TRIES = 8
_DIGEST = 16
_LONGEST_NAME = 200


def step(name: str) -> None:
    """Called between the steps of a save, by their names; a test kills the process there."""


@attrs.frozen
class Loaded:
    """A bundle whose every byte was checked."""

    manifest: Manifest
    identity: str
    parts: dict[str, bytes]


@attrs.frozen
class Bundle:
    """A bundle in the store, not looked into yet.

    Attributes:
        name: as it was given to ``warm_start``.
        folder: where it lies.
    """

    name: str
    folder: Path

    @property
    def id(self) -> str:
        """``name/digest``: how messages and the command line call it."""
        return f"{self.name}/{self.folder.name}"


def bundle_id(fit: dict[str, object], mode: str) -> str:
    """The folder name of what fits: the same for equal fields and mode."""
    return digest_of([fit, mode])[:_DIGEST]


class Store:
    """Bundles below one root folder.

    Args:
        root: the folder; made on the first save.
        key: signs and checks manifests, where given.
    """

    def __init__(self, root: Path, key: bytes | None = None) -> None:
        self.root = root
        self._key = key

    def bundle(self, name: str, digest: str) -> Bundle:
        """The bundle of that name and digest, whether it is there or not.

        Raises:
            ArtifactError: no name that a folder could have.
        """
        quoted = quote(name, safe=" +@=,")
        quoted = f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
        if not name.strip() or len(quoted) > _LONGEST_NAME:
            rule = f"A name has 1 to {_LONGEST_NAME} characters"
            raise ArtifactError("warm_start", name, rule, "argument", "Name it after the model")
        return Bundle(name, self.root / "bundles" / quoted / digest)

    def bundles(self, name: str | None = None) -> list[Bundle]:
        """Every bundle in the store, or those of one name."""
        found = []
        top = self.root / "bundles" if name is None else self.bundle(name, "x").folder.parent
        pattern = f"*/*/{MANIFEST}" if name is None else f"*/{MANIFEST}"
        with contextlib.suppress(OSError):
            found = sorted(path.parent for path in top.glob(pattern))
        return [Bundle(unquote(folder.parent.name), folder) for folder in found]

    # -- reading ---------------------------------------------------------------------------------

    def manifest(self, bundle: Bundle) -> tuple[Manifest, str]:
        """The checked manifest of a bundle, and what tells this save of it from others.

        Raises:
            FileNotFoundError: no such bundle.
            ArtifactRefused: not to be trusted, or damaged.
        """
        if not os.path.lexists(bundle.folder / MANIFEST):
            raise FileNotFoundError(bundle.folder)
        trust.check_folder(bundle.folder, self.root)
        data = trust.read(bundle.folder / MANIFEST, _LARGEST_MANIFEST)
        manifest = Manifest.from_bytes(data, self._key)
        # A bundle that was copied under another's name fits nothing.
        if bundle_id(manifest.fit, manifest.mode) != bundle.folder.name or manifest.name != bundle.name:
            raise ArtifactRefused("the manifest belongs to another bundle")
        return manifest, digest_of(data.decode("ascii", "replace"))

    def load(self, bundle: Bundle) -> Loaded:
        """The whole bundle, every byte checked. Needs no lock: files never change under their names.

        Raises:
            FileNotFoundError: no such bundle.
            ArtifactRefused: not to be trusted, or damaged.
        """
        for _ in range(_TRIES):
            manifest, identity = self.manifest(bundle)
            try:
                parts = {part.kind: trust.read(bundle.folder / part.file, part.size) for part in manifest.parts}
            except FileNotFoundError:
                time.sleep(0.01)
                continue
            for part in manifest.parts:
                part.check(parts[part.kind])
            return Loaded(manifest, identity, parts)
        raise ArtifactRefused("a data file that the manifest names is missing")

    # -- writing ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, bundle: Bundle, patience: float = _PATIENCE) -> Iterator[None]:
        """Be the one writer of a bundle. The lock is the system's: a dead writer doesn't hold it.

        Raises:
            filelock.Timeout: another process wrote for ``patience`` seconds.
            OSError: the folder can't be made or locked.
        """
        trust.make_private(bundle.folder.parent)
        # The lock lies beside the folder, so that removing a bundle doesn't remove its lock.
        with filelock.FileLock(f"{bundle.folder}.lock", timeout=patience):
            yield

    def save(self, bundle: Bundle, make: Callable[[], tuple[Manifest, dict[str, bytes]] | None]) -> Manifest | None:
        """Write what ``make`` gives, called while this process is the one writer; None writes nothing.

        Raises:
            OSError, filelock.Timeout: nothing was saved, what was there is still whole.
            ArtifactRefused: a folder above can be written by others.
        """
        with self.writing(bundle):
            made = make()
            if made is None:
                return None
            manifest, parts = made
            trust.make_private(bundle.folder)
            trust.check_folder(bundle.folder, self.root)
            try:
                for part in manifest.parts:
                    if not self._is_there(bundle, part):
                        write_file(bundle.folder / part.file, parts[part.kind])
                    step(f"{part.kind} written")
                _flush_folder(bundle.folder)
                step("folder flushed")
                write_file(bundle.folder / MANIFEST, manifest.to_bytes(self._key))
                _flush_folder(bundle.folder)
                step("manifest written")
            finally:
                self._clean(bundle)
            return manifest

    def _is_there(self, bundle: Bundle, part: Part) -> bool:
        try:
            part.check(trust.read(bundle.folder / part.file, part.size))
        except (OSError, ArtifactRefused):
            return False
        return True

    def _clean(self, bundle: Bundle) -> None:
        """Remove what no manifest names: files of earlier saves, and of writers that died."""
        try:
            manifest, _ = self.manifest(bundle)
        except (OSError, ArtifactRefused):
            return
        named = {MANIFEST, *(part.file for part in manifest.parts)}
        with contextlib.suppress(OSError):
            for path in bundle.folder.iterdir():
                if path.name not in named:
                    path.unlink()

    def remove(self, bundle: Bundle) -> None:
        """Remove a bundle, manifest first. Call it as the one writer."""
        (bundle.folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(bundle.folder, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write, flush and rename; the temporary name is unique across hosts that share the folder."""
    name = f".{path.name}.{socket.gethostname()[:40]}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    temporary = path.with_name(name)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            step("half written")
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, value: object) -> None:
    """Write a small record whole or not at all."""
    trust.make_private(path.parent)
    write_file(path, json.dumps(value).encode("ascii"))


def _flush_folder(folder: Path) -> None:
    """Make renames in ``folder`` outlast a power loss, where folders can be flushed."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
