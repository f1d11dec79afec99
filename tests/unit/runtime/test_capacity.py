"""What a Ray cluster lacks for bundles of resources, as a sentence."""

from __future__ import annotations

from skyrl.runtime.ray_cluster.capacity import NodeCapacity, amounts, missing


def node(number: int, total: dict[str, float], free: dict[str, float] | None = None) -> NodeCapacity:
    return NodeCapacity(f"id{number}", f"10.0.0.{number}", total, total if free is None else free)


def test_nothing_is_missing_where_the_bundles_fit():
    both = [node(1, {"CPU": 2}), node(2, {"CPU": 1, "GPU": 1})]
    assert missing([{"CPU": 1, "GPU": 1}, {"CPU": 1}, {"CPU": 1}], both) == ""


def test_each_node_with_what_it_is_short_of():
    cluster = [node(1, {"CPU": 8}), node(2, {"CPU": 8, "GPU": 4}, {"CPU": 0.5, "GPU": 1})]
    assert missing([{"GPU": 2, "CPU": 1}], cluster) == (
        "no node has 1 CPU and 2 GPU: 10.0.0.1 has no GPU; 10.0.0.2 has 0.5 of 8 CPU free and 1 of 4 GPU free"
    )


def test_a_bundle_after_the_ones_that_fit():
    cluster = [node(1, {"GPU": 2}), node(2, {"GPU": 1}, {})]
    assert missing([{"GPU": 1}] * 3, cluster) == (
        "no node has 1 GPU for each of 3, and 2 of them fit: 10.0.0.1 has 0 of 2 GPU free; 10.0.0.2 has 0 of 1 GPU free"
    )


def test_bundles_that_need_nodes_of_their_own():
    assert missing([{"CPU": 1}] * 2, [node(1, {"CPU": 9})], apart=True) == (
        "no other node has 1 CPU for each of 2, and 1 of them fit, each on its own node: there is no further node"
    )
    assert missing([{"CPU": 1}] * 2, [node(1, {"CPU": 9}), node(2, {"CPU": 1})], apart=True) == ""


def test_only_the_nearest_nodes_are_named():
    cluster = [node(number, {"CPU": 1}) for number in range(1, 10)]
    said = missing([{"CPU": 2}], cluster)
    assert said.count("CPU free") == 4
    assert said.endswith("and 5 more nodes")


def test_a_cluster_without_nodes():
    assert missing([{"CPU": 1}], []) == "the Ray cluster has no living node"


def test_amounts_without_trailing_zeros():
    assert amounts({"CPU": 2.0, "GPU": 0, "box": 0.5}) == "2 CPU and 0.5 box"
    assert amounts({}) == "no resource"


def test_ray_counts_ten_thousandths():
    assert missing([{"CPU": 0.1}] * 10, [node(1, {"CPU": 1})]) == ""
