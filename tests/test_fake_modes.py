"""Fake tensor modes take no stack while guards are read; elsewhere they do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo import package
from torch._subclasses import FakeTensorMode, fake_tensor

from dynapolicy.torch_compat.fake_modes import ModesWithoutStacks

if not hasattr(package, "load_guards_state"):
    pytest.skip(f"torch {torch.__version__} loads no guards", allow_module_level=True)


def names(mode):
    return [frame.name for frame in mode._stack_trace]


@pytest.fixture
def reading(monkeypatch):
    """What runs while guards are read."""
    run = []
    monkeypatch.setattr(package, "load_guards_state", lambda _: run[-1]())
    held = ModesWithoutStacks()

    def read(fn):
        run.append(fn)
        return package.load_guards_state(b"")

    yield read
    held.stop()


def test_only_the_thread_that_reads_is_spared(reading):
    made = {}

    def make(name):
        made[name] = names(FakeTensorMode())

    def both():
        make("reader")
        other = threading.Thread(target=make, args=["other"])
        other.start()
        other.join()

    reading(both)
    make("after")
    assert made["reader"] == []
    assert made["other"][-2:] == made["after"][-2:] == ["make", "__init__"]


def test_a_mode_without_a_stack_can_say_so(reading):
    assert reading(FakeTensorMode).stack == ""


def test_a_failed_read_is_over(reading):
    with pytest.raises(ZeroDivisionError):
        reading(lambda: 1 / 0)
    assert names(FakeTensorMode())


def test_stop_puts_torch_s_own_back():
    before = fake_tensor.traceback, package.load_guards_state
    ModesWithoutStacks().stop()
    assert (fake_tensor.traceback, package.load_guards_state) == before


def test_another_torch_that_takes_no_stacks_is_left_alone(monkeypatch):
    monkeypatch.delattr(fake_tensor, "traceback")
    before = package.load_guards_state
    held = ModesWithoutStacks()
    assert package.load_guards_state is before
    held.stop()
    assert not hasattr(fake_tensor, "traceback")
