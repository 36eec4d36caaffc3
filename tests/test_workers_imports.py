"""Imports in the background, with a made-up torch that is slow and imports itself in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker_programs import environ

TORCH = {
    "__init__": "",
    "one": "import time; first = 1; time.sleep(0.2)\nfrom torch.two import second\ntime.sleep(0.3); last = 1",
    "two": "import time; second = 2; time.sleep(0.3)\nfrom torch.one import first",
    "three": "import time; time.sleep(0.3)\nfrom . import four\nfrom .four import fourth\nthird = 3",
    "four": "fourth = 4",
    "spawner": (
        "import threading, importlib\n"
        "thread = threading.Thread(target=lambda: importlib.import_module('torch.four')); thread.start()\n"
    ),
}

HEAD = """
import builtins, importlib, sys, threading, time
from dynapolicy.workers import imports
from dynapolicy.workers.imports import gate
errors, seen = [], []
pythons = builtins.__import__, importlib.import_module
def enter(code):
    try:
        exec(code, {"__name__": "program"})
    except BaseException as error:
        errors.append(repr(error))
def thread(code):
    one = threading.Thread(target=enter, args=(code,), daemon=True); one.start(); return one
def until(true):
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end: time.sleep(0.005)
def back():
    return (builtins.__import__, importlib.import_module) == pythons
"""


def python(tmp_path: Path, code: str) -> str:
    """What a program prints that imports the made-up torch."""
    package = tmp_path / "torch"
    package.mkdir(exist_ok=True)
    for name, text in TORCH.items():
        (package / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**environ(), "PYTHONPATH": f"{tmp_path}:{environ()['PYTHONPATH']}"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "entrance",
    [
        "import torch.two",
        "from torch.two import second",
        "from torch import two",
        "import importlib; importlib.import_module('torch.two')",
        "import importlib; importlib.import_module('.two', 'torch')",
    ],
)
def test_a_circle_may_be_entered_elsewhere_meanwhile(tmp_path: Path, entrance: str) -> None:
    """Whoever comes waits for the background, whatever the words of the import; without the gate this fails."""
    code = f"""
import torch
gate.put_up()
with gate.step() as waits:
    other = thread({entrance!r} + "; import sys; sys.modules['torch.one'].last")
    until(waits)
    import torch.one
    print(waits())
other.join(20)
gate.take_down()
print(errors, back())
"""
    assert python(tmp_path, code) == "True\n[] True"


def test_without_the_gate_the_circle_is_broken(tmp_path: Path) -> None:
    """What the gate is for: two threads enter at different places, and one gets a half-made module."""
    code = """
import torch
for one in [thread("import torch.one"), thread("import torch.two; torch.one.last")]: one.join(20)
print(*errors)
"""
    assert "'one'" in python(tmp_path, code)


def test_a_first_import_of_torch_waits_as_well(tmp_path: Path) -> None:
    """A submodule's lock is taken before its parent's."""
    code = """
gate.put_up()
threads = [thread(f"import torch.{name}") for name in ("one", "two", "three", "four")]
with gate.step():
    import torch.one
for one in threads: one.join(20)
gate.take_down()
print(errors, sorted(name for name in sys.modules if name.startswith("torch.")), back())
"""
    assert python(tmp_path, code) == "[] ['torch.four', 'torch.one', 'torch.three', 'torch.two'] True"


def test_a_thread_that_was_amid_an_import_comes_first(tmp_path: Path) -> None:
    """It holds locks already, so it never waits, and the background does."""
    code = """
import torch
other = thread("import torch.three")
until(lambda: "torch.three" in sys.modules)
gate.put_up()
with gate.step():
    print(sys.modules["torch.three"].third)
    import torch.four
other.join(20)
gate.take_down()
print(errors, back())
"""
    assert python(tmp_path, code) == "3\n[] True"


def test_what_is_loaded_and_what_is_not_torchs_is_free(tmp_path: Path) -> None:
    """Nobody waits for a name that is there, nor for anybody else's module."""
    code = """
import torch.four
gate.put_up()
with gate.step() as waits:
    other = thread("import torch.four, colorsys; from torch.four import fourth; from torch import four")
    other.join(20)
    print(other.is_alive(), waits(), "colorsys" in sys.modules)
gate.take_down()
print(errors, back())
"""
    assert python(tmp_path, code) == "False False True\n[] True"


