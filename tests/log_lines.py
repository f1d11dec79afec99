"""What skyrl has logged in a test. SDK clients of earlier tests in the same process may still log lost heartbeats."""

from __future__ import annotations

import pytest


def skyrl_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("skyrl")]
