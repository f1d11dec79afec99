"""What the trainer's ranks ask a Ray cluster for, as configured: the launcher checks it, and the engine asks."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.config.server import ServerConfig
from skyrl.runtime.ray_cluster.capacity import Bundle


@dataclass(frozen=True)
class RankPlaces:
    """What to ask Ray for: `bundles`, each with room for `ranks_each` ranks that take `each` one's resources."""

    bundles: tuple[Bundle, ...]
    ranks_each: int
    each: Bundle
    strategy: str
    cuda: bool

    @property
    def ranks(self) -> int:
        return len(self.bundles) * self.ranks_each


def rank_places(config: ServerConfig, *, cluster_has_gpus: bool) -> RankPlaces:
    """The places of the configured ranks.

    Ranks with GPUs: the GPUs of one node are one bundle, and each further bundle is on another node if there is one.
    Ranks without GPUs, which `policy_num_cpu_ranks` asks for, are spread over the nodes. A single rank that nothing
    was configured for runs without a GPU if the cluster has none.
    """
    placement = config.backend_config.trainer.placement
    single = placement.ranks == 1 and "GPU" not in placement.policy_resources
    if placement.policy_num_cpu_ranks is not None or (single and not cluster_has_gpus):
        each = {"CPU": float(config.threads), **placement.policy_resources}
        return RankPlaces((each,) * placement.ranks, 1, each, "SPREAD", cuda=False)
    each = {"GPU": 1.0, **placement.policy_resources}
    count = placement.policy_num_gpus_per_node
    bundle = {name: amount * count for name, amount in each.items()}
    strategy = "STRICT_PACK" if placement.policy_num_nodes == 1 else "SPREAD"
    return RankPlaces((bundle,) * placement.policy_num_nodes, count, each, strategy, cuda=True)
