"""The rows of a branch: from a shard's tokens to the slots of its schedule, and back.

B batch, n tokens of the shard, m slots of all its chunks, M with those of full tiles, N heads that run the branch, of
queries or of keys, O those of them that are told apart: 1 where all are of one class, else N.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int, Integer, Shaped, UInt

from ringjax._schedule.schedule import BranchSchedule
from ringjax._schedule.side import Side

Combine = Callable[[Array, Array], Array]


def put(token: Array, row: Array) -> Array:
    """Puts a row in the place of its token."""
    del token
    return row


class BranchHeads(NamedTuple):
    """The heads of a shard that run a branch: `size` of them, from its own number `first` on.

    Heads are of one class whose rows have the same offsets, in this branch and in earlier ones whose pairs it leaves
    out. Where shards have different numbers of heads in the branch, `is_member` says which of these are. Classes are
    NumPy's where all shards have the same heads.
    """

    first: Any
    size: int
    offsets: UInt[np.ndarray, "classes"]
    earlier_offsets: tuple[UInt[np.ndarray, "classes"], ...]
    classes: Int[Array | np.ndarray, "O"]
    is_member: Bool[Array, "N"] | None = None

    def cut(self, array: Shaped[Array, "B n all D"]) -> Shaped[Array, "B n N D"]:
        """Returns the part of an array that these heads are."""
        if self.size == array.shape[2]:
            return array
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size, axis=2)

    def paste(self, array: Shaped[Array, "B n all D"], part: Shaped[Array, "B n N D"]) -> Shaped[Array, "B n all D"]:
        """Undoes `cut`."""
        if self.size == array.shape[2]:
            return part
        return jax.lax.dynamic_update_slice_in_dim(array, part, self.first, axis=2)

    def in_groups(self, groups: int) -> "BranchHeads":
        """Returns the query heads, so many of each."""
        repeat = lambda array: np.repeat(array, groups) if isinstance(array, np.ndarray) else jnp.repeat(array, groups)
        is_member = None if self.is_member is None else repeat(self.is_member)
        classes = self.classes if self.classes.size == 1 else repeat(self.classes)
        return self._replace(first=self.first * groups, size=self.size * groups, classes=classes, is_member=is_member)

    def of_heads(self, array: Shaped[Array, "all *rest"]) -> Shaped[Array, "N *rest"]:
        """Returns what an array of all heads says of these."""
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size)


class Rows(NamedTuple):
    """The rows that the heads of one shard keep on one side of a branch.

    `is_whole` says that no axis of the mesh cuts the shard's batches and heads further, as the compiler chooses. Where
    rows are `already_taken`, tokens are these rows, and only documents are of all tokens.
    """

    schedule: BranchSchedule
    side: Side
    shard: Int[Array, ""]
    heads: BranchHeads
    is_whole: bool = False
    already_taken: bool = False

    @property
    def offset(self) -> UInt[Array | np.ndarray, "O"]:
        """The offset of each head."""
        return pick(self.heads.offsets, self.heads.classes)

    def of_keys(self) -> "Rows":
        """Returns the rows of keys."""
        return self._replace(side=self.schedule.keys)

    def in_groups(self, groups: int) -> "Rows":
        """Returns the rows of query heads, so many for each key/value head."""
        return self._replace(heads=self.heads.in_groups(groups))

    def of_classes(self) -> "Rows":
        """Returns the rows of all classes on the mesh, the same wherever heads are, so that no axis has to reduce."""
        classes, is_member = np.arange(self.heads.offsets.size, dtype=np.int32), self.heads.is_member
        is_any = None if is_member is None else is_member.any()[None]
        return self._replace(heads=self.heads._replace(classes=classes, is_member=is_any), already_taken=False)

    def of_group(self, group: Any) -> "Rows":
        """Returns the rows of one of the groups of the shard."""
        shard = self.shard * self.side.num_groups + group
        return self._replace(schedule=self.schedule.of_group(), side=self.side.of_group(), shard=shard)

    def take(self, tokens: Shaped[Array, "B n N D"]) -> Shaped[Array, "B m N D"]:
        """Takes the kept rows of the shard's tokens; empty slots are junk."""
        side = self.side
        if self.already_taken:
            return tokens
        tokens = jax.lax.slice_in_dim(tokens, side.begin, side.begin + side.span, axis=1)
        if side.chunks == "residues":
            return rearrange(tokens, "B (m r) ... -> B (r m) ...", r=side.step)
        if side.is_strided:
            rows = self._take_one(self._split(tokens))
            missing = side.num_chunks * side.chunk_rows - rows.shape[1]  # of a last chunk that is shorter
            return jnp.pad(rows, [(0, 0), (0, missing), (0, 0), (0, 0)]) if missing else rows
        shard = self.shard.astype(jnp.uint32)
        chunk, slot = naturals(side.num_chunks)[:, None, None], naturals(side.chunk_rows)[:, None]
        token, is_row = side.slot_token(shard, chunk, slot, self.offset)
        index = jnp.where(is_row, token - side.first(shard), 0)  # [chunks, slots, O]
        return _take(tokens, rearrange(index, "c s O -> (c s) O"))

    def put(
        self,
        tokens: Shaped[Array, "B n N D"],
        rows: Shaped[Array, "B m N D"],
        combine: Combine = put,
    ) -> Shaped[Array, "B n N D"]:
        """Returns the shard's tokens with the kept rows in their places, or what is made of both."""
        side = self.side
        if self.already_taken:
            return combine(tokens, rows)
        if side.span < tokens.shape[1]:
            part = jax.lax.slice_in_dim(tokens, side.begin, side.begin + side.span, axis=1)
            part = self._put_among(part, rows, combine)
            return jax.lax.dynamic_update_slice_in_dim(tokens, part, side.begin, axis=1)
        return self._put_among(tokens, rows, combine)

    def _put_among(self, tokens: Array, rows: Array, combine: Combine) -> Array:
        side = self.side
        if side.chunks == "residues":
            return combine(tokens, rearrange(rows, "B (r m) ... -> B (m r) ...", r=side.step))
        if side.is_strided:
            rows = jax.lax.slice_in_dim(rows, 0, side.span // side.step, axis=1)
            return self._put_one(self._split(tokens), rows, combine).reshape(tokens.shape)
        shard = self.shard.astype(jnp.uint32)
        token = side.first(shard) + naturals(side.span)[:, None]  # [n, 1]
        chunk, slot = side.token_slot(shard, token, self.offset)  # [n, 1], [n, O]
        is_kept = side.is_kept(token, self.offset)  # [n, O]
        index = jnp.where(is_kept, chunk * side.chunk_rows + slot, 0)
        return jnp.where(is_kept[..., None], combine(tokens, _take(rows, index)), tokens)

    def pad(self, rows: Shaped[Array, "B m N D"]) -> Shaped[Array, "B M N D"]:
        """Adds the empty slots that fill tiles."""
        side = self.side
        slots = side.num_blocks * side.block_rows
        return _resize(rows, side.num_chunks, side.num_full_chunks, slots)

    def unpad(self, rows: Shaped[Array, "B M N D"]) -> Shaped[Array, "B m N D"]:
        """Undoes `pad`."""
        side = self.side
        return _resize(rows, side.num_full_chunks, side.num_chunks, side.chunk_rows)

    def spread(self, rows: Shaped[Array, "B m N D"], fill: float) -> Shaped[Array, "B n N D"]:
        """Returns tokens with the rows of a dense branch in their places, and `fill` elsewhere.

        Selected, so that what is made of it reads each row once and keeps no tokens.
        """
        if self.already_taken:
            return rows
        split = jnp.where(_is_offset(self.side.step, self.offset), rows[:, :, None], fill)
        return rearrange(split, "B m r N D -> B (m r) N D")

    def _take_one(self, split: Shaped[Array, "B m r N D"]) -> Shaped[Array, "B m N D"]:
        if split.shape[2] == 1:
            return split[:, :, 0]
        ways = {"cpu": take_slices, "default": take_selected} | ({"cuda": take_vectors} if self.is_whole else {})
        ways = {platform: functools.partial(function, offset=self.offset) for platform, function in ways.items()}
        return jax.lax.platform_dependent(split, **ways)

    def _put_one(
        self, split: Shaped[Array, "B m r N D"], rows: Shaped[Array, "B m N D"], combine: Combine
    ) -> Shaped[Array, "B m r N D"]:
        if split.shape[2] == 1:
            return combine(split[:, :, 0], rows)[:, :, None]
        ways = {"cpu": put_slices, "tpu": put_in_one_pass, "default": put_selected}
        more = {"offset": self.offset, "combine": combine}
        ways = {platform: functools.partial(function, **more) for platform, function in ways.items()}
        return jax.lax.platform_dependent(split, rows, **ways)

    def _split(self, tokens: Shaped[Array, "B n N D"]) -> Shaped[Array, "B m r N D"]:
        return rearrange(tokens, "B (m r) ... -> B m r ...", r=self.side.step)


def _resize(rows: Shaped[Array, "B m N D"], chunks: int, new_chunks: int, slots: int) -> Shaped[Array, "B M N D"]:
    """Gives rows so many chunks, and each of them so many slots: empty ones are added or removed at the ends."""
    missing = new_chunks - chunks, slots - rows.shape[1] // chunks
    if missing == (0, 0):
        return rows
    split = rearrange(rows, "B (c s) ... -> B c s ...", c=chunks)
    padding = [(0, {1: missing[0], 2: missing[1]}.get(axis, 0), 0) for axis in range(split.ndim)]
    return rearrange(jax.lax.pad(split, jnp.zeros((), rows.dtype), padding), "B c s ... -> B (c s) ...")


def pick(array: np.ndarray, index: Any, axis: int = 0) -> Any:
    """Returns the entries of a table with these numbers, a NumPy array if these are known beforehand."""
    if isinstance(index, np.ndarray):
        return array.take(index, axis)
    return jnp.take(array, index, axis, mode="clip")


def naturals(stop: int) -> UInt[Array, "stop"]:
    """Returns the numbers below `stop`."""
    # Unsigned: there division and remainder are one instruction each, without the cases of a negative sign.
    return jnp.arange(stop, dtype=jnp.uint32)


def _take(array: Shaped[Array, "B m N D"], index: Integer[Array, "M O"]) -> Shaped[Array, "B M N D"]:
    # One gather of whole vectors for each head: along a sharded head axis it stays local.
    return jnp.take_along_axis(array, index[None, :, :, None], axis=1, mode="promise_in_bounds")


# One of r tokens for each head, in three ways. CPUs copy one slice for each head of a batch of heads, in one piece, and
# touch none of the other tokens. GPUs gather single vectors, which touches no others either, but needs all dimensions
# before in one: only where no compiler shards them. Elsewhere, and where one does, gathers and scatters would transpose
# all of their operand, and a selection is one fused pass.


def take_selected(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, by selection."""
    return jnp.where(_is_offset(split.shape[2], offset), split, 0).sum(axis=2, dtype=split.dtype)


def put_selected(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Replaces the token number `offset` of each r, by selection."""
    return jnp.where(_is_offset(split.shape[2], offset), combine(split, rows[:, :, None]), split)


def put_in_one_pass(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Does what `put_selected` does, and nothing of what follows moves into the pass.

    Else a TPU's compiler makes an array of each row r times before it.
    """
    return jax.lax.optimization_barrier(put_selected(split, rows, offset, combine))


def _is_offset(rate: int, offset: UInt[Array | np.ndarray, "O"]) -> Bool[Array | np.ndarray, "rate O 1"]:
    return (np.arange(rate, dtype=np.uint32)[:, None] == offset)[..., None]


def take_slices(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, slice by slice."""
    batch, count, _, heads, width = split.shape
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(0, 1, 3),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(3,),
        start_indices_batching_dims=(0,),
    )
    sizes = (batch, count, 1, 1, width)
    return jax.lax.gather(split, _of_heads(offset, heads), numbers, sizes, mode="promise_in_bounds")


def put_slices(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Replaces the token number `offset` of each r, slice by slice."""
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 1, 3),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(3,),
        scatter_indices_batching_dims=(0,),
    )
    index = _of_heads(offset, split.shape[3])
    rows = combine(take_slices(split, offset), rows)
    return jax.lax.scatter(
        split, index, rows, numbers, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
    )


def take_vectors(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, vector by vector."""
    batch, count, rate, heads, width = split.shape
    of_first = naturals(batch * count).reshape(batch, count, 1) * np.uint32(rate * heads)
    index = of_first + (offset * np.uint32(heads) + np.arange(heads, dtype=np.uint32))
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0,))
    vectors = split.reshape(-1, width)
    return jax.lax.gather(vectors, index[..., None], numbers, (1, width), unique_indices=True, mode="promise_in_bounds")


def _of_heads(offset: UInt[Array | np.ndarray, "O"], heads: int) -> Int[Array | np.ndarray, "N 1"]:
    return (offset + np.zeros(heads, np.uint32)).astype(np.int32)[:, None]
