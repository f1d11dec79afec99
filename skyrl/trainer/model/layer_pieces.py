"""Plain decoder layers as two pieces, before and after the attention, each one operation of autograd.

A plain layer is that of Llama, Qwen2, Qwen3, Mistral and others: RMS norm, projections, rotary embeddings of halves,
attention, sum; RMS norm, gated MLP with silu, sum. With PEFT, transformers' layer starts some 110 operations forward
and 160 backward (`benchmarks.operations`). A piece computes its backward itself, by the functions of `kernels.between`:
fewer passes over its rows, and its numbers depend on tensors and the model's configuration alone. What is cheap to
compute again, such as normed rows and the MLP's product, is not kept.

Whether a layer is plain is tried, not looked up: a small layer of the same class and configuration with random weights
must give what the pieces give. All others stay as transformers has them. Knows transformers' names of modules. Knows
nothing of how attention packs rows, of which rows belong to whom, or of the sum of gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl.trainer.kernels.between import IN_TORCH, Between
from skyrl.trainer.lora.linear import ActiveSegments, MultiLoraLinear
from skyrl.trainer.lora.products import Frozen, Joined
from skyrl.trainer.model import layer_functions
from skyrl.trainer.model.layer_functions import Constants, Parameters
from skyrl.trainer.model.layer_graphs import LayerGraphs

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def install(layers: Iterable[nn.Module], between: Between) -> int:
    """Let the plain ones of some decoder layers compute with pieces. Their linear layers must be `MultiLoraLinear`s.
    Returns how many do."""
    found = 0
    for layer in layers:
        if (options := _options_of_plain(layer)) is not None:
            layer.forward = PlainLayer(layer, between, options.get("sliding_window")).forward
            found += 1
    return found


class PlainLayer:
    """What the pieces need of a decoder layer. Reads its parameters at each call: FSDP2 gathers them before. window: of
    its attention. `graphs`: of the model's layers, if there are any; `index`: which of these it is."""

    graphs: LayerGraphs | None = None
    index = 0

    def __init__(self, layer: Any, between: Between, window: int | None) -> None:
        self._window = window
        self._as_it_was = layer.forward
        self.attention, mlp = layer.self_attn, layer.mlp
        self.q, self.k, self.v, self.o = (getattr(self.attention, name) for name in _ATTENTION)
        self.gate, self.up, self.down = (getattr(mlp, name) for name in _MLP)
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.of_heads = getattr(self.attention, "q_norm", None), getattr(self.attention, "k_norm", None)
        self.head_dim = int(self.attention.head_dim)
        first, second = map(_epsilon, self.norms)
        of_query, of_key = (0.0 if each is None else _epsilon(each) for each in self.of_heads)
        self.constants = Constants(between, first, (of_query, of_key), self.head_dim), Constants(between, second)

    @property
    def linears(self) -> list[MultiLoraLinear]:
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def before(self) -> Parameters:
        """Of the piece before the attention."""
        of_heads = [None if each is None else each.weight for each in self.of_heads]
        return Parameters(self.norms[0].weight, _frozen(self.q, self.k, self.v), of_heads)

    def after(self) -> Parameters:
        """Of the piece after the attention."""
        return Parameters(self.norms[1].weight, _frozen(self.o, self.gate, self.up, self.down))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> Tensor:
        """hidden_states [1, R, hidden], as the layer's own forward."""
        cos, sin = position_embeddings
        if cos.shape[-1] != self.head_dim:  # a part of each head turns
            own = {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return self._as_it_was(hidden_states, **own, **options)
        graphed = None if self.graphs is None else self.graphs.of_micro_batch(cos, sin)
        joined, matrices = Joined.of([linear.updates() for linear in (self.q, self.k, self.v)])
        hidden = hidden_states.squeeze(0)
        if graphed is None:
            query, key, value, residual = _Before.apply(hidden, cos[0], sin[0], self, joined, *matrices)
        else:
            query, key, value, residual = graphed.before(
                self.index, self.constants[0], self.before(), hidden, joined, matrices
            )
        states = (each.transpose(0, 1)[None] for each in (query, key, value))
        computed = AttentionInterface()[self.attention.config._attn_implementation]
        own = {"scaling": self.attention.scaling, "sliding_window": self._window, "dropout": 0.0}
        attended, _ = computed(self.attention, *states, attention_mask, **own, **options)
        of_each = [Joined.of([linear.updates()]) for linear in (self.o, self.down)]
        both = Joined.of([linear.updates() for linear in (self.gate, self.up)])
        parts = of_each[0], both, of_each[1]
        matrices = [matrix for _, of_part in parts for matrix in of_part]
        joined = tuple(part for part, _ in parts)
        rows = attended.squeeze(0).flatten(1)
        if graphed is None:
            return _After.apply(rows, residual, self, joined, *matrices).unsqueeze(0)
        given = self.index, self.constants[1], self.after(), (rows, residual)
        return graphed.after(*given, joined, matrices).unsqueeze(0)


def plain_layers(layers: Iterable[nn.Module]) -> list[PlainLayer]:
    """Those of some decoder layers that compute with pieces."""
    owners = [getattr(layer.forward, "__self__", None) for layer in layers]
    return [each for each in owners if isinstance(each, PlainLayer)]


def _frozen(*linears: MultiLoraLinear) -> list[Frozen]:
    return [Frozen(linear.base.weight, linear.base.bias) for linear in linears]


def _epsilon(norm: Any) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class _Before(torch.autograd.Function):
    """From a layer's rows [R, hidden] to queries [R, heads, n], keys and values [R, kv_heads, n]. Also the rows
    themselves, for the sum after the attention."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: PlainLayer,
        joined: Sequence[Joined],
        *matrices: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parameters = layer.before()
        (query, key, value), kept = layer_functions.before(
            layer.constants[0], parameters, joined, matrices, (hidden, cos, sin)
        )
        weights = [each.weight for each in parameters.linears]
        ctx.save_for_backward(hidden, cos, sin, parameters.norm, *parameters.of_heads, *weights, *kept)
        ctx.constants, ctx.joined = layer.constants[0], joined
        return query, key, value, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, cos, sin, norm, of_query, of_key, *rest = ctx.saved_tensors
        parameters = Parameters(norm, [Frozen(each, None) for each in rest[:3]], (of_query, of_key))
        inputs, of_input = (hidden, cos, sin), ctx.needs_input_grad[0]
        of_rows, of_matrices = layer_functions.before_backward(
            ctx.constants, parameters, ctx.joined, grads, inputs, rest[3:], of_input=of_input
        )
        return of_rows, None, None, None, None, *of_matrices


class _After(torch.autograd.Function):
    """From the attention's result [R, heads * n] and the layer's rows [R, hidden] to the next layer's."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,
        residual: Tensor,
        layer: PlainLayer,
        joined: Sequence[Sequence[Joined]],
        *matrices: Tensor,
    ) -> Tensor:
        parameters = layer.after()
        result, kept = layer_functions.after(layer.constants[1], parameters, joined, matrices, (attended, residual))
        weights = [each.weight for each in parameters.linears]
        ctx.save_for_backward(attended if joined[0] else None, parameters.norm, *weights, *kept)
        ctx.constants, ctx.joined = layer.constants[1], joined
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        attended, norm, *rest = ctx.saved_tensors
        parameters = Parameters(norm, [Frozen(each, None) for each in rest[:4]])
        of_attended, of_total, of_matrices = layer_functions.after_backward(
            ctx.constants, parameters, ctx.joined, grads[0], attended, rest[4:], of_input=ctx.needs_input_grad[0]
        )
        of_residual = of_total if ctx.needs_input_grad[1] else None
        return of_attended, of_residual, None, None, *of_matrices


