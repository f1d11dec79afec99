"""The comparison with a sampler that a test scripts: what it refuses, and in which words.

The real vLLM is compared at each start of the end-to-end tests' servers, and refused by tests/faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from adapter_hosts import HostWithAllAdapters, UnreachableHost

from skyrl.base.config.server import ConfigError
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine.sampler_check import SamplerCheck
from skyrl.engine.trainer_probes import Expected, PicturePrompt, Probe
from skyrl.inference.vllm_client import VllmError
from skyrl.runtime.processes.startup import FirstStarts, NotLoaded, cause_of_own

KINDS = ("self_attn.q_proj", "mlp.experts.down_proj", "lm_head")
BASE = np.random.default_rng(0).normal(-6, 1.5, 63).astype(np.float32)
CHANGES = {kind: np.random.default_rng(n + 1).normal(0, 1, 63).astype(np.float32) for n, kind in enumerate(KINDS)}


IMAGE = 99
PICTURE = PicturePrompt.of(VisionConfig("qwen3_vl", IMAGE, 16, 2, 32 * 32, 256 * 256), np.arange(64), max_context=100)
SEEN = np.random.default_rng(5).normal(-6, 1.5, 32).astype(np.float32)


def expected(start: int = 1) -> Expected:
    """What a trainer computes. `start` tells the names of one start of the engine from those of another."""
    probes = [
        Probe(kind, AdapterVersion.of(f"start-check-{start}", n + 1), BASE + CHANGES[kind])
        for n, kind in enumerate(KINDS)
    ]
    return Expected(np.arange(64), BASE, probes)


@dataclass
class ScriptedSampler:
    """Computes what the trainer does, but for what a test sets."""

    trainer: Expected = field(default_factory=expected)
    ignores: Sequence[str] = ()
    other: dict[str, np.ndarray] = field(default_factory=dict)
    """Changes by kind, in place of the trainer's."""
    base: np.ndarray = field(default_factory=lambda: BASE + np.float32(0.01))
    seen: np.ndarray = field(default_factory=lambda: SEEN + np.float32(0.002))
    failure: Exception | None = None
    fails_at: str = ""
    is_alive: bool = False
    """Whether it works on after the failure."""
    loaded: dict[str, str] = field(default_factory=dict)

    def _layers(self, name: str) -> str:
        return next((probe.layers for probe in self.trainer.probes if probe.adapter.name == name), "base")

    def _fail(self, layers: str) -> None:
        if self.failure is not None and self.fails_at == layers:
            raise self.failure

    async def health(self) -> object | None:
        return object() if self.is_alive else None

    async def load_adapter(self, name: str, directory: str) -> None:
        self._fail(self._layers(name))
        self.loaded[name] = directory

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    async def logprobs_behind(self, model: str, tokens: list[int], picture: bytes, count: int) -> list[float]:
        self._fail("picture")
        assert (model, tokens.count(IMAGE), picture[1:4]) == ("tiny", 1, b"PNG")
        assert count == len(self.seen)
        return self.seen.tolist()

    async def prompt_logprobs(self, model: str, tokens: list[int]) -> list[float]:
        layers = self._layers(model)
        if layers == "base":
            self._fail("base")
            return self.base.tolist()
        assert self.loaded[model] == f"/adapters/{model}"
        if layers in self.ignores:
            return self.base.tolist()
        return (self.base + self.other.get(layers, CHANGES[layers])).tolist()


async def run(sampler: ScriptedSampler) -> str:
    return await SamplerCheck(sampler.trainer, cast(Any, sampler), HostWithAllAdapters(), "tiny").run()


async def test_a_sampler_that_computes_the_same_passes_with_figures() -> None:
    sampler = ScriptedSampler(other={"lm_head": 0.9 * CHANGES["lm_head"]})
    said = await run(sampler)
    assert said.startswith(
        "the base model's logprobs are at most 0.01 apart, and of the changes by 3 adapters at least 90.0% is the same "
        "(lm_head); the comparison took "
    )
    assert sampler.loaded == {}, "the sampler keeps no probe"


def seeing() -> Expected:
    return replace(expected(), picture=PICTURE, seen=SEEN)


async def test_the_text_behind_a_picture_is_compared_too() -> None:
    assert ", behind a picture 0.002, and of the changes by" in await run(ScriptedSampler(seeing()))
    other = (
        r"behind a picture differ from the trainer's by 0\.1 .*; 0\.05 is allowed\), so vLLM has another vision tower"
    )
    with pytest.raises(ConfigError, match=other):
        await run(ScriptedSampler(seeing(), seen=SEEN + np.float32(0.1)))


