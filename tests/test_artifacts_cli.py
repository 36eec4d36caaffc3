"""``python -m dynapolicy artifacts``: exit status 0 fine, 1 something is damaged, 2 bad usage."""

from __future__ import annotations

import argparse
import json
import os
import time

import pytest

from dynapolicy.artifacts import command as artifacts_cli
from dynapolicy.artifacts import workdirs
from dynapolicy.artifacts.store import Store
from dynapolicy.errors import ArtifactError
from test_artifacts_store import save


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with one bundle, where the environment says."""
    root = tmp_path / "root"
    monkeypatch.setenv("DYNAPOLICY_ARTIFACT_DIR", str(root))
    monkeypatch.delenv("DYNAPOLICY_ARTIFACT_KEY", raising=False)
    kept = Store(root)
    save(kept, b"a")
    return kept


def command(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    artifacts_cli.add_arguments(parser)
    return artifacts_cli.run(parser.parse_args(["--json", *words]))


def printed(capsys):
    return json.loads(capsys.readouterr().out)


def test_ls_shows_what_is_kept(store, capsys):
    """Name, size and when, without reading the data."""
    assert command("ls") == 0
    (one,) = printed(capsys)
    assert (one["bundle"].partition("/")[0], one["bytes"], one["torch"], one["state"]) == ("m", 4554, "2.13.0", "kept")


def test_verify_reads_every_byte(store, capsys):
    """A flipped byte in a data file is seen by verify, not by ls."""
    path = next(store.bundles()[0].folder.glob("*.blob"))
    assert command("verify") == 0
    path.write_bytes(b"b" + path.read_bytes()[1:])
    printed(capsys)
    assert command("ls") == 0
    printed(capsys)
    assert command("verify") == 1
    assert "sha256" in printed(capsys)[0]["why"]


def test_a_quarantined_bundle_is_called_so(store, capsys):
    """With the reason."""
    _, identity = store.manifest(store.bundles()[0])
    workdirs.quarantine(store.root, identity, "m", "it died")
    assert command("ls") == 0
    assert printed(capsys)[0]["why"] == "it died"


def test_prune_by_age_and_by_size(store, capsys):
    """Young and small stays, old goes, and what is over the size goes."""
    assert command("prune", "--older-than", "1h") == 0
    assert command("prune", "--max-size", "1G") == 0
    assert len(store.bundles()) == 1
    old = time.time() - 7200
    os.utime(store.bundles()[0].folder / "manifest.json", (old, old))
    assert command("prune", "--older-than", "1h") == 0
    assert store.bundles() == []
    save(store, b"a")
    assert command("prune", "--max-size", "1k") == 0
    assert store.bundles() == []
    capsys.readouterr()


def test_prune_leaves_what_is_being_written_or_used(store, capsys):
    """A writer's lock, and a process that runs on a bundle, keep it."""
    bundle = store.bundles()[0]
    with store.writing(bundle):
        assert command("prune", "--max-size", "0") == 0
    work = workdirs.WorkFolder(store.root)
    work.note("proven", bundle.id, "x")
    capsys.readouterr()
    assert command("prune", "--max-size", "0") == 0
    assert printed(capsys)[0]["why"] == "in use"
    assert len(store.bundles()) == 1
    work.close()
    assert command("prune", "--max-size", "0") == 0
    assert store.bundles() == []


@pytest.mark.parametrize("words", [(), ("--older-than", "soon"), ("--max-size", "-1")])
def test_prune_without_a_limit_or_with_a_bad_one_is_bad_usage(store, words):
    """And removes nothing."""
    with pytest.raises(ArtifactError):
        command("prune", *words)
    assert len(store.bundles()) == 1
