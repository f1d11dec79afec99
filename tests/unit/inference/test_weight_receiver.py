"""The calls that a vLLM worker answers, on a small model and groups of one process."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weight_model import EMBED, HEAD, KEY, QUERY, SCALE, SHAPES, TinyModel, served, tensors

from skyrl.inference.vllm_plugin.weights.jobs import WeightsError
from skyrl.inference.vllm_plugin.weights.receiver import NOT_IN_SERVICE, Receiver
from skyrl.inference.vllm_plugin.weights.sources import MOST_GROUPS
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged
from skyrl.weights.deltas import delta
from skyrl.weights.segments import KeptMemory, Segment, places_of
from skyrl.weights.tensors import COMPLEX, FLOATS, INTEGERS, digest, dtype_name


class FakeGroup:
    """The trainer's side is `sent`; tests/component has the same calls over a real group."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.closed = False
        self.during: Callable[[], object] = lambda: None

    def broadcast_each(self, tensors: Iterable[torch.Tensor]) -> Generator[torch.Tensor]:
        for tensor in tensors:
            self.during()
            if not self.sent:
                raise RuntimeError("the trainer is gone")
            yield tensor.copy_(self.sent.pop(0))

    def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, directory: Path) -> None:
        self.model = TinyModel()
        self.groups: dict[str, FakeGroup] = {}
        self.receiver = Receiver(
            served(self.model, directory / "first"), self._join, torch.device("cpu"), {"tp_rank": 0}, 0, lambda: None
        )

    def _join(self, **arguments: Any) -> FakeGroup:
        if arguments["address"] == "nowhere":
            raise RuntimeError("nobody answers")
        return self.groups.setdefault(arguments["name"], FakeGroup())

    def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        return self.receiver.answer(name, arguments)

    def job(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """The state of a job at its end, or the refusal."""
        started = self.call(name, **arguments)
        if not started["ok"]:
            return started
        ended()
        return self.call("job", numbers=[started["job"]])

    def join(self, name: str = "g", address: str = "here", rank_offset: int = 1) -> FakeGroup:
        arguments: dict[str, Any] = {"port": 1, "world_size": 2, "backend": "gloo", "timeout_s": 1.0}
        state = self.job("join_group", name=name, address=address, rank_offset=rank_offset, **arguments)
        assert state["ok"], state
        return self.groups[name]

    def bucket(self, part: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
        return {
            "group": "g",
            "names": list(part),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in part.values()],
            "shapes": [list(one.shape) for one in part.values()],
            "version": "1",
            "checksums": None,
        } | changes

    def receive(self, part: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
        self.groups["g"].sent.extend(part.values())
        return self.job("receive", **self.bucket(part, **changes))

    def map(self, part: dict[str, torch.Tensor], **changes: Any) -> dict[str, Any]:
        """Stage a part that lies in memory of this process."""
        places, size = places_of(part)
        segment = Segment(size, torch.device("cpu"))
        segment.fill(part, places)
        bucket = {name: value for name, value in self.bucket(part).items() if name != "group"}
        state = self.job("map", **bucket | {"places": places, "memory": segment.described()} | changes)
        segment.close()
        return state

    def read(self, directory: Path, **changes: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {"version": "1", "checksums": None, "partial": False}
        return self.job("read", directory=str(directory), **arguments | changes)

    def untouched(self) -> bool:
        old = tensors(0.0)
        return torch.equal(self.model.attn.qk.weight, torch.cat([old[QUERY], old[KEY]]))


def ended() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("skyrl "):
            thread.join(10)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def checkpoint(directory: Path, parts: list[dict[str, torch.Tensor]]) -> Path:
    directory.mkdir()
    places: dict[str, str] = {}
    for number, part in enumerate(parts):
        save_file(part, directory / f"{number}.safetensors")
        places |= dict.fromkeys(part, f"{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def test_a_checkpoint_is_read_and_then_applied(world: World, tmp_path: Path) -> None:
    new = tensors(2.0)
    sums = {name: digest(name, tensor) for name, tensor in new.items()}
    assert world.read(checkpoint(tmp_path / "new", [new]), checksums=sums)["tensors"] == len(SHAPES)
    assert world.untouched()
    assert world.call("apply", partial=False)["broken"] is None
    assert torch.equal(world.model.attn.qk.weight[:4], new[QUERY])
    assert world.call("state")["staged"] == 0
    assert "nothing to apply" in world.call("apply", partial=False)["error"]


def test_the_next_update_is_staged_in_the_same_memory(world: World, tmp_path: Path) -> None:
    world.join()
    directory, places = checkpoint(tmp_path / "new", [tensors(2.0)]), []
    for number in range(4):
        assert (world.read(directory) if number % 2 else world.receive(tensors(2.0)))["ok"]
        staged = world.receiver._area.staged
        assert staged is not None
        places.append(min(tensor.data_ptr() for tensor in staged.tensors.values()))
        del staged
        assert world.call("apply", partial=False)["broken"] is None
    assert len(set(places)) == 1


def test_a_version_is_made_of_the_one_before_and_what_differs(world: World, tmp_path: Path) -> None:
    old, new = tensors(2.0), tensors(2.0)
    new[QUERY][1, 2], new[SCALE] = 7.0, torch.tensor(9.0)
    entries = {key: one for name in new for key, one in delta(name, old[name], new[name]).items()}
    sums = {name: digest(name, tensor) for name, tensor in new.items()}
    assert world.read(checkpoint(tmp_path / "old", [old]), keep=True)["ok"]
    assert world.call("apply", partial=False)["broken"] is None
    changes = checkpoint(tmp_path / "new", [entries])
    assert world.read(changes, version="2", keep=True, base="1", checksums=sums)["tensors"] == len(SHAPES)
    assert torch.equal(world.model.attn.qk.weight[:4], old[QUERY])
    assert world.call("apply", partial=False)["broken"] is None
    assert torch.equal(world.model.attn.qk.weight, torch.cat([new[QUERY], new[KEY]]))
    assert torch.equal(world.model.scale, new[SCALE])
    assert "bytes of '1' are not kept here, but those of '2'" in world.read(changes, version="3", base="1")["error"]


@pytest.mark.parametrize(
    ("entries", "arguments", "message"),
    [
        ({"other:positions": torch.tensor([0])}, {}, "base: it has no other"),
        ({f"{KEY}:positions": torch.tensor([99]), f"{KEY}:values": torch.zeros(1)}, {}, "go beyond"),
        ({f"{KEY}:values": torch.zeros(1)}, {}, "do not fit"),
        ({f"{KEY}:positions": torch.tensor([0]), f"{KEY}:values": torch.tensor([torch.nan])}, {}, "not a finite"),
        ({SCALE: torch.zeros(3)}, {}, "shapes: scale"),
        ({SCALE: torch.tensor(1.0)}, {"checksums": {KEY: "00"}}, "checksums: attn.k.weight was made"),
    ],
)
def test_wrong_changes_leave_the_model_and_no_base(
    entries: dict[str, torch.Tensor], arguments: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    assert world.read(checkpoint(tmp_path / "old", [tensors(0.0)]), keep=True)["ok"]
    assert world.call("apply", partial=False)["broken"] is None
    changes = checkpoint(tmp_path / "new", [entries])
    assert message in world.read(changes, version="2", base="1", **arguments)["error"]
    assert world.call("state")["staged"] == 0
    assert world.untouched()
    assert "those of none" in world.read(changes, version="2", base="1")["error"]


def _take_scale(world: World) -> None:
    """From now on the model takes this tensor as its own, instead of copying it."""

    def load(given: Any) -> None:
        for name, tensor in given:
            TinyModel.load_weights(world.model, [(name, tensor)])
            if name == SCALE:
                world.model.scale.data = tensor

    world.model.load_weights = load  # type: ignore[method-assign]


def test_a_tensor_that_the_model_took_as_its_own_is_not_the_trainers_memory(world: World) -> None:
    """The trainer writes its next update there."""
    _take_scale(world)
    new = tensors(2.0)
    places, size = places_of(new)
    segment = Segment(size, torch.device("cpu"))
    segment.fill(new, places)
    arguments = {name: value for name, value in world.bucket(new).items() if name != "group"}
    assert world.job("map", **arguments, places=places, memory=segment.described())["missing"] == 0
    assert world.call("apply", partial=False)["broken"] is None
    segment.fill(tensors(3.0), places)
    assert torch.equal(world.model.scale, new[SCALE])
    assert torch.equal(world.model.attn.qk.weight[:4], new[QUERY])
    segment.close()


def test_a_tensor_that_the_model_took_as_its_own_is_no_base(world: World, tmp_path: Path) -> None:
    _take_scale(world)
    world.read(checkpoint(tmp_path / "old", [tensors(2.0)]), keep=True)
    assert world.call("apply", partial=False)["broken"] is None
    assert "those of none" in world.read(tmp_path / "old", version="2", base="1")["error"]


def test_a_tied_head_may_be_in_an_earlier_file_than_the_embedding(world: World, tmp_path: Path) -> None:
    new = tensors(2.0)
    embedding = new.pop(EMBED)
    directory = checkpoint(tmp_path / "new", [{HEAD: embedding.clone(), **new}, {EMBED: embedding}])
    assert world.read(directory)["ok"]
    wrong = checkpoint(tmp_path / "wrong", [{HEAD: embedding + 1, **new}, {EMBED: embedding}])
    assert "tied to another tensor" in world.read(wrong)["error"]


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"other": torch.zeros(1)}, {}, "has no other"),
        ({KEY: None}, {}, "lacks attn.k.weight"),
        ({KEY: torch.zeros(3, 4)}, {}, "shapes: attn.k.weight"),
        ({KEY: torch.full((2, 4), torch.nan)}, {}, "not a finite number"),
        ({}, {"checksums": {KEY: "00"}}, "checksums: attn.k.weight arrived"),
        ({}, {"checksums": {"attn.kk.weight": "00"}}, "has no attn.kk.weight"),
    ],
)
def test_a_wrong_checkpoint_leaves_the_model_and_nothing_staged(
    change: dict[str, torch.Tensor | None], arguments: dict[str, Any], message: str, world: World, tmp_path: Path
) -> None:
    part = {name: tensor for name, tensor in (tensors(2.0) | change).items() if tensor is not None}
    state = world.read(checkpoint(tmp_path / "new", [part]), **arguments)
    assert (state["ok"], state["status"]) == (False, 400)
    assert message in state["error"]
    assert world.call("state")["staged"] == 0
    assert "nothing to apply" in world.call("apply", partial=True)["error"]
    assert world.untouched()


def test_an_update_by_buckets_is_whole_at_the_last_one(world: World) -> None:
    world.join()
    new = tensors(2.0)
    first = world.receive({EMBED: new[EMBED], SCALE: new[SCALE]})
    assert (first["missing"], sorted(first["some"])) == (2, [KEY, QUERY])
    assert "lacks" in world.call("apply", partial=False)["error"]
    assert world.receive({QUERY: new[QUERY], KEY: new[KEY]})["missing"] == 0
    assert world.untouched()
    assert world.call("apply", partial=False)["broken"] is None
    assert torch.equal(world.model.scale, new[SCALE])
    assert not world.receive({HEAD: new[EMBED]})["new"]


def test_a_new_version_forgets_an_update_that_was_not_finished(world: World) -> None:
    world.join()
    world.receive({EMBED: tensors(2.0)[EMBED]})
    rest = {name: tensor for name, tensor in tensors(3.0).items() if name != EMBED}
    assert world.receive(rest, version="2")["missing"] == 1


def test_tensors_in_a_trainers_memory_are_applied_once_all_are_staged(world: World) -> None:
    new = tensors(2.0)
    first = world.map({EMBED: new[EMBED], SCALE: new[SCALE]})
    assert (first["missing"], sorted(first["some"])) == (2, [KEY, QUERY])
    assert world.call("staged", version="1")["missing"] == 2
    assert world.map({QUERY: new[QUERY], KEY: new[KEY]})["missing"] == 0
    assert world.untouched()
    assert world.call("apply", partial=False)["broken"] is None
    assert torch.equal(world.model.attn.qk.weight, torch.cat([new[QUERY], new[KEY]]))
    assert "nothing of '1' is staged" in world.call("staged", version="1")["error"]


def test_two_updates_of_one_version_are_not_mixed(world: World, tmp_path: Path) -> None:
    """Two trainers that give no version, or one that was killed and begins the same version again."""
    new, other = tensors(2.0), tensors(3.0)
    rest = {name: tensor for name, tensor in new.items() if name != EMBED}
    world.join("g")
    world.join("h")
    world.receive({EMBED: new[EMBED]}, version=None)
    world.groups["h"].sent.append(other[QUERY])
    assert world.job("receive", **world.bucket({QUERY: other[QUERY]}, group="h", version=None))["missing"] == 3
    assert world.receive(rest, version=None)["missing"] == 1, "of the update that the other one has interrupted"
    world.map({EMBED: new[EMBED]}, update="one")
    assert world.map(rest, update="two")["missing"] == 1
    assert "nothing of '1' is staged" in world.call("staged", version="1", update="one")["error"]
    assert world.call("staged", version="1", update="two")["missing"] == 1
    world.read(checkpoint(tmp_path / "whole", [other]))
    assert world.map({EMBED: new[EMBED]})["missing"] == 3, "the checkpoint that was read is another update"


def test_an_update_that_began_and_sent_nothing_takes_no_part_of_the_next_version(world: World) -> None:
    """Its trainer was killed after the first call."""
    new = tensors(2.0)
    world.map({}, version="1")
    world.map({EMBED: new[EMBED], SCALE: new[SCALE]}, version="2")
    assert world.map({QUERY: new[QUERY], KEY: new[KEY]}, version="2")["missing"] == 0
    assert world.call("staged", version="2")["missing"] == 0


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ({KEY: torch.zeros(3, 4)}, {}, "shapes: attn.k.weight"),
        ({KEY: torch.full((2, 4), torch.nan)}, {}, "not a finite number"),
        ({KEY: torch.zeros(2, 4)}, {"places": [64]}, "places: attn.k.weight ends after"),
        ({KEY: torch.zeros(2, 4)}, {"places": [2]}, "places: attn.k.weight begins at byte 2, which"),
        ({KEY: torch.zeros(2, 4)}, {"memory": {"pid": 1, "descriptor": 0, "inode": 1, "bytes": 1}}, "memory: "),
        ({KEY: torch.zeros(2, 4)}, {"memory": {"gpu": "other", "handle": [], "bytes": 1}}, "memory: "),
    ],
)
def test_a_wrong_part_of_a_trainers_memory_leaves_nothing_staged(
    part: dict[str, torch.Tensor], changes: dict[str, Any], message: str, world: World
) -> None:
    world.map({EMBED: tensors(2.0)[EMBED]})
    refused = world.map(part, **changes)
    assert (refused["ok"], refused["status"]) == (False, 400)
    assert message in refused["error"]
    assert world.call("state")["staged"] == 0
    assert world.untouched()


