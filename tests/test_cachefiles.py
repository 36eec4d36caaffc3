"""A cache folder that was gathered and put elsewhere is as good as the first."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dynapolicy.artifacts import bundling
from dynapolicy.artifacts.cachefiles import gather, unpack
from dynapolicy.artifacts.envelope import Entry
from dynapolicy.artifacts.store import Loaded
from dynapolicy.torch_compat import artifacts as compat

HERE = Path(__file__).parent


def compiled_with(folder):
    """Compile a kernel for a GPU in a process of its own; every file of Triton's and when it was written."""
    subprocess.run(
        [sys.executable, "-c", "import triton_kernel; triton_kernel.compiled()"],
        env={**os.environ, "PYTHONPATH": str(HERE), "TRITON_CACHE_DIR": str(folder / "triton")},
        capture_output=True,
        check=True,
        timeout=200,
    )
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_compiles_no_kernel_again_in_another_folder(tmp_path):
    """Its lists of files name them by whole paths, in the folder of a process that is gone.

    What a kernel was on the way to its binary is left behind.
    """
    assert any(path.suffix == ".ttir" for path in compiled_with(tmp_path / "first"))
    entries = gather(tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    second = tmp_path / "second"
    unpack(entries, second)
    before = {path.relative_to(second): path.stat().st_mtime_ns for path in second.rglob("*") if path.is_file()}
    assert sorted(path.name for path in before) == ["__grp__add_one.json", "add_one.cubin", "add_one.json"]
    assert compiled_with(second) == before


def put(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_a_list_names_files_below_the_new_folder_and_leaves_others(tmp_path):
    kernel = tmp_path / "a" / "triton" / "HASH"
    paths = {"k.cubin": str(kernel / "k.cubin"), "libdevice.bc": "/usr/lib/libdevice.bc"}
    put(kernel, "__grp__k.json", json.dumps({"child_paths": paths}))
    unpack(gather(tmp_path / "a"), tmp_path / "b")
    listed = json.loads((tmp_path / "b" / "triton" / "HASH" / "__grp__k.json").read_text())["child_paths"]
    assert listed == {"k.cubin": str(tmp_path / "b/triton/HASH/k.cubin"), "libdevice.bc": "/usr/lib/libdevice.bc"}


def test_a_list_names_no_file_that_stays_behind(tmp_path):
    """Since 3.8 Triton takes no list of which a file is missing, and compiles the kernel again."""
    kernel = tmp_path / "a" / "triton" / "HASH"
    names = ["k.source", "k.ttir", "k.ttgir", "k.llir", "k.ptx", "k.cubin", "k.json"]
    for name in names:
        put(kernel, name, "x")
    put(kernel, "__grp__k.json", json.dumps({"child_paths": {name: str(kernel / name) for name in names}}))
    unpack(gather(tmp_path / "a"), tmp_path / "b")
    listed = json.loads((tmp_path / "b" / "triton" / "HASH" / "__grp__k.json").read_text())["child_paths"]
    assert list(listed) == ["k.cubin", "k.json"]
    assert all(Path(path).exists() for path in listed.values())


def test_a_kernel_without_a_binary_is_kept_whole(tmp_path):
    put(tmp_path / "a", "k.spv", "x")
    put(tmp_path / "a", "k.ttir", "x")
    assert sorted(entry.key for entry in gather(tmp_path / "a")) == ["k.spv", "k.ttir"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"child_paths": 3}', '{"child_paths": {"k": 3}}', '{"k": {}}']
)
def test_what_is_no_list_stays_as_it_is(text, tmp_path):
    put(tmp_path / "a", "__grp__k.json", text)
    unpack(gather(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b" / "__grp__k.json").read_text() == text


@pytest.mark.parametrize("first", ["torch", "files"])
def test_what_autotuning_found_is_put_whether_torch_or_the_files_come_first(first, tmp_path, monkeypatch):
    """It is in torch's blob and among the files, and both are written at a time."""
    if compat.layout() is None:
        pytest.skip("torch 2.6 has no blob")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    kind = "autotune" if compat.layout().grouped else "1"
    found = b'{"XBLOCK": 128}'
    content = bundling.Content(
        (Entry(kind, "ab/kernel.best_config", found),), (Entry("file", "inductor/ab/kernel.best_config", found),)
    )
    manifest, parts = bundling.manifest_of(content, name="m", mode="default", fit={})
    done = threading.Event()

    def before(write):
        return lambda *args: (write(*args), done.set())[0]

    def after(write):
        return lambda *args: (done.wait(20), write(*args))[1]

    monkeypatch.setattr(compat, "load_blob", (before if first == "torch" else after)(compat.load_blob))
    monkeypatch.setattr(bundling, "unpack", (after if first == "torch" else before)(bundling.unpack))
    bundling.put(Loaded(manifest, "identity", parts), content, tmp_path)
    assert (tmp_path / "inductor/ab/kernel.best_config").read_bytes() == found


def test_a_file_stands_in_for_no_folder(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="exists"):
        unpack([Entry("file", "a", b"x")], tmp_path)
