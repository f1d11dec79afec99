"""The actor of a rank, without Ray."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from skyrl.engine.rank_actors import RankActor

MODULE = "a_module_of_the_test"


class Rank:
    def __init__(self, device_type: str) -> None:
        self.device_type = device_type


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor asks no cluster for its node, and does not end this process."""
    module = ModuleType(MODULE)
    module.Rank = Rank  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(RankActor, "node", lambda _: "127.0.0.2")
    monkeypatch.setattr(RankActor, "_end_if_unasked", lambda _: None)
    for variable in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "set")


def make(*, cuda: bool, device_type: str) -> None:
    RankActor(cuda, 60.0).make(f"{MODULE}:Rank", [device_type], ["127.0.0.2"])


def test_a_rank_that_was_given_a_gpu_does_not_train_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="torch finds no CUDA device on this rank's node, which has a GPU for it"):
        make(cuda=True, device_type="cpu")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_rank_trains_on_the_device_that_it_was_given(device_type: str) -> None:
    make(cuda=device_type == "cuda", device_type=device_type)
