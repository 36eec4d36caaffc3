"""Which torch has what, held against the installed torch by trying. The release says only which column is expected."""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
from packaging.version import Version

from dynapolicy import CompilePolicy, ScopeWarning, UnsupportedTorchWarning, apply_policy, capabilities
from dynapolicy.torch_compat import lever
from dynapolicy.torch_compat.settings import find, known_names, limit_names

pytestmark = pytest.mark.usefixtures("torch_ready")

RELEASES = ("2.6", "2.7", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")

#: One row for each feature, one cell for each release.
TABLE = {
    "recompile_limit and its family":                  "no  yes yes yes yes yes yes yes yes",
    "the old names are aliases":                       "no  yes yes yes yes yes yes yes yes",
    "a value set on one thread is seen on others":     "yes yes yes yes yes no  no  no  no ",
    "torch.compile(recompile_limit=)":                 "no  no  no  no  no  yes yes yes yes",
    "torch.compile(isolate_recompiles=)":              "no  no  no  no  no  no  yes yes yes",
    "allow_unspec_int_on_nn_module":                   "no  yes yes yes yes yes yes yes yes",
    "torch.compiler.save_cache_artifacts":             "no  yes yes yes yes yes yes yes yes",
    "config.caching_precompile":                       "no  no  yes yes yes yes yes yes yes",
    "torch.compiler.precompile":                       "no  no  no  no  no  no  no  yes yes",
}  # fmt: skip

#: The same by dynapolicy's own record. A value of a context is one that others don't see.
FIELDS = {
    "recompile_limit and its family": "recompile_limit_names",
    "torch.compile(recompile_limit=)": "recompile_limit_keyword",
    "torch.compile(isolate_recompiles=)": "isolate_recompiles",
    "allow_unspec_int_on_nn_module": "allow_unspec_int_on_nn_module",
    "torch.compiler.save_cache_artifacts": "cache_artifacts",
    "config.caching_precompile": "caching_precompile",
    "torch.compiler.precompile": "precompile",
}


def _config() -> Any:
    from torch._dynamo import config

    return config


def _family() -> bool:
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    return all(hasattr(_config(), name) for name in names)


def _aliases() -> bool:
    config = _config()
    with config.patch(cache_size_limit=77):
        return getattr(config, "recompile_limit", None) == 77


def _seen_elsewhere() -> bool:
    config = _config()
    with config.patch(specialize_int=not config.specialize_int), ThreadPoolExecutor(1) as pool:
        return bool(pool.submit(lambda: config.specialize_int).result() == config.specialize_int)


def _takes(**keyword: Any) -> Callable[[], bool]:
    def probe() -> bool:
        import torch

        try:
            compiled = torch.compile(lambda x: x + 1, backend="eager", **keyword)
        except TypeError:
            return False
        return bool(compiled(torch.ones(2)).sum() == 4)

    return probe


def _compiler_has(name: str) -> Callable[[], bool]:
    def probe() -> bool:
        import torch

        return hasattr(torch.compiler, name)

    return probe


PROBES: dict[str, Callable[[], bool]] = {
    "recompile_limit and its family": _family,
    "the old names are aliases": _aliases,
    "a value set on one thread is seen on others": _seen_elsewhere,
    "torch.compile(recompile_limit=)": _takes(recompile_limit=9),
    "torch.compile(isolate_recompiles=)": _takes(recompile_limit=9, isolate_recompiles=True),
    "allow_unspec_int_on_nn_module": lambda: hasattr(_config(), "allow_unspec_int_on_nn_module"),
    "torch.compiler.save_cache_artifacts": _compiler_has("save_cache_artifacts"),
    "config.caching_precompile": lambda: hasattr(_config(), "caching_precompile"),
    "torch.compiler.precompile": _compiler_has("precompile"),
}


def column() -> int:
    """The column of the installed torch."""
    installed = Version(capabilities().torch_version)
    series = f"{installed.major}.{installed.minor}"
    if series not in RELEASES:
        pytest.skip(f"the table has no column for torch {series}")
    return RELEASES.index(series)


def disagreements(table: dict[str, str], found: dict[str, bool]) -> list[str]:
    """Rows whose cell for the installed torch isn't what was found."""
    return [feature for feature, cells in table.items() if (cells.split()[column()] == "yes") != found[feature]]


@pytest.fixture(scope="module")
def found(torch_ready: Any) -> dict[str, bool]:
    """What the installed torch has."""
    return {feature: probe() for feature, probe in PROBES.items()}


def test_the_table_agrees_with_the_installed_torch(found: dict[str, bool]) -> None:
    """Every row, by trying."""
    assert disagreements(TABLE, found) == []
    assert all(len(cells.split()) == len(RELEASES) for cells in TABLE.values())


@pytest.mark.parametrize("feature", TABLE)
def test_altering_one_cell_of_the_table_shows(feature: str, found: dict[str, bool]) -> None:
    """The test above would fail, and name that row."""
    cells = TABLE[feature].split()
    cells[column()] = "no" if cells[column()] == "yes" else "yes"
    assert disagreements({**TABLE, feature: " ".join(cells)}, found) == [feature]


def test_the_record_of_capabilities_agrees_with_what_was_found(found: dict[str, bool]) -> None:
    """Each field says what trying says, and the process-wide lever works on every torch of the table."""
    can = capabilities()
    assert {feature: getattr(can, field) for feature, field in FIELDS.items()} == {row: found[row] for row in FIELDS}
    assert can.context_local_config is not found["a value set on one thread is seen on others"]
    assert can.process_lever


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_scalar_setting_of_this_torch_is_known() -> None:
    """A name is called unknown only where no torch has it; aliases count as what they stand for."""
    sections = {
        "dynamo": "torch._dynamo",
        "inductor": "torch._inductor",
        "functorch": "torch._functorch",
        "compiler": "torch.compiler",
    }
    missing, scalars = [], 0
    for section, package in sections.items():
        config = importlib.import_module(f"{package}.config")
        for name in [f"{section}.{key}" for key in config._config]:
            setting = find(name)
            if setting is not None and type(setting.entry.default) in (bool, int, str):
                scalars += 1
                missing += [] if name in known_names() else [name]
    assert missing == []
    assert scalars > 200


# -- a torch that has changed ----------------------------------------------------------------------------


def test_probing_leaves_no_trace() -> None:
    """The configuration entry is the same object with the same fields and class afterwards."""
    config = _config()
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    entry = config._config[name]
    before = (type(entry), dict(entry.__dict__))
    assert lever.probe(config) is None
    assert (type(entry), dict(entry.__dict__)) == before


@pytest.mark.parametrize(
    "config",
    [
        types.SimpleNamespace(),
        types.SimpleNamespace(_config={}),
        types.SimpleNamespace(_config={"recompile_limit": types.SimpleNamespace(default=8)}),
        types.SimpleNamespace(
            _config={"recompile_limit": types.SimpleNamespace(user_override=None, default=8)}, recompile_limit=8
        ),
    ],
    ids=["no entries", "no limit", "no override", "override not read"],
)
def test_a_configuration_that_has_changed_is_recognised(config: Any) -> None:
    """Whatever is different, the probe says what, and raises nothing."""
    assert isinstance(lever.probe(config), str)


def test_a_torch_without_the_lever_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one clear warning that says what to do instead."""
    monkeypatch.setattr(lever, "probe", lambda config: "it is gone")
    with pytest.warns(UnsupportedTorchWarning) as said:
        can = capabilities.__wrapped__()
    assert not can.process_lever
    message = str(said[0].message)
    assert [part for part in ("it is gone", "apply it in each thread", "compile_kwargs()") if part not in message] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capabilities.__wrapped__()


def test_without_the_lever_a_policy_holds_where_torch_puts_it() -> None:
    """By plain assignment: in this context, or before 2.12 in the process; the value found is put back."""
    can = attrs.evolve(capabilities(), process_lever=False)
    limit = find(limit_names(can)[0])
    assert limit is not None
    before = limit.read()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        applied = apply_policy(CompilePolicy(floor=40), capabilities=can)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(limit.read).result()
    assert limit.read() == 40
    assert elsewhere == (before if can.context_local_config else 40)
    assert [one.category for one in said] == ([ScopeWarning] if can.context_local_config else [])
    assert applied.scope == ("context" if can.context_local_config else "process")
    applied.restore()
    assert limit.read() == before


def test_without_context_scope_a_policy_of_a_context_holds_in_the_process() -> None:
    """As before torch 2.12: it warns, and the handle says so."""
    can = attrs.evolve(capabilities(), context_local_config=False)
    limit = find(limit_names(can)[0])
    assert limit is not None
    with pytest.warns(ScopeWarning, match="whole process"):
        applied = apply_policy(CompilePolicy(floor=40), scope="context", capabilities=can)
    with applied, ThreadPoolExecutor(1) as pool:
        assert applied.scope == "process"
        assert pool.submit(limit.read).result() == 40
