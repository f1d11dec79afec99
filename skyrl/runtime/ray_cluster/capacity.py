"""What a Ray cluster has free, in words, and placement groups that are waited for without a bound on patience.

`rank_places` says what the trainer's ranks ask a cluster for, as configured: the launcher checks it, and the engine
asks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl.base.config.server import ServerConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


logger = logging.getLogger(__name__)

Bundle = Mapping[str, float]
POLL_S = 0.2
LONGEST_POLL_S = 2.0
SHOWN_NODES = 4
_SLACK = 1e-6
"""Ray counts ten-thousandths of a resource."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One living node: its address, and its resources in all and free."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


class Cancelled(Exception):
    """The wait for a placement group was ended by the caller."""


def nodes() -> list[NodeCapacity]:
    """The living nodes of the cluster to which this process is connected, in the order of their addresses."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray's public function has the sum of all nodes

    free = available_resources_per_node()
    found = [
        NodeCapacity(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def missing(bundles: Sequence[Bundle], on: Sequence[NodeCapacity] | None = None, *, apart: bool = False) -> str:
    """What the cluster lacks for these bundles, in one sentence without a full stop; empty if they fit. `apart`: each
    bundle needs a node of its own. `on` are the nodes; by default those of the cluster."""
    places = [(node, dict(node.free)) for node in (nodes() if on is None else on)]
    if not places:
        return "the Ray cluster has no living node"
    taken: set[str] = set()
    for number, bundle in enumerate(bundles):
        fitting = [
            (node, free) for node, free in places if not (apart and node.id in taken) and not _short_of(bundle, free)
        ]
        if fitting:
            node, free = fitting[0]
            taken.add(node.id)
            for name, amount in bundle.items():
                free[name] = free.get(name, 0.0) - amount
            continue
        wanted = amounts(bundle)
        if len(bundles) > 1:
            wanted = f"{wanted} for each of {len(bundles)}, and {number} of them fit"
            if apart:
                wanted += ", each on its own node"
        left = [(node, free) for node, free in places if not (apart and node.id in taken)]
        return f"no {'other ' if number and apart else ''}node has {wanted}: {_each(bundle, left)}"
    return ""


def amounts(bundle: Bundle) -> str:
    """`1 CPU and 2 GPU`."""
    words = [f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount]
    return " and ".join(words) or "no resource"


def reserve(
    bundles: Sequence[Bundle],
    strategy: str,
    *,
    name: str,
    on_waiting: Callable[[str], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    target_node: str | None = None,
) -> PlacementGroup:
    """A placement group whose resources are reserved. Blocks until they are, however long that takes; call it on a
    thread. `on_waiting` is told what is missing whenever that changes. `target_node` is the id of the node to prefer,
    with STRICT_PACK only. Raises Cancelled when `is_cancelled`; then the group is removed."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    wanted = [dict(bundle) for bundle in bundles]
    group = placement_group(wanted, strategy=strategy, name=name, _soft_target_node_id=target_node)
    said, pause_s = "", POLL_S / 4
    try:
        while placement_group_table(group)["state"] != "CREATED":
            if is_cancelled():
                raise Cancelled
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
            if pause_s < POLL_S:  # a group that fits is placed within milliseconds
                continue
            lack = missing(bundles, apart=strategy == "STRICT_SPREAD") or "Ray has not placed it yet"
            if lack != said:
                said = lack
                on_waiting(lack)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _short_of(bundle: Bundle, free: Mapping[str, float]) -> list[str]:
    return [name for name, amount in bundle.items() if free.get(name, 0.0) < amount - _SLACK]


def _each(bundle: Bundle, places: Sequence[tuple[NodeCapacity, Mapping[str, float]]]) -> str:
    """What each node is short of. Nodes that have most come first."""
    if not places:
        return "there is no further node"
    ordered = sorted(places, key=lambda place: (len(_short_of(bundle, place[1])), place[0].address))
    words = [f"{node.address} has {_lack(bundle, node, free)}" for node, free in ordered[:SHOWN_NODES]]
    more = len(ordered) - len(words)
    return "; ".join([*words, *([f"and {more} more nodes"] if more > 0 else [])])


def _lack(bundle: Bundle, node: NodeCapacity, free: Mapping[str, float]) -> str:
    lacks: list[str] = []
    for name in sorted(_short_of(bundle, free)):
        total, left = node.total.get(name, 0.0), max(0.0, free.get(name, 0.0))
        lacks.append(f"{left:g} of {total:g} {name} free" if total else f"no {name}")
    return " and ".join(lacks)


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
