"""The query parameter `access_scope` of lists: `owned` asks for the tenant's own things, `accessible` also for what
other tenants have published. Only checkpoints can be published."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query

AccessScope = Annotated[Literal["owned", "accessible"], Query()]
"""FastAPI refuses any other value, and the answer is a 400 that names the parameter."""
