"""`skyrl keys`, `skyrl quotas` and `skyrl usage`: what an operator does for single tenants, in a server's database.

Keys are made, listed and revoked. Quotas are exceptions from those in the configuration, which hold for all tenants.
Usage are the tokens of all tenants, or of one, by day, run and base model. The server may run or not.
"""

from __future__ import annotations

import getpass
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyrl.cli.db import ConfigFile, DatabaseUrl, StateDir, in_database, open_database, print_table, refusal

if TYPE_CHECKING:
    from skyrl.sampling.quota_account import QuotaLimits
    from skyrl.storage.db.database import Connection
    from skyrl.storage.db.keys import ListedKey, Scope
    from skyrl.storage.db.usage_report import UsageLine


keys_app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_MAX_DAYS = 36_500
_TENANT = re.compile(r"[0-9a-f]{32}")
MAX_NAME = 100


def _expires_at(text: str | None) -> float | None:
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdecimal() or not 0 < int(number) * _UNITS[unit] <= _MAX_DAYS * 86_400:
        raise refusal("keys", f"--expires: {text!r} is not a time such as 90d, 12h or 30m, of at most {_MAX_DAYS} days")
    return time.time() + int(number) * _UNITS[unit]


def _scopes(names: list[str] | None) -> list[Scope]:
    from skyrl.storage.db.keys import SCOPES

    for scope in names or ():
        if scope not in SCOPES:
            raise refusal("keys", f"--scope: {scope!r} is not one of: {', '.join(SCOPES)}")
    return [cast("Scope", scope) for scope in names or ("train", "sample")]


def _adopted_tenant() -> str:
    """The tenant of a key from before keys were managed. Reads that key from the terminal or standard input, because a
    list of processes shows the arguments of a command."""
    from skyrl.api.access import tenant_of_key

    prompt = "The old key (the new key will stand for the same tenant): "
    key = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not key:
        raise refusal("keys", "--adopt: give the key on standard input")
    return tenant_of_key(key)


def _owner(tenant: str | None, *, adopt: bool) -> Callable[[Connection], str | None]:
    """A function that finds the tenant of the new key, in the transaction that makes the key; None for a new tenant."""
    from skyrl.storage.db.keys import KeyRefused, known_tenant

    if tenant is not None and adopt:
        raise refusal("keys", "give --tenant or --adopt, not both")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise refusal(
            "keys", f"--tenant: {tenant!r} is not a tenant as `skyrl keys list` shows them (32 hexadecimal digits)"
        )
    wanted = _adopted_tenant() if adopt else tenant

    def find(connection: Connection) -> str | None:
        if wanted is not None and not known_tenant(connection, wanted):
            name = "--adopt: the given key" if adopt else f"--tenant: {wanted}"
            raise KeyRefused(f"{name} has no key, session or checkpoint here; leave it out for a new tenant")
        return wanted

    return find


@keys_app.command()
def create(
    name: Annotated[str, typer.Option(help="What the key is for; shown by list.")] = "",
    tenant: Annotated[str | None, typer.Option(help="An existing tenant. Default: a new tenant.")] = None,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Read a key used before keys were managed from stdin, and take its tenant."),
    ] = False,
    scope: Annotated[
        list[str] | None, typer.Option(help="train, sample, admin; several times. Default: train and sample.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="90d, 12h, 30m. Default: never.")] = None,
    make_database: Annotated[
        bool, typer.Option("--make-database", help="Make the database if it does not exist: before the first start.")
    ] = False,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Make a key and print it. It cannot be shown again. A running server accepts the key two seconds later."""
    from skyrl.storage.db import keys

    if len(name) > MAX_NAME or not (name.isprintable()):
        raise refusal("keys", f"--name: must be at most {MAX_NAME} printable characters")
    owner, scopes, end = _owner(tenant, adopt=adopt), _scopes(scope), _expires_at(expires)

    def make(connection: Connection) -> tuple[str, keys.ApiKey]:
        return keys.create(connection, tenant=owner(connection), name=name, scopes=scopes, expires_at=end)

    with open_database("keys", state_dir, database_url, config, make=make_database) as (_, database):
        text, key = database.write(make, power_safe=True)
    typer.echo(f"key {key.id} of tenant {key.tenant}, {in_database(database)}; it is not shown again:", err=True)
    typer.echo(text)


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="List only this tenant's keys.")] = None,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Print all keys without their secrets, one per line. The list includes revoked and expired keys."""
    from skyrl.storage.db import keys

    with open_database("keys", state_dir, database_url, config) as (_, database):
        listed = database.read(lambda connection: keys.listed(connection, tenant))
    lines = [("KEY", "TENANT", "SCOPES", "CREATED", "EXPIRES", "LAST USED", "STATE", "NAME")]
    lines += [_line(key) for key in listed]
    print_table(lines)


def _line(listed: ListedKey) -> tuple[str, ...]:
    from skyrl.storage.db.keys import SCOPES

    def at(seconds: float | None) -> str:
        return "-" if seconds is None else time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(seconds))

    key = listed.key
    state = "revoked" if listed.revoked_at is not None else "expired" if key.expired else "good"
    times = at(key.created_at), at(key.expires_at), at(listed.last_used_at)
    scopes = ",".join(scope for scope in SCOPES if scope in key.scopes)
    return key.id, key.tenant, scopes, *times, state, key.name


@keys_app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, as list shows it.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Revoke a key and every token made for it. A running server refuses key and tokens two seconds later."""
    from skyrl.storage.db import keys

    with open_database("keys", state_dir, database_url, config) as (_, database):
        database.write(lambda connection: keys.revoke(connection, key), power_safe=True)
    typer.echo(f"key {key} is revoked {in_database(database)}", err=True)


quotas_app = typer.Typer(help="Show what tenants use, and set quotas for single tenants.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(help="The tenant, as `skyrl keys list` and `skyrl quotas list` show it.")]
_HELP = "A number, unlimited, or default (the quota that the configuration sets for all tenants)."
Number = Annotated[str | None, typer.Option(help=_HELP)]
_MAX_COUNT, _MAX_AMOUNT = 2**31 - 1, 2**63 - 1


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


@quotas_app.command("set")
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


@quotas_app.command()
def clear(
    tenant: Tenant, state_dir: StateDir = None, database_url: DatabaseUrl = None, config: ConfigFile = None
) -> None:
    """Delete a tenant's own quotas: the quotas of the configuration hold for the tenant again."""
    from skyrl.storage.db import quotas

    with open_database("quotas", state_dir, database_url, config) as (_, database):
        if not database.write(lambda connection: quotas.clear(connection, tenant), power_safe=True):
            raise refusal("quotas", f"{tenant} has no quotas of its own {in_database(database)}")
    typer.echo(f"tenant {tenant} has no quotas of its own any more {in_database(database)}", err=True)


@quotas_app.command("list")
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
    from skyrl.storage.db.usage_report import UsageLine, last_days, report

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