def test_after_an_update_its_memory_is_free(world: World) -> None:
    world.join()
    assert world.receive(tensors(2.0))["missing"] == 0
    staged = weakref.ref(world.receiver._area.staged.tensors[KEY])  # type: ignore[union-attr]
    assert world.call("apply", partial=False)["broken"] is None
    gc.collect()
    assert staged() is None


def test_a_tensor_that_does_not_fit_is_received_and_refused(world: World) -> None:
    """The group is still of use: everything that was sent has been received."""
    group = world.join()
    part = {KEY: torch.zeros(3, 4), QUERY: tensors(2.0)[QUERY]}
    assert "shapes: attn.k.weight" in world.receive(part)["error"]
    assert group.sent == []
    assert not group.closed
    assert world.call("state")["staged"] == 0
    assert world.receive(tensors(2.0))["missing"] == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_model_takes_floats_of_every_dtype(dtype: torch.dtype, world: World) -> None:
    world.join()
    new = {name: torch.ones_like(tensor).to(dtype) for name, tensor in tensors(2.0).items()}
    assert world.receive(new | {HEAD: new[EMBED].clone()})["missing"] == 0
    assert world.call("apply", partial=False)["broken"] is None
    assert torch.equal(world.model.attn.qk.weight, torch.ones(6, 4))
    other = {EMBED: new[EMBED], HEAD: torch.full(new[EMBED].shape, 2.0).to(dtype)}
    assert "tied to another tensor" in world.receive(other)["error"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*INTEGERS, *COMPLEX], ids=str)
