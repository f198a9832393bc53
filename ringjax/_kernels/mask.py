"""The mask of tiles: which pairs of a query and a key attend, and which blocks are active.

Independent of mesh and pattern: a query has an interval of positions and some labels, a key has a position and some
labels. Letters: I tiles of queries, J tiles of keys, B batch, A the batches that masks tell apart (B or 1), C chunks
side by side, K key/value heads, O the heads that masks tell apart (K or 1), G query heads of one key/value head, R rows
of a tile.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, UInt

# An interval without a position.
EMPTY = jnp.iinfo(jnp.int32).max, -1


class ActiveBlocks(NamedTuple):
    """The active blocks of each tile: those that `is_active` marks among the tiles `start..stop` of its group.

    `first` is the number of the group's first tile, None if there is only one group.
    """

    first: Any
    start: Int[Array, "I"]
    stop: Int[Array, "I"]
    is_active: Bool[Array, "I J"]

    def number(self, tile: Any) -> Any:
        """Returns the number among all tiles, given that in the group."""
        return tile if self.first is None else self.first + tile


class BlockMask(NamedTuple):
    """Which blocks, tiles of queries by tiles of keys, are active, and which are full. No block crosses groups."""

    is_active: Bool[Array, "groups I_of_group J_of_group"]
    is_full: Bool[Array, "groups I_of_group J_of_group"]

    def of_queries(self) -> ActiveBlocks:
        """Returns the active blocks of each tile of queries."""
        groups, rows, tiles = self.is_active.shape
        number = jax.lax.broadcasted_iota(jnp.int32, self.is_active.shape, 2)
        start = jnp.where(self.is_active, number, tiles).min(axis=2)
        stop = jnp.where(self.is_active, number + 1, 0).max(axis=2)  # before the start where no block is active
        first = None if groups == 1 else np.repeat(np.arange(groups, dtype=np.int32) * tiles, rows)
        return ActiveBlocks(first, start.reshape(-1), stop.reshape(-1), self.is_active.reshape(groups * rows, tiles))

    def of_keys(self) -> ActiveBlocks:
        """Returns the active blocks of each tile of keys."""
        return self.transposed().of_queries()

    def transposed(self) -> "BlockMask":
        """Returns the mask of tiles of keys by tiles of queries."""
        return BlockMask(*(array.swapaxes(1, 2) for array in self))


class LeftOut(NamedTuple):
    """The keys that each query leaves out: those with its `label` and a position in its interval; None for any.

    Keys have only the label.
    """

    label: Int[Array, "I 1 C O R"] | None = None
    first: Int[Array, "I 1 C O R"] | None = None
    last: Int[Array, "I 1 C O R"] | None = None


class QueryMask(NamedTuple):
    """What each query attends to: keys at ``first <= position <= last`` with its `document` and its `phase`.

    `left_out` has the keys of earlier branches. `stream` is the start and the step of the dropout stream. A padding row
    has an empty interval. `first` is None if no tile has a key before it. A is 1 if all batches are the same, else B,
    and O is 1 if all heads are the same, else K.
    """

    first: Int[Array, "I A C O Rq"] | None
    last: Int[Array, "I A C O Rq"]
    document: Int[Array, "I B C O Rq"] | None = None
    phase: Int[Array, "I 1 C O Rq"] | None = None
    left_out: tuple[LeftOut, ...] = ()
    stream: tuple[UInt[Array, "I B C K G Rq"], ...] = ()


class KeyMask(NamedTuple):
    """The keys of a `QueryMask`; `position` is also the index of a key's weight in the dropout stream of a query.

    `is_key` is None if no row is padding.
    """

    position: Int[Array, "J A C O Rk"]
    is_key: Bool[Array, "J A C O Rk"] | None = None
    document: Int[Array, "J B C O Rk"] | None = None
    phase: Int[Array, "J 1 C O Rk"] | None = None
    left_out: tuple[LeftOut, ...] = ()


class Range(NamedTuple):
    """The least and the greatest of some values of each tile; tiles attend only within their group."""

    least: Int[Array, "A groups I C"]
    most: Int[Array, "A groups I C"]


class Bounds(NamedTuple):
    """The bounds of the mask of each tile of one side, which decide which blocks are active.

    For queries, `low` and `high` bound the ends of their intervals; `low` is None if no key comes before these. For
    keys, both bound the position. `is_full` says whether `is_key` holds for all rows of a tile.
    """

    low: Range | None
    high: Range
    is_full: Bool[Array, "A groups I C"] | None = None
    document: Range | None = None
    phase: Range | None = None
    left_out: tuple["LeftOutBounds", ...] = ()


class LeftOutBounds(NamedTuple):
    """The bounds of `LeftOut`: of the labels of rows that have one, whether all rows do, and of the interval."""

    label: Range | None
    has_label: Any
    first: Range | None
    last: Range | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("queries", "keys", "blocks"), meta_fields=("is_by_batch",)
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which queries attend to which keys; if `is_by_batch`, `blocks` has the groups of each batch after each other."""

    queries: QueryMask
    keys: KeyMask
    blocks: BlockMask
    is_by_batch: bool = False


