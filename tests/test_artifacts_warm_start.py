"""``warm_start`` in processes of their own: what is compiled once comes back, and what is bad heals."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import dynapolicy as dp
from dynapolicy.artifacts import saver
from dynapolicy.artifacts.bundling import Content, manifest_of, opened
from dynapolicy.artifacts.envelope import Entry
from dynapolicy.artifacts.store import Store

CHILD = Path(__file__).with_name("artifacts_child.py")
#: Loading this pickle ends the process, as a broken kernel would.
DEADLY = b"cposix\n_exit\n(I9\ntR."


def start(root, batches, *, mode="default", instances=1, resets=0, status=0, before=None, **environment):
    """One start in a process of its own; what it said."""
    ours = ("DYNAPOLICY", "TORCHINDUCTOR", "TRITON")
    keep = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    ran = subprocess.run(
        [sys.executable, CHILD, root, mode, batches, str(instances), str(resets)],
        env={**keep, "PYTHONPATH": str(CHILD.parents[1]), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        preexec_fn=before,
    )
    assert ran.returncode == status, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]) if status == 0 else None


@pytest.fixture(scope="module")
def compiled():
    """A store that one cold start filled, with graphs for batches of 1 and 2."""
    # Not pytest's own folder: that is below the temporary folder with loose modes on some systems.
    folder = Path(tempfile.mkdtemp())
    said = start(folder / "root", "1,2")
    assert (said["verdict"], said["compiled"], said["right"]) == ("cold", 2, True)
    assert "no artifacts of 'small'" in said["reason"]
    yield folder / "root"
    shutil.rmtree(folder)


@pytest.fixture
def root(compiled, tmp_path):
    """The same, moved to another path."""
    shutil.copytree(compiled, tmp_path / "moved" / "store")
    (tmp_path / "moved").chmod(0o700)
    return tmp_path / "moved" / "store"


@pytest.fixture
def no_compiler(tmp_path):
    """A PATH whose compilers only write down that they were called, and fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gcc", "g++", "cc", "c++", "clang", "clang++"):
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nexit 127\n')
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}


def content_of(root):
    store = Store(root)
    (bundle,) = store.bundles()
    loaded = store.load(bundle)
    return store, bundle, loaded, opened(loaded)


def rewrite(root, change):
    """Save the bundle again with other artifacts, as somebody could who may write there."""
    store, bundle, loaded, content = content_of(root)
    old = loaded.manifest
    made = manifest_of(
        change(content),
        name=old.name,
        mode=old.mode,
        fit=old.fit,
        traced=old.traced,
        guards=old.guards,
        toolchain=old.toolchain,
    )
    store.save(bundle, lambda: made)


def graph_entries(content):
    """Kind and key of each compiled graph, wherever this torch keeps it."""
    files = [one for one in content.files if "/fxgraph/" in one.key]
    return [one for one in content.artifacts if one.kind in ("inductor", "0")] or files


def modes_hold_for_root_too():
    """Linux: without CAP_DAC_OVERRIDE root can't write where the modes say that its owner can't."""
    cap_bset_drop, cap_dac_override = 24, 1
    ctypes.CDLL(None).prctl(cap_bset_drop, cap_dac_override, 0, 0, 0)


@pytest.fixture
def read_only(root):
    """The same tree, where its owner may only read; it must not be changed."""
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    for folder in folders:
        folder.chmod(0o500)
    before = sorted(root.rglob("*"))
    yield root
    assert sorted(root.rglob("*")) == before
    for folder in folders:
        folder.chmod(0o700)


