"""Attention of tiles of queries on tiles of keys: forward, backward, and the merging of partial results.

Knows no mesh and no pattern: what may attend to what is said by an interval of positions for each query and a position
for each key. Letters: I tiles of queries, J tiles of keys, B batch, C chunks that lie side by side, K key/value heads,
G query heads of one key/value head, R rows of a tile, H width of queries and keys, V width of values.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The position of a slot that holds no key: beyond every interval.
NOWHERE = jnp.iinfo(jnp.int32).max


class Visits(NamedTuple):
    """Which tiles of queries and of keys meet, and which of these no mask cuts; tiles of other groups never meet."""

    meets: Bool[Array, "groups I_of_group J_of_group"]
    is_whole: Bool[Array, "groups I_of_group J_of_group"]

    def of_queries(self) -> tuple[Array, Array, Array]:
        """Returns for each tile of queries the tiles of keys `start..stop` that it meets, and those that are whole."""
        groups, _, tiles = self.meets.shape
        first = jnp.arange(groups, dtype=jnp.int32)[:, None] * tiles
        stop = first + tiles - jnp.argmax(self.meets[..., ::-1], axis=-1)
        start = first + jnp.argmax(self.meets, axis=-1)
        stop = jnp.where(self.meets.any(axis=-1), stop, start)
        return start.reshape(-1), stop.reshape(-1), self.is_whole.reshape(-1, tiles)

    def of_keys(self) -> tuple[Array, Array, Array]:
        """Returns for each tile of keys the tiles of queries `start..stop` that it meets, and those that are whole."""
        return Visits(*(array.swapaxes(1, 2) for array in self)).of_queries()


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


class Gradients(NamedTuple):
    """Sums of gradients under way: without the scale, and of keys and values with their rows last."""

    query: Float[Array, "I B C K G Rq H"]
    key: Float[Array, "J B C K H Rk"]
    value: Float[Array, "J B C K V Rk"]


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


# Inside, a tile has as few dimensions as can be: *X are the batch and the key/value heads, those of them that are more
# than one, and the Q = G * Rq queries of one key/value head are one matrix. With dimensions of size one in between,
# XLA:CPU copies every tile of logits and fuses nothing with its products.


class _Folded(NamedTuple):
    """The arguments of a sweep: trees of tiles [I, *X, Q, ...] and [J, *X, Rk, ...], and their intervals."""

    queries: Any
    keys: Keys
    first: Int[Array, "I *X Q"]
    last: Int[Array, "I *X Q"]
    position: Int[Array, "J *X Rk"]
    visits: Visits


def _fold(queries: Any, keys: Keys, mask: Mask) -> _Folded:
    row = jax.tree.leaves(queries)[0][..., 0]  # [I, B, C, K, G, Rq]
    query_shape, key_shape = row.shape, keys.key.shape[:-1]
    lead = tuple(size for size in (key_shape[1] * key_shape[2], key_shape[3]) if size > 1)
    fold_queries = lambda array: array.reshape(query_shape[0], *lead, -1, *array.shape[6:])
    fold_keys = lambda array: array.reshape(key_shape[0], *lead, *array.shape[4:])
    spread_query = lambda array: fold_queries(jnp.broadcast_to(array[:, None, :, :, None], query_shape))
    return _Folded(
        jax.tree.map(fold_queries, queries),
        jax.tree.map(fold_keys, keys),
        spread_query(mask.first),
        spread_query(mask.last),
        fold_keys(jnp.broadcast_to(mask.position[:, None], key_shape)),
        mask.visits,
    )


def forward(query: Array, keys: Keys, mask: Mask, scale: float, partial: Partial) -> Partial:
    """Adds the attention of queries on the keys that the mask allows to a softmax under way; `scale` is positive."""
    shapes = jax.tree.map(jnp.shape, partial)
    (query, partial), keys, first, last, position, visits = _fold((query, partial), keys, mask)
    tiles_of_group = visits.meets.shape[2]

    def tile_of_queries(partials, tile):
        index, query, first, last, (start, stop, is_whole) = tile

        def tile_of_keys(j, partial):
            key, value = keys.key[j], keys.value[j]
            logits = lambda: _logits(query, key)
            whole = lambda partial: _add_logits(partial, logits(), value, scale)
            cut = lambda partial: _add_logits(partial, _masked(logits(), first, last, position[j]), value, scale)
            return jax.lax.cond(is_whole[j % tiles_of_group], whole, cut, partial)

        partial = jax.lax.fori_loop(start, stop, tile_of_keys, Partial(*(array[index] for array in partials)))
        return Partial(*(_put_at(array, index, tile) for array, tile in zip(partials, partial, strict=True))), None

    indices = jnp.arange(query.shape[0], dtype=jnp.int32)
    partial, _ = jax.lax.scan(tile_of_queries, partial, (indices, query, first, last, visits.of_queries()))
    return jax.tree.map(jnp.reshape, partial, Partial(*shapes))


def _logits(query: Float[Array, "*X Q H"], key: Float[Array, "*X Rk H"]) -> Float[Array, "*X Q Rk"]:
    # Not yet scaled: the scale is positive, so it can wait for passes over the logits that are made anyway.
    return jnp.einsum("...qh,...jh->...qj", query, key, preferred_element_type=accumulation_dtype(query, key))


def _masked(logits: Float[Array, "*X Q Rk"], first: Array, last: Array, position: Array) -> Float[Array, "*X Q Rk"]:
    position = position[..., None, :]  # [*X, 1, Rk]
    is_allowed = (first[..., None] <= position) & (position <= last[..., None])  # [*X, Q, Rk]
    return jnp.where(is_allowed, logits, -jnp.inf)


def _add_logits(
    partial: Partial, logits: Float[Array, "*X Q Rk"], value: Float[Array, "*X Rk V"], scale: float
) -> Partial:
    maximum = jnp.maximum(partial.maximum, logits.max(axis=-1) * scale)  # [*X, Q]
    # A row that has met no key yet has a maximum of -inf: shifting by 0 instead keeps -inf - -inf out.
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(logits * scale - shift[..., None])
    decay = jnp.exp(partial.maximum - shift)
    denominator = partial.denominator * decay + weights.sum(axis=-1)
    numerator = partial.numerator * decay[..., None] + jnp.einsum(
        "...qj,...jv->...qv", weights.astype(value.dtype), value, preferred_element_type=weights.dtype
    )
    return Partial(maximum, denominator, numerator)


def finish(partial: Partial) -> tuple[Float[Array, "I B C K G Rq V"], Float[Array, "I B C K G Rq"]]:
    """Returns the output and the lse of each row: zeros and -inf for a row that attends to nothing."""
    is_empty = partial.denominator == 0
    denominator = jnp.where(is_empty, 1, partial.denominator)
    return partial.numerator / denominator[..., None], partial.maximum + jnp.log(denominator)


def merge(
    outs: Sequence[Float[Array, "*rows V"]], lses: Sequence[Float[Array, "*rows"]]
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Returns the output and the lse of the softmax over the keys of partial results, each key of each counted."""
    maximum = functools.reduce(jnp.maximum, lses)
    shift = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = [jnp.exp(lse - shift) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    divisor = jnp.where(total == 0, 1, total)
    parts = [out * (weight / divisor)[..., None] for out, weight in zip(outs, weights, strict=True)]
    return functools.reduce(jnp.add, parts), maximum + jnp.log(divisor)


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


def start_gradients(queries: Queries, keys: Keys, step: Any = 0) -> Gradients:
    """Returns the gradients of nothing, for tiles of queries and of keys; `step` is the number of a loop around."""
    dtype = accumulation_dtype(*queries, *keys)
    # Zeros that depend on the loop, as far as compilers know: else these would keep an array of zeros through it.
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), dtype), step))
    zeros = lambda array: jnp.zeros_like(array, dtype) + zero
    # With rows last: else each tile of weights would have to be transposed for the product, not the queries beside it.
    return Gradients(zeros(queries.query), *(zeros(array.swapaxes(-1, -2)) for array in keys))


