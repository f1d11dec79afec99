"""Sampling clients: made from the base model, from saved weights, or from another sampling client."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import tinker
from tinker import types

from ..catalogue import feature
from ..user import MODEL, SECOND_NAME, User, both, run_program, same, wait

GROUP = "Sampling clients"

OTHER_PROCESS = """
import os, pickle, sys, warnings
warnings.simplefilter("ignore")
sampler, prompt, params = pickle.load(sys.stdin.buffer)
answer = sampler.sample(prompt, 1, params).result()
pickle.dump([list(answer.sequences[0].tokens), sampler.compute_logprobs(prompt).result()], sys.stdout.buffer)
sys.stdout.flush()
os._exit(0)
"""
"""The program exits at once: with running threads of SDK 0.25.0, Python may abort while it shuts down."""


def trained(user: User) -> tuple[Any, list[int], np.ndarray]:
    """A training client that has learnt TEXT by heart, the tokens that it must sample, and their logprobs."""
    trainer = user.train(rank=8, seed=4)
    for _ in range(12):
        user.step(trainer)
    return trainer, user.tokens[user.prompt.length :], user.scores(trainer)


@feature(GROUP, "Of the base model, by either name.")
def base_model_sampler(user: User) -> None:
    expected = user.greedy(user.sampler)
    for sampler in both(user.service, "create_sampling_client", base_model=SECOND_NAME):
        assert user.greedy(sampler) == expected
    made = wait(type(user.sampler).create(user.service.holder, base_model=MODEL))
    assert user.greedy(made) == expected


@feature(GROUP, "Of weights saved under a name: samples and logprobs are the trainer's.")
def sampler_of_named_weights(user: User) -> None:
    trainer, learnt, scores = trained(user)
    first = wait(trainer.save_weights_for_sampler("final")).path
    second = wait(wait(trainer.save_weights_for_sampler_async("copy"))).path
    wait(trainer.forward_backward(user.data, "cross_entropy"))
    wait(trainer.optim_step(types.AdamParams(learning_rate=1.0)))
    samplers = both(trainer, "create_sampling_client", first)
    samplers += both(user.service, "create_sampling_client", model_path=second)
    for sampler in samplers:
        assert user.greedy(sampler, len(learnt)) == learnt
        assert same(user.prompt_logprobs(sampler), scores)
        assert wait(sampler.get_base_model()) == MODEL


@feature(GROUP, "`save_weights_and_get_sampling_client`: weights without a name.")
def sampler_of_current_weights(user: User) -> None:
    trainer, learnt, scores = trained(user)
    before = user.greedy(user.sampler, len(learnt))
    for sampler in both(trainer, "save_weights_and_get_sampling_client"):
        assert user.greedy(sampler, len(learnt)) == learnt != before
        assert same(user.prompt_logprobs(sampler), scores)
    listed = wait(user.rest.list_checkpoints(user.model_id(trainer))).checkpoints
    assert listed == []


@feature(
    GROUP,
    "The same as a future of the client.",
    needs=("TrainingClient.save_weights_and_get_sampling_client_submit",),
)
def sampler_as_a_future(user: User) -> None:
    trainer, learnt, _ = trained(user)
    assert user.greedy(wait(trainer.save_weights_and_get_sampling_client_submit()), len(learnt)) == learnt


@feature(
    GROUP,
    '`kind="inflight"` samples from weights at least as new as the call.',
    needs=("TrainingClient.save_weights_and_get_sampling_client(kind)",),
)
def inflight_sampler(user: User) -> None:
    trainer, learnt, _ = trained(user)
    sampler = wait(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    assert user.greedy(sampler, len(learnt)) == learnt


@feature(GROUP, "`get_sampler` says what a sampling client samples from.")
def describe_a_sampler(user: User) -> None:
    trainer = user.train()
    path = wait(trainer.save_weights_for_sampler("described")).path
    wait(trainer.create_sampling_client(path))
    samplers = wait(user.rest.get_session(user.session_of(trainer))).sampler_ids
    described = [wait(user.rest.get_sampler(sampler)) for sampler in samplers]
    found = [sampler for sampler in described if sampler.model_path == path]
    assert [sampler.base_model for sampler in found] == [MODEL]
    assert wait(user.rest.get_sampler_async(found[0].sampler_id)) == found[0]


@feature(GROUP, "A pickled sampling client samples in another process.")
def sampling_client_in_another_process(user: User) -> None:
    trainer, learnt, _ = trained(user)
    sampler = wait(trainer.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=len(learnt), temperature=0.0, stop=[])
    given = pickle.dumps((sampler, user.prompt, params))
    tokens, scores = pickle.loads(run_program("-c", OTHER_PROCESS, given=given))
    assert tokens == learnt
    assert same(scores[1:], wait(sampler.compute_logprobs(user.prompt))[1:], 1e-5)


def _with_its_process(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    """The SDK gives its process 30 s to start and import torch, which is short on a busy machine."""
    late: Any = getattr(tinker, "SidecarStartupError", ())
    for _ in range(4):
        try:
            return wait(trainer.save_weights_and_get_sampling_client())
        except late:
            continue
    return wait(trainer.save_weights_and_get_sampling_client())


@feature(
    GROUP,
    "Sampling in a process of its own, with `TINKER_SUBPROCESS_SAMPLING`.",
    needs=("SamplingClient(subprocess_sampling)",),
)
def sampling_in_a_subprocess(user: User) -> None:
    trainer, learnt, _ = trained(user)
    os.environ["TINKER_SUBPROCESS_SAMPLING"] = "1"
    try:
        sampler = _with_its_process(trainer)
    finally:
        del os.environ["TINKER_SUBPROCESS_SAMPLING"]
    assert user.greedy(sampler, len(learnt)) == learnt


@feature(GROUP, "The same by its handle, a string.", needs=("SamplingClient.from_sampler_handle",))
def sampler_handle(user: User) -> None:
    trainer, learnt, _ = trained(user)
    handle = wait(trainer.save_weights_and_get_sampling_client()).get_sampler_handle()
    assert user.greedy(tinker.SamplingClient.from_sampler_handle(handle, api_key=user.key), len(learnt)) == learnt


@feature(GROUP, "A retry configuration of one's own.")
def retry_configuration(user: User) -> None:
    from tinker.lib.retry_handler import RetryConfig

    config = RetryConfig(progress_timeout=300.0, retry_delay_base=0.1, retry_delay_max=0.2)
    sampler = wait(user.service.create_sampling_client(base_model=MODEL, retry_config=config))
    assert user.greedy(sampler) == user.greedy(user.sampler)


@feature(
    GROUP,
    "`record_stability_info` is accepted; nothing is recorded.",
    needs=("ServiceClient.create_sampling_client(record_stability_info)",),
)
def stability_info(user: User) -> None:
    sampler = wait(user.service.create_sampling_client(base_model=MODEL, record_stability_info=True))
    assert user.greedy(sampler) == user.greedy(user.sampler)
