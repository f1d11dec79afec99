"""One tenant as a process of its own: reads runs to do from stdin, reports its steps on stdout, both as JSON lines.

A process per tenant, because that is what tenants are: nothing but the server is shared. It stays alive between runs,
so that the time of a run holds no imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict

import tinker
import transformers

from skyrl.demo.rl import Settings, Step, train
from skyrl.tiny.corpus import TASKS


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    """Usage: tenant.py TASK API_KEY. A line of stdin is {"base_url", "base_model", "settings"}; its end is the end."""
    task = TASKS[sys.argv[1]]
    os.environ["TINKER_API_KEY"] = sys.argv[2]
    assert transformers.AutoTokenizer  # imported lazily: now, and not within the first run
    say(event="up")
    for line in sys.stdin:
        order = json.loads(line)
        settings = Settings(**order["settings"])
        with tinker.ServiceClient(base_url=order["base_url"]) as service:
            started = time.perf_counter()

            def on_step(step: Step) -> None:
                say(event="step", **asdict(step))

            train(service, order["base_model"], task, settings, on_step)
            say(event="done", seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()
