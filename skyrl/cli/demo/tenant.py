"""One tenant of the demo, as a process: reads orders for runs from stdin, reports steps on stdout, as JSON lines.

Each tenant is a process, because real tenants share only the server. The process lives for several runs, so that the
measured time of a run includes no imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict

import tinker
import transformers

from skyrl.base.tiny.corpus import TASKS
from skyrl.cli.demo.rl import Settings, Step, train


def report(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    """Usage: tenant.py TASK API_KEY. A line of stdin is {"base_url", "base_model", "settings"}. The process ends at the
    end of stdin."""
    task = TASKS[sys.argv[1]]
    os.environ["TINKER_API_KEY"] = sys.argv[2]
    assert transformers.AutoTokenizer  # import the lazy module now, before the first run
    report(event="up")
    for line in sys.stdin:
        order = json.loads(line)
        settings = Settings(**order["settings"])
        with tinker.ServiceClient(base_url=order["base_url"]) as service:
            started = time.perf_counter()

            def on_step(step: Step) -> None:
                report(event="step", **asdict(step))

            train(service, order["base_model"], task, settings, on_step)
            report(event="done", seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()
