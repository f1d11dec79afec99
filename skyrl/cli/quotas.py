"""`skyrl quotas`: exceptions for single tenants from the quotas in the configuration, which hold for all tenants."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl.cli.database import ConfigFile, DatabaseUrl, StateDir, in_database, open_database, print_table, refusal

if TYPE_CHECKING:  # importing the database takes longer than `skyrl --help` may
    from skyrl.sampling.quota_account import QuotaLimits
    from skyrl.storage.db.database import Connection

app = typer.Typer(help="Show what tenants use, and set quotas for single tenants.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(help="The tenant, as `skyrl keys list` and `skyrl quotas list` show it.")]
_HELP = "A number, unlimited, or default (the quota that the configuration sets for all tenants)."
Number = Annotated[str | None, typer.Option(help=_HELP)]
_MAX_COUNT, _MAX_AMOUNT = 2**31 - 1, 2**63 - 1
_TENANT = re.compile(r"[0-9a-f]{32}")


def _number(name: str, text: str) -> int | None:
    """The value of an option; None for `default`."""
    from skyrl.sampling.quota_account import LEAST, UNLIMITED

    if text in ("unlimited", "default"):
        return UNLIMITED if text == "unlimited" else None
    most = _MAX_AMOUNT if name in ("tokens_per_minute", "stored_bytes") else _MAX_COUNT
    if not (text.isdecimal() and len(text) <= len(str(most)) and LEAST[name] <= int(text) <= most):
        option = name.replace("_", "-")
        raise refusal(
            "quotas", f"--{option}: {text!r} is not a number from {LEAST[name]} to {most}, unlimited, or default"
        )
    return int(text)


@app.command("set")
def set_quotas(
    tenant: Tenant,
    requests_in_flight: Number = None,
    tokens_per_minute: Number = None,
    models: Number = None,
    stored_bytes: Number = None,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Set quotas of one tenant. Other quotas of the tenant stay. A running server applies them two seconds later."""
    from skyrl.sampling.quota_account import NAMES
    from skyrl.storage.db import quotas
    from skyrl.storage.db.keys import known_tenant

    options = dict(zip(NAMES, (requests_in_flight, tokens_per_minute, models, stored_bytes), strict=True))
    values = {name: _number(name, text) for name, text in options.items() if text is not None}
    if not values:
        names = ", ".join("--" + name.replace("_", "-") for name in NAMES)
        raise refusal("quotas", f"give at least one of {names}")
    if not _TENANT.fullmatch(tenant):
        raise refusal("quotas", f"{tenant!r} is not a tenant as `skyrl keys list` shows them (32 hexadecimal digits)")

    def change(connection: Connection) -> bool:
        known = known_tenant(connection, tenant)
        if known:
            quotas.change(connection, tenant, values)
        return known

    with open_database("quotas", state_dir, database_url, config) as (_, database):
        if not database.write(change, power_safe=True):
            raise refusal("quotas", f"{tenant} has no key, session or checkpoint {in_database(database)}")
    typer.echo(f"tenant {tenant} has quotas of its own {in_database(database)}", err=True)


@app.command()
def clear(
    tenant: Tenant, state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None
) -> None:
    """Delete a tenant's own quotas: the quotas of the configuration hold for the tenant again."""
    from skyrl.storage.db import quotas

    with open_database("quotas", state_dir, database_url, config) as (_, database):
        if not database.write(lambda connection: quotas.clear(connection, tenant), power_safe=True):
            raise refusal("quotas", f"{tenant} has no quotas of its own {in_database(database)}")
    typer.echo(f"tenant {tenant} has no quotas of its own any more {in_database(database)}", err=True)


@app.command("list")
def list_quotas(state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Print what each tenant uses and may use: tenants with samples in flight, models in training, checkpoints, or
    quotas of their own. Give --config if the server has one: it sets the quotas of all tenants."""
    from skyrl.sampling.quota_account import QuotaLimits
    from skyrl.storage.db import quotas

    with open_database("quotas", state_dir, database_url, config) as (loaded, database):
        tenants = database.read(quotas.held)
    defaults = QuotaLimits.of(loaded)
    lines: list[tuple[str, ...]] = [
        ("TENANT", "REQUESTS IN FLIGHT", "TOKENS PER MINUTE", "MODELS", "STORED BYTES", "OWN QUOTAS")
    ]
    lines.append(("every", *_cells((None,) * 4, defaults), ""))
    for tenant, held in sorted(tenants.items()):
        used = (held.samples, None, held.models, held.stored_bytes)
        own = "yes" if any(number is not None for number in held.exceptions) else "no"
        lines.append((tenant, *_cells(used, defaults.with_exceptions(held.exceptions)), own))
    print_table(lines)


def _cells(used: Iterable[int | None], limits: QuotaLimits) -> list[str]:
    """One cell per quota: the limit, and the amount in use if it is known."""
    from skyrl.sampling.quota_account import NAMES

    texts = ("unlimited" if getattr(limits, name) is None else str(getattr(limits, name)) for name in NAMES)
    return [limit if amount is None else f"{amount} of {limit}" for amount, limit in zip(used, texts, strict=True)]
