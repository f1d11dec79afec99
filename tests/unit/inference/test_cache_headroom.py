"""Admission to vLLM's cache with the plugin: vLLM's own scheduler, and answers of given lengths. No model runs.
`benchmarks/scheduling.py` counts larger loads, `benchmarks/concurrency.py` measures a real vLLM."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from plain_vllm import without_plugin

from skyrl.base.tiny import model_path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    from benchmarks.scheduling import BLOCK, BLOCKS, Cache
    from skyrl.inference.vllm_plugin.admission import (
        FIRST_LENGTH,
        MAX_BOUNDS,
        Lengths,
        growth,
        keep_headroom,
    )
    from skyrl.inference.vllm_plugin.waits import bounds_of, count_waits, waits_of


@pytest.mark.parametrize(
    ("running", "most"),
    [
        ([], 0),
        ([(10, 500)], 10),
        ([(10, 0), (10, 0)], 20),
        ([(2, 5), (10, 5)], 5),  # at the end of the second one: its ten tokens, less the five of the first one
        ([(9, 1), (10, 1)], 18),  # at the end of the first one
        ([(1, 100)] * 4, 4),
    ],
)
def test_the_most_that_requests_will_hold_beyond_what_they_hold(running: list[tuple[float, int]], most: float) -> None:
    assert growth(running) == most


def test_answers_are_expected_to_be_as_long_as_those_with_the_same_bound() -> None:
    lengths = Lengths()
    assert lengths.left(1_000, 0) == FIRST_LENGTH
    assert lengths.left(100, 0) == 100
    lengths.ended(1_000, 40)
    assert lengths.left(1_000, 0) == 40
    assert lengths.left(1_000, 30) == 10
    lengths.ended(1_000, 56)
    assert lengths.left(1_000, 0) == 41
    assert lengths.left(999, 0) == FIRST_LENGTH


def test_an_answer_beyond_the_expected_length_is_expected_to_go_on() -> None:
    lengths = Lengths()
    lengths.ended(1_000, 40)
    assert lengths.left(1_000, 80) == 20
    assert lengths.left(1_000, 990) == 10, "not beyond its bound"


def test_the_number_of_averages_is_bounded() -> None:
    lengths = Lengths()
    for bound in range(1, MAX_BOUNDS + 1):
        lengths.ended(bound, 1)
    assert lengths.left(MAX_BOUNDS, 0) == 1
    lengths.ended(5_000, 3)
    assert lengths.left(MAX_BOUNDS, 0) == FIRST_LENGTH
    assert lengths.left(5_000, 0) == 3


@pytest.fixture(scope="module")
def config() -> Iterator[VllmConfig]:
    """For schedulers with the plugin's room, whose patches end with the tests. No other patch is applied."""
    with pytest.MonkeyPatch.context() as patches:
        for owner, name in (
            (Scheduler, "__init__"),
            (Scheduler, "_free_request"),
            (Scheduler, "make_stats"),
            (KVCacheManager, "allocate_slots"),
        ):
            patches.setattr(owner, name, getattr(owner, name))
        keep_headroom()
        count_waits()
        with without_plugin():
            arguments = EngineArgs(
                model=str(model_path()),
                dtype="float32",
                block_size=BLOCK,
                max_model_len=1024,
                scheduling_policy="priority",
            )
            config = arguments.create_engine_config()
        yield config


def answers(cache: Cache, count: int = 60) -> None:
    rng = random.Random(0)
    for number in range(count):
        cache.add(rng.randint(150, 300), priority=number)


def test_many_samples_whose_answers_grow_do_not_throw_each_other_out(config: VllmConfig) -> None:
    before, now = Cache(config, headroom=False), Cache(config)
    for cache in (before, now):
        answers(cache)
        cache.run()
    assert len(now.ended) == len(before.ended) == 60
    assert before.preemptions > 60, "the load is no storm"
    assert now.preemptions < before.preemptions / 2
    assert now.computed < before.computed
    assert now.steps <= 1.05 * before.steps, "the cache is left empty"


def test_a_request_begins_at_once_while_no_other_runs(config: VllmConfig) -> None:
    cache = Cache(config)
    cache.add(900, prompt=1_000, most=1_000)
    assert cache.step() == ["r0"]


