"""Which node a server should run on: one that has room for all of it, and of those the one with the fewest servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl.runtime.ray_cluster.capacity import Bundle, NodeCapacity, missing


def choose(nodes: Sequence[NodeCapacity], bundle: Bundle, servers_on: Mapping[str, int]) -> str | None:
    """The id of the node; None when no node has room. `servers_on` has the number of servers by node id."""
    fitting = [node for node in nodes if not missing([bundle], [node])]
    if not fitting:
        return None
    return min(fitting, key=lambda node: (servers_on.get(node.id, 0), node.address)).id


def actor_options(bundle: Bundle) -> dict[str, object]:
    """The bundle as options of an actor."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    gpus = bundle.get("GPU", 0.0)
    return {
        "num_cpus": bundle.get("CPU", 0.0),
        "num_gpus": int(gpus) if gpus == int(gpus) else gpus,
        "memory": bundle.get("memory") or None,
        "resources": others,
    }
