"""A custom loss: a graph of torch operations that a client has traced, as plain data, and the operations it may have.

Only names: the trainer has the functions (`skyrl.trainer.custom_loss`). A name that is not listed here is refused, so
that nothing in a graph is ever looked up in a module or an object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_NODES = 512
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_GRAPH_BYTES = 128 * 2**10
"""Size of a custom loss in the database, as JSON."""
MAX_LOSSES = 64
MAX_LOSSES_OF_TENANT = 1024
"""Custom losses of one session."""


@dataclass(frozen=True)
class Ref:
    """An argument that is the value of an earlier node."""

    node: str


@dataclass(frozen=True)
class Dtype:
    """An argument that is a torch dtype, such as `float32`."""

    name: str


@dataclass(frozen=True)
class Device:
    """An argument that is a device: the one where the loss is computed."""


@dataclass(frozen=True)
class LossInput:
    """`name`: `logprobs` or a key of loss_fn_inputs. `rank`: the number of its dimensions, 0 to 2."""

    name: str
    rank: int


@dataclass(frozen=True)
class LossNode:
    """One operation. `op`: placeholder, call_function, call_method or output. `target`: a listed name. Arguments are
    numbers, None, words, Ref, Dtype, Device, `...`, and lists, tuples, dicts and slices of these."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class CustomLoss:
    """A checked graph. Its placeholders are `inputs` in order; the last node returns (loss, metrics)."""

    name: str
    inputs: tuple[LossInput, ...]
    nodes: tuple[LossNode, ...]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DTYPES = _words("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool")

WORDS = _words("none mean sum floor trunc linear lower higher midpoint nearest constant tanh fro cpu")
"""The strings that an argument may be, beside the names of attributes."""

NEVER_SET = _words("out generator requires_grad pin_memory names size_average reduce inplace sparse_grad layout")
"""Keyword arguments that may only be null or false."""

OPERATORS = _words(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
)
MATH = _words("acos asin atan atan2 ceil cos cosh exp expm1 fabs floor log log10 log1p log2 pow sin sinh sqrt tan tanh")
ATTRIBUTES = _words("T device dtype indices mT ndim shape values")

TENSOR = _words(
    """abs absolute acos acosh add addcdiv addcmul all amax amin any argmax argmin argsort asin asinh atan atan2 atanh
    bmm ceil clamp clamp_max clamp_min clip clone copysign cos cosh count_nonzero cummax cummin cumprod cumsum detach
    diag diagonal digamma div divide dot eq erf erfc erfinv exp exp2 expm1 flatten flip float_power floor floor_divide
    fmax fmin fmod frac gather ge greater greater_equal gt heaviside hypot index_add index_select inner isfinite isinf
    isnan kthvalue le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp
    logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_select matmul max maximum mean
    median min minimum mm movedim mul multiply mv nan_to_num nanmean nanmedian nansum narrow ne neg negative norm
    not_equal outer permute positive pow prod quantile ravel reciprocal relu remainder reshape roll round rsqrt scatter
    scatter_add select sgn sigmoid sign signbit sin sinc sinh softmax sort sqrt square squeeze std sub subtract sum
    swapaxes t take take_along_dim tan tanh tile topk transpose tril triu true_divide trunc unflatten unsqueeze var
    where xlogy"""
)
"""Functions of torch that are methods of tensors, too."""

METHODS = TENSOR | _words(
    """bool contiguous cpu dim double expand expand_as float int long new_full new_ones new_zeros numel repeat
    reshape_as size to type_as unfold view view_as"""
)
CREATIONS = _words("arange eye full linspace ones zeros")
FUNCTIONS = TENSOR | CREATIONS | _words("cat concat cosine_similarity full_like ones_like stack zeros_like")
FUNCTIONAL = _words(
    """binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity elu gelu hardsigmoid hardswish
    hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid margin_ranking_loss mish
    mse_loss normalize one_hot pad poisson_nll_loss relu relu6 selu sigmoid silu smooth_l1_loss soft_margin_loss
    softmax softmin softplus softsign tanh tanhshrink threshold"""
)
SPECIAL = _words(
    "entr erf erfc erfinv expit expm1 gammaln log1p log_ndtr log_softmax logit logsumexp ndtr softmax xlog1py xlogy"
)

SERVED = frozenset(
    [
        "getattr",
        *(f"operator.{name}" for name in OPERATORS),
        *(f"math.{name}" for name in MATH),
        *(f"torch.{name}" for name in FUNCTIONS),
        *(f"torch.nn.functional.{name}" for name in FUNCTIONAL),
        *(f"torch.special.{name}" for name in SPECIAL),
    ]
)
"""The targets of call_function."""

_HOMES = (
    ("_operator.", "operator."),
    ("builtins.getattr", "getattr"),
    ("torch.functional.", "torch."),
    ("torch._C._special.special_", "torch.special."),
    ("torch._C._nn.", "torch.nn.functional."),
)
_NAMES = {"torch.nn.functional.log_sigmoid": "torch.nn.functional.logsigmoid"} | {
    "torch.nn.functional._threshold": "torch.nn.functional.threshold"
}


def public_name(target: str) -> str:
    """The name of a function in torch's documentation. torch.fx writes some functions by the module where torch keeps
    them."""
    for kept, public in _HOMES:
        if target.startswith(kept):
            target = public + target.removeprefix(kept)
    return _NAMES.get(target, target)