def test_a_request_waits_for_the_room_that_a_running_one_will_need(config: VllmConfig) -> None:
    cache = Cache(config)
    for _ in range(40):  # 64 blocks: all prompts would fit
        cache.add(64)
    running = cache.step()
    assert 1 < len(running) < 40
    assert cache.scheduler.get_request_counts() == (len(running), 40 - len(running))
    assert waits_of(cache.scheduler) == {"cache": 40 - len(running)}
    cache.run()
    assert len(cache.ended) == 40


def test_the_blocks_of_the_next_steps_stay_free_whatever_is_expected(config: VllmConfig) -> None:
    """Prompts of 30 tokens fill their block in two steps, those of 10 never."""
    began = {}
    for prompt in (30, 10):
        cache = Cache(config)
        for _ in range(60):
            cache.add(16, prompt=prompt, most=16)
        began[prompt] = len(cache.step())
        cache.run()
        assert cache.preemptions == 0
    assert began[30] == (BLOCKS - 1) // 2 < began[10]


def test_what_a_step_ran_out_of_is_why_the_others_wait(config: VllmConfig) -> None:
    seats, tokens = Cache(config), Cache(config)
    seats.scheduler.max_num_active_reqs, tokens.scheduler.max_num_scheduled_tokens = 2, 60
    for cache in (seats, tokens):
        for _ in range(5):
            cache.add(64)
        assert waits_of(cache.scheduler).total() == 5
        cache.step()
    assert waits_of(seats.scheduler) == {"seats": 3}
    assert waits_of(tokens.scheduler) == {"tokens": 2}
    assert bounds_of(seats.scheduler) == {
        "cache": BLOCKS * BLOCK,
        "seats": 2,
        "tokens": config.scheduler_config.max_num_batched_tokens,
    }
    stats = seats.scheduler.make_stats()
    assert stats is not None
    sent = {name: number for name, number in stats.num_kv_fetch_reqs_by_stage.items() if name.startswith("skyrl_")}
    assert sent["skyrl_waits_seats"] == 3
    assert (sent["skyrl_waits_cache"], sent["skyrl_bound_seats"], len(sent)) == (0, 2, 9)


def test_of_what_is_put_aside_only_another_adapter_waits_for_a_place(config: VllmConfig) -> None:
    """vLLM keeps a request aside until it runs, also when its adapter has a place again."""
    seats = Cache(config)
    seats.scheduler.max_num_active_reqs = 2
    for _ in range(4):
        seats.add(64)
    seats.step()
    one, two = SimpleNamespace(lora_int_id=1), SimpleNamespace(lora_int_id=2)
    for running in seats.scheduler.running:
        running.lora_request = one  # type: ignore[assignment]
    seats.scheduler.lora_config = lora = SimpleNamespace(max_loras=1)  # type: ignore[assignment]
    for adapter in (one, two):
        request = seats.scheduler.waiting.pop_request()
        request.lora_request = adapter  # type: ignore[assignment]
        seats.scheduler.deferred_waiting.add(request)
    assert waits_of(seats.scheduler) == {"seats": 1, "adapters": 1}
    lora.max_loras = 2
    assert waits_of(seats.scheduler) == {"seats": 2}


def test_a_prompt_that_other_samples_hold_is_not_counted_as_given_back(config: VllmConfig) -> None:
    cache = Cache(config)
    first = cache.add(50, prompt=100)
    cache.step()
    assert cache.headroom._tell(first) == (FIRST_LENGTH - 1, 101)
    twin = cache.add(50, prompt=100)
    twin.prompt_token_ids = first.prompt_token_ids
    twin.block_hashes = first.block_hashes[:]
    cache.step()
    assert cache.headroom._tell(first) == (FIRST_LENGTH - 2, 2)


def test_the_order_of_priorities_stays(config: VllmConfig) -> None:
    cache = Cache(config)
    for number in range(40):
        cache.add(256, priority=40 - number)
    running = cache.step()
    assert running == [f"r{39 - number}" for number in range(len(running))]


def test_a_request_that_is_cancelled_while_it_waits_makes_no_difference(config: VllmConfig) -> None:
    cache = Cache(config)
    added = [cache.add(100) for _ in range(40)]
    running = cache.step()
    waiting = [request.request_id for request in added if request.request_id not in running]
    cache.scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)
    cache.run()
    assert sorted(cache.ended) == sorted(running)
    assert cache.headroom.lengths.left(400, 0) == 100, "cancelled requests count as answers"


def test_the_operators_own_watermark_stays_the_least(config: VllmConfig) -> None:
    cache = Cache(config, watermark=0.5)
    for _ in range(60):
        cache.add(2, prompt=31, most=2)
    assert len(cache.step()) <= 33
