"""All benchmarks, one after the other; results go to benchmarks/results/NAME.json. Takes some three minutes."""

from __future__ import annotations

import json
from pathlib import Path

import forwarding
import training
import transports

RESULTS = Path(__file__).with_name("results")

if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    for module in (transports, forwarding, training):
        print(f"== {module.__name__}", flush=True)
        (RESULTS / f"{module.__name__}.json").write_text(json.dumps(module.run(), indent=1) + "\n")
