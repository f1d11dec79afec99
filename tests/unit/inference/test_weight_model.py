"""New tensors get into the model in one step, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from weight_model import EMBED, HEAD, KEY, QUERY, SCALE, SHAPES, TinyModel, served, tensors

from skyrl.inference.vllm_plugin.weights import model as module
from skyrl.inference.vllm_plugin.weights.jobs import WeightsError
from skyrl.inference.vllm_plugin.weights.model import Broken, ServedModel
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged, is_finite


def test_a_full_update_reaches_every_element(tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    one.apply(tensors(3.0), full=True)
    new = tensors(3.0)
    assert torch.equal(model.embed_tokens.weight[:5], new[EMBED])
    assert torch.equal(model.embed_tokens.weight[5:], torch.zeros(3, 4))
    assert torch.equal(model.attn.qk.weight, torch.cat([new[QUERY], new[KEY]]))
    assert torch.equal(model.scale, new[SCALE])


@pytest.mark.parametrize("skipped", sorted(SHAPES))
def test_a_tensor_that_the_loader_skips_breaks_the_model(skipped: str, tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    model.skipped = skipped
    with pytest.raises(Broken, match="did not reach"):
        one.apply(tensors(3.0), full=True)


def test_an_error_in_the_middle_breaks_the_model(tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    model.raises_at = KEY
    with pytest.raises(Broken, match="on purpose"):
        one.apply(tensors(3.0), full=True)
    with pytest.raises(Broken, match="on purpose"):
        one.apply({KEY: tensors(3.0)[KEY]}, full=False)
    model.raises_at = None
    one.apply(tensors(3.0), full=True)
    assert torch.equal(model.attn.qk.weight[4:], tensors(3.0)[KEY])


def test_a_partial_update_leaves_the_other_tensors(tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    one.apply({KEY: tensors(3.0)[KEY]}, full=False)
    assert torch.equal(model.attn.qk.weight, torch.cat([tensors(0.0)[QUERY], tensors(3.0)[KEY]]))


def test_the_checkpoint_of_the_model_says_what_an_update_needs(tmp_path: Path) -> None:
    needed = served(TinyModel(), tmp_path / "tied").needed()
    assert needed.shapes == SHAPES
    assert needed.optional == {HEAD}
    assert served(TinyModel(), tmp_path / "apart", tied=False).needed().optional == frozenset()
    for name, shape, dtype, message in [
        ("other", (1,), torch.float32, "names: the model has no other"),
        (KEY, (4, 2), torch.float32, "shapes: attn.k.weight has the shape"),
        (SCALE, (1,), torch.float32, "shapes: scale has the shape"),
        (KEY, (2, 4), torch.int8, "dtypes: attn.k.weight is int8"),
    ]:
        with pytest.raises(WeightsError, match=message):
            needed.check(name, shape, dtype)


def test_a_model_without_its_checkpoint_cannot_be_updated(tmp_path: Path) -> None:
    one = served(TinyModel(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="own checkpoint cannot be read") as raised:
        one.needed()
    assert raised.value.status == 501


def layer(kind: str, backend: str | None = None) -> torch.nn.Module:
    """A layer whose class has a name of vLLM's."""
    method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
    return type(kind, (torch.nn.Module,), {"quant_method": None if backend is None else method})()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (layer("RoutedExperts", "CPU"), "the weights of extra in a form of its kernel"),
        (layer("RoutedExperts"), "the weights of extra in a form of its kernel"),
        (layer("RoutedExperts", "TRITON"), None),
    ],
)
def test_layers_in_a_form_that_is_not_known_are_refused(
    extra: torch.nn.Module, message: str | None, tmp_path: Path
) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    model.extra = extra
    if message is None:
        assert one.needed().shapes == SHAPES
        return
    with pytest.raises(WeightsError, match=message) as raised:
        one.needed()
    assert raised.value.status == 501


