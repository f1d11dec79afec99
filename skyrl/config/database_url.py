"""Database URLs as operators write them: read with care, and shown without their password.

Imports no database, so that the configuration can use it. A refusal repeats nothing of the URL: what looks like a host
may be a part of the password.
"""

from __future__ import annotations

from pathlib import Path

_SECRETS = ("password", "sslpassword")
"""Parameters behind the `?` that PostgreSQL's driver takes as secrets."""


def readable_url(text: str) -> str:
    """The URL, with `postgres://` spelled `postgresql://`.

    Raises ValueError for one whose password cannot be told from its host, or whose port is no number.
    """
    scheme, separator, rest = text.partition("://")
    if scheme.startswith("sqlite") or not separator:
        return text
    if rest.count("@") > 1:
        raise ValueError(
            "has more than one @, so that the password cannot be told from the host: percent-encode the password "
            "(@ is %40, / is %2F, : is %3A, % is %25)"
        )
    host = rest.rpartition("@")[2].partition("?")[0].partition("/")[0]
    _, _, port = host.rpartition("]")[2].partition(":")  # an IPv6 address stands in brackets
    if port and not port.isdecimal():
        raise ValueError("the port is not a number; a password must be percent-encoded (: is %3A, / is %2F)")
    return f"{'postgresql' if scheme == 'postgres' else scheme}://{rest}"


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for another database, and for one in memory."""
    from sqlalchemy.engine import make_url

    name = make_url(url).database if url.startswith("sqlite:") else None
    return Path(name) if name and name != ":memory:" else None


def shown_url(url: str) -> str:
    """What may be printed of a URL that `readable_url` has returned."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    query = {name: "hidden" if name in _SECRETS else value for name, value in parsed.query.items()}
    return parsed.set(query=query).render_as_string(hide_password=True)
