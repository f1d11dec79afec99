"""Where a datum's tokens came from, as the client says: spans of prompts and of sampled sequences.

They are checked, and stay in the stored body. No loss reads them, and no answer of the SDK has a place for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import RequestError

MAX_SPANS = 10_000
"""Of one field of a datum."""
MAX_ID = 200


class SpanOfSequence(msgspec.Struct):
    sequence_id: str
    length: int
    offset: int = 0


class JsonSpan(msgspec.Struct):
    """One of both."""

    prompt_tokens: SpanOfSequence | None = None
    sampled_tokens: SpanOfSequence | None = None


def span_of_proto(message: pb.ProvenanceSpan) -> JsonSpan:
    kind = message.WhichOneof("span")
    if kind is None:
        return JsonSpan()
    found = message.prompt_tokens if kind == "prompt_tokens" else message.sampled_tokens
    span = SpanOfSequence(found.sequence_id, found.length, found.offset)
    return JsonSpan(span) if kind == "prompt_tokens" else JsonSpan(None, span)


def check_provenance(
    model_input: Sequence[JsonSpan],
    loss_fn_inputs: Sequence[JsonSpan],
    tokens: int | None,
    targets: int | None,
    field: str,
) -> None:
    """Raise RequestError unless the spans cover `tokens` tokens and `targets` rows of target_tokens. None: unknown."""
    for name, spans, expected in (
        ("model_input_spans", model_input, tokens),
        ("loss_fn_input_spans", loss_fn_inputs, targets),
    ):
        if len(spans) > MAX_SPANS:
            raise RequestError(f"may have at most {MAX_SPANS} spans, got {len(spans)}", field=f"{field}.{name}")
        total = sum(_length(span, f"{field}.{name}[{index}]") for index, span in enumerate(spans))
        if expected is not None and total != expected:
            raise RequestError(
                f"the spans cover {total} positions, and must tile all {expected}; both fields have spans, or none has",
                field=f"{field}.{name}",
            )


def _length(span: JsonSpan, field: str) -> int:
    given = [each for each in (span.prompt_tokens, span.sampled_tokens) if each is not None]
    if len(given) != 1:
        raise RequestError("must have prompt_tokens or sampled_tokens", field=field)
    (of_sequence,) = given
    if not 1 <= len(of_sequence.sequence_id) <= MAX_ID:
        raise RequestError(f"must have 1 to {MAX_ID} characters", field=f"{field}.sequence_id")
    for name in ("offset", "length"):
        if not 0 <= getattr(of_sequence, name) < 2**62:
            raise RequestError("must be at least 0, and fit 62 bits", field=f"{field}.{name}")
    return of_sequence.length
