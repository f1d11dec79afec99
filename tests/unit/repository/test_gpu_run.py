"""A run of the GPU tests: their order, and the table of what a run has found before it was cut off."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.gpu.figures import REHEARSAL, Figures
from tests.gpu.order import ORDER, place_of
from tests.gpu.table import BEGIN, END, NotAFile, main, read, section, with_section
from tests.gpu.test_speed import _waits_of

TESTS = Path(__file__).parents[2] / "gpu"
PAGE = Path(__file__).parents[3] / "docs/gpu.md"


def test_each_place_of_the_order_is_a_test_and_each_file_has_a_place() -> None:
    for entry in ORDER:
        file, _, name = entry.partition("::")
        assert f"def {name.partition('[')[0]}" in (TESTS / file).read_text(), entry
    for file in TESTS.glob("test_*.py"):
        assert place_of(f"tests/gpu/{file.name}::test_any") < len(ORDER), file.name


def test_numerics_come_first_and_the_longest_entry_decides() -> None:
    gradients = "tests/gpu/test_numerics.py::test_gradients_are_as_close_to_float32_as_those_of_peft"
    places = [
        f"{gradients}[qwen3]",
        "tests/gpu/test_speed.py::test_06b_beside_peft[grpo-4x16]",
        f"{gradients}[qwen3.5]",
    ]
    assert [place_of(test) for test in places] == sorted(place_of(test) for test in places)
    assert len({place_of(test) for test in places}) == 3


def test_a_run_that_was_cut_off_gives_the_rows_until_then(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "figures.jsonl")
    figures.add(
        where="NVIDIA H100", torch="2.11.0", cuda="13.0", python="3.12.3", day="2026-11-27", settings='{"a": 1}'
    )
    figures.record("32 × 256: tokens/s", 8315.4)
    figures.record("32 × 256: tokens/s", 6180.2, "beside")
    figures.add(test="test_speed.py::test_06b_beside_peft", outcome="passed", seconds=40.0)
    figures.record("the same bits", False)
    figures.add(test="test_engine.py::test_x", outcome="failed", seconds=1.0)
    assert figures.target is not None
    with figures.target.open("a") as file:
        file.write('{"at_s": 95.0, "what": "half a li')
    with figures.target.open() as file:
        made = section(read(file))
    assert "on NVIDIA H100, 2026-11-27: torch 2.11.0, CUDA 13.0, Python 3.12.3" in made
    assert "1 failed, 1 passed." in made
    assert 'With `{"a": 1}`.' in made
    assert "Failed: `test_engine.py::test_x`." in made
    assert "| 32 × 256: tokens/s | 8,315 |  | 6,180 |" in made
    assert "| the same bits | no |  |  |" in made
    page = with_section(PAGE.read_text(), made)
    assert with_section(page, made) == page
    assert page.index(BEGIN) < page.index("8,315") < page.index(END)


def test_a_file_without_a_machine_is_refused() -> None:
    with pytest.raises(NotAFile, match="no line names the machine"):
        section([{"at_s": 1.0, "what": "x", "column": "alone", "value": 1}])


def test_figures_of_a_rehearsal_are_printed_and_leave_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, page = tmp_path / "figures.jsonl", tmp_path / "docs/gpu.md"
    figures = Figures(file)
    figures.add(where=REHEARSAL, torch="2.13.0", cuda="None", python="3.11.7", day="2026-11-28")
    figures.record("the same bits", True)
    page.parent.mkdir()
    page.write_text(before := f"{BEGIN}a GPU's figures{END}")
    monkeypatch.chdir(tmp_path)
    main([str(file)])
    assert "| the same bits | yes |" in capsys.readouterr().out
    assert page.read_text() == before
    main([str(file), "--page", str(page)])
    assert "| the same bits | yes |" in page.read_text()


def test_a_missing_file_of_figures_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-file"])
    assert "No such file or directory: 'no-such-file'" in capsys.readouterr().err


def test_waits_are_counted_though_the_mode_that_tells_of_them_warns_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's does. The mode goes off again also when the run fails."""
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    assert _waits_of(lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1)) == 1
    with pytest.raises(ZeroDivisionError):
        _waits_of(lambda: print(1 // 0))
    assert modes == ["warn", "default"] * 2