_TRIED = "skyrl_tried"
_HEADS, _KV_HEADS, _SIZE, _ROWS = 4, 2, 8, 5
_calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []


def _tried(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Some function of all three, which notes what it was called with."""
    _calls.append(((query, key, value), options))
    groups = query.shape[1] // key.shape[1]
    return (query + (key * value).repeat_interleave(groups, dim=1)).transpose(1, 2), None


AttentionInterface.register(_TRIED, _tried)


@contextmanager
def _small(layer: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A small layer of the same class and configuration with random weights, float32 on the CPU, and a copy of it whose
    linear layers are wrapped."""
    kind: Any = next(each for each in type(layer).__mro__ if each.__module__.startswith("transformers."))
    config = copy.deepcopy(layer.self_attn.config)
    config.hidden_size, config.intermediate_size, config.head_dim = _HEADS * _SIZE, 3 * _SIZE, _SIZE
    config.num_attention_heads, config.num_key_value_heads = _HEADS, _KV_HEADS
    config._attn_implementation = _TRIED
    with torch.device("cpu"):
        small = kind(config, layer.self_attn.layer_idx).float().eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in small.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.3)
        wrapped = copy.deepcopy(small)
        for part, names in ((wrapped.self_attn, _ATTENTION), (wrapped.mlp, _MLP)):
            for name in names:
                setattr(part, name, MultiLoraLinear(name, getattr(part, name), ActiveSegments()))
        yield small, wrapped


@torch.no_grad()
def _options_of_plain(layer: Any) -> dict[str, Any] | None:
    """What a layer of this class and configuration gives to its attention beside states, tried with a small one. None
    unless that computes what the pieces do."""
    linears = [getattr(getattr(layer, "self_attn", None), name, None) for name in _ATTENTION]
    linears += [getattr(getattr(layer, "mlp", None), name, None) for name in _MLP]
    if not all(isinstance(each, MultiLoraLinear) for each in linears):
        return None
    try:
        with _small(layer) as (small, wrapped):
            hidden = torch.linspace(-1, 1, _ROWS * _HEADS * _SIZE).sin().view(1, _ROWS, -1)
            angles = torch.linspace(0, 2, _ROWS * _SIZE // 2).view(1, _ROWS, -1).repeat(1, 1, 2)
            given = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
            expected = small(hidden, **given)
            (states, options) = _calls[0]
            found = PlainLayer(wrapped, IN_TORCH, options.get("sliding_window")).forward(hidden, **given)
            own_states, own = _calls[1]
            pairs = zip((*own_states, found), (*states, expected), strict=True)
            same = all(_close(one, other) for one, other in pairs)
    except Exception:  # whatever it is: the layer's form is another one
        return None
    finally:
        _calls.clear()
    asked = {name: value for name, value in options.items() if value is not None and value is not False}
    known = all(not isinstance(value, Tensor) and own.get(name) == value for name, value in asked.items())
    return options if same and known else None


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)
