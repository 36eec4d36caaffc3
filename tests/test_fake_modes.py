"""Fake tensor modes take no stack while a package is installed; elsewhere they do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

from dynapolicy.torch_compat import precompile
from dynapolicy.torch_compat.fake_modes import ModesWithoutStacks

if precompile.lacking():
    pytest.skip(f"torch {torch.__version__} can't precompile", allow_module_level=True)

from torch._dynamo.package import CompilePackage


def names(mode):
    return [frame.name for frame in mode._stack_trace]


@pytest.fixture
def installing(monkeypatch):
    """Runs a function while a package is installed."""
    monkeypatch.setattr(CompilePackage, "install", lambda run: run())
    held = ModesWithoutStacks()
    yield CompilePackage.install
    held.stop()


def test_only_the_thread_that_installs_is_spared(installing):
    made = {}

    def make(name):
        made[name] = names(FakeTensorMode())

    def both():
        make("installer")
        other = threading.Thread(target=make, args=["other"])
        other.start()
        other.join()

    installing(both)
    make("after")
    assert made["installer"] == []
    assert made["other"][-2:] == made["after"][-2:] == ["make", "__init__"]


def test_a_mode_without_a_stack_can_say_so(installing):
    made = []
    installing(lambda: made.append(FakeTensorMode()))
    assert made[0].stack == ""


def test_stacks_are_taken_again_after_an_install_that_failed(installing):
    with pytest.raises(ZeroDivisionError):
        installing(lambda: 1 / 0)
    assert names(FakeTensorMode())


def test_stop_puts_torch_s_own_back():
    before = fake_tensor.traceback, CompilePackage.install
    ModesWithoutStacks().stop()
    assert (fake_tensor.traceback, CompilePackage.install) == before


def test_a_torch_that_takes_no_stacks_is_left_alone(monkeypatch):
    monkeypatch.delattr(fake_tensor, "traceback")
    before = CompilePackage.install
    held = ModesWithoutStacks()
    assert CompilePackage.install is before
    held.stop()
    assert not hasattr(fake_tensor, "traceback")
