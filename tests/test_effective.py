"""``effective`` tells for each setting what holds here, what holds elsewhere, and who asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dynapolicy as dp
from places import limit_name, new_thread

pytestmark = pytest.mark.usefixtures("torch_ready")


def asking(limit: int, **knobs: Any) -> dp.CompilePolicy:
    """A policy that comes to this limit."""
    return dp.CompilePolicy(floor=limit, **knobs)


def row(name: str | None = None) -> Any:
    """The row of one setting, else of the recompile limit."""
    name = name or f"dynamo.{limit_name()}"
    return next(one for one in dp.effective() if one.setting == name)


@pytest.fixture
def config(torch_ready: Any) -> Any:
    """Dynamo's configuration."""
    return torch_ready._dynamo.config


def test_without_a_policy_nothing_is_asked() -> None:
    """The three limits, torch's own values, and no verdict on them."""
    records = dp.effective()
    assert [one.verdict for one in records] == ["not asked"] * 3
    assert (row().value, row().process_default, row().asked) == (8, 8, None)


def test_records_have_the_same_keys_and_read_well() -> None:
    """JSON, text and HTML of one table."""
    with dp.apply_policy(asking(20, settings={"dynamo.specialize_int": True})):
        records = dp.effective()
        plain = records.to_json()
    keys = ["setting", "value", "process_default", "asked", "verdict", "why"]
    assert all(list(one) == keys for one in plain)
    assert json.loads(json.dumps(plain)) == plain
    lines = str(records).splitlines()
    assert len({line.index(one.verdict) for line, one in zip(lines[2:], records, strict=True)}) == 1
    assert records._repr_html_().count("<tr>") == len(records) + 1


def test_a_policy_is_in_force_on_every_thread() -> None:
    """The same verdict where it was applied and on another thread."""
    with dp.apply_policy(asking(20)), new_thread() as run:
        for found in (row(), run(row)):
            assert (found.value, found.process_default, found.asked, found.verdict) == (20, 20, 20, "in force")


def test_a_higher_value_of_somebody_else(config: Any) -> None:
    """Limits are never lowered; the table says who won."""
    with config.patch({limit_name(): 64}), dp.apply_policy(asking(20)):
        assert (row().value, row().asked, row().verdict) == (64, 20, "raised by another")


def test_a_lower_value_that_was_set_afterwards_shadows(config: Any) -> None:
    """Somebody assigns after the policy: it wins there, and the table says so."""
    with dp.apply_policy(asking(20)):
        with config.patch({limit_name(): 5}):
            assert (row().value, row().asked, row().verdict) == (5, 20, "shadowed")
        assert row().verdict == "in force"


def test_torchs_own_default_may_be_higher() -> None:
    """A policy of four leaves torch's eight."""
    with dp.apply_policy(dp.CompilePolicy(floor=4)):
        assert (row().value, row().asked, row().verdict) == (8, 4, "raised by another")
        assert "exact=True" in row().why


def test_a_context_policy_holds_here_only() -> None:
    """Where torch has values of one context, the process default stays."""
    if not dp.capabilities().context_local_config:
        pytest.skip("on this torch every value is process-wide")
    with dp.apply_policy(asking(20), scope="context"), new_thread() as run:
        here = row()
        assert (here.value, here.process_default, here.asked, here.verdict) == (20, 8, 20, "in force")
        assert run(row).verdict == "not asked"


def test_a_setting_that_this_torch_lacks_is_not_available() -> None:
    """Both names are known, and no torch has both."""
    lacking = "dynamo.allow_unspec_int_on_nn_module"
    if dp.capabilities().allow_unspec_int_on_nn_module:
        pytest.skip(f"this torch has {lacking}")
    policy = asking(20, settings={lacking: True})
    with pytest.warns(dp.SettingWarning):
        applied = dp.apply_policy(policy)
    with applied:
        assert (row(lacking).value, row(lacking).verdict) == (None, "not available")


@pytest.mark.filterwarnings("ignore::dynapolicy.TooLateWarning")
def test_other_settings_and_the_precision_have_rows(torch_ready: Any) -> None:
    """What else the policy asks for, dynamo's, inductor's and the precision."""
    before = torch_ready.get_float32_matmul_precision()
    policy = asking(20, settings={"inductor.max_fusion_size": 17}, float32_matmul_precision="medium")
    try:
        with dp.apply_policy(policy):
            assert row("inductor.max_fusion_size").verdict == "in force"
            precision = row("float32_matmul_precision")
            assert (precision.value, precision.verdict) == ("medium", "in force")
    finally:
        torch_ready.set_float32_matmul_precision(before)


def test_a_frozen_process_says_what_can_not_be_counted() -> None:
    """While frozen, calls that run eager can't be seen."""
    with dp.freeze():
        assert row("freeze").verdict == "unseen"
        assert "can't be counted" in row("freeze").why
    with dp.freeze("raise"):
        assert row("freeze").verdict == "in force"
