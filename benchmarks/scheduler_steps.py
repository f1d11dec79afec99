"""vLLM's scheduler for `benchmarks.concurrency`: it writes down each step. Its file is copied beside a server of any
build, so it knows vLLM 0.32 alone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

FILE = "SKYRL_BENCH_STEPS"
"""The environment's variable with the file to write."""


class Steps(Scheduler):
    """A line for each step: CPU seconds of the process before it, the tokens and the sequences that it computes, and
    the sequences that it throws out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = open(os.environ[FILE], "a", buffering=1)  # noqa: SIM115

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        cpu_s = time.process_time()
        output = super().schedule(*args, **kwargs)
        tokens, thrown_out = output.total_num_scheduled_tokens, len(output.preempted_req_ids or ())
        print(f"{cpu_s:.6f}", tokens, len(output.num_scheduled_tokens), thrown_out, file=self._steps)
        return output
