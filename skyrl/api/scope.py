"""Whose things a list holds: the tenant's own, whether the SDK asks for its own or for all that it may see."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query

AccessScope = Annotated[Literal["owned", "accessible"], Query()]
"""A query parameter; another value is refused by the framework, with a 400 that names it."""