def test_a_restart_compiles_nothing_even_from_a_read_only_tree_without_a_compiler(read_only, no_compiler, tmp_path):
    """Moved, too, and with an empty temporary folder: two graphs come back, and no compiler runs."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    said = start(read_only, "1,2", before=modes_hold_for_root_too, XDG_CACHE_HOME=str(private), **no_compiler)
    assert list((private / "dynapolicy" / "work").iterdir())
    assert (said["verdict"], said["graphs"], said["compiled"], said["right"]) == ("warm", 2, 0, True)
    assert said["text"].startswith("warm: 2 of 2 graphs from artifacts, 0 compiled")
    called = (tmp_path / "called").read_text().split("\n")
    # Inductor asks the compiler who it is; it is not asked to compile.
    assert {one for one in called if one} <= {"--version", "-v", "-dumpversion", "-dumpmachine"}


def test_a_missing_entry_makes_it_partial_and_is_saved_anew(root):
    """One graph is taken out of the bundle: it is compiled, said, and there again afterwards."""
    gone = graph_entries(content_of(root)[3])[0]

    def without(content):
        files = tuple(one for one in content.files if one.key != gone.key)
        autograd = ("aot_autograd", "2")
        kept = [one for one in content.artifacts if one.key != gone.key and one.kind not in autograd]
        return Content(tuple(kept), tuple(one for one in files if "/aotautograd/" not in one.key))

    rewrite(root, without)
    said = start(root, "1,2")
    assert (said["verdict"], said["from_artifacts"], said["compiled"], said["right"]) == ("partial", 1, 1, True)
    assert "1 graphs were not in the artifacts" in said["reason"]
    assert len(graph_entries(content_of(root)[3])) == 2


def test_a_run_that_uses_a_part_never_narrows_the_bundle(root):
    """Only batch 1 is called: the graph of batch 2 stays."""
    before = content_of(root)[3]
    said = start(root, "1")
    assert (said["verdict"], said["graphs"]) == ("warm", 1)
    assert content_of(root)[3].same_as(before)


def test_a_poisoned_artifact_kills_one_start_and_no_other(root):
    """A process dies while it uses an artifact: the next one is told so, and starts cold."""

    def deadly(content):
        names = {one.key for one in graph_entries(content)}
        poison = lambda one: Entry(one.kind, one.key, DEADLY) if one.key in names else one  # noqa: E731
        autograd = ("aot_autograd", "2")
        artifacts = [poison(one) for one in content.artifacts if one.kind not in autograd]
        return Content(tuple(artifacts), tuple(poison(one) for one in content.files if "/aotautograd/" not in one.key))

    rewrite(root, deadly)
    start(root, "1", status=9)
    # It compiles anew, and what it saves replaces the bundle.
    said = start(root, "1")
    assert (said["verdict"], said["compiled"], said["right"]) == ("refused", 1, True)
    assert "died between loading it and its first good batch" in said["reason"]
    assert any("Quarantined" in one for one in said["said"])
    assert start(root, "1")["verdict"] == "warm"


# -- in this process, without compiling ----------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Other tests compiled in this process, which is not what these are about."""
    monkeypatch.setattr("dynapolicy.artifacts.session.compiled_something", lambda: False)
    for name in ("DYNAPOLICY_ARTIFACT_DIR", "DYNAPOLICY_ARTIFACT_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("dynapolicy.artifacts.start.tempfile", SimpleNamespace(gettempdir=lambda: "/nowhere"))


def saved(root, **arguments):
    """A bundle with one harmless file, for what ``arguments`` say."""
    start = dp.warm_start("m", root=root, **arguments)
    with start:
        fit = start._fit
        mine = Content((), (Entry("file", "inductor/fxgraph/x", b"x"),))
        made = manifest_of(mine, name="m", mode="default", fit=fit)
        start._store.save(start._bundle, lambda: made)
    return made[0]


def test_everything_is_put_back(tmp_path, here, monkeypatch):
    """Cache folders and key tag, set or unset, are as they were found."""
    from torch.compiler import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = config.cache_key_tag
    with dp.warm_start("m", root=tmp_path / "root"):
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            assert Path(os.environ[name]).is_relative_to(tmp_path / "root")
        assert config.cache_key_tag.startswith("dynapolicy-")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    assert "TRITON_CACHE_DIR" not in os.environ
    assert config.cache_key_tag == before


def test_an_interrupt_while_it_loads_leaves_nothing_in_force(tmp_path, here, monkeypatch):
    """The block is not entered then, so it is not left either."""
    from torch.compiler import config

    def interrupted(store, bundle):
        raise KeyboardInterrupt

    before, tag, load = dict(os.environ), config.cache_key_tag, Store.load
    monkeypatch.setattr(Store, "load", interrupted)
    with pytest.raises(KeyboardInterrupt), dp.warm_start("m", root=tmp_path / "root"):
        raise AssertionError("it was entered")
    assert (dict(os.environ), config.cache_key_tag) == (before, tag)
    monkeypatch.setattr(Store, "load", load)
    assert (
        on_a_thread(lambda: dp.warm_start("m", root=tmp_path / "root").__enter__().__exit__(None, None, None)) is None
    )


def test_a_disk_that_is_full_makes_no_start_fail(tmp_path, here, monkeypatch):
    """What can't be written down is not, and the start goes on cold."""

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    saved(tmp_path / "root")
    monkeypatch.setattr("dynapolicy.artifacts.workdirs.write_json", full)
    with pytest.warns(dp.ArtifactWarning, match="No space left"), dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.verdict == "refused"


def on_a_thread(enter):
    """What entering on a thread of its own raises, or None."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).exception(timeout=60)


def test_two_threads_cant_have_one_cache_for_two_starts(tmp_path, here):
    """Each would compile into the folder and under the key of the other, and save what is not its own."""

    def enter():
        with dp.warm_start("second", root=tmp_path / "root"):
            pass

    before = dict(os.environ)
    with dp.warm_start("first", root=tmp_path / "root"):
        inside = dict(os.environ)
        error = on_a_thread(enter)
        assert type(error) is dp.ArtifactError
        assert "second" in str(error)
        assert "warm_start('first') is open elsewhere" in str(error)
        assert os.environ == inside
    assert os.environ == before
    assert on_a_thread(enter) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_starts_lie_one_inside_the_other_also_in_a_task_and_in_a_forked_child(tmp_path, here):
    """What was open around it does not forbid a start."""

    async def task():
        with dp.warm_start("of a task", root=tmp_path / "root"):
            return True

    with dp.warm_start("outer", root=tmp_path / "root"):
        outer = dict(os.environ)
        assert asyncio.run(task())
        assert os.environ == outer
        # A thread that forks is in no block, and its child is in none either.
        assert on_a_thread(lambda: forked(lambda: asyncio.run(task()))) is None


def forked(call):
    """Call it in a child, that must end well."""
    child = os.fork()
    if not child:
        os._exit(0 if call() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_mismatch_names_the_field_and_both_values(tmp_path, here):
    """What differs, and nothing else."""
    saved(tmp_path / "root", extra={"quantized": False})
    with dp.warm_start("m", root=tmp_path / "root", extra={"quantized": True}) as start:
        assert (start.verdict, str(start)) == (
            "cold",
            'cold: no artifacts: extra {"quantized": false} -> {"quantized": true}',
        )


def test_what_compiles_after_the_block_is_not_this_start_s(tmp_path, here):
    """How a start went is settled when it ends."""
    from torch._dynamo.utils import counters

    with dp.warm_start("m", root=tmp_path / "root") as start:
        counters["inductor"]["fxgraph_cache_miss"] += 1
        assert start.record().compiled == 1
    settled = start.record()
    counters["inductor"]["fxgraph_cache_miss"] += 1
    assert (start.record(), settled.compiled) == (settled, 1)


def test_home_host_and_address_never_matter(tmp_path, here, monkeypatch):
    """What fits is a list of what is allowed to matter."""
    saved(tmp_path / "root")
    for name in ("HOME", "HOSTNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "PWD"):
        monkeypatch.setenv(name, "/another")
    with dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.verdict == "loaded"


def test_the_environment_wins_over_the_argument(tmp_path, here, monkeypatch):
    """The operator says where."""
    monkeypatch.setenv("DYNAPOLICY_ARTIFACT_DIR", str(tmp_path / "operator"))
    with dp.warm_start("m", root=tmp_path / "program") as start:
        assert "operator" in start.record().reason
    assert not (tmp_path / "program").exists()


def test_the_temporary_folder_is_never_used_in_silence(tmp_path, here, monkeypatch):
    """It is cleaned under running jobs."""
    monkeypatch.setattr("dynapolicy.artifacts.start.tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path)))
    with pytest.warns(dp.ArtifactWarning, match="below the temporary folder"), dp.warm_start("m", root=tmp_path / "t"):
        pass


def test_too_late_is_said(tmp_path, here, monkeypatch):
    """What compiled before is in no artifact."""
    monkeypatch.setattr("dynapolicy.artifacts.session.compiled_something", lambda: True)
    with pytest.warns(dp.TooLateWarning, match="Enter it earlier"), dp.warm_start("m", root=tmp_path / "root"):
        pass


def test_a_damaged_bundle_is_a_warning_and_a_cold_start(tmp_path, here):
    """Nothing of it is used, and the program runs."""
    saved(tmp_path / "root")
    (path,) = (tmp_path / "root").glob("bundles/m/*/*.files")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(dp.ArtifactWarning, match="refused"), dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.verdict == "refused"
        assert list((start._at.work.path / "inductor").iterdir()) == []


def test_a_bundle_with_a_key_outside_writes_nothing(tmp_path, here):
    """A manifest that is whole and valid, and a file that would land elsewhere."""
    saved(tmp_path / "root")
    for key in ("../../escaped", "/tmp/escaped-by-dynapolicy"):
        rewrite(tmp_path / "root", lambda content, key=key: Content((), (Entry("file", key, b"x"),)))
        outside = pytest.warns(dp.ArtifactWarning, match="outside the cache folder")
        with outside, dp.warm_start("m", root=tmp_path / "root") as start:
            assert start.verdict == "refused"
        shutil.rmtree(tmp_path / "root")
        saved(tmp_path / "root")
    assert not list(tmp_path.rglob("escaped"))
    assert not Path("/tmp/escaped-by-dynapolicy").exists()


def test_a_first_call_that_raises_is_made_again_cold(tmp_path, here):
    """The artifact is quarantined, the program gets its result, and the next start loads nothing."""
    saved(tmp_path / "root")
    calls = []

    def first_batch(value):
        calls.append(value)
        if len(calls) == 1:
            raise RuntimeError("a kernel is broken")
        return value * 2

    said = pytest.warns(dp.ArtifactWarning, match="a kernel is broken")
    with said, dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.first(first_batch, 21) == 42
        assert start.verdict == "refused"
    with pytest.warns(dp.ArtifactWarning, match="quarantined"), dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.verdict == "refused"


def test_a_call_that_raises_without_artifacts_too_blames_nobody(tmp_path, here):
    """The program's own error comes out, and the artifact stays in use."""
    saved(tmp_path / "root")

    def broken():
        raise KeyError("the program's own")

    said = pytest.warns(dp.ArtifactWarning, match="quarantined")
    with pytest.raises(KeyError), said, dp.warm_start("m", root=tmp_path / "root") as start:
        start.first(broken)
    with dp.warm_start("m", root=tmp_path / "root") as start:
        assert start.verdict == "loaded"


def test_what_was_compiled_is_saved_once_compilation_rests(monkeypatch):
    """Not before, not again without a reason, and a save that runs is waited for at the end."""
    monkeypatch.setattr(saver, "LOOK", 0.01)
    monkeypatch.setattr(saver, "QUIET", 0.1)
    counted, saves, ended, amid = [0], [], [], threading.Event()
    monkeypatch.setattr(saver, "counts", lambda: counted[0])

    def save():
        saves.append(counted[0])
        amid.set()
        time.sleep(0.1)
        ended.append(saves[-1])

    watching = saver.Saver(save)
    time.sleep(0.3)
    assert not amid.is_set()
    for number in (1, 2):
        counted[0] = number
        assert amid.wait(30)
        amid.clear()
    time.sleep(0.3)
    counted[0] = 3
    assert amid.wait(30)
    watching.stop()
    assert ended == saves == [1, 2, 3]


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path, here, monkeypatch):
    """Disk full at the end: the program ends well."""
    mine = Content((), (Entry("file", "a/fxgraph/x", b"x"),))
    monkeypatch.setattr("dynapolicy.artifacts.bundling.collect", lambda folder: mine)

    def full(*_args):
        raise OSError(28, "No space left on device")

    start = dp.warm_start("m", root=tmp_path / "root")
    with pytest.warns(dp.ArtifactWarning, match="not saved: .*No space left"):
        with start:
            monkeypatch.setattr("dynapolicy.artifacts.store.os.fsync", full)
        monkeypatch.undo()


