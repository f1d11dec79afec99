"""Fixtures of the tests of an API process."""

from __future__ import annotations

import pytest

from skyrl.runtime.metrics import files


@pytest.fixture(autouse=True)
def metrics_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then by `scrape`: the process's own thread could replace what that has written by what it had read before."""
    monkeypatch.setattr(files, "PERIOD_S", 1000.0)
