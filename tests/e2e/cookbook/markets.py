"""Questions about the future with known outcomes, in the columns of the data set Prophet Arena.

Each asks whether an animal comes. A source says whether it was seen, which tells the outcome; three of four come. Knows
no recipe.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.e2e.cookbook import tasks

FILE = "markets.csv"
TRAIN, VALIDATION = 64, 16
"""How many markets close before the recipes' date of the split, and how many open after it."""
DATES = (("2025-09-01", "2025-09-05"), ("2025-11-01", "2025-11-05"))
"""Of the snapshot and of the close, for both."""


def write(root: Path) -> None:
    """Write `root / FILE`."""
    rows = [
        _row(number, opens, closes)
        for count, (opens, closes) in zip((TRAIN, VALIDATION), DATES, strict=True)
        for number in range(count)
    ]
    with (root / FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(number: int, opens: str, closes: str) -> dict[str, str]:
    animal, comes = tasks.ANIMALS[number % len(tasks.ANIMALS)], number % 4 != 1
    market = f"the {animal} comes"
    seen = f"The {animal} was {'seen' if comes else 'not seen'} at the mill."
    return {
        "submission_id": f"{opens}-{number}",
        "event_ticker": f"{opens}-{number}",
        "title": f"Will the {animal} come?",
        "snapshot_time": opens,
        "close_time": closes,
        "market_outcome": json.dumps({market: int(comes)}),
        "category": "Animals",
        "markets": json.dumps([market]),
        "sources": json.dumps([{"title": "Seen", "summary": seen, "ranking": 1}]),
    }