class Absorbing(torch.nn.Module):
    """As latent attention does, this layer computes with a tensor that it makes of `attn.k`."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__()
        self.kv_b_proj = model.attn.qk
        self.made = torch.nn.Parameter(torch.zeros(2, 4))

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.made.data.copy_(2 * self.kv_b_proj.weight[4:].to(dtype))


Absorbing.__name__ = "MLAAttention"


@pytest.mark.parametrize("full", [True, False])
def test_what_a_layer_makes_of_its_weights_is_new_and_counts(full: bool, tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    model.absorbing = Absorbing(model)
    one.needed()
    before, new = one.digests(), tensors(3.0)
    one.apply(new if full else {KEY: new[KEY]}, full=full)
    assert torch.equal(model.absorbing.made, 2 * new[KEY])
    assert before["absorbing.made"] != one.digests()["absorbing.made"]


def test_packed_and_quantized_models_are_refused(tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    model.attn.qk.weight = torch.nn.Parameter(torch.empty(0))
    for call in (one.needed, one.digests):
        with pytest.raises(WeightsError, match=r"attn\.qk\.weight in a packed form") as raised:
            call()
        assert raised.value.status == 501
    with pytest.raises(WeightsError, match="quantized"):
        ServedModel(TinyModel(), str(tmp_path), None, "fp8", 1).needed()


def test_tensors_are_read_by_their_names_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(TinyModel(), tmp_path)
    given = tensors(0.0)
    for name in (EMBED, QUERY, KEY):
        assert one.read(name, 100) == given[name].tolist()
        assert one.read(name, 1) == given[name][:1].tolist()
        assert one.read(name, 0) == []
    assert one.read(HEAD, 2) == given[EMBED][:2].tolist()
    assert one.read(SCALE, 100) == [float(given[SCALE])]
    with pytest.raises(WeightsError, match="has no other"):
        one.read("other", 1)
    with pytest.raises(WeightsError, match="several ranks"):
        served(TinyModel(), tmp_path, tensor_parallel=2).read(KEY, 1)
    monkeypatch.setattr(module, "MOST_SHOWN", 8)
    assert len(one.read(EMBED, 2)) == 2
    with pytest.raises(WeightsError, match="truncate_size: 12 numbers"):
        one.read(EMBED, 3)


def test_one_bit_changes_one_digest(tmp_path: Path) -> None:
    model = TinyModel()
    one = served(model, tmp_path)
    before = one.digests()
    with torch.no_grad():
        model.scale.view(torch.int32).bitwise_xor_(1)
    after = one.digests()
    assert [name for name in before if before[name] != after[name]] == ["scale"]
    one.reset()
    assert not set(one.digests().values()) & set(before.values())


def staged(needed: Needed, name: str, tensor: torch.Tensor, into: Staged | None = None, *, has: bool = False) -> Staged:
    into = into or Staged("1", "test")
    into.add(needed, name, tensor, None, lambda _: has)
    return into


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_finite_number_is_refused(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    needed = served(TinyModel(), tmp_path).needed()
    wrong = torch.ones(2, 4)
    wrong[1, 3] = value
    with pytest.raises(WeightsError, match="not a finite number"):
        staged(needed, KEY, wrong.to(dtype))
    assert staged(needed, KEY, torch.ones(2, 4).to(dtype)).bytes == 8 * dtype.itemsize


def test_a_sum_that_overflows_is_no_infinite_value() -> None:
    assert is_finite(torch.full((4,), 3e38))
    assert is_finite(torch.full((4,), 1e300, dtype=torch.float64))
    assert is_finite(torch.empty(0))


@pytest.mark.parametrize("value", [7e4, -7e4])
def test_a_value_that_the_models_dtype_cannot_hold_is_refused(value: float, tmp_path: Path) -> None:
    large = torch.ones(2, 4)
    large[0, 0] = value
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        assert staged(served(TinyModel(dtype), tmp_path / str(number)).needed(), KEY, large).tensors
    needed = served(TinyModel(torch.float16), tmp_path / "half").needed()
    for sent in (large, large.to(torch.bfloat16), large.to(torch.float64)):
        with pytest.raises(WeightsError, match="larger than 65504"):
            staged(needed, KEY, sent)
    assert staged(needed, KEY, large / 2).tensors


def test_a_tied_head_must_have_the_values_of_the_embedding(tmp_path: Path) -> None:
    one = served(TinyModel(), tmp_path)
    needed, new = one.needed(), tensors(3.0)
    with pytest.raises(WeightsError, match="tied to another tensor"):
        staged(needed, HEAD, new[EMBED])
    kept = staged(needed, EMBED, new[EMBED])
    staged(needed, HEAD, new[EMBED].clone(), kept)
    assert list(kept.tensors) == [EMBED]
    with pytest.raises(WeightsError, match="tied to another tensor"):
        staged(needed, HEAD, new[EMBED] + 1, kept)
    assert one.has_embedding(tensors(0.0)[EMBED])
    assert not one.has_embedding(new[EMBED])
    assert not one.has_embedding(torch.zeros(9, 4))
    assert not one.has_embedding(torch.tensor(0.0))


def test_a_tensor_that_comes_twice_is_counted_once(tmp_path: Path) -> None:
    needed = served(TinyModel(), tmp_path).needed()
    kept = staged(needed, KEY, torch.ones(2, 4))
    staged(needed, KEY, torch.zeros(2, 4, dtype=torch.float64), kept)
    assert kept.bytes == 64
    assert kept.missing(needed) == [name for name in needed.shapes if name != KEY]


def test_a_checkpoint_with_a_head_of_its_own_needs_it(tmp_path: Path) -> None:
    one = served(TinyModel(), tmp_path, tied=False)
    save_file(tensors(0.0) | {HEAD: torch.zeros(5, 4)}, tmp_path / "model.safetensors")
    assert HEAD in one.needed().shapes


class Wrapper(torch.nn.Module):
    """As vLLM wraps a layer for adapters."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_loaders_see_the_model_without_wrappers_for_adapters(tmp_path: Path) -> None:
    model: Any = TinyModel()
    one = served(model, tmp_path)
    wrapper: Any
    wrapper = model.attn.qk = Wrapper(model.attn.qk)
    model.also = wrapper
    wrapper.lora_base_layer_prefix = "base_layer."
    loads, seen = model.load_weights, []

    def load_weights(given: Any) -> None:
        seen.append((model.attn.qk, model.also, wrapper.lora_base_layer_prefix))
        loads(given)

    model.load_weights = load_weights
    one.apply(tensors(3.0), full=True)
    assert seen == [(wrapper.base_layer, wrapper.base_layer, "")]
    model.raises_at = KEY
    with pytest.raises(Broken):
        one.apply(tensors(4.0), full=True)
    assert model.attn.qk is model.also is wrapper
    assert wrapper.lora_base_layer_prefix == "base_layer."
    assert "attn.qk.weight" in one.digests()
