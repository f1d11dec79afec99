"""A user whose requests wait: prints what the SDK logs about it.

Run in an isolated environment like run.py, as `python -m tests.e2e.sdk.waiter --url URL`. The program ends when the SDK
has logged why a new model waits and why a sample waits, or after WAIT_S.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time

import tinker
from tinker import types

from .user import SECOND_NAME

WAIT_S = 300.0
WANTED = ("Model creation", "Sampling")


class Heard(logging.Handler):
    """Prints what the SDK says about pauses, once for each kind of request."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()
        self.all_heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        kind = next((kind for kind in WANTED if said.startswith(kind)), None)
        if kind is not None and "is paused" in said and kind not in self.kinds:
            self.kinds.add(kind)
            print(said, flush=True)
            if self.kinds == set(WANTED):
                self.all_heard.set()


def report_pauses_at_once() -> None:
    """Newer SDKs log a pause of training only after 15 minutes."""
    module = sys.modules.get("tinker.lib.queue_state_logger")
    if hasattr(module, "PAUSE_GRACE_PERIOD"):
        module.PAUSE_GRACE_PERIOD = 0  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    given = parser.parse_args()
    heard = Heard()
    logging.getLogger("tinker").addHandler(heard)
    report_pauses_at_once()
    service = tinker.ServiceClient(base_url=given.url, api_key="tml-waits")

    def train() -> None:
        service.create_lora_training_client(base_model=SECOND_NAME, rank=4)

    threading.Thread(target=train, daemon=True).start()
    sampler = service.create_sampling_client(base_model=SECOND_NAME)
    sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2))
    end = time.monotonic() + WAIT_S
    heard.all_heard.wait(end - time.monotonic())
    sys.stdout.flush()
    os._exit(0)  # the SDK still polls, and its HTTP library may abort an interpreter that ends meanwhile


if __name__ == "__main__":
    main()
