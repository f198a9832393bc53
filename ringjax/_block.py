"""Attention of tiles of queries on tiles of keys: forward, backward, and the merging of partial results.

Knows no mesh and no pattern: what may attend to what is said by an interval of positions for each query and a position
for each key. Letters: I tiles of queries, J tiles of keys, B batch, C chunks that lie side by side, K key/value heads,
G query heads of one key/value head, R rows of a tile, H width of queries and keys, V width of values.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The position of a slot that holds no key: beyond every interval.
NOWHERE = jnp.iinfo(jnp.int32).max


class Visits(NamedTuple):
    """For each tile of queries, the tiles of keys `start..stop` that it meets, and those that no mask cuts."""

    start: Int[Array, "I"]
    stop: Int[Array, "I"]
    is_whole: Bool[Array, "I J_of_group"]


class Mask(NamedTuple):
    """Query attends to key where ``first <= position <= last``; O is K, or 1 where all heads have the same rows."""

    first: Int[Array, "I C O Rq"]
    last: Int[Array, "I C O Rq"]
    position: Int[Array, "J C O Rk"]
    visits: Visits


class Partial(NamedTuple):
    """A softmax under way: the running maximum, denominator and numerator of each row."""

    maximum: Float[Array, "I B C K G Rq"]
    denominator: Float[Array, "I B C K G Rq"]
    numerator: Float[Array, "I B C K G Rq V"]


class Queries(NamedTuple):
    """What the backward needs of each row of queries; `lse` is +inf where the row attends to nothing."""

    query: Float[Array, "I B C K G Rq H"]
    out_grad: Float[Array, "I B C K G Rq V"]
    lse: Float[Array, "I B C K G Rq"]
    delta: Float[Array, "I B C K G Rq"]


class Keys(NamedTuple):
    """Rows of keys and values."""

    key: Float[Array, "J B C K Rk H"]
    value: Float[Array, "J B C K Rk V"]


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """Returns the dtype of sums over the arrays: float32 at least."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def start(query: Float[Array, "I B C K G Rq H"], value: Float[Array, "J B C K Rk V"]) -> Partial:
    """Returns the softmax of nothing, for tiles of queries."""
    row = jnp.zeros_like(query[..., 0], accumulation_dtype(query, value))  # [I, B, C, K, G, R]
    return Partial(row - jnp.inf, row, jnp.zeros_like(row[..., None], shape=(*row.shape, value.shape[-1])))


def forward(query: Array, keys: Keys, mask: Mask, scale: float, partial: Partial) -> Partial:
    """Adds the attention of all queries on all keys that the mask allows to a softmax under way."""
    tiles_of_group = mask.visits.is_whole.shape[1]

    def tile_of_queries(_, tile):
        query, first, last, (start, stop, is_whole), partial = tile

        def tile_of_keys(j, partial):
            key, value, interval = keys.key[j], keys.value[j], (first, last, mask.position[j])
            whole = lambda partial: _add_logits(partial, _logits(query, key, scale), value)
            cut = lambda partial: _add_logits(partial, _masked(_logits(query, key, scale), *interval), value)
            return jax.lax.cond(is_whole[j % tiles_of_group], whole, cut, partial)

        return None, jax.lax.fori_loop(start, stop, tile_of_keys, partial)

    return jax.lax.scan(tile_of_queries, None, (query, mask.first, mask.last, mask.visits, partial))[1]


def _logits(query: Float[Array, "B C K G Rq H"], key: Float[Array, "B C K Rk H"], scale: float) -> Array:
    logits = jnp.einsum("bckgqh,bckjh->bckgqj", query, key, preferred_element_type=accumulation_dtype(query, key))
    return logits * scale


def _masked(logits: Float[Array, "B C K G Rq Rk"], first: Array, last: Array, position: Array) -> Array:
    position = position[:, :, None, :]  # [C, K, 1, Rk]
    allowed = (first[..., None] <= position) & (position <= last[..., None])  # [C, K, Rq, Rk]
    return jnp.where(allowed[:, :, None], logits, -jnp.inf)


