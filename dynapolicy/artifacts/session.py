"""One warm start: load, watch, save, and blame the artifact where it was to blame."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..apply import current_policy
from ..errors import ArtifactError, ArtifactRefused, ArtifactWarning, TooLateWarning, warn
from ..torch_compat import artifacts as compat
from ..torch_compat.entries import compiled_something
from . import bundling, workdirs
from .fit import fit_of
from .fitting import check_fit, check_usable, why_missing
from .manifest import Manifest
from .places import Places
from .saver import Saver
from .saving import Addition
from .start import say_unsafe
from .store import Store, bundle_id
from .verdict import WarmStartRecord, recorded

if TYPE_CHECKING:
    from ..policy import CompilePolicy

__all__ = ["WarmStart"]

T = TypeVar("T")


class WarmStart:
    """A warm start, see ``warm_start``. A context manager for one use; ``str()`` says how it went."""

    def __init__(
        self,
        name: str,
        store: Store,
        policy: CompilePolicy | None,
        sources: Iterable[Any],
        signature: Any,
        extra: Any,
        mode: str,
    ) -> None:
        self.name = name
        self.mode = mode
        self._store = store
        self._asked = (policy, sources, signature, extra)
        self._loaded: Manifest | None = None
        self._identity = ""
        self._refused = self._missing = ""
        self._load_seconds = 0.0
        self._seconds: float | None = None
        self._proven = False
        self._entered = False
        self._final: WarmStartRecord | None = None

    # -- begin -------------------------------------------------------------------------------------

    def __enter__(self) -> WarmStart:
        """Load what fits. Never fails because of an artifact.

        Raises:
            ArtifactError: entered twice, an argument that can't be used, or another start is open on another
                thread or in another task.
        """
        if self._entered:
            raise ArtifactError("warm_start", self.name, "It was entered already", "with", "Call warm_start() again")
        self._entered = True
        self._began = time.monotonic()
        if compiled_something():
            warn("Something compiled before warm_start: it is in no artifact. Enter it earlier.", TooLateWarning)
        policy, sources, signature, extra = self._asked
        self._fit = fit_of(policy if policy is not None else current_policy(), sources, signature, extra)
        self._bundle = self._store.bundle(self.name, bundle_id(self._fit, self.mode))
        say_unsafe(self._store.root)
        self._at = Places(self.name, self._store, self._fit, self.mode, self._say)
        self._before = compat.counts()
        fields = {"name": self.name, "mode": self.mode, "fit": self._fit}
        self._addition = Addition(self._store, self._bundle, self._at, lambda: self._counted().misses, fields)
        try:
            self._load()
            self._at.count_kernels()
            self._saver = Saver(self._save_if_quiet)
        except BaseException:
            # An interrupt amid loading: the block is not entered, so nothing would put this back.
            self._at.precompile.abandon()
            self._at.leave()
            raise
        return self

    # -- load --------------------------------------------------------------------------------------

    def _load(self) -> None:
        self._note("cold")
        try:
            if self._at.precompile.refused:
                raise ArtifactRefused(self._at.precompile.refused)
            self._read()
        except FileNotFoundError:
            self._missing = why_missing(self._store, self.name, self.mode, self._fit)
        except (ArtifactRefused, OSError) as error:
            self._refused = str(error)
            self._loaded = None
            self._note("cold")
            self._at.precompile.abandon()
            self._at.empty()
            self._say(f"The artifacts of {self._bundle.id} are refused: {error}. This start goes on cold.")
        # Where nothing was loaded, nothing is known of torch's files.
        self._at.keys.begin({})
        self._load_seconds = time.monotonic() - self._began

    def _read(self) -> None:
        loaded = self._store.load(self._bundle)
        manifest = loaded.manifest
        check_fit(manifest, self._fit)
        check_usable(manifest, loaded.identity, self._at.state)
        self._at.keys.begin(manifest.keys)
        self._at.precompile.check(manifest.guards)
        content = bundling.opened(loaded)
        # From here to the first good batch a death is this artifact's.
        self._identity = loaded.identity
        self._at.work.note(workdirs.LOADING, self._bundle.id, loaded.identity)
        bundling.put(loaded, content, self._at.work.path)
        self._at.toolchain.answers.update(manifest.toolchain)
        self._loaded = manifest
        self._addition.loaded = frozenset((one.kind, one.key) for one in content.artifacts)
        self._at.precompile.loaded(manifest.guards, self._distrust)

    # -- the first good batch ------------------------------------------------------------------------

    def first(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Make the first call. Where it raises on artifacts, they are quarantined and it is made again, cold."""
        try:
            result = call(*args, **kwargs)
        except Exception as error:
            if self._loaded is None or self._proven:
                raise
            identity = self._identity
            self._blame(error)
            try:
                result = call(*args, **kwargs)
            except Exception:
                # It fails without artifacts too, so they were not to blame.
                workdirs.lift(self._at.state, identity)
                raise
        self.proven()
        return result

    def proven(self) -> None:
        """The first batch was good: what was loaded is not to blame for anything that comes later."""
        if not self._proven:
            self._proven = True
            self._seconds = time.monotonic() - self._began
            self._note("proven" if self._loaded else "cold")

    def _note(self, phase: str) -> None:
        # A disk that is full must not end a program that runs well without it.
        with contextlib.suppress(OSError):
            self._at.work.note(phase, self._bundle.id)

    def _distrust(self, why: str) -> None:
        workdirs.quarantine(self._at.state, self._identity, self._bundle.id, why)

    def _blame(self, error: BaseException) -> None:
        why = f"the first call raised {type(error).__name__}: {str(error)[:200]}"
        self._distrust(why)
        self._refused, self._loaded, self._addition.loaded = f"quarantined: {why}", None, frozenset()
        self._note("cold")
        # Nothing of it stays, on disk or in memory.
        self._at.precompile.abandon()
        self._at.empty()
        compat.clear_caches()
        self._say(f"The artifacts of {self._bundle.id} are quarantined: {why}.")

    # -- save ----------------------------------------------------------------------------------------

    def save(self) -> bool:
        """Save what was compiled so far and is in no bundle. Whether there was something to save.

        A save that fails is a warning.
        """
        if not self._entered:
            return False
        try:
            return self._addition.save()
        except Exception as error:  # noqa: BLE001 - neither torch's nor the disk's trouble ends the program
            self._say(f"The artifacts of {self._bundle.id} are not saved: {error}.")
            return False

    def _save_if_quiet(self) -> None:
        if self._loaded is None or self._counted().hits or self._counted().packages:
            self.proven()
        self.save()

    # -- what it was ---------------------------------------------------------------------------------

    def _counted(self) -> compat.CacheCounts:
        return compat.counts().since(self._before)

    def record(self) -> WarmStartRecord:
        """How the start went so far, read from torch's counters; after the block, how it went."""
        if self._final is not None:
            return self._final
        return recorded(
            self._counted(),
            self._loaded,
            name=self.name,
            mode=self.mode,
            refused=self._refused,
            missing=self._missing,
            precompile=self._at.precompile,
            new_kernels=self._at.new_kernels(),
            load_seconds=self._load_seconds,
            seconds=self._seconds if self._seconds is not None else time.monotonic() - self._began,
        )

    @property
    def verdict(self) -> str:
        """``"warm"``, ``"partial"``, ``"cold"``, ``"refused"``, or ``"loaded"`` before the first graph."""
        return self.record().verdict

    def __str__(self) -> str:
        return str(self.record()) if self._entered else f"not entered: {self.name}"

    def _say(self, message: str) -> None:
        warn(message, ArtifactWarning, once=(id(self), message), stacklevel=5)

    # -- end -----------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.stop()
        try:
            if error is None:
                self.proven()
                self.save()
            elif self._loaded is not None and not self._proven and isinstance(error, Exception):
                self._blame(error)
            else:
                # An interrupt says nothing against the artifact.
                self.proven()
            self._final = self.record()
        finally:
            self._at.leave()
