"""What was logged in a test, but not by the SDK: clients of earlier tests may still log lost heartbeats."""

from __future__ import annotations

import pytest


def logged_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if not record.name.startswith("tinker")]