@pytest.mark.parametrize("status", [403, 404])
async def test_a_sampler_without_a_route_for_pictures_is_named_and_not_refused(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    failure = VllmError("score a prompt with a picture", status, "Restart vllm serve with --enable-scale-out")
    said = await run(ScriptedSampler(seeing(), failure=failure, fails_at="picture"))
    assert "behind a picture" not in said
    assert "requests with images will fail" in caplog.text
    assert "--enable-scale-out" in caplog.text


async def test_a_sampler_that_refuses_a_picture_is_a_reason_not_to_start() -> None:
    failure = VllmError("score a prompt with a picture", 400, "too large")
    with pytest.raises(ConfigError, match=r"with a picture"):
        await run(ScriptedSampler(seeing(), failure=failure, fails_at="picture"))


def test_a_picture_that_does_not_fit_the_context_is_not_compared() -> None:
    sight = VisionConfig("qwen3_vl", IMAGE, 16, 2, 1024 * 1024, 2048 * 2048)
    assert PicturePrompt.of(sight, np.arange(64), max_context=1024) is None
    assert PicturePrompt.of(sight, np.arange(64), max_context=4096) is not None


@pytest.mark.parametrize("kind", KINDS)
async def test_one_ignored_kind_of_layers_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await run(ScriptedSampler(ignores=[kind]))
    change = float(np.median(np.abs(CHANGES[kind])))
    assert str(refused.value) == (
        f"base_model: a random adapter on {kind} changes the trainer's logprobs by {change:.2g} and vLLM's by 0 "
        "(medians over 63 tokens): vLLM ignores it, so nobody would sample what these layers learn; "
        "generator.inference_engine.compare_with_trainer = false leaves this comparison out"
    )


async def test_another_scale_of_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"on lm_head changes .* and vLLM's by .*: vLLM adds something else, 0\.\d+"):
        await run(ScriptedSampler(other={"lm_head": 2 * CHANGES["lm_head"]}))


async def test_other_weights_are_refused_before_any_adapter() -> None:
    sampler = ScriptedSampler(base=np.random.default_rng(9).normal(-6, 1.5, 63), fails_at=KINDS[0], failure=KeyError())
    with pytest.raises(
        ConfigError, match=r"base model differ from the trainer's by [12]\.\d \(.* is allowed\), so vLLM"
    ):
        await run(sampler)


async def test_a_change_that_rounding_hides_is_named_and_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    noise = np.random.default_rng(8).normal(0, 0.45, 63).astype(np.float32)
    said = await run(ScriptedSampler(base=BASE + noise, ignores=KINDS))
    assert "adapters" not in said
    assert "does not cover self_attn.q_proj: a random adapter on it changes the trainer's logprobs by" in caplog.text


@pytest.mark.parametrize("status", [400, 500])
async def test_an_adapter_that_vllm_refuses_is_a_reason_not_to_start(status: int) -> None:
    failure = VllmError("load adapter 'x'", status, "the adapter changes what vLLM computes without adapters")
    sentence = (
        r"^base_model: vLLM refuses what clients would ask it for \(an adapter on lm_head\): .*: [45]00 the adapter"
    )
    with pytest.raises(ConfigError, match=sentence):
        await run(ScriptedSampler(failure=failure, fails_at="lm_head", is_alive=True))


@pytest.mark.parametrize(
    "failure", [httpx.ReadError("gone"), VllmError("load adapter 'x'", 500, "engine is dead"), VllmError("x", 503, "")]
)
@pytest.mark.parametrize("fails_at", ["base", "lm_head"])
async def test_a_sampler_without_an_answer_is_tried_again_by_another_start(failure: Exception, fails_at: str) -> None:
    with pytest.raises(NotLoaded, match=r"vLLM .* when it is compared with the trainer \("):
        await run(ScriptedSampler(failure=failure, fails_at=fails_at))


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_and_a_store_that_is_away_are_no_refusal(status: int) -> None:
    failure = VllmError("load adapter 'x'", status, "later")
    with pytest.raises(NotLoaded, match=rf"{status} later"):
        await run(ScriptedSampler(failure=failure, fails_at="lm_head", is_alive=True))


async def test_the_same_failure_in_two_starts_ends_the_server() -> None:
    starts = FirstStarts()
    hopeless = []
    for start in (11, 222):
        trainer = expected(start)
        name = trainer.probes[2].adapter.name
        failure = VllmError(f"load adapter {name!r}", 500, "dead")
        with pytest.raises(NotLoaded) as ended:
            await run(ScriptedSampler(trainer, failure=failure, fails_at="lm_head"))
        hopeless.append(starts.hopeless("engine", cause_of_own(75, f"cannot start: {ended.value}")))
    assert hopeless == [False, True]


async def test_an_adapter_that_cannot_be_brought_to_vllm_is_tried_again() -> None:
    sampler = ScriptedSampler()
    with pytest.raises(NotLoaded, match=f"an adapter on {KINDS[0]}"):
        await SamplerCheck(sampler.trainer, cast(Any, sampler), UnreachableHost(), "tiny").run()
