"""vLLM's own scheduler and cache, with the plugin's shared tails: what is computed in each step, and what is copied.
Tokens are given, no model runs. `tests/component/inference/test_vllm_server.py` has the real samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from plain_vllm import without_plugin

from skyrl.base.tiny import model_path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from skyrl.inference.vllm_plugin.prefix_cache import forget, share_tails

BLOCK = 32
SIZES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=48)


@cache
def engine_config() -> VllmConfig:
    with without_plugin():
        arguments = EngineArgs(
            model=str(model_path()), dtype="float32", block_size=BLOCK, max_model_len=256, max_num_batched_tokens=512
        )
        return arguments.create_engine_config()


class World:
    """A scheduler whose requests sample the token 9 in each step."""

    def __init__(self, blocks: int, *groups: Any) -> None:
        share_tails()
        config = engine_config()
        config.cache_config.num_gpu_blocks = blocks
        layers = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(groups or (FULL,))]
        cache = KVCacheConfig(blocks, [], layers)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, BLOCK)
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(BLOCK, algorithm)
        self._added = 0

    def add(self, prompt: list[int], count: int = 1, *, tokens: int = 4, **params: Any) -> list[Request]:
        added = []
        for _ in range(count):
            self._added += 1
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)
            request = Request(f"r{self._added}", prompt, sampling, None, block_hasher=self._hasher)
            self.scheduler.add_request(request)
            added.append(request)
        return added

    def step(self) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """The number of tokens that each request computes, and the copies of blocks."""
        output = self.scheduler.schedule()
        self.update(output)
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        return output.num_scheduled_tokens, copies

    def update(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, [[9] for _ in names])
        self.scheduler.update_from_output(output, done)

    def run(self) -> list[tuple[list[int], int]]:
        """For each step until all requests have ended: tokens of the requests, and how many blocks were copied."""
        steps = []
        while self.scheduler.has_unfinished_requests():
            counts, copies = self.step()
            steps.append((list(counts.values()), len(copies)))
            assert len(steps) < 100
        return steps

    def block_of(self, request: Request, number: int) -> int:
        return self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][number]

    @property
    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - pool.get_num_free_blocks() - 1


@pytest.fixture
def make() -> Callable[..., World]:
    return World


def test_the_rest_of_a_prompt_is_computed_once_and_copied_to_the_other_samples(make: Callable[..., World]) -> None:
    world = make(100)
    first, *others = world.add(list(range(45)), 4)
    assert world.step() == ({"r1": 45}, [])
    source = world.block_of(first, 1)
    counts, copies = world.step()
    assert counts == {"r1": 1, "r2": 1, "r3": 1, "r4": 1}
    assert copies == [(source, world.block_of(other, 1)) for other in others]
    assert len({world.block_of(request, 1) for request in (first, *others)}) == 4
    assert {world.block_of(request, 0) for request in others} == {world.block_of(first, 0)}
    world.run()
    assert world.used_blocks == 0


@pytest.mark.parametrize(
    ("length", "second_step"),
    [
        (20, [1, 1]),  # shorter than a block
        (64, [1, 1]),  # the last block is full, but the last token's logits are needed
        (33, [1]),  # nothing is behind the last block but the last token
        (36, [1]),  # too little to wait for
    ],
)
def test_prompts_of_other_lengths(make: Callable[..., World], length: int, second_step: list[int]) -> None:
    world = make(100)
    world.add(list(range(length)), 2, tokens=2)
    first, second = world.run()[:2]
    assert second[0][: len(second_step)] == second_step
    assert first == ([length], 0) if second[1] else first[0] == [length, length - length // BLOCK * BLOCK]
    assert second[1] == (length in (20, 64))


def test_a_tail_is_found_after_its_block_is_full_and_after_its_request_has_ended(make: Callable[..., World]) -> None:
    world = make(100)
    world.add(list(range(45)), tokens=40)
    world.run()
    world.add(list(range(45)), 3, tokens=2)
    assert world.run() == [([1, 1, 1], 3), ([1, 1, 1], 0)]
    assert world.used_blocks == 0


def test_requests_that_sample_one_token_wait_for_one_step_together(make: Callable[..., World]) -> None:
    world = make(100)
    world.add(list(range(45)), 20, tokens=1)
    assert world.run() == [([45], 0), ([1] * 19, 19)]


def test_other_prompts_and_other_salts_share_nothing(make: Callable[..., World]) -> None:
    world = make(100)
    world.add(list(range(45)))
    world.add([*range(40), *range(100, 105)])
    salted = world.add(list(range(45)))[0]
    salted.cache_salt, salted.block_hashes = "x", []
    salted.update_block_hashes()
    assert world.step() == ({"r1": 45, "r2": 13, "r3": 45}, [])


def test_a_request_for_the_prompts_logprobs_computes_its_prompt(make: Callable[..., World]) -> None:
    world = make(100)
    world.add(list(range(45)))
    world.add(list(range(45)), prompt_logprobs=0)
    assert world.step() == ({"r1": 45, "r2": 45}, [])


def test_new_weights_forget_tails_and_a_running_request_does_not_store_them_again(make: Callable[..., World]) -> None:
    world = make(100)
    world.add(list(range(20)), tokens=60)
    world.step()
    forget(world.scheduler)
    for _ in range(30):  # its block is full by now
        world.step()
    world.add(list(range(20)), tokens=1)
    assert world.step()[0]["r2"] == 20


def test_a_preempted_request_is_computed_again_and_its_samples_do_not_wait_for_ever(make: Callable[..., World]) -> None:
    world = make(8)
    requests = world.add(list(range(45)), 6, tokens=40)
    world.run()
    assert all(request.num_output_tokens == 40 for request in requests)
    assert any(request.num_preemptions for request in requests)
    assert world.used_blocks == 0


def test_a_tail_of_a_request_that_is_taken_out_of_its_step_is_not_found(make: Callable[..., World]) -> None:
    world = make(100)
    first, second = world.add(list(range(45)), 2)
    world.scheduler.schedule()
    world.scheduler.running.remove(first)
    world.scheduler._preempt_request(first, 0.0)
    counts, copies = world.step()
    assert not copies
    assert counts["r2"] > 1


def test_layers_with_windows_share_too(make: Callable[..., World]) -> None:
    world = make(100, FULL, WINDOW)
    first, other = world.add(list(range(120)), 2)
    assert world.step() == ({"r1": 120}, [])
    sources = [ids[3] for ids in world.scheduler.kv_cache_manager.get_block_ids(first.request_id)]
    counts, copies = world.step()
    assert counts == {"r1": 1, "r2": 1}
    own = [ids[3] for ids in world.scheduler.kv_cache_manager.get_block_ids(other.request_id)]
    assert copies == list(zip(sources, own, strict=True))
    world.run()
    assert world.used_blocks == 0
