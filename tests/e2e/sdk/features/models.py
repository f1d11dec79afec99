"""Models: LoRA adapters in training, and the server's information about them."""

from __future__ import annotations

import numpy as np
from tinker import types

from ..catalogue import feature
from ..user import MODEL, SECOND_NAME, User, both, refusal, same, wait

GROUP = "Models"


@feature(GROUP, "A LoRA model of a given rank; `get_info` says its name, rank and base model.")
def create_a_model(user: User) -> None:
    for trainer in both(user.service, "create_lora_training_client", MODEL, 2):
        for info in both(trainer, "get_info"):
            session, _, number = info.model_id.partition(":train:")
            assert session == user.session_of(user.model)
            assert number.isdecimal()
            assert info.is_lora
            assert info.lora_rank == 2
            assert info.model_data.model_name == MODEL


@feature(GROUP, "The same seed starts the same adapter, another seed another.")
def seed_of_a_model(user: User) -> None:
    scores = []
    for seed in (7, 7, 8):
        trainer = user.train(seed=seed)
        user.step(trainer)
        scores.append(user.scores(trainer))
    assert np.array_equal(scores[0], scores[1])
    assert not np.array_equal(scores[0], scores[2])


@feature(GROUP, "`train_mlp`, `train_attn` and `train_unembed` choose the layers; `weights_info` names them.")
def trained_layers(user: User) -> None:
    for chosen in ("mlp", "attn", "unembed"):
        flags = {f"train_{part}": part == chosen for part in ("mlp", "attn", "unembed")}
        trainer = user.train(rank=4, **flags)
        before = user.scores(trainer)
        user.step(trainer)
        assert not np.array_equal(user.scores(trainer), before)
        info = wait(user.rest.get_weights_info_by_tinker_path(wait(trainer.save_state("only")).path))
        assert info.base_model == MODEL
        assert info.lora_rank == 4
        assert {name: getattr(info, name) for name in flags} == flags


@feature(GROUP, "`user_metadata` of a model comes back with its training run.")
def model_metadata(user: User) -> None:
    trainer = user.train(user_metadata={"experiment": "matrix"})
    run = user.model_id(trainer)
    for found in both(user.rest, "get_training_run", run):
        assert found.user_metadata == {"experiment": "matrix"}


@feature(GROUP, "A model asked for by its second name is served under that name.")
def second_name(user: User) -> None:
    trainer = user.train(base_model=SECOND_NAME)
    assert wait(trainer.get_info()).model_data.model_name == SECOND_NAME
    sampler = wait(trainer.save_weights_and_get_sampling_client())
    assert user.greedy(sampler) == user.greedy(user.sampler)


@feature(GROUP, "`get_tokenizer` of training and sampling clients loads the model's tokenizer.")
def tokenizer(user: User) -> None:
    trainer = user.train()
    sampler = wait(user.service.create_sampling_client(base_model=MODEL))
    for loaded in (trainer.get_tokenizer(), sampler.get_tokenizer()):
        assert len(loaded) == 512
        assert loaded.decode(loaded.encode("The old fox")) == "The old fox"
    for name in both(sampler, "get_base_model"):
        assert name == MODEL


@feature(GROUP, "A base model the server does not have is refused by name.", statuses=(400,))
def unknown_base_model(user: User) -> None:
    said = refusal(lambda: user.train(base_model="nobody/nothing"))
    assert "base_model" in said
    assert MODEL in said


@feature(
    GROUP,
    "Training with Dimuon: the server has AdamW only.",
    needs=("types.DimuonOptimizerConfig",),
    refusal="optimizer_config",
    statuses=(400,),
)
def dimuon_optimizer(user: User) -> None:
    user.train(optimizer=types.DimuonOptimizerConfig())


@feature(GROUP, "AdamW named as the optimizer is the default.", needs=("types.AdamOptimizerConfig",))
def optimizer_config(user: User) -> None:
    scores = []
    for optimizer in (None, types.AdamOptimizerConfig()):
        trainer = user.train(seed=3, optimizer=optimizer)
        user.step(trainer)
        scores.append(user.scores(trainer))
        assert wait(trainer.get_info()).optimizer_config.type == "adamw"
    assert same(*scores, tolerance=0.0)


@feature(GROUP, "Unloading a model, which ends it.", needs=("models.unload",))
def unload_a_model(user: User) -> None:
    from tinker.lib.api_future_impl import _APIFuture
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    service = user.open()
    trainer = user.train(service)
    user.step(trainer)
    model = user.model_id(trainer)
    holder = trainer.holder

    async def unload() -> object:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            promise = await client.models.unload(request=types.UnloadModelRequest(model_id=model))
        future = _APIFuture(
            types.UnloadModelResponse, holder, promise, request_start_time=0.0, request_type="UnloadModel"
        )
        return await future.result_async()

    assert wait(holder.run_coroutine_threadsafe(unload())).model_id == model
    assert model in refusal(lambda: trainer.forward(user.data, "cross_entropy"))
