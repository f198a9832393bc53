"""The rows of a branch: from a shard's tokens to the padded rows of its schedule, and back.

B batch, n tokens of the shard, m padded rows of all its chunks, M those of whole tiles, N heads of queries or of keys
that run the branch, O is 1 if all of these are of one class, else N.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int, Integer, Shaped, UInt

from ringjax._kernels.strides import Combine, Strides, is_offset, put
from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side


class BranchHeads(NamedTuple):
    """The heads of a shard that run a branch: `size` of them, from the shard's head number `first` on.

    The heads of a class have the same offsets, in this branch and in the earlier ones whose pairs it leaves out. If
    shards have different numbers of heads in the branch, `is_member` says which of the `size` heads run it. `classes`
    is a NumPy array if all shards have the same heads.
    """

    first: Any
    size: int
    offsets: UInt[np.ndarray, "classes"]
    earlier_offsets: tuple[UInt[np.ndarray, "classes"], ...]
    classes: Int[Array | np.ndarray, "O"]
    is_member: Bool[Array, "N"] | None = None

    def cut(self, array: Shaped[Array, "B n all D"]) -> Shaped[Array, "B n N D"]:
        """Returns the part of an array that belongs to these heads."""
        if self.size == array.shape[2]:
            return array
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size, axis=2)

    def paste(self, array: Shaped[Array, "B n all D"], part: Shaped[Array, "B n N D"]) -> Shaped[Array, "B n all D"]:
        """Undoes `cut`."""
        if self.size == array.shape[2]:
            return part
        return jax.lax.dynamic_update_slice_in_dim(array, part, self.first, axis=2)

    def in_groups(self, groups: int) -> "BranchHeads":
        """Returns the query heads of these key/value heads, `groups` of each."""
        repeat = lambda array: np.repeat(array, groups) if isinstance(array, np.ndarray) else jnp.repeat(array, groups)
        is_member = None if self.is_member is None else repeat(self.is_member)
        classes = self.classes if self.classes.size == 1 else repeat(self.classes)
        return self._replace(first=self.first * groups, size=self.size * groups, classes=classes, is_member=is_member)

    def of_heads(self, array: Shaped[Array, "all *rest"]) -> Shaped[Array, "N *rest"]:
        """Returns the entries of these heads in an array of all heads."""
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size)


class Rows(NamedTuple):
    """The rows that the heads of one shard keep on one side of a branch.

    If `is_whole`, the compiler does not shard the batches and heads of the shard along more mesh axes. If rows are
    `already_taken`, the tokens are these rows, and only documents have all tokens.
    """

    schedule: BranchSchedule
    side: Side
    shard: Int[Array, ""]
    heads: BranchHeads
    is_whole: bool = False
    already_taken: bool = False
    strides: Strides = Strides()
    is_of_keys: bool = False

    @property
    def offset(self) -> UInt[Array | np.ndarray, "O"]:
        """The offset of each head."""
        return pick(self.heads.offsets, self.heads.classes)

    def of_keys(self) -> "Rows":
        """Returns the rows of keys."""
        return self._replace(side=self.schedule.keys, is_of_keys=True)

    def in_groups(self, groups: int) -> "Rows":
        """Returns the rows of query heads, so many for each key/value head."""
        return self._replace(heads=self.heads.in_groups(groups))

    def of_classes(self) -> "Rows":
        """Returns the rows of all classes on the mesh: the same on all shards of heads, so no axis has to reduce."""
        classes, is_member = np.arange(self.heads.offsets.size, dtype=np.int32), self.heads.is_member
        is_any = None if is_member is None else is_member.any()[None]
        return self._replace(heads=self.heads._replace(classes=classes, is_member=is_any), already_taken=False)

    def of_group(self, group: Any) -> "Rows":
        """Returns the rows of one of the groups of the shard."""
        shard = self.shard * self.side.num_groups + group
        return self._replace(schedule=self.schedule.of_group(), side=self.side.of_group(), shard=shard)

    def take(self, tokens: Shaped[Array, "B n N D"]) -> Shaped[Array, "B m N D"]:
        """Takes the kept rows of the shard's tokens; padding rows have arbitrary values."""
        side = self.side
        if self.already_taken:
            return tokens
        tokens = jax.lax.slice_in_dim(tokens, side.begin, side.begin + side.num_tokens, axis=1)
        if side.chunks == "phases":
            return self.strides.sort(tokens, side.step)
        if side.is_strided:
            rows = tokens
            if side.step > 1:
                rows = self.strides.take(tokens, side.step, self.offset, self.is_whole)
            missing = side.num_chunks * side.chunk_rows - rows.shape[1]  # of a last chunk that is shorter
            return jnp.pad(rows, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else rows
        shard = self.shard.astype(jnp.uint32)
        chunk, row = naturals(side.num_chunks)[:, None, None], naturals(side.chunk_rows)[:, None]
        token, is_row = side.row_token(shard, chunk, row, self.offset)
        index = jnp.where(is_row, token - side.first(shard), 0)  # [chunks, rows, O]
        return _take(tokens, rearrange(index, "c s O -> (c s) O"))

    def put(
        self,
        tokens: Shaped[Array, "B n N D"],
        rows: Shaped[Array, "B m N D"],
        combine: Combine = put,
    ) -> Shaped[Array, "B n N D"]:
        """Returns the shard's tokens, with each kept one replaced by `combine(token, row)`."""
        side = self.side
        if self.already_taken:
            return combine(tokens, rows)
        if side.num_tokens < tokens.shape[1]:
            part = jax.lax.slice_in_dim(tokens, side.begin, side.begin + side.num_tokens, axis=1)
            part = self._put_among(part, rows, combine)
            return jax.lax.dynamic_update_slice_in_dim(tokens, part, side.begin, axis=1)
        return self._put_among(tokens, rows, combine)

    def _put_among(self, tokens: Array, rows: Array, combine: Combine) -> Array:
        side = self.side
        if side.chunks == "phases":
            return self.strides.put_sorted(tokens, rows, side.step, combine)
        if side.is_strided:
            rows = jax.lax.slice_in_dim(rows, 0, side.num_tokens // side.step, axis=1)
            if side.step == 1:
                return combine(tokens, rows)
            return self.strides.put(tokens, rows, side.step, self.offset, combine)
        shard = self.shard.astype(jnp.uint32)
        token = side.first(shard) + naturals(side.num_tokens)[:, None]  # [n, 1]
        chunk, row = side.token_row(shard, token, self.offset)  # [n, 1], [n, O]
        is_kept = side.is_kept(token, self.offset)  # [n, O]
        index = jnp.where(is_kept, chunk * side.chunk_rows + row, 0)
        return jnp.where(is_kept[..., None], combine(tokens, _take(rows, index)), tokens)

    def pad(self, rows: Shaped[Array, "B m N D"]) -> Shaped[Array, "B M N D"]:
        """Adds the rows of padding that fill tiles."""
        side = self.side
        num_rows = side.num_blocks * side.block_rows
        return _resize(rows, side.num_chunks, side.num_full_chunks, num_rows)

    def unpad(self, rows: Shaped[Array, "B M N D"]) -> Shaped[Array, "B m N D"]:
        """Undoes `pad`."""
        side = self.side
        return _resize(rows, side.num_full_chunks, side.num_chunks, side.chunk_rows)

    def spread(self, rows: Shaped[Array, "B m N D"], fill: float) -> Shaped[Array, "B n N D"]:
        """Returns tokens with the rows of a dense branch in their places, and `fill` elsewhere.

        This is a selection, which fuses into its uses: these read each row once, and no array of tokens is kept.
        """
        if self.already_taken:
            return rows
        split = jnp.where(is_offset(self.side.step, self.offset), rows[:, :, None], fill)
        return rearrange(split, "B m r N D -> B (m r) N D")


def _resize(rows: Shaped[Array, "B m N D"], chunks: int, new_chunks: int, num_rows: int) -> Shaped[Array, "B M N D"]:
    """Returns `new_chunks` chunks of `num_rows` rows: adds or removes padding at the ends of chunks and of all."""
    missing = new_chunks - chunks, num_rows - rows.shape[1] // chunks
    if missing == (0, 0):
        return rows
    split = rearrange(rows, "B (c s) ... -> B c s ...", c=chunks)
    padding = [(0, {1: missing[0], 2: missing[1]}.get(axis, 0), 0) for axis in range(split.ndim)]
    return rearrange(jax.lax.pad(split, jnp.zeros((), rows.dtype), padding), "B c s ... -> B (c s) ...")


def pick(array: np.ndarray, index: Any, axis: int = 0) -> Any:
    """Returns the entries of a table at an index, as a NumPy array if the index is one."""
    if isinstance(index, np.ndarray):
        return array.take(index, axis)
    return jnp.take(array, index, axis, mode="clip")


def naturals(stop: int) -> UInt[Array, "stop"]:
    """Returns the numbers below `stop`."""
    # Unsigned, so that division and remainder are one instruction each, without a case for negative numbers.
    return jnp.arange(stop, dtype=jnp.uint32)


def _take(array: Shaped[Array, "B m N D"], index: Integer[Array, "M O"]) -> Shaped[Array, "B M N D"]:
    # Gathers whole vectors for each head, so that it stays local along a sharded head axis.
    return jnp.take_along_axis(array, index[None, :, :, None], axis=1, mode="promise_in_bounds")
