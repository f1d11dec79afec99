"""Checks a database URL that an operator wrote.

Imports no SQLAlchemy, so that the configuration loads quickly. The error messages repeat no part of the URL, because
what looks like a host may be a part of the password.
"""

from __future__ import annotations


def readable_url(text: str) -> str:
    """The URL, with `postgresql://` in place of `postgres://`.

    Raises ValueError when the password cannot be told from the host, or when the port is not a number.
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
