"""Pictures among packed rows: which rows hold which embeddings, and the positions of all rows.

Knows arrays and what was seen. Knows nothing of vision towers, files or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.prefixes import Layout
from skyrl.training.backends.torch_lora.vision import Seen


@dataclass(frozen=True)
class PictureRows:
    """The pictures of a slice, on the device. rows: int64 [P], ascending, the rows of the slice that hold a picture.
    embeddings: [P, hidden]. `deepstack`: of each layer that adds some, [P, hidden]. positions: int64 [3, rows of the
    slice], in time, height and width."""

    rows: Tensor
    embeddings: Tensor
    deepstack: tuple[Tensor, ...]
    positions: Tensor

    @staticmethod
    def of(data: Sequence[Datum], layout: Layout, seen: Mapping[str, Seen], device: torch.device) -> PictureRows | None:
        """None if no sequence has a picture. layout: of `data`; `seen`: every picture, by digest."""
        if not any(datum.pictures for datum in data):
            return None
        digests = list(dict.fromkeys(picture.digest for datum in data for picture in datum.pictures))
        looked = [seen[digest] for digest in digests]
        starts = np.cumsum([0, *(each.tokens for each in looked)])
        first = dict(zip(digests, starts[:-1].tolist(), strict=True))
        places = layout.of_rows([_places(datum, first) for datum in data])
        rows = np.flatnonzero(places >= 0)
        chosen = torch.from_numpy(places[rows])

        def of_rows(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).index_select(0, chosen).to(device)

        return PictureRows(
            torch.from_numpy(rows).to(device),
            of_rows([each.embeddings for each in looked]),
            tuple(of_rows(of_layer) for of_layer in zip(*(each.deepstack for each in looked), strict=True)),
            torch.from_numpy(layout.of_rows([positions_of(datum, seen).T for datum in data]).T.copy()).to(device),
        )


def _places(datum: Datum, first: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """For each token its place among the embeddings of all pictures, -1 for text. `first`: the places of the first
    token of each picture, by digest."""
    places = np.full(len(datum.tokens), -1, np.int64)
    for picture in datum.pictures:
        places[picture.start : picture.stop] = first[picture.digest] + np.arange(picture.tokens)
    return places


def positions_of(datum: Datum, seen: Mapping[str, Seen]) -> npt.NDArray[np.int64]:
    """The positions of a sequence's tokens in time, height and width, int64 [3, N]: the multimodal rotary positions of
    Qwen2-VL (arXiv 2409.12191, section 2.1).

    Text counts on in all three. A picture's tokens have one time, and heights and widths counted from it. The text
    behind counts on from the largest of them."""
    positions = np.empty((3, len(datum.tokens)), np.int64)
    done, following = 0, 0
    """Tokens that have positions, and the position of the next one."""
    for picture in datum.pictures:
        text = picture.start - done
        positions[:, done : picture.start] = following + np.arange(text)
        following += text
        height, width = seen[picture.digest].grid
        grid = np.indices((1, height, width)).reshape(3, -1)
        positions[:, picture.start : picture.stop] = following + grid
        following += max(height, width)
        done = picture.stop
    positions[:, done:] = following + np.arange(len(datum.tokens) - done)
    return positions