def masked(scores: Float[Array, "*X Q Rk"], of_queries: QueryMask, of_keys: KeyMask) -> Float[Array, "*X Q Rk"]:
    """Returns the scores of pairs that attend, and minus infinity for the others."""
    of_queries = jax.tree.map(lambda array: array[..., None], of_queries)  # [*X, Q, 1]
    of_keys = jax.tree.map(lambda array: array[..., None, :], of_keys)  # [*X, 1, Rk]
    return jnp.where(is_allowed(of_queries, of_keys), scores, -jnp.inf)


def is_allowed(of_queries: QueryMask, of_keys: KeyMask) -> Any:
    """Returns which pairs attend, of masks whose arrays broadcast to the pairs."""
    position = of_keys.position
    is_allowed = position <= of_queries.last
    if of_queries.first is not None:
        is_allowed &= of_queries.first <= position
    if of_keys.is_key is not None:
        is_allowed &= of_keys.is_key
    if of_queries.document is not None and of_keys.document is not None:
        is_allowed &= of_queries.document == of_keys.document
    if of_queries.phase is not None and of_keys.phase is not None:
        is_allowed &= of_queries.phase == of_keys.phase
    for query, key in zip(of_queries.left_out, of_keys.left_out, strict=True):
        is_allowed &= _is_allowed_beside(query, key, position)
    return is_allowed


def _is_allowed_beside(query: LeftOut, key: LeftOut, position: Any) -> Any:
    """Returns which pairs are not left out."""
    reasons = []
    if query.label is not None and key.label is not None:
        reasons.append(query.label != key.label)
    if query.first is not None and query.last is not None:
        reasons += [position < query.first, query.last < position]
    return functools.reduce(operator.or_, reasons)


def bounds_of_queries(mask: QueryMask, num_groups: int) -> Bounds:
    """Returns the bounds of tiles of queries, which lie in `num_groups` groups."""
    is_query = None if mask.first is None else mask.first <= mask.last
    return Bounds(
        None if mask.first is None else _range(mask.first, num_groups),
        _range(mask.last, num_groups),
        document=None if mask.document is None else _range(mask.document, num_groups, is_query),
        phase=None if mask.phase is None else _range(mask.phase, num_groups, is_query),
        left_out=tuple(_bounds_of_left_out(left_out, num_groups) for left_out in mask.left_out),
    )


def bounds_of_keys(mask: KeyMask, num_groups: int, is_full: Any = True) -> Bounds:
    """Returns the bounds of tiles of keys; if `is_full` is false, no tile is full."""
    position = _range(mask.position, num_groups, mask.is_key)
    return Bounds(
        position,
        position,
        None if mask.is_key is None else _reduce(jax.lax.reduce_and, mask.is_key, num_groups) & is_full,
        None if mask.document is None else _range(mask.document, num_groups, mask.is_key),
        None if mask.phase is None else _range(mask.phase, num_groups, mask.is_key),
        tuple(_bounds_of_left_out(left_out, num_groups) for left_out in mask.left_out),
    )