def backward(queries: Queries, keys: Keys, mask: Mask, scale: float, grads: Gradients) -> Gradients:
    """Adds what the allowed pairs contribute to sums of gradients under way."""
    shapes = jax.tree.map(jnp.shape, grads)
    (queries, query_grad), keys, first, last, position, visits = _fold((queries, grads.query), keys, mask)
    keys_grad = tuple(array.reshape(keys.key.shape[:-2] + array.shape[-2:]) for array in grads[1:])
    tiles_of_group = visits.meets.shape[1]

    def tile_of_keys(grads, tile):
        index, keys, position, (start, stop, is_whole) = tile

        def tile_of_queries(i, grads):
            query_grads, key_grad, value_grad = grads
            tile = jax.tree.map(lambda array: array[i], queries)
            logits = lambda: _logits(tile.query, keys.key)
            whole = lambda: _tile_gradients(tile, logits(), keys, scale)
            cut = lambda: _tile_gradients(tile, _masked(logits(), first[i], last[i], position), keys, scale)
            dq, dk, dv = jax.lax.cond(is_whole[i % tiles_of_group], whole, cut)
            return _put_at(query_grads, i, query_grads[i] + dq), key_grad + dk, value_grad + dv

        query_grads, *keys_grads = grads
        grads = query_grads, *(array[index] for array in keys_grads)
        query_grads, *keys_grad = jax.lax.fori_loop(start, stop, tile_of_queries, grads)
        put = lambda array, tile: _put_at(array, index, tile)
        return (query_grads, *map(put, keys_grads, keys_grad)), None

    indices = jnp.arange(position.shape[0], dtype=jnp.int32)
    tiles = indices, keys, position, visits.of_keys()
    (query_grad, *keys_grad), _ = jax.lax.scan(tile_of_keys, (query_grad, *keys_grad), tiles)
    return jax.tree.map(jnp.reshape, Gradients(query_grad, *keys_grad), Gradients(*shapes))


