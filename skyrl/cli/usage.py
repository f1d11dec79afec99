"""`skyrl usage`: the tokens of all tenants, or of one, by day, run and base model, from the server's database."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl.cli.database import ConfigFile, DatabaseUrl, StateDir, open_database, print_table

if TYPE_CHECKING:
    from skyrl.storage.db.usage import UsageLine


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def usage(
    days: Annotated[int, typer.Option(min=1, max=366, help="How many days in UTC, today included.")] = 7,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant, as `skyrl keys list` shows it.")] = None,
    run: Annotated[str | None, typer.Option(help="Only this run: the id of a model that was trained.")] = None,
    format: Annotated[Format, typer.Option(help="How to print it.")] = Format.TABLE,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Print the tokens trained, sampled, and given as prompts (not in the prefix cache, found there, and computed for
    all sequences together). Samples from the base model have no run."""
    from skyrl.storage.db.usage import UsageLine, last_days, report

    with open_database("usage", state_dir, database_url, config) as (_, database):
        lines = database.read(lambda c: report(c, *last_days(days), tenant=tenant, run=run))
    names = [field.name for field in fields(UsageLine)]
    if format is Format.JSON:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=1))
    elif format is Format.CSV:
        from skyrl.api.ui.usage_csv import as_csv

        typer.echo(as_csv(names, (asdict(line) for line in lines)), nl=False)
    else:
        print_table(_table(names, lines))


def _table(names: list[str], lines: list[UsageLine]) -> list[tuple[str, ...]]:
    """The lines, with a header and a line of sums."""
    table = [tuple(name.replace("_", " ").upper() for name in names)]
    table += [tuple(_cell(value) for value in asdict(line).values()) for line in lines]
    sums = [sum(getattr(line, name) for line in lines) for name in names[4:]]
    return [*table, ("all", "", "", "", *(_cell(amount) for amount in sums))]


def _cell(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value or "-"