def test_a_dtype_of_another_kind_is_received_and_refused(dtype: torch.dtype, world: World) -> None:
    group = world.join()
    wrong = world.receive({KEY: torch.ones(2, 4, dtype=dtype)})
    assert wrong["error"] == f"dtypes: {KEY} is {dtype_name(dtype)}, the model has a floating-point tensor"
    assert not group.closed
    assert world.receive(tensors(2.0))["missing"] == 0


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_a_number_for_an_integer_is_refused(dtype: torch.dtype) -> None:
    needed = Needed({"steps": (1,)}, {"steps": False}, frozenset())
    with pytest.raises(WeightsError, match="the model has an integer tensor"):
        needed.check("steps", (1,), dtype)
    for integer in INTEGERS:
        needed.check("steps", (1,), integer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": ["float4"]}, "dtypes: 'float4', of attn.k.weight, is not one of float64"),
        ({"dtypes": ["float4_e2m1fn_x2"]}, "dtypes: 'float4_e2m1fn_x2'"),
        ({"dtypes": ["nn"]}, "dtypes: 'nn'"),
        ({"dtypes": []}, "the numbers must be equal"),
        ({"shapes": [[1 << 40]]}, "more than this model can have"),
        ({"names": [KEY, KEY], "dtypes": ["int8"] * 2, "shapes": [[1]] * 2}, "occurs twice"),
    ],
)
def test_a_bucket_that_is_refused_unreceived_ends_its_group(
    changes: dict[str, Any], message: str, world: World
) -> None:
    """Otherwise the tensors of the refused bucket would be taken for those of the next one."""
    group = world.join()
    refused = world.receive({KEY: tensors(9.0)[KEY]}, **changes)
    assert message in refused["error"]
    assert group.closed
    again = world.receive({KEY: tensors(2.0)[KEY]})
    assert "has failed" in again["error"]
    assert world.call("leave_group", name="g")["ok"]
    del world.groups["g"]
    world.join()
    assert world.receive(tensors(2.0))["missing"] == 0