def finish_gradients(grads: Gradients, scale: float) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries, keys and values, laid out as these are."""
    return grads.query * scale, grads.key.swapaxes(-1, -2) * scale, grads.value.swapaxes(-1, -2)


def _put_at(array: Array, index: Array, tile: Array) -> Array:
    # In place: as an input and an output of a scan there would be two arrays, and a scatter would be serial on CPUs.
    return jax.lax.dynamic_update_index_in_dim(array, tile, index, axis=0)


def _tile_gradients(
    queries: Any, logits: Float[Array, "*X Q Rk"], keys: Any, scale: float
) -> tuple[Float[Array, "*X Q H"], Float[Array, "*X H Rk"], Float[Array, "*X V Rk"]]:
    query, out_grad, lse, delta = queries
    key, value = keys
    dtype = logits.dtype
    weights = jnp.exp(logits * scale - lse[..., None])  # [*X, Q, Rk]
    weights_grad = jnp.einsum("...qv,...jv->...qj", out_grad, value, preferred_element_type=dtype)
    # dS; its factor `scale` is left to the sums.
    logits_grad = (weights * (weights_grad - delta[..., None])).astype(jnp.result_type(query, key))
    weights = weights.astype(out_grad.dtype)
    value_grad = jnp.einsum("...qv,...qj->...vj", out_grad, weights, preferred_element_type=dtype)
    key_grad = jnp.einsum("...qh,...qj->...hj", query, logits_grad, preferred_element_type=dtype)
    query_grad = jnp.einsum("...qj,...jh->...qh", logits_grad, key, preferred_element_type=dtype)
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

    return Visits(meets.any(axis=-1), is_whole.all(axis=-1))  # [groups, I of a group, J of a group]
