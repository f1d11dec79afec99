"""The engine's process with ranks on a Ray cluster: it waits for room, says what is missing, goes on, and ends when a
rank dies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine_process import EngineProcess

from .machines import Machines

pytestmark = pytest.mark.ray


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["adapters", "whole model"])
def test_the_engine_waits_for_its_ranks_and_ends_with_them(
    cluster: Machines, tmp_path: Path, migrated_url: str, full: bool
) -> None:
    placement = {"policy_num_cpu_ranks": 2, "policy_resources": {"CPU": 1, "seat": 1}}
    engine = EngineProcess(
        tmp_path / "state",
        migrated_url,
        ray_address=cluster.address,
        checkpoint_store=(tmp_path / "store").as_uri(),
        external_inference_url=None if full else "http://127.0.0.1:9",
        backend_config={
            "trainer.placement": placement,
            "trainer.rank_timeout_s": 60,
            "trainer.full_finetuning": full,
        },
    )
    try:
        engine.until(lambda: engine.state().reason.startswith("waiting for the trainer's ranks: "))
        said = engine.state().reason
        assert "no node has 1 CPU and 1 seat for each of 2, and 0 of them fit: " in said
        assert re.search(r"127\.0\.0\.2 has (0 of 0|no) CPU.* and no seat", said)
        assert not engine.state().training_ready
        node = cluster.add(cpus=2, resources='{"seat": 2}')
        engine.until(lambda: engine.state().training_ready)
        assert len(node.ranks()) == 2
        node.ranks()[0].kill()
        assert engine.ended() == 1
        assert "RankDied: rank " in engine.log
        assert "has died" in engine.log
        assert engine.state().reason == "the engine has stopped"
        node.kill()
    finally:
        engine.close()