def test_a_trainer_that_is_gone_leaves_the_model_untouched(world: World) -> None:
    group = world.join()
    state = world.job("receive", **world.bucket(tensors(2.0)))
    assert "the trainer is gone" in state["error"]
    assert group.closed
    assert world.call("state") | {"groups": [], "staged": 0, "broken": None} == world.call("state")
    assert world.untouched()


def test_a_bucket_without_memory_for_it_ends_its_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    group = world.join()

    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(KeptMemory, "empty", no_memory)
    assert "not enough memory" in world.receive(tensors(2.0))["error"]
    monkeypatch.undo()
    assert group.closed
    assert "has failed" in world.receive(tensors(2.0))["error"]


@pytest.mark.parametrize("call", ["stop", "discard"])
def test_a_bucket_that_is_stopped_ends_its_group(call: str, world: World) -> None:
    group = world.join()
    group.during = lambda: world.call(call)
    assert "stopped" in world.receive(tensors(2.0))["error"]
    assert len(group.sent) == len(SHAPES) - 1
    assert group.closed
    assert world.call("state")["staged"] == 0


def test_a_call_during_a_bucket_ends_its_group_once_it_is_free(world: World) -> None:
    group, closed = world.join(), []
    second: list[dict[str, Any]] = []

    def during() -> None:
        if not second:
            second.append(world.call("receive", **world.bucket(tensors(3.0))))
            closed.append(group.closed)

    group.during = during
    assert "stopped" in world.receive(tensors(2.0))["error"]
    assert second[0]["status"] == 409
    assert closed == [False]
    assert group.closed


