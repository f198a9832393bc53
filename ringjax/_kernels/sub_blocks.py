"""The sub-blocks of a step: rows of two chunks whose mask a fused kernel can express.

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
    """Which rows of queries attend to which rows of keys: all, or those up to the diagonal where it `is_causal`.

    With a `window`, only that many, the nearest. With `sequences`, only rows that are in the sequence of the same
    number on both sides, and the diagonal begins at the first rows of these two sequences. Rows outside of all
    sequences attend to none.
    """

    is_causal: bool = False
    window: int | None = None
    sequences: tuple[Sequences, Sequences] | None = None


class ChunkView(NamedTuple):
    """What is seen of a side: the order of the shard, the place of its rows among its chunks' rows, and their labels.

    The order is smaller where the first rows that a shard computes are earlier. Labels are None where all rows that
    meet attend.
    """

    order: Any
    place: range
    labels: Labels | None

    def of_batch(self, size: int) -> "ChunkView":
        """Returns the view of so many batches and chunks: labels may be the same for all batches."""
        spread = lambda array: jnp.tile(array, (size // array.shape[0], 1))
        return self._replace(labels=jax.tree.map(spread, self.labels))


def see(padded: PaddedRows) -> ChunkView:
    """Returns what is seen of the padded rows of a shard."""
    side, schedule = padded.side, padded.schedule
    holder, row = schedule.origin(padded.shards[0], 0)
    begin, size = side.begin // side.step, side.num_padded_rows // side.num_chunks
    labels = _labels(padded) if has_sequences(schedule, padded.documents is not None) else None
    return ChunkView(holder * schedule.queries.num_padded_rows + row, range(begin, begin + size), labels)


def window_of(schedule: BranchSchedule) -> int | None:
    """Returns the size of a branch that is a window, None for others."""
    return schedule.branch.size if isinstance(schedule.branch, Window) else None


def has_sequences(schedule: BranchSchedule, has_documents: bool) -> bool:
    """Whether not all rows that meet attend to each other, but those of sequences."""
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
    """Some rows of queries and of keys that meet, and which of them attend to each other.

    All do, or those up to the diagonal where it `is_causal`, in a `window` if there is one. Where rows have `labels`,
    only rows with the same labels do. Where it `is_reversed`, those up to the diagonal do, of rows in reversed order.
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
        """Whether labels tell which rows attend to each other; else these have not been as they should."""
        if self.labels is None:
            return jnp.ones(1, bool)
        return self.labels[0].is_sorted if self.is_same else are_apart(*self.labels)

    def reverse(self, array: Array) -> Array:
        """Reverses the order of rows, where it is."""
        return array[:, ::-1] if self.is_reversed else array

    def over(self, compute: Callable[[Pairs], Any], join: Callable[[Any, Any], Any], most: int) -> Any:
        """Returns what is computed of all pairs, joined where there are more sequences than a kernel takes at once."""
        pairs = Pairs(self.is_causal or self.is_reversed, self.window)
        if self.labels is None:
            return compute(pairs)
        if not self.is_same:
            return compute(pairs._replace(sequences=find_shared(*self.labels)))
        numbers, size = find_sequences(self.labels[0]), min(most, self.labels[0].document.shape[1])

        def of_some(number: Any) -> Any:
            sequence = numbers.sequences(number * size, size)
            return compute(pairs._replace(sequences=(sequence, sequence)))

        # Most often these are all.
        joined = of_some(jnp.int32(0))
        return jax.lax.fori_loop(1, -(-numbers.most // size), lambda i, total: join(total, of_some(i)), joined)


def switch(step: AttentionStep, compute: Callable[..., Any], queries: Any, keys: Keys) -> Any:
    """Computes the sub-blocks of a step: where its case is known beforehand, with that case alone."""
    schedule, batch = step.schedule, keys.key.shape[0]
    views = step.queries.of_batch(batch), step.keys.of_batch(batch)
    # By the order of the shards: the same, keys that are earlier, and later ones.
    ways = list(_own_blocks(schedule, *views)), *_other_blocks(schedule, *views)
    if not schedule.is_causal and views[0].labels is None:  # then all attend to all, wherever they are
        ways = (ways[0],) * 3
    possible = ways if not isinstance(step.hops, int) else ways[1:] if step.hops else ways[:1]
    cases = [way for number, way in enumerate(possible) if not any(way is other for other in possible[:number])]
    case = 0
    if len(cases) > 1:
        way = jnp.where(step.keys.order < step.queries.order, 1, 2 * (step.keys.order > step.queries.order))
        case = jnp.array([next((i for i, one in enumerate(cases) if one is way), 0) for way in ways])[way]
    if step.is_new is not True:
        case, cases = jnp.where(step.is_new, case, len(cases)), [*cases, []]
    if len(cases) == 1:
        return compute(cases[0], queries, keys)
    return jax.lax.switch(case, [functools.partial(compute, blocks) for blocks in cases], queries, keys)


def _own_blocks(schedule: BranchSchedule, queries: ChunkView, keys: ChunkView) -> Iterator[SubBlock]:
    """The sub-blocks of one shard's rows: the same rows on both sides, and those before and behind them."""
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


# Two shards of a balanced ring, each with an early and a late half of rows: of the shard whose early half is earlier,
# the late half is later, because the numbers of the halves of a shard have the same sum on all. So either all queries
# come after the early keys, and before the late ones, or the late queries come after all keys, and the early ones
# before: each time half of the pairs, without a mask.


def _other_blocks(
    schedule: BranchSchedule, queries: ChunkView, keys: ChunkView
) -> tuple[list[SubBlock], list[SubBlock]]:
    """The sub-blocks of two shards' rows, where the keys are earlier and where they are later."""
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
    """The sub-block of rows of other tokens: all of them, or as far as a window of earlier ones goes."""
    window = window_of(schedule)
    if window is None:
        yield block(queries, keys)
    elif window > 1:
        # Query i sees the last w - 1 keys but for i of them: those up to the diagonal, counted from the end.
        yield block((queries[0], queries[0] + window - 1), (keys[1] - window + 1, keys[1]), is_reversed=True)


def _sub_block(
    queries: ChunkView, keys: ChunkView, query_rows: tuple[int, int], key_rows: tuple[int, int], **more: Any
) -> SubBlock:
    cut = lambda view, rows: slice(rows[0] - view.place.start, rows[1] - view.place.start)
    of_queries, of_keys = cut(queries, query_rows), cut(keys, key_rows)
    if queries.labels is None or keys.labels is None:
        return SubBlock(of_queries, of_keys, **more)
    return SubBlock(of_queries, of_keys, (queries.labels.cut(of_queries), keys.labels.cut(of_keys)), **more)
