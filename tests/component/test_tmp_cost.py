import time
from statistics import median

from api_harness import Api
from sqlalchemy import insert, update
from test_status_page import TENANT, new_run

from skyrl.storage.db.database import Database
from skyrl.storage.db.models import models
from skyrl.storage.db.run_steps import curves, steps
from skyrl.storage.db.runs import open_samplers, pending_of
from tests.postgres_server import ON_BOTH


@ON_BOTH
async def test_cost(api: Api, database: Database):
    runs = [await new_run(api) for _ in range(20)]

    def fill(c):
        for run in runs:
            c.execute(
                insert(steps),
                [
                    dict(
                        model_id=run,
                        step=n,
                        updated_at=1.0,
                        ended_at=1.0,
                        passes=1,
                        tokens=10,
                        loss_sum=1.0,
                        loss_tokens=8,
                        gap_sum=0,
                        gap_tokens=0,
                        clipped_sum=0,
                        clipped_tokens=0,
                        busy_s=1.0,
                    )
                    for n in range(1, 2101)
                ],
            )
        c.execute(update(models).values(steps=2100))

    database.write(fill)
    for name, f in (
        ("curves", lambda c: curves(c, runs)),
        ("pending", lambda c: pending_of(c, TENANT, 200)),
        ("samplers", lambda c: open_samplers(c, TENANT, 50)),
    ):
        t = []
        for _ in range(15):
            b = time.perf_counter()
            database.read(f)
            t.append((time.perf_counter() - b) * 1e3)
        print(name, round(median(t), 1), round(max(t), 1))
    t = []
    for _ in range(15):
        b = time.perf_counter()
        r = await api.http.get("/ui/api/state")
        t.append((time.perf_counter() - b) * 1e3)
    print("state", round(median(t), 1), round(max(t), 1), len(r.content))
