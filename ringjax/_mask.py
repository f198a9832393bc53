"""The mask of tiles: which pairs of queries and keys attend, pair by pair, and which tiles meet at all.

Knows no mesh and no pattern: an interval of positions and some labels of each query, a position and some labels of each
key. Letters: I tiles of queries, J tiles of keys, B batch, A the batches that masks tell apart, C chunks that lie side
by side, K key/value heads, O the heads that masks tell apart, G query heads of one key/value head, R rows of a tile.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, UInt

# The position of a slot that holds no key: beyond every interval.
NOWHERE = jnp.iinfo(jnp.int32).max


class Visits(NamedTuple):
    """Which tiles of queries and of keys meet, and which of these no mask cuts; tiles of other groups never meet."""

    meets: Bool[Array, "groups I_of_group J_of_group"]
    is_whole: Bool[Array, "groups I_of_group J_of_group"]

    NOTHING, CUT, WHOLE = range(3)  # the cases of two tiles

    def of_queries(self) -> tuple[Array, Array, Array]:
        """Returns for each tile of queries the tiles of keys `start..stop` that it may meet, and the case of each."""
        groups, _, tiles = self.meets.shape
        first = jnp.arange(groups, dtype=jnp.int32)[:, None] * tiles
        stop = first + tiles - jnp.argmax(self.meets[..., ::-1], axis=-1)
        start = first + jnp.argmax(self.meets, axis=-1)
        stop = jnp.where(self.meets.any(axis=-1), stop, start)
        cases = self.meets.astype(jnp.int32) + (self.meets & self.is_whole)
        return start.reshape(-1), stop.reshape(-1), cases.reshape(-1, tiles)

    def of_keys(self) -> tuple[Array, Array, Array]:
        """Returns for each tile of keys the tiles of queries `start..stop` that it may meet, and the case of each."""
        return Visits(*(array.swapaxes(1, 2) for array in self)).of_queries()


class QueryMask(NamedTuple):
    """What each query attends to: keys at ``first <= position <= last`` with its `document` and other `segments`.

    Each of the `segments` is the query's in another branch. `stream` is the start and the step of its dropout. Here A
    is B, or 1 where all batches are the same, and O is K, or 1 where all heads are.
    """

    first: Int[Array, "I A C O Rq"]
    last: Int[Array, "I A C O Rq"]
    document: Int[Array, "I B C O Rq"] | None = None
    segments: tuple[Int[Array, "I 1 C O Rq"], ...] = ()
    stream: tuple[UInt[Array, "I B C K G Rq"], ...] = ()


class KeyMask(NamedTuple):
    """Which queries attend to each key, see `QueryMask`; `position` also numbers its weights for dropout."""

    position: Int[Array, "J A C O Rk"]
    document: Int[Array, "J B C O Rk"] | None = None
    segments: tuple[Int[Array, "J 1 C O Rk"], ...] = ()


class Mask(NamedTuple):
    """Which queries attend to which keys; tiles of one batch alone where `is_by_batch`, its groups after each other."""

    queries: QueryMask
    keys: KeyMask
    visits: Visits
    is_by_batch: bool = False


def masked(scores: Float[Array, "*X Q Rk"], of_queries: QueryMask, of_keys: KeyMask) -> Float[Array, "*X Q Rk"]:
    """Returns the scores of pairs that attend, and minus infinity for the others."""
    position = of_keys.position[..., None, :]  # [*X, 1, Rk]
    is_allowed = (of_queries.first[..., None] <= position) & (position <= of_queries.last[..., None])  # [*X, Q, Rk]
    if of_queries.document is not None and of_keys.document is not None:
        is_allowed &= of_queries.document[..., None] == of_keys.document[..., None, :]
    for query, key in zip(of_queries.segments, of_keys.segments, strict=True):
        is_allowed &= query[..., None] != key[..., None, :]
    return jnp.where(is_allowed, scores, -jnp.inf)


def find_visits(of_queries: QueryMask, of_keys: KeyMask, num_groups: int, is_by_batch: bool = False) -> Visits:
    """Returns which tiles meet, of tiles that lie in so many groups apart from each other on both sides.

    A tile of keys is left out where no interval reaches one of its positions, where no document is on both sides, or
    where all rows are in one segment of an earlier branch. It is whole where nothing masks a pair.
    """

    def bound(reduce: Callable[..., Array], array: Array, axis: int) -> Array:
        bounds = rearrange(reduce(array, axis=(3, 4)), "(groups I) A C -> A groups I C", groups=num_groups)
        return jnp.expand_dims(bounds, axis)  # [A, groups, I, 1, C], or [A, groups, 1, J, C]

    def label_range(labels: Array, is_label: Array, axis: int) -> tuple[Array, Array]:
        most = jnp.iinfo(labels.dtype).max
        return bound(jnp.min, jnp.where(is_label, labels, most), axis), bound(
            jnp.max, jnp.where(is_label, labels, -1), axis
        )

    first, last, position = of_queries.first, of_queries.last, of_keys.position
    is_query, is_key = first != NOWHERE, position != NOWHERE
    nearest, farthest = label_range(position, is_key, 2)
    meets = (bound(jnp.min, first, 3) <= farthest) & (bound(jnp.max, last, 3) >= nearest)
    is_whole = (bound(jnp.max, first, 3) <= nearest) & (bound(jnp.min, last, 3) >= bound(jnp.max, position, 2))
    if of_queries.document is not None and of_keys.document is not None:
        least, greatest = label_range(of_queries.document, is_query, 3)
        key_least, key_greatest = label_range(of_keys.document, is_key, 2)
        meets &= (least <= key_greatest) & (key_least <= greatest)
        is_whole &= (least == key_greatest) & (greatest == key_least)
    for query, key in zip(of_queries.segments, of_keys.segments, strict=True):
        least, greatest = label_range(query, query >= 0, 3)
        key_least, key_greatest = label_range(key, key >= 0, 2)
        is_one_segment = (bound(jnp.min, query, 3) == key_greatest) & (bound(jnp.min, key, 2) == greatest)
        meets &= ~is_one_segment
        is_whole &= (greatest < key_least) | (key_greatest < least)
    meets, is_whole = meets.any(axis=-1), is_whole.all(axis=-1)  # [A, groups, I, J]
    if is_by_batch:
        return Visits(*(rearrange(array, "A groups I J -> (A groups) I J") for array in (meets, is_whole)))
    return Visits(meets.any(axis=0), is_whole.all(axis=0))
