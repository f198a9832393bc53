"""The meeting of rows: which tokens are in the slots of two shards, and the mask of those that attend to each other.

B batch, K key/value heads that run the branch, O those of them that are told apart, classes of heads with the same
rows, G query heads of a key/value head; I tiles of queries, J of keys, C chunks of a tile, R rows (slots) of a block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Int, UInt

from ringjax import _dropout
from ringjax._mask import NOWHERE, KeyMask, Mask, QueryMask, Visits, find_visits
from ringjax._rows import Rows, naturals
from ringjax._schedule import BranchSchedule


class Noise(NamedTuple):
    """What the dropout of a branch is drawn from: the seed, and the global numbers of batches and query heads."""

    seed: UInt[Array, "2"]
    batch: Int[Array, "B"]
    head: Int[Array, "K G"]

    def stream(self, token: Int[Array, "I C O R"]) -> tuple[UInt[Array, "I B C K G R"], UInt[Array, "I B C K G R"]]:
        """Returns the start and the step of the stream of each row of queries."""
        batch, head = self.batch[:, None, None, None, None], self.head[..., None]
        return _dropout.make_stream(self.seed, batch, head, token[:, None, :, :, None])


class Tiles(NamedTuple):
    """Rows of queries, or of keys and values, as their implementation has them, with the documents of each."""

    arrays: Any
    documents: Int[Array, "J B C classes R"] | None = None


class Slots(NamedTuple):
    """Where rows are when they are computed: whose they are, and whether the halves of balanced shards are swapped."""

    rows: Rows
    shards: Int[Array, "S"]
    is_swapped: bool
    documents: Int[Array, "J B C classes R"] | None = None

    def tokens(self) -> tuple[Int[Array, "J C O R"], Bool[Array, "J C O R"]]:
        """Returns the position of the token in each slot of each shard's tiles, and whether there is one."""
        branch = self.rows.branch
        shard = self.shards.astype(jnp.uint32)[:, None, None, None, None]
        tile = naturals(branch.num_tiles)[:, None, None, None]
        chunk = tile // branch.num_blocks * branch.chunks_per_tile
        chunk = chunk + naturals(branch.chunks_per_tile)[:, None, None]  # [I, C, 1, 1]
        slot = naturals(branch.block_rows) + tile % branch.num_blocks * branch.block_rows  # [I, 1, 1, R]
        if self.is_swapped:
            shard, slot = branch.origin(shard, slot)
        token, is_row = branch.slot_token(shard, chunk, slot, self.rows.offset[:, None])  # [S, I, C, O, R]
        flat = lambda array: rearrange(array, "S I C O R -> (S I) C O R")
        return flat(token.astype(jnp.int32)), flat(is_row)

    def labels(self, token: Int[Array, "J C O R"], nothing: int) -> tuple[Any, tuple[Array, ...]]:
        """Returns the documents, and the segments of earlier branches: the number `nothing` where one keeps no row."""
        heads = self.rows.heads
        documents = None if self.documents is None else self.documents[:, :, :, heads.classes]
        token = token.astype(jnp.uint32)
        segments = []
        for (_, length, rate), offsets in zip(self.rows.branch.earlier, heads.earlier_offsets, strict=True):
            is_kept = token % length % rate == offsets[heads.classes][:, None]
            segments.append(jnp.where(is_kept, (token // length).astype(jnp.int32), nothing)[:, None])
        return documents, tuple(segments)


class Meeting(NamedTuple):
    """Rows of queries of one shard and rows of keys of one or more, which are computed where they meet.

    Nothing is where the keys are not new.
    """

    queries: Slots
    keys: Slots
    is_new: Any = True
    noise: Noise | None = None

    @property
    def branch(self) -> BranchSchedule:
        """The branch that the rows are of."""
        return self.queries.rows.branch

    def of_classes(self) -> "Meeting":
        """Returns the meeting of all classes of heads on the mesh."""
        outline = lambda slots: slots._replace(rows=slots.rows.of_classes())
        return self._replace(queries=outline(self.queries), keys=outline(self.keys))


def make_mask(meeting: Meeting) -> Mask:
    """Returns which queries attend to which keys: those of their segment, document, and no earlier branch."""
    rows, branch = meeting.queries.rows, meeting.branch
    # Each batch skips the tiles that its own documents allow, if it is known that no device has to wait for another's.
    is_by_batch = meeting.queries.documents is not None and rows.is_whole
    outline = meeting.of_classes()
    visits = find_visits(
        _mask_queries(outline.queries),
        _mask_keys(outline.keys, outline.is_new),
        branch.num_tiles // branch.num_blocks,
        is_by_batch,
    )
    if rows.heads.is_member is not None:
        visits = Visits(visits.meets & rows.heads.is_member.any(), visits.is_whole & rows.heads.is_member.all())
    of_queries = _mask_queries(meeting.queries)
    if meeting.noise is not None:
        of_queries = of_queries._replace(stream=meeting.noise.stream(meeting.queries.tokens()[0]))
    return Mask(of_queries, _mask_keys(meeting.keys, meeting.is_new), visits, is_by_batch)


def _mask_queries(slots: Slots) -> QueryMask:
    branch = slots.rows.branch
    token, is_row = slots.tokens()
    document, segments = slots.labels(token, nothing=-1)
    first = token - token % branch.segment_length
    last = token if branch.is_causal else first + (branch.segment_length - 1)
    is_row = _counts(slots, is_row, document)
    first, last = jnp.where(is_row, first[:, None], NOWHERE), jnp.where(is_row, last[:, None], -1)
    return QueryMask(first, last, document, segments)


def _mask_keys(slots: Slots, is_new: Any) -> KeyMask:
    token, is_row = slots.tokens()
    document, segments = slots.labels(token, nothing=-2)
    is_row = _counts(slots, is_row & is_new, document)
    return KeyMask(jnp.where(is_row, token[:, None], NOWHERE), document, segments)


def _counts(slots: Slots, is_row: Bool[Array, "J C O R"], document: Any) -> Bool[Array, "J A C K R"]:
    """Which rows are of a head that runs the branch, and of a document."""
    is_row, is_member = is_row[:, None], slots.rows.heads.is_member
    if document is not None:
        is_row &= document >= 0
    return is_row if is_member is None else is_row & is_member[:, None]
