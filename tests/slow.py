"""Whether slow tests run. `make test` leaves them out and says so; `make test-slow` runs them alone."""

from __future__ import annotations

import os

RUNS_SLOW_TESTS = os.environ.get("SKYRL_TEST_SLOW") == "1"
