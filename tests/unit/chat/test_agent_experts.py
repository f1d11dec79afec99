"""The routed experts of turns, joined into those of a row as the trainer and slime read them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled_turns import Sampler, said, user

from skyrl.base.types.agents import AgentLimits, AgentSession, AgentTurn
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.errors import RequestError
from skyrl.chat.agents.export import FORMS, About, Experts, Row, as_slime, ends_of, recorded, rows_of
from skyrl.trainer.protocol import Datum, Mixture, TrainingPass
from skyrl.trainer.rows.prefixes import experts_of
from skyrl.trainer.rows.routed_experts import check_routed_experts, with_sorted_experts

LAYERS, PER_TOKEN, COUNT = 4, 2, 6
WITH_EXPERTS = [1, 3]
SESSION = AgentSession(
    "s", "t", "n", "m", "b", BaseWeights(), "pinned", AgentLimits(100, 10_000, 60, 60), created_at=0.0, used_at=0.0
)


def of_tokens(first: int, last: int, seed: int = 1) -> np.ndarray:
    """The experts of tokens `first` to `last` - 1 of one prompt, uint8 [tokens, layers, k]."""
    rng = np.random.default_rng(seed)
    every = rng.permuted(np.tile(np.arange(COUNT), (500, LAYERS, 1)), axis=-1)
    return every[first:last, :, :PER_TOKEN].astype(np.uint8)


def record(turn: AgentTurn, rows: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, rows)
    object.__setattr__(turn, "routed_experts", file.getvalue())


def a_row() -> Row:
    """Of three turns without records."""
    sampler = Sampler()
    sampler.ask([user("go")], "yes")
    sampler.ask([user("go"), said("yes"), user("and now?")], "one")
    sampler.ask([user("go"), said("yes"), user("and now?"), said("one"), user("then")], "two")
    (row,) = rows_of(sampler.tree, ends_of(sampler.tree), 0, 1)
    return row


def recorded_as_asked_for(row: Row, seed: int = 1) -> None:
    """Each turn's record begins with the last token that the turn before has sampled."""
    before = 0
    for each in row.turns:
        record(each.turn, of_tokens(before, each.stop - 1, seed))
        before = each.stop - 1


def test_the_records_of_turns_that_continue_one_another_cover_every_token_but_the_last() -> None:
    row = a_row()
    recorded_as_asked_for(row)
    np.testing.assert_array_equal(recorded(row), of_tokens(0, len(row.tokens) - 1))


def test_the_turn_that_sampled_the_next_token_counts_where_records_overlap() -> None:
    row = a_row()
    for number, each in enumerate(row.turns):
        record(each.turn, of_tokens(0, each.stop - 1, seed=number))
    found = recorded(row)
    assert found is not None
    first, second, third = row.turns
    np.testing.assert_array_equal(found[: first.stop - 1], of_tokens(0, first.stop - 1, seed=0))
    np.testing.assert_array_equal(
        found[first.stop - 1 : second.stop - 1], of_tokens(first.stop - 1, second.stop - 1, 1)
    )
    np.testing.assert_array_equal(found[second.stop - 1 :], of_tokens(second.stop - 1, third.stop - 1, seed=2))


def test_tokens_of_a_turn_without_a_record_are_unrecorded() -> None:
    row = a_row()
    recorded_as_asked_for(row)
    first, second, _ = row.turns
    object.__setattr__(second.turn, "routed_experts", None)
    found = recorded(row)
    assert found is not None
    assert (found[first.stop - 1 : second.stop - 1] == -1).all()
    assert (np.delete(found, np.s_[first.stop - 1 : second.stop - 1], axis=0) != -1).all()


def test_the_trainer_reads_the_layers_with_experts_from_a_datum() -> None:
    row = a_row()
    recorded_as_asked_for(row)
    datum = FORMS["datums"](row, About(SESSION, 1.0, Experts(WITH_EXPERTS, COUNT)))
    sent = datum["loss_fn_inputs"]["routed_experts"]
    given = Datum(row.tokens[:-1].astype(np.int64), {"routed_experts": np.array(sent["data"]).reshape(sent["shape"])})
    mixture = Mixture(len(WITH_EXPERTS), COUNT, PER_TOKEN)
    check_routed_experts(given, mixture)
    (read,) = experts_of(with_sorted_experts(TrainingPass("m", [given], "ppo"), mixture).data) or []
    expected = np.sort(of_tokens(0, len(row.tokens) - 1)[:, WITH_EXPERTS], axis=-1)
    np.testing.assert_array_equal(read.reshape(expected.shape), expected)


def test_slimes_sample_has_all_layers_as_sglang_sends_them() -> None:
    row = a_row()
    recorded_as_asked_for(row)
    sent = FORMS["samples"](row, About(SESSION, 1.0))["rollout_routed_experts"]
    read = np.frombuffer(base64.b64decode(sent), np.int32).reshape(len(row.tokens) - 1, LAYERS, PER_TOKEN)
    np.testing.assert_array_equal(read, of_tokens(0, len(row.tokens) - 1))


def test_rows_without_records_have_no_experts() -> None:
    row = a_row()
    about = About(SESSION, 1.0, Experts(WITH_EXPERTS, COUNT))
    assert as_slime(row) is None
    assert "routed_experts" not in FORMS["datums"](row, about)["loss_fn_inputs"]
    assert "rollout_routed_experts" not in FORMS["samples"](row, about)


@pytest.mark.parametrize("experts", [Experts([1, LAYERS], COUNT), Experts(WITH_EXPERTS, COUNT - 1)])
def test_records_of_another_model_are_no_datum(experts: Experts) -> None:
    row = a_row()
    recorded_as_asked_for(row)
    with pytest.raises(RequestError, match="do not fit the base model"):
        FORMS["datums"](row, About(SESSION, 1.0, experts))


def test_records_that_are_longer_than_their_turn_are_refused() -> None:
    row = a_row()
    record(row.turns[0].turn, of_tokens(0, row.turns[0].stop))
    with pytest.raises(RequestError, match=r"turn t0 has the shape"):
        recorded(row)


CONFIGS: list[tuple[dict[str, Any], list[int]]] = [
    ({"num_experts": 4}, [0, 1, 2, 3]),
    ({"num_experts": 4, "mlp_only_layers": [1]}, [0, 2, 3]),
    ({"num_experts": 4, "decoder_sparse_step": 2}, [1, 3]),
    ({"n_routed_experts": 4, "first_k_dense_replace": 1}, [1, 2, 3]),
    ({"n_routed_experts": 4, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, [2, 3]),
    ({"n_routed_experts": 4, "hybrid_override_pattern": "MEM*"}, [1]),
]


@pytest.mark.parametrize(("config", "layers"), CONFIGS)
def test_configurations_say_which_layers_have_experts(
    config: dict[str, Any], layers: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4} | config))
    found = Experts.of(str(tmp_path))
    assert found == Experts(layers, 4)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    assert Experts.of(str(tmp_path)) is None
