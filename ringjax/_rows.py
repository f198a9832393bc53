"""The rows of a branch: from a shard's tokens to the tiles of its schedule, and back.

B batch, n tokens of the shard, K key/value heads, O their offsets (1 where all heads share one, else K); I tiles, C
chunks of a tile, R rows (slots) of a block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Int, Integer, Shaped, UInt

from ringjax._block import NOWHERE, Mask, find_visits
from ringjax._schedule import BranchSchedule


class Rows(NamedTuple):
    """The rows that one shard keeps in one branch: for the offset of each of its heads, among those of all heads."""

    branch: BranchSchedule
    shard: Int[Array, ""]
    offset: UInt[Array, "O"]
    all_offsets: UInt[Array, "A"]

    def tokens(self) -> tuple[Int[Array, "I C O R"], Bool[Array, "I C O R"]]:
        """Returns the global number of the token in each slot, and whether there is one."""
        branch = self.branch
        tile = _count(branch.num_tiles)[:, None, None, None]
        chunk = tile // branch.num_blocks * branch.chunks_per_tile
        chunk = chunk + _count(branch.chunks_per_tile)[:, None, None]  # [I, C, 1, 1]
        slot = _count(branch.block_rows) + tile % branch.num_blocks * branch.block_rows  # [I, 1, 1, R]
        token, is_row = branch.slot_token(self.shard.astype(jnp.uint32), chunk, slot, self.offset[:, None])
        return token.astype(jnp.int32), is_row

    def after(self, step: Any) -> "Rows":
        """Returns the rows that are at this shard after `step` rotations along its ring."""
        return self._replace(shard=self.branch.source(self.shard, step))

    def outline(self) -> "Rows":
        """Returns the rows of all offsets on the mesh: the same wherever heads are, so that no axis has to reduce."""
        return self._replace(offset=self.all_offsets)

    def take(self, tokens: Shaped[Array, "B n K *rest"]) -> Shaped[Array, "I B C K *rest_of_rows"]:
        """Takes the kept rows [I, B, C, K, ..., R, H] of the shard's tokens [B, n, K, ..., H]; empty slots are junk."""
        branch = self.branch
        if not branch.is_identity:
            token, is_row = self.tokens()
            index = jnp.where(is_row, token - self.shard * branch.shard_length, 0)  # [I, C, O, R]
            tokens = _take(tokens, rearrange(index, "I C O R -> (I C R) O"))  # [B, I * C * R, K, ..., H]
        return rearrange(tokens, "B (I C R) K ... H -> I B C K ... R H", C=branch.chunks_per_tile, R=branch.block_rows)

    def put(self, rows: Shaped[Array, "I B C K *rest_of_rows"], fill: float = 0.0) -> Shaped[Array, "B n K *rest"]:
        """Returns the shard's tokens [B, n, K, ..., H]: their kept rows [I, B, C, K, ..., R, H], elsewhere `fill`."""
        branch = self.branch
        rows = rearrange(rows, "I B C K ... R H -> B (I C R) K ... H")
        if branch.is_identity:
            return rows
        shard = self.shard.astype(jnp.uint32)
        token = shard * branch.shard_length + _count(branch.shard_length)[:, None]  # [n, 1]
        chunk, slot = branch.token_slot(shard, token, self.offset)  # [n, 1], [n, O]
        is_kept = branch.is_kept(token, self.offset)  # [n, O]
        # Chunks stand side by side only where each is one block, so slots follow one another chunk by chunk.
        index = jnp.where(is_kept, chunk * (branch.num_blocks * branch.block_rows) + slot, 0)
        is_kept = is_kept.reshape(*is_kept.shape, *[1] * (rows.ndim - 3))
        return jnp.where(is_kept, _take(rows, index), fill)


def _count(stop: int) -> UInt[Array, "stop"]:
    # Unsigned: there division and remainder are one instruction each, without the cases of a negative sign.
    return jnp.arange(stop, dtype=jnp.uint32)


def _take(array: Shaped[Array, "B m K *rest"], index: Integer[Array, "M O"]) -> Shaped[Array, "B M K *rest"]:
    # One gather of whole vectors for each head: along a sharded head axis it stays local.
    index = index.reshape(1, *index.shape, *[1] * (array.ndim - 3))
    return jnp.take_along_axis(array, index, axis=1, mode="promise_in_bounds")


def make_mask(query_rows: Rows, key_rows: Rows, is_causal: bool, is_new: Any) -> Mask:
    """Returns which queries attend to which keys: those of their segment; nothing where the rows are not new."""

    def positions(queries: Rows, keys: Rows) -> tuple[Array, Array, Array]:
        token, is_row = queries.tokens()
        first = token - token % queries.branch.segment_length
        last = token if is_causal else first + (queries.branch.segment_length - 1)
        position, is_key = keys.tokens()
        return (
            jnp.where(is_row, first, NOWHERE),
            jnp.where(is_row, last, -1),
            jnp.where(is_key & is_new, position, NOWHERE),
        )

    groups = query_rows.branch.num_tiles // query_rows.branch.num_blocks
    visits = find_visits(*positions(query_rows.outline(), key_rows.outline()), groups)
    return Mask(*positions(query_rows, key_rows), visits)
