"""An attention step: a shard of queries and one of keys, the tokens of their rows, and the mask between them.

B batch, K key/value heads that run the branch, O is 1 if all of these have the same rows, else K, `classes` of heads
with the same rows, G query heads of a key/value head; I tiles of queries, J of keys, C chunks of a tile, R padded rows
of a block.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int, UInt

from ringjax._kernels.mask import (
    EMPTY,
    Bounds,
    KeyMask,
    LeftOut,
    Mask,
    QueryMask,
    bounds_of_keys,
    bounds_of_queries,
    find_active_blocks,
)
from ringjax._kernels.rows import Rows, pick
from ringjax._pattern import dropout
from ringjax._pattern.branch import remainder
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side


class DropoutCounters(NamedTuple):
    """The counters from which a branch draws dropout: the seeds, and the global numbers of batches and query heads."""

    seed: UInt[Array, "B 2"]
    batch: Int[Array, "B"]
    head: Int[Array, "K G"]

    def stream(self, token: UInt[Array, "I C O R"]) -> tuple[UInt[Array, "I B C K G R"], UInt[Array, "I B C K G R"]]:
        """Returns the start and the step of the dropout stream of each query row."""
        batch, head = self.batch[:, None, None, None, None], self.head[..., None]
        seed = self.seed.T.reshape(2, *batch.shape)
        return dropout.make_stream(seed, batch, head, token[:, None, :, :, None])


class Tiles(NamedTuple):
    """Rows of queries, or of keys and values, in their implementation's layout, with the document of each row."""

    arrays: Any
    documents: Int[Array, "J B C classes R"] | None = None


class PaddedRows(NamedTuple):
    """The rows of `shards` as a step computes them: those that these were dealt if `is_dealt`, else those they keep."""

    rows: Rows
    shards: Int[Array, "S"] | UInt[Array, "S"]
    is_dealt: bool
    documents: Int[Array, "J B C classes R"] | None = None

    @property
    def schedule(self) -> BranchSchedule:
        """The schedule of the branch."""
        return self.rows.schedule

    @property
    def side(self) -> Side:
        """The side of the branch that the rows are on."""
        return self.rows.side

    def bounded(self) -> "PaddedRows":
        """Returns padded rows of all classes of heads: the bounds of tiles are the same however XLA shards heads."""
        return self._replace(rows=self.rows.of_classes())

    def tokens(self) -> tuple[UInt[Array, "J C O R"], Bool[Array, "J C O R"] | None]:
        """Returns the position of the token in each padded row of each shard's tiles, and whether the row has a token.

        The latter is None if every row of every shard has one. The tiles of a group are consecutive, across all shards.
        """
        side, offset = self.side, self.rows.offset[:, None]
        shard = self.shards.astype(jnp.uint32)[:, None, None, None, None]
        tile = np.arange(side.num_tiles, dtype=np.uint32)[:, None, None, None]
        chunk = tile // side.num_blocks * side.chunks_per_tile
        chunk = chunk + np.arange(side.chunks_per_tile, dtype=np.uint32)[:, None, None]  # [I, C, 1, 1]
        first = np.uint32(side.block_rows) * (tile % side.num_blocks)  # [I, 1, 1, 1]
        row = jnp.arange(side.block_rows, dtype=jnp.uint32)
        if self.is_dealt:  # blocks as a whole
            shard, first = self.schedule.origin(shard, first, side)
        if side.is_strided:
            start, end = self._token_bounds(shard, chunk, first)
            token = start + (offset + row * np.uint32(side.step))  # [S, I, C, O, R]
            is_row = None if side.is_full else token < end
        else:
            token, is_row = side.row_token(shard, chunk, first + row, offset)
        if is_row is not None and side.num_full_chunks > side.num_chunks:
            is_row &= chunk < side.num_chunks
        flat = lambda array: rearrange(array, "S (groups I) C O R -> (groups S I) C O R", groups=side.num_tile_groups)
        return flat(token), None if is_row is None else flat(is_row)

    def _token_bounds(self, shard: Any, chunk: Any, row: Any) -> tuple[Array, Array]:
        """Returns the first token of each block, and the end of its chunk or of all tokens, whichever is first."""
        side = self.side
        step, stop = np.uint32(side.step), np.uint32(side.stop) if isinstance(side.stop, int) else side.stop
        begin = shard * np.uint32(side.shard_length) + side.first(0, chunk)
        end = begin + np.uint32(side.chunk_length)
        return begin + row * step, end if side.is_full else jnp.minimum(end, stop)

    def labels(
        self, token: UInt[Array, "J C O R"], of_keys: bool = False, are_chunks_apart: bool = True
    ) -> tuple[Any, Any, tuple[LeftOut, ...]]:
        """Returns the documents, the phases if tiles have several, and the pairs that a union leaves out."""
        heads, branch = self.rows.heads, self.side.branch
        documents = None if self.documents is None else self.documents[:, :, :, heads.classes]
        is_mixed = branch.modulus > 1 and not (are_chunks_apart and self.side.chunks == "phases")
        phase = remainder(token, branch.modulus).astype(jnp.int32)[:, None] if is_mixed else None
        left_out = []
        for (_, earlier), offsets in zip(self.schedule.earlier_branches, heads.earlier_offsets, strict=True):
            label = first = last = None
            if earlier.is_by_group or earlier.modulus > 1:
                is_kept = earlier.keeps(token, pick(offsets, heads.classes)[:, None])
                label = jnp.where(is_kept, earlier.group(token).astype(jnp.int32), -2 if of_keys else -1)[:, None]
            if not (of_keys or earlier.is_by_group):
                # The interval without causality: so a block on the diagonal can be left out as a whole.
                first, last = _interval(earlier.seen(token))
            left_out.append(LeftOut(label, first, last))
        return documents, phase, tuple(left_out)

    def of_members(self, is_row: Any, document: Any) -> Bool[Array, "J A C K R"] | None:
        """Returns which rows have a token, a document, and a head that runs the branch; None if all do."""
        conditions = [
            None if is_row is None else is_row[:, None],
            None if document is None else document >= 0,
            self._of_member_heads(),
        ]
        conditions = [condition for condition in conditions if condition is not None]
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def _of_member_heads(self) -> Bool[Array, "J 1 C K 1"] | None:
        is_member = self.rows.heads.is_member
        if is_member is None:
            return None
        tiles, chunks = self.side.num_tiles * self.shards.size, self.side.chunks_per_tile
        return jnp.broadcast_to(is_member[:, None], (tiles, 1, chunks, is_member.size, 1))


