"""Types of columns: numbers of rows, references to weights as text, and the shape of a LoRA adapter as seven columns;
and records of rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

from skyrl.base.types.weights import LoraSpec, WeightsRef, parse_weights

ROW_NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers new rows only in a column of type INTEGER. PostgreSQL's INTEGER has 32 bits, which is too few."""


class WeightsText(TypeDecorator[WeightsRef]):
    """A reference to weights, stored as its text (see `skyrl.base.types.weights`)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: WeightsRef | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> WeightsRef | None:
        return None if value is None else parse_weights(value)


T = TypeVar("T")


def record_of(kind: type[T], row: Any, **more: Any) -> T:
    """The dataclass `kind` of a row: each field is the column of its name, but for those in `more`."""
    own = [field.name for field in fields(cast(Any, kind)) if field.name not in more]
    return kind(**{name: getattr(row, name) for name in own}, **more)


def plain_lora_of(row: Any) -> LoraSpec:
    """The LoRA columns of an upload's row, which knows neither ranks of layers nor value heads."""
    return LoraSpec(
        rank=row.lora_rank,
        alpha=row.lora_alpha,
        seed=row.seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )


def lora_of(row: Any) -> LoraSpec:
    """The LoRA columns of a models row or of a checkpoints row."""
    pattern = tuple((expression, rank) for expression, rank in row.rank_pattern or ())
    return replace(plain_lora_of(row), rank_pattern=pattern, value_head=row.value_head)


def plain_lora_values(lora: LoraSpec) -> dict[str, Any]:
    """The reverse of `plain_lora_of`: values by the names of the columns."""
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "seed": lora.seed,
        "train_attn": lora.train_attn,
        "train_mlp": lora.train_mlp,
        "train_unembed": lora.train_unembed,
    }


def lora_values(lora: LoraSpec) -> dict[str, Any]:
    """The reverse of `lora_of`."""
    more = {"rank_pattern": lora.rank_pattern or None, "value_head": lora.value_head}
    return plain_lora_values(lora) | more
