"""Pictures in the packed design: each is computed once, shared with its prompt, and never with another picture; passes
of others, several tenants and restarts change nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cachetools import LRUCache
from picture_support import SEEING_FAMILIES, Picture, Sequences, group, made_once, mixed, of_transformers, text
from torch_lora_support import assert_close, assert_same, make_backend, ok, rl, saved, sft, spec, train
from trainer_kinds import STEP
from transformers import AutoConfig

from skyrl.base.config.loading import load_config
from skyrl.trainer.model.loading import model_class
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.packing import positions_of
from skyrl.trainer.vision import Seen
from tests.local_ranks import rank_of

TOLERANCE = 1e-3
"""As in test_families_packed."""
BackendOf = Callable[..., LoraBackend]
SOME = [*SEEING_FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in SEEING_FAMILIES[2:])]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory)


@pytest.fixture
def backend_of(path_of: Callable[[str], str]) -> BackendOf:
    """A backend on a family's tiny model, with a model "m"."""

    def make(family: str = "qwen3-vl", **options: Any) -> LoraBackend:
        backend = make_backend(path=path_of(family), **options)
        backend.create_model("m", spec(4, 1))
        return backend

    return make


@contextmanager
def tower_calls(backend: LoraBackend) -> Iterator[list[int]]:
    """The numbers of patches of the pictures that go through the tower."""
    tower = rank_of(backend).base.tower
    assert tower is not None
    calls: list[int] = []
    handle = tower.module.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    yield calls
    handle.remove()


def _learn(backend: LoraBackend, sequences: Sequences, path: Path, loss: str = "cross_entropy") -> Any:
    """A step, then a gradient that waits: logprobs, and weights, moments and gradients."""
    results = ok(backend.run([sequences.to("m", loss)]))
    backend.optim_step("m", STEP)
    results += ok(backend.run([sequences.to("m", loss)]))
    return [each for result in results for each in result.logprobs], saved(backend, "m", path)


def _assert_close(one: Any, other: Any) -> None:
    for logprobs, of_other in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(logprobs, of_other, atol=1e-4)
    assert_close(one[1], other[1], TOLERANCE)


@pytest.mark.parametrize("family", SOME)
def test_a_group_about_one_picture_computes_picture_and_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend_of: BackendOf, family: str
) -> None:
    picture = Picture.drawn(1)
    sequences = group(picture, 16, loss="ppo")
    backend = backend_of(family)
    with tower_calls(backend) as calls:
        (result,) = ok(backend.run([sequences.to("m", "ppo")]))
    assert calls == [4 * picture.tokens]
    prompt = 4 + picture.tokens + 10
    answers = sum(len(datum.tokens) - prompt for datum in sequences.data)
    assert result.metrics["computed_tokens:sum"] == prompt + answers
    shared = _learn(backend_of(family), sequences, tmp_path / "shared", "ppo")
    monkeypatch.setattr(prefixes, "MIN_SAVED_ROWS", 10**9)
    _assert_close(shared, _learn(backend_of(family), sequences, tmp_path / "apart", "ppo"))


def test_pictures_of_one_size_at_one_place_do_not_share_rows(backend_of: BackendOf) -> None:
    pictures = [Picture.drawn(seed) for seed in (1, 2)]
    sequences, alone = Sequences(), []
    before, behind = text(1, 20), text(2, 20)
    for picture in pictures:
        sequences.add(before, picture, behind, answer=3)
        alone.append(Sequences())
        alone[-1].add(before, picture, behind, answer=3)
    backend = backend_of()
    (result,) = ok(backend.run([sequences.to("m", backward=False)]))
    assert result.metrics["computed_tokens:sum"] == 20 + 2 * (pictures[0].tokens + 20)
    first, second = result.logprobs
    np.testing.assert_array_equal(first[:19], second[:19])
    assert np.abs(first - second)[26:].max() > 1e-3
    for of_both, one in zip(result.logprobs, alone, strict=True):
        (expected,) = ok(backend.run([one.to("m", backward=False)]))
        np.testing.assert_allclose(of_both, expected.logprobs[0], atol=2e-5)


def test_text_alone_gives_the_same_bits_with_a_tower_and_without(
    tmp_path: Path, path_of: Callable[[str], str], backend_of: BackendOf
) -> None:
    blind_path = shutil.copytree(path_of("qwen3-vl"), tmp_path / "blind")
    (blind_path / "preprocessor_config.json").unlink()
    blind = LoraBackend(load_config({"base_model": str(blind_path)}))
    blind.create_model("m", spec(4, 1))
    assert blind.limits.sight is None
    assert rank_of(blind).base.tower is None
    states = []
    for number, backend in enumerate((blind, backend_of())):
        ok(backend.run([train("m", sft(1, 30, 7, 19)), train("m", rl(2, 12, 40), "ppo")]))
        backend.optim_step("m", STEP)
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)


@pytest.mark.parametrize("family", SEEING_FAMILIES[:2])
def test_other_passes_do_not_change_a_bit(tmp_path: Path, backend_of: BackendOf, family: str) -> None:
    states = []
    for number, others in enumerate(([], [group(Picture.drawn(9), 3).to("a", "ppo"), train("b", sft(2, 30))])):
        backend = backend_of(family)
        for model_id in "ab":
            backend.create_model(model_id, spec())
        ok(backend.run([*others, mixed().to("m"), *others]))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)