def test_a_stop_in_the_last_moment_leaves_nothing_staged(world: World, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "new", [tensors(2.0)])
    embedding = Staged.add

    def stops(self: Any, needed: Any, name: str, *rest: Any) -> None:
        embedding(self, needed, name, *rest)
        if len(self.tensors) == len(SHAPES):
            world.call("discard")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staged, "add", stops)
        assert "stopped" in world.read(directory)["error"]
    assert world.call("state")["staged"] == 0


def test_groups_of_trainers_that_died_do_not_pile_up(world: World) -> None:
    groups = [world.join(f"g{number}") for number in range(MOST_GROUPS + 2)]
    assert [group.closed for group in groups] == [True] * 2 + [False] * MOST_GROUPS
    for number in range(3 * MOST_GROUPS):
        world.join(f"h{number}")
        world.call("receive", **world.bucket({}, group=f"h{number}", dtypes=["float4"]))
    assert len(world.receiver._groups.groups.failed) == MOST_GROUPS


def test_a_group_is_formed_and_left(world: World) -> None:
    group = world.join()
    assert "already" in world.job("join_group", name="g", address="here", port=1, rank_offset=1, world_size=2,
                                  backend="gloo", timeout_s=1.0)["error"]  # fmt: skip
    assert world.call("leave_group", name="g")["ok"]
    assert group.closed
    assert "there is no group" in world.call("leave_group", name="g")["error"]
    assert "there is no group" in world.job("receive", **world.bucket(tensors()))["error"]
    with pytest.raises(AssertionError, match="nobody answers"):
        world.join("h", address="nowhere")
    with pytest.raises(AssertionError, match="rank_offset"):
        world.join("h", rank_offset=2)


