"""Torch's and Triton's own files are hashed while a warm start loads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

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


def test_a_hash_that_fails_is_left_to_torch(monkeypatch):
    asked = threading.Event()

    def fails():
        asked.set()
        raise RuntimeError("no such file")

    monkeypatch.setattr(keys, "_KEYS", (("no_such_module", "key"), ("keys_of_a_test", "key"), ("math", "no_such_name")))
    monkeypatch.setitem(sys.modules, "keys_of_a_test", type("Module", (), {"key": staticmethod(fails)}))
    keys.hash_ahead()
    end_of_hashing()
    assert asked.is_set()


FORKS = """
import os, sys, threading, time
from types import SimpleNamespace
from dynapolicy.torch_compat import keys
lock, begun = threading.Lock(), threading.Event()
def key():
    with lock:
        begun.set()
        time.sleep(1)
sys.modules["some_keys"] = SimpleNamespace(key=key)
keys._KEYS = (("some_keys", "key"),)
keys.hash_ahead()
begun.wait(20)
child = os.fork()
free = lock.acquire(timeout=5)
if not child:
    keys.hash_ahead()
    os._exit(0 if free else 1)
print(free, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_waits_for_the_hash_and_leaves_the_child_no_lock():
    """Torch 2.15 holds a lock while it hashes its files: a child could never compile."""
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=200)
    assert (ran.stdout, ran.returncode) == ("True 0\n", 0), ran.stderr[-2000:]
