"""What a plain decoder layer computes before and after its attention, forward and backward, as functions of tensors.

A forward returns what its backward needs beside its arguments. No autograd, and nothing is looked up in modules: so
operations of autograd (`layer_pieces`) and graphs (`layer_graphs`) run the same functions. Knows formulas. Knows
nothing of modules, or of where tensors lie.

R: rows. `joined`, `matrices`, and what `products` keeps: as in `lora.products`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from skyrl.trainer.kernels.between import Between
from skyrl.trainer.lora.products import (
    Frozen,
    Joined,
    gradients,
    input_gradient,
    matrix_gradients,
    of_low_ranks,
    products,
)


class Constants(NamedTuple):
    """epsilon: of the norm of a layer's rows; `of_heads`: of the norms of queries' and keys' heads, 0 without."""

    between: Between
    epsilon: float
    of_heads: tuple[float, float] = (0.0, 0.0)
    head_dim: int = 0


class Parameters(NamedTuple):
    """norm [hidden]: weight of the norm of a layer's rows. linears: in the order of their products. of_heads [n]: of
    queries and of keys; None without a norm."""

    norm: Tensor
    linears: Sequence[Frozen]
    of_heads: Sequence[Tensor | None] = ()


BEFORE_KEEPS, AFTER_KEEPS = 5, 4
"""Tensors that a forward returns for its backward, before those of `products`."""


def before(
    constants: Constants,
    parameters: Parameters,
    joined: Sequence[Joined],
    matrices: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """From hidden [R, hidden], and cos and sin [R, n], to queries [R, heads, n], keys and values [R, kv_heads, n].

    Keeps rstd, then of queries and keys each the states and their rstd, if there is a norm."""
    hidden, cos, sin = inputs
    between, head_dim = constants.between, constants.head_dim
    rows, rstd = between.rms_norm(hidden, parameters.norm, constants.epsilon)
    (query, key, value), kept = products(rows, parameters.linears, joined, matrices)
    heads = [each.unflatten(1, (-1, head_dim)) for each in (query, key)]
    turned: list[Tensor] = []
    norms: list[Tensor | None] = []
    for states, weight, epsilon in zip(heads, parameters.of_heads, constants.of_heads, strict=True):
        states_turned, rstd_of_heads = between.rotated(states, weight, epsilon, cos, sin)
        turned.append(states_turned)
        norms += [None, None] if weight is None else [states, rstd_of_heads]
    return [*turned, value.unflatten(1, (-1, head_dim))], [rstd, *norms, *kept]


def before_backward(
    constants: Constants,
    parameters: Parameters,
    joined: Sequence[Joined],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kept: Sequence[Any],
    *,
    of_input: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of hidden (None without `of_input`), and of the matrices. grads: of queries, keys and values, and
    of hidden on its other way, to the sum after the attention: so both gradients of it are added in one pass."""
    of_query, of_key, of_value, of_residual = grads
    hidden, cos, sin = inputs
    rstd, *norms = kept[:BEFORE_KEEPS]
    between = constants.between
    of_heads = [
        between.rotated_backward(gradient, states, weight, rstd_of_heads, cos, sin).flatten(1)
        for gradient, weight, states, rstd_of_heads in zip(
            (of_query, of_key), parameters.of_heads, norms[::2], norms[1::2], strict=True
        )
    ]
    rows = between.normed(hidden, parameters.norm, rstd, constants.epsilon)
    of_outputs = [*of_heads, of_value.flatten(1)]
    of_rows, of_matrices = gradients(
        of_outputs, rows, parameters.linears, joined, kept[BEFORE_KEEPS:], of_input=of_input
    )
    if of_rows is not None:
        of_rows = between.rms_norm_backward(of_rows, hidden, parameters.norm, rstd, of_residual)
    return of_rows, of_matrices


def after(
    constants: Constants,
    parameters: Parameters,
    joined: Sequence[Sequence[Joined]],
    matrices: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """From the attention's result [R, heads * n] and the layer's rows [R, hidden] to the next layer's. `joined`: of the
    output projection, of the MLP's first two, and of its last.

    Keeps the sum after the attention, its rstd, gate and up."""
    attended, residual = inputs
    between, (output, *both, down) = constants.between, parameters.linears
    of_o, of_both, of_down = _split(matrices, [_count(each) for each in joined])
    (projected,), kept_o = products(attended, [output], joined[0], of_o)
    total, rows, rstd = between.add_rms_norm(projected, residual, parameters.norm, constants.epsilon)
    (gate, up), kept_both = products(rows, both, joined[1], of_both)
    (result,), kept_down = products(between.swiglu(gate, up), [down], joined[2], of_down)
    return result.add_(total), [total, rstd, gate, up, *kept_o, *kept_both, *kept_down]


def after_backward(
    constants: Constants,
    parameters: Parameters,
    joined: Sequence[Sequence[Joined]],
    of_result: Tensor,
    attended: Tensor | None,
    kept: Sequence[Tensor],
    *,
    of_input: bool,
) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """The gradients of the attention's result (None without `of_input`), of the layer's rows, and of the matrices.
    attended: None without updates of the output projection. Gate and up are overwritten."""
    between, (output, *both, down) = constants.between, parameters.linears
    total, rstd, gate, up = kept[:AFTER_KEEPS]
    kept_o, kept_both, kept_down = _split(kept[AFTER_KEEPS:], [len(each) + _count(each) for each in joined])
    of_o, of_both, of_down = joined
    of_low_rank = of_low_ranks([of_result], of_down, kept_down)
    of_product = input_gradient([of_result], [down], of_down, kept_down, of_low_rank)
    *of_gate_and_up, product = between.swiglu_backward(of_product, gate, up)
    of_last = matrix_gradients([of_result], product, of_down, kept_down, of_low_rank)
    rows = between.normed(total, parameters.norm, rstd, constants.epsilon)
    of_rows, of_first = gradients(of_gate_and_up, rows, both, of_both, kept_both, of_input=True)
    assert of_rows is not None
    of_total = between.rms_norm_backward(of_rows, total, parameters.norm, rstd, of_result)
    x: Any = attended
    of_attended, of_output = gradients([of_total], x, [output], of_o, kept_o, of_input=of_input)
    return of_attended, of_total, [*of_output, *of_first, *of_last]


def _count(joined: Sequence[Joined]) -> int:
    """How many matrices these updates have."""
    return sum(2 * len(segment.layers) for segment in joined)


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    start = 0
    for size in sizes:
        yield tensors[start : start + size]
        start += size
