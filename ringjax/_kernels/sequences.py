"""Packed sequences: where the rows of one segment, or of one document, lie in a chunk, for kernels that take offsets.

B batch, with the chunks in it; R rows of a chunk; M sequences of a batch that a kernel takes at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_MOST = jnp.iinfo(jnp.int32).max


class Sequences(NamedTuple):
    """Consecutive rows: the first one and the number of rows of each sequence, zero for an empty one."""

    start: Int[Array, "B M"]
    length: Int[Array, "B M"]

    def contains(self, rows: int) -> Bool[Array, "B R"]:
        """Returns which of so many rows are in any of the sequences."""
        return self._contains(rows).any(axis=1)

    def number(self, rows: int) -> Int[Array, "B R"]:
        """Returns the sequence that each of so many rows is in, zero where it is in none."""
        return self._contains(rows).argmax(axis=1).astype(jnp.int32)

    def _contains(self, rows: int) -> Bool[Array, "B M R"]:
        row = jnp.arange(rows, dtype=jnp.int32)
        return (row >= self.start[..., None]) & (row < (self.start + self.length)[..., None])


class Labels(NamedTuple):
    """The segment and the document of each row, both -1 for padding rows and rows without a document.

    Rows attend to each other if both labels are equal. Neither decreases along the tokens. So rows with the same labels
    are consecutive, and two chunks have at most one pair of labels in common: that of the last rows of one chunk and of
    the first rows of the other.
    """

    segment: Int[Array, "B R"]
    document: Int[Array, "B R"]

    def cut(self, rows: slice) -> "Labels":
        """Returns the labels of some of the rows."""
        return Labels(*(array[:, rows] for array in self))

    @property
    def is_row(self) -> Bool[Array, "B R"]:
        """Whether a row has labels."""
        return self.document >= 0

    @property
    def is_start(self) -> Bool[Array, "B R"]:
        """Whether a row is the first of those with its labels."""
        changes = (array[:, 1:] != array[:, :-1] for array in self)
        is_new = jnp.pad(jnp.logical_or(*changes), ((0, 0), (1, 0)), constant_values=True)
        return is_new & self.is_row

    @property
    def is_sorted(self) -> Bool[Array, "B"]:
        """Whether documents do not decrease, and rows with the same labels follow each other."""
        before = Labels(
            *(jnp.pad(jax.lax.cummax(array, axis=1), ((0, 0), (1, 0)), constant_values=-1) for array in self)
        )
        segment, document = (array[:, :-1] for array in before)
        is_new = (self.segment > segment) | (self.document > document)
        return ((~self.is_row | (self.document >= document)) & (~self.is_start | is_new)).all(axis=1)

    @property
    def least(self) -> "Labels":
        """The least segment and the least document of all rows, [B, 1]."""
        return Labels(*(jnp.where(self.is_row, array, _MOST).min(axis=1, keepdims=True) for array in self))


class SequenceNumbers(NamedTuple):
    """Twice the number of each row's sequence, plus one if the row is in none: it does not decrease along rows."""

    number: Int[Array, "B R"]

    @property
    def most(self) -> Int[Array, ""]:
        """The largest number of sequences in a batch."""
        return (self.number.max() + 2) // 2

    def sequences(self, first: Int[Array, ""], size: int) -> Sequences:
        """Returns `size` sequences, from number `first` on."""
        wanted = 2 * (first + jnp.arange(size, dtype=jnp.int32))
        find = lambda side: jax.vmap(lambda row: jnp.searchsorted(row, wanted, side=side, method="compare_all"))
        start, stop = (find(side)(self.number).astype(jnp.int32) for side in ("left", "right"))
        return Sequences(jnp.minimum(start, self.number.shape[1] - 1), stop - start)


def find_sequences(labels: Labels) -> SequenceNumbers:
    """Returns the sequences of rows with the same labels."""
    number = jnp.cumsum(labels.is_start, axis=1, dtype=jnp.int32) - 1
    return SequenceNumbers(2 * number + ~labels.is_row)


def find_shared(queries: Labels, keys: Labels) -> tuple[Sequences, Sequences]:
    """Returns the rows of two different chunks that attend to each other: a sequence of each, maybe empty."""
    common = Labels(*map(jnp.maximum, queries.least, keys.least))
    rows = [(side.segment == common.segment) & (side.document == common.document) for side in (queries, keys)]
    is_shared = rows[0].any(axis=1, keepdims=True) & rows[1].any(axis=1, keepdims=True)
    return _sequence_of(rows[0], is_shared), _sequence_of(rows[1], is_shared)


def _sequence_of(rows: Bool[Array, "B R"], is_shared: Bool[Array, "B 1"]) -> Sequences:
    start, length = rows.argmax(axis=1, keepdims=True), (rows & is_shared).sum(axis=1, keepdims=True)
    return Sequences(start.astype(jnp.int32), length.astype(jnp.int32))


def are_apart(queries: Labels, keys: Labels) -> Bool[Array, "B"]:
    """Returns whether the ranges of documents of two chunks overlap in at most one document."""
    (least, most), (least_key, most_key) = (
        (labels.least.document[:, 0], labels.document.max(axis=1)) for labels in (queries, keys)
    )
    return (most <= least_key) | (most_key <= least)
