"""The sub-blocks of a step: ranges of rows of two chunks, with a mask that a fused kernel can express.

B batch, with the chunks in it; R rows of a chunk.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._kernels.attention_step import AttentionStep, PaddedRows
from ringjax._kernels.sequences import Labels, Sequences, are_apart, find_sequences, find_shared
from ringjax._kernels.softmax import Keys
from ringjax._pattern.branch import Window
from ringjax._schedule.schedule import BranchSchedule


class Pairs(NamedTuple):
    """Which rows of queries attend to which rows of keys: to all, or, if `is_causal`, to those up to the diagonal.

    With a `window`, only to the nearest ones, that many. With `sequences`, only to rows in the sequence of the same
    number on the other side, and the diagonal begins at the first rows of these two sequences. Rows outside of all
    sequences attend to nothing.
    """

    is_causal: bool = False
    window: int | None = None
    sequences: tuple[Sequences, Sequences] | None = None


class ChunkView(NamedTuple):
    """One side of a step: the order of its shard, the place of its rows in their chunks, and their labels.

    The order is smaller if the first row that a shard computes is earlier. Labels are None if attention does not depend
    on segments or documents.
    """

    order: Any
    place: range
    labels: Labels | None

    def of_batch(self, size: int) -> "ChunkView":
        """Returns the view of `size` batches times chunks; labels that are the same for all batches are repeated."""
        spread = lambda array: jnp.tile(array, (size // array.shape[0], 1))
        return self._replace(labels=jax.tree.map(spread, self.labels))


def see(padded: PaddedRows) -> ChunkView:
    """Returns the view of the padded rows of a shard."""
    side, schedule = padded.side, padded.schedule
    holder, row = schedule.origin(padded.shards[0], 0, side)
    begin, size = side.begin // side.step, side.num_padded_rows // side.num_chunks
    labels = _labels(padded) if has_sequences(schedule, padded.documents is not None) else None
    return ChunkView(holder * schedule.queries.num_padded_rows + row, range(begin, begin + size), labels)


def window_of(schedule: BranchSchedule) -> int | None:
    """Returns the size of a branch that is a window, None for others."""
    return schedule.branch.size if isinstance(schedule.branch, Window) else None


def has_sequences(schedule: BranchSchedule, has_documents: bool) -> bool:
    """Returns whether rows of a step attend only within sequences."""
    return schedule.branch.is_by_group and (has_documents or not schedule.is_dense)


def _labels(padded: PaddedRows) -> Labels:
    """Returns the segment and the document of each row."""
    side, (token, is_row) = padded.side, padded.tokens()
    of_chunks = lambda array: array.reshape(side.num_chunks, -1)  # [C, R]
    segment = of_chunks(side.branch.group(token).astype(jnp.int32))
    segment = segment if is_row is None else jnp.where(of_chunks(is_row), segment, -1)
    if padded.documents is None:
        return Labels(segment, segment)
    document = padded.documents[..., 0].reshape(-1, *segment.shape)  # [B, C, R]
    is_one = (document >= 0) & (segment >= 0)
    flat = lambda array: jnp.where(is_one, array, -1).reshape(-1, segment.shape[1])
    return Labels(flat(segment), flat(document))


class SubBlock(NamedTuple):
    """A range of queries and a range of keys, and which of these rows attend to each other.

    All do, or, if `is_causal`, those up to the diagonal, in a `window` if there is one. If rows have `labels`, only
    rows with the same labels do. If `is_reversed`, those up to the diagonal do after the order of rows is reversed.
    `is_same` says that both sides are the same rows.
    """

    queries: slice
    keys: slice
    labels: tuple[Labels, Labels] | None = None
    is_same: bool = False
    is_causal: bool = False
    window: int | None = None
    is_reversed: bool = False

    @property
    def is_promised(self) -> Any:
        """Whether documents are in order, as promised: otherwise the labels do not tell which rows attend."""
        if self.labels is None:
            return jnp.ones(1, bool)
        return self.labels[0].is_sorted if self.is_same else are_apart(*self.labels)

    def reverse(self, array: Array) -> Array:
        """Reverses the order of rows if the sub-block `is_reversed`."""
        return array[:, ::-1] if self.is_reversed else array

    def over(self, compute: Callable[[Pairs], Any], join: Callable[[Any, Any], Any], most: int) -> Any:
        """Computes all pairs, at most `most` sequences at a time, as a kernel takes them, and joins the results."""
        pairs = Pairs(self.is_causal or self.is_reversed, self.window)
        if self.labels is None:
            return compute(pairs)
        if not self.is_same:
            return compute(pairs._replace(sequences=find_shared(*self.labels)))
        numbers, size = find_sequences(self.labels[0]), min(most, self.labels[0].document.shape[1])

        def of_some(number: Any) -> Any:
            sequence = numbers.sequences(number * size, size)
            return compute(pairs._replace(sequences=(sequence, sequence)))

        # Usually these are all sequences.
        joined = of_some(jnp.int32(0))
        return jax.lax.fori_loop(1, -(-numbers.most // size), lambda i, total: join(total, of_some(i)), joined)


def switch(step: AttentionStep, compute: Callable[..., Any], queries: Any, keys: Keys) -> Any:
    """Computes the sub-blocks of a step; if its case is known at trace time, only that case is compiled."""
    schedule, batch = step.schedule, keys.key.shape[0]
    views = step.queries.of_batch(batch), step.keys.of_batch(batch)
    # By the order of the shards: the same shard, earlier keys, later keys.
    by_order = list(_own_blocks(schedule, *views)), *_other_blocks(schedule, *views)
    if not schedule.is_causal and views[0].labels is None:  # then all attend to all, wherever they are
        by_order = (by_order[0],) * 3
    possible = by_order if not isinstance(step.hops, int) else by_order[1:] if step.hops else by_order[:1]
    cases = [order for number, order in enumerate(possible) if not any(order is other for other in possible[:number])]
    case = 0
    if len(cases) > 1:
        order = jnp.where(step.keys.order < step.queries.order, 1, 2 * (step.keys.order > step.queries.order))
        case = jnp.array([next((i for i, one in enumerate(cases) if one is order), 0) for order in by_order])[order]
    if step.is_new is not True:
        case, cases = jnp.where(step.is_new, case, len(cases)), [*cases, []]
    if len(cases) == 1:
        return compute(cases[0], queries, keys)
    return jax.lax.switch(case, [functools.partial(compute, blocks) for blocks in cases], queries, keys)


def _own_blocks(schedule: BranchSchedule, queries: ChunkView, keys: ChunkView) -> Iterator[SubBlock]:
    """Yields the sub-blocks of one shard: the rows that are on both sides, and those before and after them."""
    start, stop = max(queries.place.start, keys.place.start), min(queries.place.stop, keys.place.stop)
    window = window_of(schedule)
    block = functools.partial(_sub_block, queries, keys)
    yield block((start, stop), (start, stop), is_same=True, is_causal=schedule.is_causal, window=window)
    (first, last), (first_key, last_key) = ((view.place.start, view.place.stop) for view in (queries, keys))
    others = [((stop, last), (first_key, stop)), ((start, stop), (first_key, start))]  # with earlier keys
    if not schedule.is_causal:
        others += [((first, start), (start, last_key)), ((start, stop), (stop, last_key))]
    for some, some_keys in others:
        if some[0] < some[1] and some_keys[0] < some_keys[1]:
            yield from _across(schedule, block, some, some_keys)


# Two shards of a zigzag ring, each with an early and a late half of rows: the shard with the earlier early half has the
# later late half, because the numbers of a shard's two halves have the same sum on all shards. So either all queries
# come after the early keys and before the late ones, or the late queries come after all keys, and the early queries
# before all keys: in both cases half of the pairs attend, without a mask.


def _other_blocks(
    schedule: BranchSchedule, queries: ChunkView, keys: ChunkView
) -> tuple[list[SubBlock], list[SubBlock]]:
    """Returns the sub-blocks of two different shards, for earlier keys and for later keys."""
    whole = [(view.place.start, view.place.stop) for view in (queries, keys)]
    block = functools.partial(_sub_block, queries, keys)
    if schedule.is_zigzag:
        half = len(queries.place) // 2
        return [block(whole[0], (0, half))], [block((half, 2 * half), whole[1])]
    earlier = list(_across(schedule, block, *whole))
    return earlier, ([] if schedule.is_causal else earlier)


def _across(
    schedule: BranchSchedule, block: Callable[..., SubBlock], queries: tuple[int, int], keys: tuple[int, int]
) -> Iterator[SubBlock]:
    """Yields the sub-block of queries and keys of different tokens: all, or those in a window of earlier keys."""
    window = window_of(schedule)
    if window is None:
        yield block(queries, keys)
    elif window > 1:
        # Query i sees the last w - 1 - i keys: those up to the diagonal if rows are counted from the end.
        yield block((queries[0], queries[0] + window - 1), (keys[1] - window + 1, keys[1]), is_reversed=True)


def _sub_block(
    queries: ChunkView, keys: ChunkView, query_rows: tuple[int, int], key_rows: tuple[int, int], **more: Any
) -> SubBlock:
    cut = lambda view, rows: slice(rows[0] - view.place.start, rows[1] - view.place.start)
    of_queries, of_keys = cut(queries, query_rows), cut(keys, key_rows)
    if queries.labels is None or keys.labels is None:
        return SubBlock(of_queries, of_keys, **more)
    return SubBlock(of_queries, of_keys, (queries.labels.cut(of_queries), keys.labels.cut(of_keys)), **more)
