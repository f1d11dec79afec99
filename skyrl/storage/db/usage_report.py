"""The report of usage: hours added up by day, tenant, run, base model and kind. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import Connection, func, select

from skyrl.storage.db.usage import UsageKind, usage

DAY_S = 86_400
TOKEN_KINDS = (
    UsageKind.TRAINING,
    UsageKind.PREFILL,
    UsageKind.PREFILL_CACHED,
    UsageKind.PREFILL_AGAIN,
    UsageKind.SAMPLE,
)


@dataclass(frozen=True, slots=True)
class UsageLine:
    """The tokens of one tenant, day (UTC), run and base model. `run` is empty for samples from the base model and for
    what versions of skyrl before this report have counted. A prompt counts once, whatever the number of its
    sequences: `prompt` tokens were computed; `cached` ones were not, because the inference server had them in its
    prefix cache. `computed` is what the server has computed for all sequences together, as far as it says that."""

    day: str
    tenant: str
    run: str
    base_model: str
    trained: int
    sampled: int
    prompt: int
    cached: int
    computed: int


def last_days(days: int) -> tuple[date, date]:
    """The first and the last of the last `days` days in UTC, today included."""
    last = today()
    return last - timedelta(days=days - 1), last


def today() -> date:
    """The day in UTC."""
    return datetime.now(UTC).date()


def report(
    connection: Connection, first: date, last: date, *, tenant: str | None = None, run: str | None = None
) -> list[UsageLine]:
    """The lines of the days from `first` to `last`, both included, in the order of day, tenant and run. Of one tenant,
    or of all; of one run, or of all."""
    day = usage.c.bucket - usage.c.bucket % DAY_S
    start = datetime.combine(first, datetime.min.time(), UTC)
    end = datetime.combine(last + timedelta(days=1), datetime.min.time(), UTC)
    key = (day.label("day"), usage.c.tenant, usage.c.model_id, usage.c.base_model)
    wanted = [
        usage.c.bucket >= int(start.timestamp()),
        usage.c.bucket < int(end.timestamp()),
        usage.c.kind.in_(TOKEN_KINDS),
    ]
    if tenant is not None:
        wanted.append(usage.c.tenant == tenant)
    if run is not None:
        wanted.append(usage.c.model_id == run)
    query = select(*key, usage.c.kind, func.sum(usage.c.amount).label("amount")).where(*wanted)
    sums: dict[tuple[int, str, str, str], dict[str, int]] = {}
    for row in connection.execute(query.group_by(*key, usage.c.kind)):
        kinds = sums.setdefault((row.day, row.tenant, row.model_id, row.base_model), {})
        kinds[row.kind] = round(row.amount)
    return [_line(key, kinds) for key, kinds in sorted(sums.items())]


def _line(key: tuple[int, str, str, str], kinds: dict[str, int]) -> UsageLine:
    start, tenant, run, base_model = key
    return UsageLine(
        datetime.fromtimestamp(start, UTC).date().isoformat(),
        tenant,
        run,
        base_model,
        trained=kinds.get(UsageKind.TRAINING, 0),
        sampled=kinds.get(UsageKind.SAMPLE, 0),
        prompt=kinds.get(UsageKind.PREFILL, 0),
        cached=kinds.get(UsageKind.PREFILL_CACHED, 0),
        computed=kinds.get(UsageKind.PREFILL, 0) + kinds.get(UsageKind.PREFILL_AGAIN, 0),
    )