def _add_logits(partial: Partial, logits: Float[Array, "B C K G Rq Rk"], value: Float[Array, "B C K Rk V"]) -> Partial:
    maximum = jnp.maximum(partial.maximum, logits.max(axis=-1))  # [B, C, K, G, Rq]
    # A row that has met no key yet has a maximum of -inf: shifting by 0 instead keeps -inf - -inf out.
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(logits - shift[..., None])
    decay = jnp.exp(partial.maximum - shift)
    denominator = partial.denominator * decay + weights.sum(axis=-1)
    numerator = partial.numerator * decay[..., None] + jnp.einsum(
        "bckgqj,bckjv->bckgqv", weights.astype(value.dtype), value, preferred_element_type=weights.dtype
    )
    return Partial(maximum, denominator, numerator)


def finish(partial: Partial) -> tuple[Float[Array, "I B C K G Rq V"], Float[Array, "I B C K G Rq"]]:
    """Returns the output and the lse of each row: zeros and -inf for a row that attends to nothing."""
    is_empty = partial.denominator == 0
    denominator = jnp.where(is_empty, 1, partial.denominator)
    return partial.numerator / denominator[..., None], partial.maximum + jnp.log(denominator)


def merge(
    out: Float[Array, "*rows V"], lse: Float[Array, "*rows"], other_out: Array, other_lse: Array
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Returns the output and the lse of the softmax over the keys of two partial results, each key of both counted."""
    maximum = jnp.maximum(lse, other_lse)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weight, other_weight = jnp.exp(lse - shift), jnp.exp(other_lse - shift)
    total = weight + other_weight
    divisor = jnp.where(total == 0, 1, total)
    merged = out * (weight / divisor)[..., None] + other_out * (other_weight / divisor)[..., None]
    return merged, maximum + jnp.log(divisor)


# The backward. With L the global lse of a row, P = exp(S - L) are its weights over all keys of all branches, wherever
# those were computed: out = sum_s P v_s with sum_s P = 1, and L = log sum_s exp(S). For cotangents g of out and l of L,
#
#     dv_s = sum_t P_ts g_t                              out is linear in v
#     dP_ts = g_t . v_s
#     dS_ts = P_ts (dP_ts - sum_u P_tu dP_tu) + P_ts l_t  the softmax's Jacobian, and dL/dS = P
#           = P_ts (dP_ts - delta_t),                    delta_t = g_t . out_t - l_t
#     dq_t = scale sum_s dS_ts k_s,   dk_s = scale sum_t dS_ts q_t
#
# because sum_u P_tu dP_tu = g_t . sum_u P_tu v_u = g_t . out_t. Each term needs one pair (t, s) and the row's own L and
# delta: the sums may be cut over branches, tiles and devices in any way, and a pair of two branches counts twice.


def backward(queries: Queries, keys: Keys, mask: Mask, scale: float) -> tuple[Array, Keys]:
    """Returns what the allowed pairs add to the gradients: that of the queries, and those of the keys and values."""
    tiles_of_group = mask.visits.is_whole.shape[1]
    dtype = accumulation_dtype(*queries, *keys)

    def tile_of_queries(keys_grad, tile):
        tile_queries, first, last, (start, stop, is_whole) = tile

        def tile_of_keys(j, grads):
            query_grad, keys_grad = grads
            tile_keys, interval = Keys(keys.key[j], keys.value[j]), (first, last, mask.position[j])
            logits = lambda: _logits(tile_queries.query, tile_keys.key, scale)
            whole = lambda: _tile_gradients(tile_queries, logits(), tile_keys, scale)
            cut = lambda: _tile_gradients(tile_queries, _masked(logits(), *interval), tile_keys, scale)
            dq, dk, dv = jax.lax.cond(is_whole[j % tiles_of_group], whole, cut)
            return query_grad + dq, Keys(_add_at(keys_grad.key, j, dk), _add_at(keys_grad.value, j, dv))

        query_grad = jnp.zeros_like(tile_queries.query, dtype)
        query_grad, keys_grad = jax.lax.fori_loop(start, stop, tile_of_keys, (query_grad, keys_grad))
        return keys_grad, query_grad

    # The gradients of keys and values are summed with their rows last: the other way around, each tile of weights would
    # have to be transposed for the product, here the narrow tile of queries is.
    transpose = lambda keys: Keys(*(array.swapaxes(-1, -2) for array in keys))
    keys_grad = transpose(Keys(*(jnp.zeros_like(array, dtype) for array in keys)))
    keys_grad, query_grad = jax.lax.scan(tile_of_queries, keys_grad, (queries, mask.first, mask.last, mask.visits))
    return query_grad, transpose(keys_grad)


def _add_at(array: Array, index: Array, addend: Array) -> Array:
    # A slice read and written back stays in place; as a scatter it would be serial on CPUs.
    return jax.lax.dynamic_update_index_in_dim(array, array[index] + addend, index, axis=0)


def _tile_gradients(queries: Queries, logits: Array, keys: Keys, scale: float) -> tuple[Array, Array, Array]:
    query, out_grad, lse, delta = queries
    key, value = keys
    dtype = logits.dtype
    weights = jnp.exp(logits - lse[..., None])  # [B, C, K, G, Rq, Rk]
    weights_grad = jnp.einsum("bckgqv,bckjv->bckgqj", out_grad, value, preferred_element_type=dtype)
    logits_grad = (weights * (weights_grad - delta[..., None]) * scale).astype(jnp.result_type(query, key))
    weights = weights.astype(out_grad.dtype)
    value_grad = jnp.einsum("bckgqv,bckgqj->bckvj", out_grad, weights, preferred_element_type=dtype)
    key_grad = jnp.einsum("bckgqh,bckgqj->bckhj", query, logits_grad, preferred_element_type=dtype)
    query_grad = jnp.einsum("bckgqj,bckjh->bckgqh", logits_grad, key, preferred_element_type=dtype)
    return query_grad, key_grad, value_grad


def find_visits(
    first: Int[Array, "I C O Rq"], last: Int[Array, "I C O Rq"], position: Int[Array, "J C O Rk"], groups: int
) -> Visits:
    """Returns which tiles meet, of tiles that lie in `groups` apart from each other on both sides.

    A tile of keys is left out where no interval reaches one of its positions, and whole where every interval holds all.
    """

    def bounds(array: Array, reduce: Callable[..., Array]) -> Array:
        return reduce(array, axis=(2, 3)).reshape(groups, -1, array.shape[1])  # [groups, tiles of a group, C]

    def compare(queries: Array, keys: Array, comparison: Callable[..., Array]) -> Array:
        return comparison(queries[:, :, None], keys[:, None])  # [groups, I of a group, J of a group, C]

    nearest = bounds(position, jnp.min)
    farthest = bounds(jnp.where(position == NOWHERE, -1, position), jnp.max)
    meets = compare(bounds(first, jnp.min), farthest, jnp.less_equal)
    meets &= compare(bounds(last, jnp.max), nearest, jnp.greater_equal)
    is_whole = compare(bounds(first, jnp.max), nearest, jnp.less_equal)
    is_whole &= compare(bounds(last, jnp.min), bounds(position, jnp.max), jnp.greater_equal)

    meets = meets.any(axis=-1)  # [groups, I of a group, J of a group]
    tiles = meets.shape[-1]
    begin = jnp.arange(groups, dtype=jnp.int32)[:, None] * tiles
    begin, end = begin + jnp.argmax(meets, axis=-1), begin + tiles - jnp.argmax(meets[..., ::-1], axis=-1)
    end = jnp.where(meets.any(axis=-1), end, begin)
    return Visits(begin.reshape(-1), end.reshape(-1), is_whole.all(axis=-1).reshape(-1, tiles))