def test_patience_ends(tmp_path: Path) -> None:
    """A thread that an import waits for would wait for that import: it goes on after a while."""
    code = """
imports._PATIENCE = 0.3
import torch
gate.put_up()
with gate.step():
    import torch.spawner
    torch.spawner.thread.join(20)
    print(torch.spawner.thread.is_alive(), "torch.four" in sys.modules)
gate.take_down()
print(back())
"""
    assert python(tmp_path, code) == "False True\nTrue"


def test_somebody_elses_stand_in_stays(tmp_path: Path) -> None:
    """Put there since, it is not taken away, and ours lets everything through."""
    code = """
gate.put_up()
ours = builtins.__import__
def theirs(name, *rest, **more):
    seen.append(name)
    return ours(name, *rest, **more)
builtins.__import__ = theirs
gate.take_down()
import torch.four
print(builtins.__import__ is theirs, importlib.import_module is pythons[1], "torch.four" in seen)
"""
    assert python(tmp_path, code) == "True True True"


def test_two_at_a_time_put_it_up_once(tmp_path: Path) -> None:
    """The last to go takes it down."""
    code = """
gate.put_up(); gate.put_up(); gate.take_down()
print(back())
gate.take_down()
print(back())
"""
    assert python(tmp_path, code) == "False\nTrue"


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_forked_child_waits_for_nobody(tmp_path: Path) -> None:
    """The thread that had the turn is not there."""
    code = """
import os
from dynapolicy.workers import forks
import torch
forks.look_after(lambda: None, lambda seconds: None)
gate.put_up()
went, stay = threading.Event(), threading.Event()
def hold():
    with gate.step():
        went.set(); stay.wait(20)
holder = threading.Thread(target=hold, daemon=True); holder.start(); went.wait(20)
child = os.fork()
if not child:
    import torch.four
    os._exit(0 if back() else 1)
print(os.waitpid(child, 0)[1])
stay.set(); holder.join(20); gate.take_down()
print(back())
"""
    assert python(tmp_path, code) == "0\nTrue"


LATE = """
from dynapolicy.workers.loading import Loader
case = {case!r}
if case == "compiled before":
    import torch._dynamo
    loader = Loader()
else:
    loader = Loader()
if case == "compiles now":
    import torch._dynamo.busy
    other = threading.Thread(target=torch._dynamo.busy.wait); other.start()
if case == "somebody waits":
    sys.modules["program"] = sys.modules["__main__"]  # a module of torch starts a thread that waits
loader.compiler(lambda: case == "stopping")
loader.end()
print([name for name in ("graph", "compile_fx") if "torch._inductor." + name in sys.modules], back())
if case == "compiles now":
    torch._dynamo.busy.event.set()
"""

COMPILER = {
    "_dynamo/__init__": "",
    "_dynamo/busy": "import threading; event = threading.Event()\ndef wait(): event.wait(20)",
    "_inductor/__init__": "",
    "_inductor/graph": (
        "import sys, time; program = sys.modules.get('program')\n"
        "if program: program.thread('import torch.two'); time.sleep(0.3)"
    ),
    "_inductor/compile_fx": "",
}


@pytest.mark.parametrize(
    ("case", "loaded"),
    [
        ("early", ["graph", "compile_fx"]),
        ("compiled before", []),
        ("compiles now", []),
        ("stopping", []),
        ("somebody waits", ["graph"]),
    ],
)
def test_the_rest_of_the_compiler_is_loaded_only_where_that_helps(tmp_path: Path, case: str, loaded: list[str]) -> None:
    """A program that compiles already, or that came to its own imports, is as fast by itself."""
    for name, text in COMPILER.items():
        path = tmp_path / "torch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert python(tmp_path, LATE.format(case=case)) == f"{loaded} True"