def test_a_broken_model_needs_a_full_update(world: World, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "new", [tensors(2.0)])
    world.model.raises_at = KEY
    world.read(directory)
    assert "on purpose" in world.call("apply", partial=False)["broken"]
    assert "on purpose" in world.call("state")["broken"]
    world.model.raises_at = None
    part = checkpoint(tmp_path / "part", [{KEY: tensors(2.0)[KEY]}])
    assert world.read(part, partial=True)["ok"]
    refused = world.call("apply", partial=True)
    assert "it needs all its tensors" in refused["error"]
    world.read(directory)
    assert world.call("apply", partial=False)["broken"] is None
    assert world.call("mark_broken", reason=None)["ok"]
    assert world.call("state")["broken"] is None


def test_new_weights_count_as_broken_until_they_are_in_service(world: World, tmp_path: Path) -> None:
    """Whoever applied them may have ended before it named them."""
    world.read(checkpoint(tmp_path / "new", [tensors(2.0)]))
    assert world.call("apply", partial=False)["broken"] is None
    assert world.call("state")["broken"] == NOT_IN_SERVICE
    part = checkpoint(tmp_path / "part", [{KEY: tensors(3.0)[KEY]}])
    for is_named in (False, True):
        if is_named:
            world.call("mark_broken", reason=None)
            assert world.call("state")["broken"] is None
        assert world.read(part, partial=True)["ok"]
        assert world.call("apply", partial=True)["ok"] is is_named
    assert world.call("state")["broken"] == NOT_IN_SERVICE


def test_reset_tensors_break_the_model_until_an_update(world: World, tmp_path: Path) -> None:
    world.job("snapshot")
    assert world.job("compare")["differing"] == []
    world.call("reset_tensors")
    assert "reset" in world.call("state")["broken"]
    assert world.job("compare")["differing"] == ["attn.qk.weight", "embed_tokens.weight", "scale"]
    world.read(checkpoint(tmp_path / "new", [tensors(0.0)]))
    assert world.call("apply", partial=False)["broken"] is None
    assert world.job("compare")["differing"] == []
