"""Torch's and Triton's own files are hashed while a warm start loads, or not at all where they are what they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import dynapolicy as dp
from dynapolicy.torch_compat import keys

pytestmark = [
    pytest.mark.filterwarnings("ignore:Artifacts are kept in:dynapolicy.ArtifactWarning"),
    pytest.mark.filterwarnings("ignore:Something compiled before:dynapolicy.TooLateWarning"),
]


@pytest.fixture
def hashed(monkeypatch):
    """The threads that ask torch for the hash of its files."""
    import torch._dynamo  # noqa: F401 - first, or torch can't import the next
    from torch._inductor import codecache

    threads = []
    original = codecache.torch_key

    def torch_key():
        threads.append(threading.current_thread())
        return original()

    monkeypatch.setattr(codecache, "torch_key", torch_key)
    return threads


def end_of_hashing():
    for thread in threading.enumerate():
        if thread.name == keys.THREAD:
            thread.join(60)


def test_a_warm_start_hashes_on_a_thread_while_it_loads(hashed, tmp_path):
    with dp.warm_start("keys", root=tmp_path / "root"):
        end_of_hashing()
        assert [thread.name for thread in hashed] == [keys.THREAD]


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Two packages whose files are hashed. The first can be told its hash, as torch's can."""
    asked, told = [], []

    def torch_s():
        asked.append("torch_s")
        return b"\0\xff"

    def triton_s():
        asked.append("triton_s")
        return "1-2"

    torch_s.set = told.append
    for key in (torch_s, triton_s):
        name = f"some_{key.__name__}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        module = SimpleNamespace(__file__=str(tmp_path / name / "__init__.py"), **{key.__name__: key})
        monkeypatch.setitem(sys.modules, name, module)
    some = tuple(keys._Key(f"some_{name}", name, f"some_{name}") for name in ("torch_s", "triton_s"))
    monkeypatch.setattr(keys, "_KEYS", some)
    return SimpleNamespace(root=tmp_path, asked=asked, told=told, triton=sys.modules["some_triton_s"])


def known(saved):
    made = keys.Keys()
    made.begin(saved)
    return made, made.known()


def test_what_was_hashed_of_the_same_files_is_not_hashed_again(packages):
    """Half a second, of which a start that traces nothing takes less than one."""
    _, saved = known({})
    assert sorted(packages.asked) == ["torch_s", "triton_s"]
    packages.asked.clear()
    made, again = known(saved)
    assert (again, packages.told) == (saved, [b"\0\xff"])
    assert (packages.triton.triton_s(), packages.asked) == ("1-2", [])
    made.stop()
    assert (packages.triton.triton_s(), packages.asked) == ("1-2", ["triton_s"])


@pytest.mark.parametrize("change", ["longer", "later", "another", "fewer"])
def test_files_that_changed_are_hashed_again(packages, change):
    file = packages.root / "some_torch_s" / "there.py"
    file.write_text("x = 1")
    os.utime(file, (1, 1))
    _, saved = known({})
    packages.asked.clear()
    if change == "longer":
        file.write_text("x = 12")
        os.utime(file, (1, 1))
    elif change == "later":
        os.utime(file, (5, 5))
    elif change == "another":
        (file.parent / "deeper").mkdir()
        (file.parent / "deeper" / "one.so").touch()
    else:
        file.unlink()
    known(saved)
    assert packages.asked == ["torch_s"]


def test_what_is_compiled_from_them_is_no_change(packages):
    """Python writes it when it first imports, and would do so in each new container."""
    _, saved = known({})
    packages.asked.clear()
    (packages.root / "some_torch_s" / "__pycache__").mkdir()
    (packages.root / "some_torch_s" / "__pycache__" / "a.pyc").touch()
    known(saved)
    assert packages.asked == []


@pytest.mark.parametrize("saved", [7, {}, {"files": "other"}, {"files": None, "key": 3}, {"files": None, "key": "os"}])
def test_a_saved_hash_that_says_nothing_is_hashed_anew(packages, saved):
    if isinstance(saved, dict) and "key" in saved:
        saved = {**saved, "files": keys.fingerprint(str(packages.root / "some_torch_s"))}
    known({"torch_s": saved})
    assert sorted(packages.asked) == ["torch_s", "triton_s"]


def test_a_hash_that_fails_is_left_to_torch(packages):
    def fails():
        packages.asked.append("fails")
        raise RuntimeError("no such file")

    packages.triton.triton_s = fails
    made, found = known({})
    assert (sorted(packages.asked), list(found)) == (["fails", "torch_s"], ["torch_s"])
    made.stop()


def test_what_is_not_there_is_not_hashed(monkeypatch):
    missing = (keys._Key("no_such_module", "key", "torch"), keys._Key("math", "no_such_name", "torch"))
    monkeypatch.setattr(keys, "_KEYS", (*missing, keys._Key("math", "sqrt", "no_such_package")))
    assert known({})[1] == {}


FORKS = """
import os, sys, threading, time
from types import SimpleNamespace
from dynapolicy.torch_compat import keys
lock, begun = threading.Lock(), threading.Event()
def key():
    with lock:
        begun.set()
        time.sleep(1)
sys.modules["some_keys"] = SimpleNamespace(key=key, __file__=sys.argv[1])
keys._KEYS = (keys._Key("some_keys", "key", "some_keys"),)
keys.Keys().begin({})
begun.wait(20)
child = os.fork()
free = lock.acquire(timeout=5)
if not child:
    keys.Keys().begin({})
    os._exit(0 if free else 1)
print(free, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_the_hash_and_leaves_the_child_no_lock(tmp_path):
    """Torch 2.15 holds a lock while it hashes its files: a child could never compile."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "__init__.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert (ran.stdout, ran.returncode) == ("True 0\n", 0), ran.stderr[-2000:]
