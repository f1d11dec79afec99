"""The trainer's ranks on a Ray cluster, as the engine uses them: started at its start, watched, and ended with it.

Knows how the engine says what it waits for. Knows nothing of what the ranks compute.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from skyrl.base.config.server import ServerConfig
from skyrl.runtime.ray_cluster.capacity import rank_places
from skyrl.storage.db.faults import DatabaseError, reason
from skyrl.trainer.protocol import RankDied
from skyrl.training.engine.rank_actors import RankActors, cluster_has_gpus

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LOADING = "loading the base model"
ADAPTER_RANK = "skyrl.trainer.ranks.lora_rank:Rank"
EXPERT_RANK = "skyrl.trainer.ranks.lora_rank:ExpertRank"
FULL_RANK = "skyrl.trainer.ranks.full_rank:FullRank"


def start_ranks(config: ServerConfig, publish: Callable[[str], None]) -> RankActors:
    """Start the configured ranks, on a thread. Waits for room without an end; `publish` gets the reason why training is
    not ready: the resource that the cluster lacks, then that the base model is loaded.

    Raises RankDied when a rank does not start.
    """
    from skyrl.trainer.ranks.over_ranks import rank_settings

    def say(missing: str) -> None:
        text = f"waiting for the trainer's ranks: {missing}" if missing else LOADING
        logger.info("%s", text)
        try:
            publish(text)
        except DatabaseError as error:
            logger.warning("could not publish that the engine is %s: %s", text, reason(error))

    places = rank_places(config, cluster_has_gpus=cluster_has_gpus())
    settings = rank_settings(config)
    return RankActors(
        places,
        _rank_class(config),
        (settings,),
        timeout_s=settings.timeout_s,
        died=RankDied,
        on_waiting=say,
        name=f"skyrl-ranks-{secrets.token_hex(4)}",
    )


def _rank_class(config: ServerConfig) -> str:
    if config.full_finetuning:
        return FULL_RANK
    return EXPERT_RANK if config.backend_config.trainer.placement.expert_parallel else ADAPTER_RANK


async def watch_ranks(ranks: RankActors) -> None:
    """Raises RankDied when a rank dies, also while no command runs."""
    while True:
        await asyncio.sleep(LOOK_S)
        ranks.raise_if_failed()
