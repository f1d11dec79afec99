"""Samples that the engine runs itself: what was cancelled is not run, and what was run is counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from api_harness import asked
from engine_harness import Harness, harness_in
from fake_upstream import FakeUpstream, after, complete, fake_upstream
from sqlalchemy import select

from skyrl.backends.base import ModelLimits
from skyrl.db.samplers import Sampler, Samplers
from skyrl.db.usage import usage
from skyrl.engine.sampling import ColocatedSampler
from skyrl.futures.kinds import Kind
from skyrl.futures.requests import NewRequest
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.endpoint import FixedEndpoint
from skyrl.sampling.http import HttpTransport
from skyrl.sampling.service import CANCELLED
from skyrl.wire.results import encode_json


def sampler_of(harness: Harness, upstream: FakeUpstream) -> ColocatedSampler:
    client = ForwardingClient(HttpTransport(), FixedEndpoint(upstream.url), api_key=None, deadline_s=10)
    group: Any = SimpleNamespace(ready=True, reason="")  # asked to wake and sleep where that frees memory
    return ColocatedSampler(
        harness.database,
        client,
        group,
        ModelLimits(1000, 100),
        "tiny",
        state_dir=harness.config.state_dir,
        sleeps=False,
        patience_s=1000,
    )


async def test_cancelled_samples_are_not_run_and_the_others_are_counted(tmp_path: Path) -> None:
    go = asyncio.Event()
    async with fake_upstream(default=after(go, complete())) as upstream, harness_in(tmp_path / "state") as harness:
        session = await harness.sessions.create("tenant", [], None, "")
        sampler = Sampler(f"{session.id}:sample:0", session.id, "tenant", "tiny", None, None, None)
        await Samplers(harness.database, harness.writer).create(sampler, 0)

        async def send(seq_id: int) -> str:
            body = encode_json(asked(sampler.id, seq_id, prompt=[5, 6, 7], num_samples=2))
            request = NewRequest(Kind.SAMPLE, "tenant", session.id, body, "json", None, None, sampler.id, seq_id)
            return (await harness.store.record(request))[0]

        first = await send(0)
        await harness.start(lambda h: setattr(h.engine, "_sampler", sampler_of(h, upstream)))
        await upstream.until(lambda server: server.busy == 1)
        kept, cancelled = await send(1), await send(2)
        harness.engine.ring()
        await harness.queued(2)  # taken from the log, and not begun
        assert await harness.store.end(cancelled, CANCELLED)
        go.set()
        for request_id in (first, kept):
            assert (await harness.outcome(request_id)).error is None
        assert await harness.outcome(cancelled) == CANCELLED
        assert len(upstream.completions) == 2
        counted = Counter[str]()
        for row in harness.database.read(lambda c: c.execute(select(usage)).all()):
            assert (row.tenant, row.session_id, row.base_model) == ("tenant", session.id, "tiny")
            counted[row.kind] += row.amount
        assert counted == {"sampling_prefill": 2 * 3, "sampling_sample": 2 * 2 * 3}
        assert harness.engine._sampler is not None
        await harness.engine._sampler.close()
