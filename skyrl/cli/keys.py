"""`skyrl keys`: make, list and revoke API keys in a server's database. The server may run or not."""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from skyrl.cli.database import ConfigFile, DatabaseUrl, StateDir, in_database, open_database, print_table, refusal

if TYPE_CHECKING:  # importing the database takes longer than `skyrl --help` may
    from skyrl.storage.db.database import Connection, Database
    from skyrl.storage.db.keys import ListedKey, Scope

app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_MAX_DAYS = 36_500
_TENANT = re.compile(r"[0-9a-f]{32}")
MAX_NAME = 100


def _refusal(message: str) -> typer.Exit:
    return refusal("keys", message)


@contextmanager
def _database(
    state_dir: Path | None, database_url: str | None, config: Path | None, *, make: bool = False
) -> Iterator[Database]:
    from skyrl.storage.db.keys import KeyRefused

    with open_database("keys", state_dir, database_url, config, make=make, refusals=(KeyRefused,)) as (_, database):
        yield database


def _expires_at(text: str | None) -> float | None:
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdecimal() or not 0 < int(number) * _UNITS[unit] <= _MAX_DAYS * 86_400:
        raise _refusal(f"--expires: {text!r} is not a time such as 90d, 12h or 30m, of at most {_MAX_DAYS} days")
    return time.time() + int(number) * _UNITS[unit]


def _scopes(names: list[str] | None) -> list[Scope]:
    from skyrl.storage.db.keys import SCOPES

    for scope in names or ():
        if scope not in SCOPES:
            raise _refusal(f"--scope: {scope!r} is not one of: {', '.join(SCOPES)}")
    return [cast("Scope", scope) for scope in names or ("train", "sample")]


def _adopted_tenant() -> str:
    """The tenant of a key from before keys were managed. Reads that key from the terminal or standard input, because a
    list of processes shows the arguments of a command."""
    from skyrl.api.access import tenant_of_key

    prompt = "The old key (the new key will stand for the same tenant): "
    key = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not key:
        raise _refusal("--adopt: give the key on standard input")
    return tenant_of_key(key)


def _owner(tenant: str | None, *, adopt: bool) -> Callable[[Connection], str | None]:
    """A function that finds the tenant of the new key, in the transaction that makes the key; None for a new tenant."""
    from skyrl.storage.db.keys import KeyRefused, known_tenant

    if tenant is not None and adopt:
        raise _refusal("give --tenant or --adopt, not both")
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise _refusal(f"--tenant: {tenant!r} is not a tenant as `skyrl keys list` shows them (32 hexadecimal digits)")
    wanted = _adopted_tenant() if adopt else tenant

    def find(connection: Connection) -> str | None:
        if wanted is not None and not known_tenant(connection, wanted):
            name = "--adopt: the given key" if adopt else f"--tenant: {wanted}"
            raise KeyRefused(f"{name} has no key, session or checkpoint here; leave it out for a new tenant")
        return wanted

    return find


@app.command()
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
        raise _refusal(f"--name: must be at most {MAX_NAME} printable characters")
    owner, scopes, end = _owner(tenant, adopt=adopt), _scopes(scope), _expires_at(expires)

    def make(connection: Connection) -> tuple[str, keys.ApiKey]:
        return keys.create(connection, tenant=owner(connection), name=name, scopes=scopes, expires_at=end)

    with _database(state_dir, database_url, config, make=make_database) as database:
        text, key = database.write(make, power_safe=True)
    typer.echo(f"key {key.id} of tenant {key.tenant}, {in_database(database)}; it is not shown again:", err=True)
    typer.echo(text)


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="List only this tenant's keys.")] = None,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Print all keys without their secrets, one per line. The list includes revoked and expired keys."""
    from skyrl.storage.db import keys

    with _database(state_dir, database_url, config) as database:
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


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id, as list shows it.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Revoke a key and every token made for it. A running server refuses key and tokens two seconds later."""
    from skyrl.storage.db import keys

    with _database(state_dir, database_url, config) as database:
        database.write(lambda connection: keys.revoke(connection, key), power_safe=True)
    typer.echo(f"key {key} is revoked {in_database(database)}", err=True)