@pytest.mark.parametrize("family", SOME)
def test_two_tenants_in_one_micro_batch_share_pictures_and_change_at_most_rounding(
    tmp_path: Path, backend_of: BackendOf, family: str
) -> None:
    alone = backend_of(family)
    ok(alone.run([mixed().to("m")]))
    merged = backend_of(family, merge=True)
    merged.create_model("other", spec(8, 2))
    merged.create_model("text", spec(2, 3))
    sequences = mixed()
    with tower_calls(merged) as calls:
        ok(merged.run([sequences.to("other"), sequences.to("m"), train("text", sft(3, 20))]))
    assert len(calls) == len(sequences.files)
    assert_close(saved(merged, "m", tmp_path / "merged"), saved(alone, "m", tmp_path / "alone"), TOLERANCE)


def test_recomputed_layers_give_the_same_bits(tmp_path: Path, backend_of: BackendOf) -> None:
    kept = _learn(backend_of(gradient_checkpointing=False), mixed(), tmp_path / "kept")
    again = _learn(backend_of(gradient_checkpointing=True), mixed(), tmp_path / "again")
    assert_same(again[1], kept[1])


def test_what_the_tower_made_is_kept_between_passes_and_for_all_models(backend_of: BackendOf) -> None:
    backend = backend_of()
    backend.create_model("other", spec())
    sequences = mixed()
    with tower_calls(backend) as calls:
        for model_id, backward in (("m", False), ("m", True), ("other", True)):
            ok(backend.run([sequences.to(model_id, backward=backward)]))
    assert len(calls) == len(sequences.files)


def _bounded(most: int) -> LRUCache[str, Seen]:
    return LRUCache(most, getsizeof=lambda seen: seen.nbytes)


def test_kept_pictures_are_bounded_in_bytes_and_the_longest_unused_go_first(backend_of: BackendOf) -> None:
    backend = backend_of()
    sequences = mixed()
    numbered = list(enumerate(sequences.data))
    tower: Any = rank_of(backend).base.tower
    seen = tower.look_at(numbered, sequences.files)
    room = sum(each.nbytes for each in seen.values()) - 1
    tower._kept = _bounded(room)
    with tower_calls(backend) as calls:
        for _ in range(2):
            tower.look_at(numbered, sequences.files)
    assert len(calls) > len(seen)
    assert 0 < tower._kept.currsize <= room
    tower._kept = _bounded(1)
    assert tower.look_at(numbered, sequences.files).keys() == seen.keys()
    assert tower._kept.currsize == 0


def test_passes_of_one_model_share_a_picture_and_a_wrong_one_fails_alone(backend_of: BackendOf) -> None:
    """With merged passes, those of one model run as one where they have prompts in common."""
    picture = Picture.drawn(1)
    whole = group(picture, 4)
    parts = [replace(whole.to("m", "ppo"), data=whole.data[first : first + 2]) for first in (0, 2)]
    backend = backend_of(merge=True)
    (expected,) = ok(backend.run([whole.to("m", "ppo")]))
    results = ok(backend.run(parts))
    rows = [result.metrics["computed_tokens:sum"] for result in results]
    assert sum(rows) == expected.metrics["computed_tokens:sum"]
    for logprobs, of_whole in zip([*results[0].logprobs, *results[1].logprobs], expected.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, of_whole, atol=2e-5)

    wrong = Sequences()
    wrong.add(text(1, 4), picture, text(2, 10), answer=2)
    wrong.add(text(1, 4), replace(Picture.drawn(2), columns=2), text(2, 10), answer=2)
    outcomes = backend.run([parts[0], wrong.to("m"), parts[1]])
    assert str(outcomes[1]).startswith("data[1]: model_input: the picture at position 4 takes 6 tokens")
    for outcome, before in zip(ok([outcomes[0], outcomes[2]]), results, strict=True):
        for logprobs, earlier in zip(outcome.logprobs, before.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, earlier, atol=2e-5)


@pytest.mark.parametrize("family", SEEING_FAMILIES[:2])
def test_positions_are_those_of_transformers(path_of: Callable[[str], str], family: str) -> None:
    path = path_of(family)
    model: Any = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    sequences = mixed()
    for datum in sequences.data:
        inputs = of_transformers(path, datum, sequences.files)
        grids = inputs.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        seen = {
            picture.digest: Seen((grid[1] // 2, grid[2] // 2), torch.zeros(picture.tokens, 1))
            for picture, grid in zip(datum.pictures, grids.tolist(), strict=True)
        }
        types = inputs.get("mm_token_type_ids", torch.zeros_like(inputs["input_ids"], dtype=torch.int32))
        expected, _ = model.model.get_rope_index(inputs["input_ids"], types, grids)
        np.testing.assert_array_equal(positions_of(datum, seen), expected[:, 0])


def test_a_picture_right_behind_another_begins_after_its_longer_side() -> None:
    """transformers takes both for one picture; vLLM counts as here."""
    a, b = Picture.drawn(1, 2, 3), Picture.drawn(2, 1, 2)
    datum = Sequences().add(text(1, 2), a, b, text(2, 2))
    seen = {each.digest: Seen((each.rows, each.columns), torch.zeros(each.tokens, 1)) for each in (a, b)}
    assert positions_of(datum, seen).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 5, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 5, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