def _bounds_of_left_out(left_out: LeftOut, num_groups: int) -> LeftOutBounds:
    bounds = (None if array is None else _range(array, num_groups) for array in left_out[1:])
    if left_out.label is None:
        return LeftOutBounds(None, None, *bounds)
    has_label = left_out.label >= 0
    labels = _range(left_out.label, num_groups, has_label)
    return LeftOutBounds(labels, _reduce(jax.lax.reduce_and, has_label, num_groups), *bounds)


def _range(labels: Array, num_groups: int, is_label: Array | None = None) -> Range:
    low, high = (labels, labels) if is_label is None else (jnp.where(is_label, labels, x) for x in EMPTY)
    return Range(_reduce(jax.lax.reduce_min, low, num_groups), _reduce(jax.lax.reduce_max, high, num_groups))


def _reduce(reduce: Callable[..., Array], array: Array, num_groups: int) -> Array:
    return rearrange(reduce(array, axes=(3, 4)), "(groups I) A C -> A groups I C", groups=num_groups)


def find_active_blocks(queries: Bounds, keys: Bounds, is_by_batch: bool = False) -> BlockMask:
    """Returns which blocks are active, and which of these are full.

    A block is inactive if, by its bounds, no interval reaches a key, no document or no phase is on both sides, or all
    pairs are left out. It is full if, by its bounds, no pair is masked.
    """
    of_queries: Any = jax.tree.map(lambda array: array[:, :, :, None], queries)  # [A, groups, I, 1, C]
    of_keys: Any = jax.tree.map(lambda array: array[:, :, None], keys)  # [A, groups, 1, J, C]
    is_active = of_queries.high.most >= of_keys.low.least
    is_full = of_queries.high.least >= of_keys.high.most
    if of_queries.low is not None:
        is_active &= of_queries.low.least <= of_keys.high.most
        is_full &= of_queries.low.most <= of_keys.low.least
    if of_keys.is_full is not None:
        is_full &= of_keys.is_full
    for one, other in ((of_queries.document, of_keys.document), (of_queries.phase, of_keys.phase)):
        if one is not None and other is not None:
            is_active &= (one.least <= other.most) & (other.least <= one.most)
            is_full &= (one.least == other.most) & (one.most == other.least)
    for query, key in zip(of_queries.left_out, of_keys.left_out, strict=True):
        all_left_out, none_left_out = _left_out_of_tiles(query, key, of_keys.high)
        is_active &= ~all_left_out
        is_full &= none_left_out
    is_active, is_full = is_active.any(axis=-1), is_full.all(axis=-1)  # [A, groups, I, J]
    if is_by_batch:
        return BlockMask(*(rearrange(array, "A groups I J -> (A groups) I J") for array in (is_active, is_full)))
    return BlockMask(is_active.any(axis=0), is_full.all(axis=0))


def _left_out_of_tiles(query: LeftOutBounds, key: LeftOutBounds, position: Range) -> tuple[Any, Any]:
    """Returns whether all pairs of two tiles are left out, and whether none is."""
    all_left_out, none_left_out = [], []
    if query.label is not None and key.label is not None:
        one, other = query.label, key.label
        is_one_label = (one.least == other.most) & (one.most == other.least)
        all_left_out.append(query.has_label & key.has_label & is_one_label)
        none_left_out.append((one.most < other.least) | (other.most < one.least))
    if query.first is not None and query.last is not None:
        all_left_out.append((query.first.most <= position.least) & (position.most <= query.last.least))
        none_left_out.append((position.most < query.first.least) | (query.last.most < position.least))
    return functools.reduce(jnp.logical_and, all_left_out), functools.reduce(jnp.logical_or, none_left_out)
