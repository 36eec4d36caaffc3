"""A bundle is saved and loaded whole, or not at all. No torch in here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dynapolicy.artifacts import store as store_module
from dynapolicy.artifacts import trust
from dynapolicy.artifacts.envelope import FILES, Entry, pack
from dynapolicy.artifacts.manifest import Manifest, Part
from dynapolicy.artifacts.store import Store, bundle_id
from dynapolicy.errors import ArtifactError, ArtifactRefused

FIT = {"torch": "2.13.0"}
KEY = b"a secret of the operator"


def files_of(value: bytes) -> bytes:
    """A whole envelope of files, with one in it."""
    return pack([Entry("file", "inductor/x", value * 3000)], FILES)


def made(value: bytes):
    """A manifest and its parts, all of one value, so that a mixture shows."""
    parts = {"files": files_of(value), "blob": value * 1500}
    described = tuple(Part.of(kind, data) for kind, data in sorted(parts.items()))
    return Manifest(name="m", mode="default", fit=FIT, parts=described, saved=1.0), parts


def save(store: Store, value: bytes):
    bundle = store.bundle("m", bundle_id(FIT, "default"))
    store.save(bundle, lambda: made(value))
    return bundle


@pytest.fixture
def kept(tmp_path):
    """A store with one bundle."""
    store = Store(tmp_path / "root")
    return store, save(store, b"a")


def test_what_was_saved_is_loaded(kept):
    """Every byte comes back."""
    store, bundle = kept
    assert store.load(bundle).parts == {"files": files_of(b"a"), "blob": b"a" * 1500}
    assert [one.id for one in store.bundles()] == [bundle.id]


def test_nobody_else_can_read_or_write_a_bundle(kept):
    """Folders and files are the user's alone."""
    store, bundle = kept
    for path in (store.root / "bundles", bundle.folder, *bundle.folder.iterdir()):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "empty"])
@pytest.mark.parametrize("which", ["blob", "files", "json"])
def test_a_damaged_file_is_refused(kept, which, damage):
    """One flipped byte, a missing end, a longer end or nothing at all, in any file."""
    store, bundle = kept
    path = next(one for one in bundle.folder.iterdir() if one.name.endswith(which))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        # Somewhere in the fit or in the data: every byte of both counts.
        at = data.index(b"2.13.0") if which == "json" else len(data) // 2
        data[at] ^= 1
    changed = {"flip": bytes(data), "truncate": bytes(data[:-7]), "grow": bytes(data) + b"x", "empty": b""}[damage]
    path.write_bytes(changed)
    with pytest.raises(ArtifactRefused):
        store.load(bundle)


def test_a_foreign_bundle_under_this_name_is_refused(kept):
    """A whole and valid bundle of another name or digest is not taken for this one."""
    store, bundle = kept
    other = store.bundle("other", bundle.folder.name)
    other.folder.parent.mkdir(mode=0o700)
    bundle.folder.rename(other.folder)
    with pytest.raises(ArtifactRefused, match="another bundle"):
        store.load(other)


def test_loose_modes_are_refused_by_name(kept):
    """A file or folder that others can write is refused, and the message says which and what to do."""
    store, bundle = kept
    for path in (bundle.folder / "manifest.json", bundle.folder, store.root):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before | stat.S_IWOTH)
        with pytest.raises(ArtifactRefused, match="chmod go-w"):
            store.load(bundle)
        path.chmod(before)
    store.load(bundle)


def test_another_owner_is_refused(kept, monkeypatch):
    """What belongs to neither this user nor root is not used."""
    store, bundle = kept
    found = os.fstat
    owner = os.geteuid() + 1

    def of_another(handle):
        values = list(found(handle))
        values[stat.ST_UID] = owner
        return os.stat_result(values)

    monkeypatch.setattr(trust.os, "fstat", of_another)
    with pytest.raises(ArtifactRefused, match=f"belongs to user {owner}"):
        store.load(bundle)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_below_the_root_is_refused(kept, tmp_path, what):
    """Below the root nothing leads elsewhere."""
    store, bundle = kept
    path = bundle.folder if what == "folder" else bundle.folder / "manifest.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactRefused, match="symbolic link"):
        store.load(bundle)


def test_a_special_file_is_refused_and_not_waited_for(kept):
    """A named pipe in the place of a file would block for ever."""
    store, bundle = kept
    path = bundle.folder / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtifactRefused, match="no regular file"):
        store.load(bundle)


def test_the_root_itself_may_be_reached_through_a_link(kept, tmp_path):
    """Many systems have links above the folder that the operator names."""
    _, bundle = kept
    (tmp_path / "link").symlink_to(tmp_path)
    through = Store(tmp_path / "link" / "root")
    assert through.load(through.bundle("m", bundle.folder.name)).parts["files"] == files_of(b"a")


