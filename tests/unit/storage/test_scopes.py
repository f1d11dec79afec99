"""Which rows each of a server's engines looks after. Runs on both databases."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import insert, select

from skyrl.base.types.weights import EVERYTHING, AdapterVersion, BaseWeights, FullWeights, LoraSpec, Scope
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db import adapter_versions, full_weights
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Model, living, model_values, models
from skyrl.storage.db.quotas import sizes
from skyrl.storage.db.samplers import Sampler, add_sampler, find_sampler
from skyrl.storage.db.scopes import in_scope, model_in_scope, models_in_scope
from skyrl.storage.db.tables import FutureRow, SessionRow
from tests.postgres_server import ON_BOTH

FIRST, SECOND = Scope(without=frozenset({"b", "b-alias"})), Scope(within=frozenset({"b", "b-alias"}))
NAMES = ("a", "b", "b-alias", "forgotten")
futures = FutureRow.__table__  # type: ignore[attr-defined]


@pytest.fixture
def database(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    session = {"id": "s", "tenant": "t", "status": "active", "created_at": 0.0, "heartbeat_at": time.time()}
    database.write(lambda c: c.execute(insert(SessionRow), session | {"sdk_version": "", "tags": []}))
    for number, name in enumerate(NAMES):
        model = Model(name, "s", "t", name, LoraSpec(4, 8.0, 1), None)
        values = model_values(model, number, "ready")
        database.write(lambda c, values=values: c.execute(insert(models), values))
    yield database
    database.close()


@ON_BOTH
def test_each_model_is_in_one_scope_and_unknown_ids_are_in_the_first(database: Database) -> None:
    ids = {*NAMES, *(f"unknown-{n}" for n in range(1200))}
    found = [database.read(lambda c, s=scope: models_in_scope(c, ids, s)) for scope in (FIRST, SECOND)]
    assert found[1] == {"b", "b-alias"}
    assert found[0] == ids - found[1]
    assert database.read(lambda c: models_in_scope(c, ids, EVERYTHING)) == ids


@ON_BOTH
def test_commands_follow_their_model_and_those_without_a_model_are_in_the_first_scope(database: Database) -> None:
    row = {"tenant": "t", "session_id": "s", "digest": b"", "body_format": "json", "status": "pending"}
    for model_id in (*NAMES, "unknown", None):
        values = row | {"id": str(model_id), "kind": "FORWARD", "model_id": model_id, "created_at": 0.0}
        database.write(lambda c, values=values: c.execute(insert(futures), values))

    def commands_in(scope: Scope) -> set[str]:
        query = select(futures.c.id).where(model_in_scope(futures.c.model_id, scope))
        return set(database.read(lambda c: c.execute(query).scalars().all()))

    assert commands_in(SECOND) == {"b", "b-alias"}
    assert commands_in(FIRST) == {"a", "forgotten", "unknown", "None"}
    assert commands_in(EVERYTHING) == commands_in(FIRST) | commands_in(SECOND)


def test_the_only_engines_statements_have_no_condition_more() -> None:
    of_all = select(models.c.id).where(models.c.status == "ready")
    for condition in (in_scope(models.c.base_model, EVERYTHING), model_in_scope(futures.c.model_id, EVERYTHING)):
        assert str(of_all.where(condition)) == str(of_all)


@ON_BOTH
def test_living_models_and_numbers_of_rows_are_those_of_the_scope(database: Database) -> None:
    for scope, expected in ((FIRST, ["a", "forgotten"]), (SECOND, ["b", "b-alias"]), (EVERYTHING, list(NAMES))):
        found = database.read(lambda c, scope=scope: living(c, scope))
        assert sorted(model.id for model in found) == expected
        assert database.read(lambda c, scope=scope: sizes(c, time.time(), scope)).models == len(expected)


def add_session_of(database: Database, model_id: str, number: int) -> str:
    sampler = Sampler(f"s:sample:{model_id}", "s", "t", model_id, None, FullWeights.of(model_id, number))
    database.write(lambda c: add_sampler(c, sampler, NAMES.index(model_id)))
    return sampler.id


@ON_BOTH
def test_each_base_model_trains_a_whole_model_of_its_own(database: Database) -> None:
    own = {name: Scope(within=frozenset({name})) for name in ("a", "b")}
    changed = models.update().where(models.c.id.in_(["a", "b"])).values(lora_rank=0, sampler_version=3)
    database.write(lambda c: c.execute(changed))
    old, new = add_session_of(database, "a", 2), add_session_of(database, "b", 3)
    for name, scope in own.items():
        assert database.read(lambda c, scope=scope: full_weights.current(c, scope)) == FullWeights.of(name, 3)
    dropped = database.write(lambda c: full_weights.drop_replaced(c, FullWeights.of("a", 3), own["a"]))
    assert dropped == [old]
    assert database.read(lambda c: find_sampler(c, new)) is not None
    with pytest.raises(full_weights.WeightsReplaced, match="replaced by version 'a@3'"):
        database.read(lambda c: find_sampler(c, old, lambda name: own[name]))
    with pytest.raises(RequestError, match="your model 'a' is being trained now"):
        database.read(full_weights.check_place("next", "t", own["a"]))
    adapter = models.update().where(models.c.id == "a").values(lora_rank=8)
    for freed in (adapter, models.update().where(models.c.id == "a").values(lora_rank=0, status="closed")):
        database.write(lambda c, freed=freed: c.execute(freed))
        database.read(full_weights.check_place("next", "t", own["a"]))
    assert database.read(lambda c: full_weights.current(c, own["a"])) == BaseWeights()


@ON_BOTH
def test_a_vllm_loads_no_adapters_of_another_base_model(database: Database) -> None:
    for number, name in enumerate(("a", "b", "b-alias")):
        sampler = Sampler(f"s:sample:{name}", "s", "t", name, None, AdapterVersion.of(name, 1))
        database.write(lambda c, sampler=sampler, number=number: add_sampler(c, sampler, number))
    found = [database.read(lambda c, s=scope: adapter_versions.in_use(c, 0.0, 8, s)) for scope in (FIRST, SECOND)]
    assert [{version.name for version in each} for each in found] == [{"a@1"}, {"b@1", "b-alias@1"}]