class View(NamedTuple):
    """One side of a step: the mask of its rows, and the bounds of its tiles."""

    mask: Any
    bounds: Bounds
    is_by_batch: bool = False


class AttentionStep(NamedTuple):
    """The queries of one shard and the keys of one or more, on the device that computes their attention.

    `queries` and `keys` are what the implementation's `see` returns. Nothing is computed if `is_new` is false, see
    `BranchSchedule.is_new`. `hops` is how many hops the streamed rows have made: zero if both sides are of one shard,
    an array if known only at run time. If `is_branch_final`, nothing is added to the results of the branch. If it
    `continues`, the step adds to sums of earlier branches.
    """

    schedule: BranchSchedule
    queries: Any
    keys: Any
    is_new: Any = True
    hops: Any = 0
    is_branch_final: bool = False
    continues: bool = False

    @property
    def is_only(self) -> bool:
        """Whether this step alone computes the sums of its queries."""
        return not self.continues and self.schedule.has_one_step

    @property
    def is_final(self) -> bool:
        """Whether the results of the step are those of the call: nothing is added to them."""
        return self.is_branch_final and self.schedule.is_local


def see_queries(padded: PaddedRows, counters: DropoutCounters | None = None) -> View:
    """Returns the view of queries, whose dropout is drawn from `counters`."""
    mask = mask_queries(padded, counters)
    bounded = mask if padded.rows.is_whole else mask_queries(padded.bounded())
    # Each batch skips blocks by its own documents, unless XLA may shard batches: devices would wait for each other.
    # A batch whose size is a symbol, in an exported program, cannot be the length of a loop.
    is_by_batch = padded.documents is not None and padded.rows.is_whole and isinstance(padded.documents.shape[1], int)
    return View(mask, bounds_of_queries(bounded, padded.side.num_tile_groups), is_by_batch)


def see_keys(padded: PaddedRows) -> View:
    """Returns the view of keys."""
    mask, is_member = mask_keys(padded), padded.rows.heads.is_member
    bounded = mask if padded.rows.is_whole else mask_keys(padded.bounded())
    is_full = True if is_member is None else is_member.all()
    return View(mask, bounds_of_keys(bounded, padded.side.num_tile_groups, is_full))


def make_mask(step: AttentionStep) -> Mask:
    """Returns the mask: queries attend to the keys that they see in their document, but not in earlier branches."""
    queries, keys = step.queries, step.keys
    blocks = find_active_blocks(queries.bounds, keys.bounds, queries.is_by_batch)
    if step.is_new is not True:
        blocks = blocks._replace(is_active=blocks.is_active & step.is_new)
    return Mask(queries.mask, keys.mask, blocks, queries.is_by_batch)


def mask_queries(
    padded: PaddedRows, counters: DropoutCounters | None = None, are_chunks_apart: bool = True
) -> QueryMask:
    """Returns what each query attends to; if `are_chunks_apart`, tiles separate chunks, and the mask need not."""
    schedule = padded.schedule
    token, is_row = padded.tokens()
    document, phase, left_out = padded.labels(token, are_chunks_apart=are_chunks_apart)
    is_row = padded.of_members(is_row, document)
    stream = () if counters is None else counters.stream(token)
    first, last = _interval(padded.side.branch.seen(token, schedule.is_causal), schedule.is_causal)
    if is_row is not None:
        first, last = (jnp.where(is_row, array, empty) for array, empty in zip((first, last), EMPTY, strict=True))
    elif schedule.is_dense and are_chunks_apart:  # where rows share a tile, they share a segment
        first = None
    return QueryMask(first, last, document, phase, left_out, stream)


def mask_keys(padded: PaddedRows, are_chunks_apart: bool = True) -> KeyMask:
    """Returns what attends to each key, as `mask_queries` does for queries."""
    token, is_row = padded.tokens()
    document, phase, left_out = padded.labels(token, of_keys=True, are_chunks_apart=are_chunks_apart)
    position = token.astype(jnp.int32)[:, None]
    return KeyMask(position, padded.of_members(is_row, document), document, phase, left_out)


def _interval(positions: tuple[Any, Any], is_causal: bool = False) -> tuple[Int[Array, "J 1 C O R"], ...]:
    first, last = positions
    if not is_causal:  # the interval may end beyond int32
        last = jnp.minimum(last, EMPTY[0] - 1)
    return first.astype(jnp.int32)[:, None], last.astype(jnp.int32)[:, None]