def test_a_key_refuses_what_it_did_not_sign(tmp_path):
    """Unsigned, signed with another key, and edited after it was signed; the key is in no file."""
    signed, unsigned, other = (Store(tmp_path / "root", key) for key in (KEY, None, b"another"))
    bundle = save(unsigned, b"a")
    with pytest.raises(ArtifactRefused, match="not signed"):
        signed.load(bundle)
    save(signed, b"b")
    assert signed.load(bundle).parts["blob"] == b"b" * 1500
    with pytest.raises(ArtifactRefused, match="not signed"):
        other.load(bundle)
    path = bundle.folder / "manifest.json"
    assert KEY not in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b'"saved": 1.0', b'"saved": 2.0'))
    with pytest.raises(ArtifactRefused, match="not signed"):
        signed.load(bundle)


@pytest.mark.parametrize("name", ["../up", "/etc/x", "..", ".hidden", "a/b", "a b", "ü", "C:\\x", "x" * 100])
def test_every_name_stays_below_the_root(tmp_path, name):
    """A model's name is no path."""
    store = Store(tmp_path)
    folder = store.bundle(name, "d").folder
    assert folder.parent.parent == tmp_path / "bundles"
    assert ".." not in folder.parts
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert [one.name for one in store.bundles()] == [name]


@pytest.mark.parametrize("name", ["", "  ", "x" * 500])
def test_a_name_that_is_none_is_an_error(tmp_path, name):
    """The one thing about artifacts that is the caller's mistake."""
    with pytest.raises(ArtifactError):
        Store(tmp_path).bundle(name, "d")


# -- death between the steps -----------------------------------------------------------------------

KILLED = """
    import os, sys
    sys.path[:0] = [{tests!r}]
    from pathlib import Path
    from dynapolicy.artifacts import store as module
    from test_artifacts_store import save
    from dynapolicy.artifacts.store import Store
    left = [{nth}]
    def step(name):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
    module.step = step
    save(Store(Path({root!r})), b"b")
"""


@pytest.mark.parametrize("nth", range(1, 8))
def test_death_between_any_two_steps_leaves_old_or_new(kept, nth):
    """Killed at each step of a save: what is there afterwards is whole, and can be saved over."""
    store, bundle = kept
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), nth=nth, root=str(store.root))
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.returncode in (0, 9), ran.stderr
    found = store.load(bundle).parts
    assert found in ({"files": files_of(b"a"), "blob": b"a" * 1500}, {"files": files_of(b"b"), "blob": b"b" * 1500})
    save(store, b"c")
    assert store.load(bundle).parts["files"] == files_of(b"c")
    assert len(list(bundle.folder.iterdir())) == 3, "files of the dead writer stayed"


def test_a_save_that_fails_leaves_what_was_there(kept, monkeypatch):
    """Disk full while writing: the old bundle is whole, and nothing half-written stays."""
    store, bundle = kept

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(store, b"b")
    assert store.load(bundle).parts["files"] == files_of(b"a")
    assert len(list(bundle.folder.iterdir())) == 3


def hold_lock(root, ready):
    store = Store(Path(root))
    with store.writing(store.bundle("m", bundle_id(FIT, "default"))):
        ready.set()
        time.sleep(60)


def test_a_dead_writer_holds_no_lock(kept):
    """Killed while it was the one writer: the next one need not wait."""
    store, bundle = kept
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=hold_lock, args=(str(store.root), ready))
    writer.start()
    assert ready.wait(60)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    began = time.monotonic()
    save(store, b"b")
    assert time.monotonic() - began < 5
    assert store.load(bundle).parts["files"] == files_of(b"b")


def write_many(root, value):
    store = Store(Path(root))
    for _ in range(25):
        save(store, value)


def read_many(root, failures):
    store = Store(Path(root))
    bundle = store.bundle("m", bundle_id(FIT, "default"))
    for _ in range(50):
        try:
            found = store.load(bundle).parts
            if len(set(found["files"][-3000:] + found["blob"])) != 1:
                failures.put("torn")
        except ArtifactRefused as error:
            failures.put(str(error))


def test_four_that_save_and_four_that_load_never_meet_half_a_bundle(kept):
    """Eight processes on one bundle: each load gives one whole save."""
    store, _ = kept
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    writers = [context.Process(target=write_many, args=(str(store.root), bytes([65 + i]))) for i in range(4)]
    readers = [context.Process(target=read_many, args=(str(store.root), failures)) for _ in range(4)]
    for one in (*writers, *readers):
        one.start()
    for one in (*writers, *readers):
        one.join(120)
    assert [one.exitcode for one in (*writers, *readers)] == [0] * 8
    assert failures.empty(), failures.get()