def test_the_key_is_in_no_record(tmp_path, here, monkeypatch):
    """Neither in the knobs nor in the store."""
    from dynapolicy.knob_table import rows_of
    from dynapolicy.knobs import read_knobs

    monkeypatch.setenv("DYNAPOLICY_ARTIFACT_KEY", "very secret")
    assert "very secret" not in repr(read_knobs(os.environ, {}, "DYNAPOLICY_", rows_of("artifacts")))
    saved(tmp_path / "root")
    assert not [one for one in (tmp_path / "root").rglob("*") if one.is_file() and b"very secret" in one.read_bytes()]


def test_two_starts_of_one_object_are_an_error(tmp_path, here):
    """It holds what it found, once."""
    start = dp.warm_start("m", root=tmp_path / "root")
    with start, pytest.raises(dp.ArtifactError, match="entered already"):
        start.__enter__()


def test_torch_and_this_library_read_the_same_envelope():
    """What torch writes is parsed here, and what is packed here is read by torch."""
    from dynapolicy.artifacts.envelope import pack, parse
    from dynapolicy.torch_compat.artifacts import layout

    if layout() is None:
        pytest.skip("torch 2.6 has no save_cache_artifacts")
    from torch.utils._appending_byte_serializer import AppendingByteSerializer, BytesReader  # noqa: F401

    some = [Entry("1" if not layout().grouped else "autotune", "ab/cd", b"content")]
    data = pack(some, layout())
    from torch.compiler import _cache

    if layout().grouped:
        found = _cache.CacheArtifactManager.deserialize(data)
        assert [(one.key, one.content) for one in found["autotune"]] == [("ab/cd", b"content")]
    else:
        (found,) = AppendingByteSerializer.to_list(data, deserialize_fn=_cache.CacheArtifact.deserialize)
        assert (found.key, found.content) == ("ab/cd", b"content")
    assert [one.key for one in parse(data, layout())] == ["ab/cd"]
