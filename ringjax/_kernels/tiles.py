"""Attention of tiles of queries on tiles of keys in plain products, for XLA: forward and backward.

Independent of mesh and pattern: a mask says which pairs attend. Letters: I tiles of queries, J tiles of keys, B batch,
C chunks side by side, K key/value heads, G query heads of one key/value head, R rows of a tile, H width of queries and
keys, V width of values.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax._kernels.mask import KeyMask, Mask, QueryMask, masked
from ringjax._kernels.softmax import Keys, Queries, Weighting, accumulation_dtype, divisor_of, shift_of
from ringjax._pattern import dropout


class Partial(NamedTuple):
    """A partial (online) softmax: the running maximum, denominator and numerator of each row."""

    maximum: Float[Array, "I B C K G Rq"]
    denominator: Float[Array, "I B C K G Rq"]
    numerator: Float[Array, "I B C K G Rq V"]


class Gradients(NamedTuple):
    """Partial sums of gradients, without the scale; those of keys and values have their rows last."""

    query: Float[Array, "I B C K G Rq H"]
    key: Float[Array, "J B C K H Rk"]
    value: Float[Array, "J B C K V Rk"]


def start(query: Float[Array, "I B C K G Rq H"], keys: Keys) -> Partial:
    """Returns an empty partial softmax, for tiles of queries."""
    row = jnp.zeros_like(query[..., 0], accumulation_dtype(query, *keys))  # [I, B, C, K, G, R]
    return Partial(row - jnp.inf, row, jnp.zeros_like(row[..., None], shape=(*row.shape, keys.value.shape[-1])))


# Inside, a tile has as few dimensions as possible: *X are the batch and the key/value heads, without those of size one,
# and the Q = G * Rq queries of one key/value head are one matrix. With dimensions of size one in between, XLA:CPU
# copies every tile of logits and fuses nothing with its products.


class _Collapse(NamedTuple):
    """Folds tiles [I, B, C, ...] into tiles [I, *X, ...], or, if `is_by_batch`, into tiles [B * I, *X, ...]."""

    lead: tuple[Any, ...]
    is_by_batch: bool

    def queries(self, array: Array) -> Array:
        groups, rows, *rest = array.shape[4:]
        return self._collapse(array, groups * rows, *rest)

    def keys(self, array: Array) -> Array:
        return self._collapse(array, *array.shape[4:])

    def undo(self, array: Array, shape: tuple[Any, ...]) -> Array:
        if not self.is_by_batch:
            return array.reshape(shape)
        return array.reshape(shape[1], shape[0], *shape[2:]).swapaxes(0, 1)

    def _collapse(self, array: Array, *rows: Any) -> Array:
        tiles, batches = array.shape[:2]
        if self.is_by_batch:
            return array.swapaxes(0, 1).reshape(batches * tiles, *self.lead, *rows)
        return array.reshape(tiles, *self.lead, *rows)


def _collapse_mask(query: Array, keys: Keys, mask: Mask) -> tuple[_Collapse, QueryMask, KeyMask]:
    """Returns how the tiles of a mask are folded, and the folded mask."""
    query_shape, key_shape = query.shape[:-1], keys.key.shape[:-1]
    _, batches, chunks, heads, *_ = key_shape
    sizes = chunks * (1 if mask.is_by_batch else batches), heads
    collapse = _Collapse(tuple(size for size in sizes if size != 1), mask.is_by_batch)
    of_groups = lambda array: array if array.ndim == len(query_shape) else array[:, :, :, :, None]
    return (
        collapse,
        jax.tree.map(lambda array: collapse.queries(jnp.broadcast_to(of_groups(array), query_shape)), mask.queries),
        jax.tree.map(lambda array: collapse.keys(jnp.broadcast_to(array, key_shape)), mask.keys),
    )


# Jitted, so that a program has each as one function, which rings call several times, with other arrays. Full blocks are
# masked as well: masking is hidden in the passes over the logits, and a second path without it would take as long again
# to compile.


@functools.partial(jax.jit, static_argnames="weighting")
def forward(query: Array, keys: Keys, mask: Mask, weighting: Weighting, partial: Partial) -> Partial:
    """Adds the attention of queries on the keys that the mask allows to a partial softmax."""
    shapes = jax.tree.map(jnp.shape, partial)
    collapse, query_mask, key_mask = _collapse_mask(query, keys, mask)
    query, partial = jax.tree.map(collapse.queries, (query, partial))
    keys = jax.tree.map(collapse.keys, keys)
    multiply = _product(weighting, query, *keys)

    def tile_of_queries(partials, tile):
        index, query, query_mask, active = tile

        def tile_of_keys(j, partial):
            tile_keys, tile_mask = _at((keys, key_mask), active.number(j))
            kept = _kept(query_mask, tile_mask, weighting)

            def add(partial: Partial) -> Partial:
                product = multiply("...qh,...jh->...qj", query, tile_keys.key)
                scores = masked(weighting.scores(product), query_mask, tile_mask)
                maximum = jnp.maximum(partial.maximum, scores.max(axis=-1) * weighting.logit_scale)  # [*X, Q]
                shift = shift_of(maximum)
                weights = jnp.exp(scores * weighting.logit_scale - shift[..., None])
                decay = jnp.exp(partial.maximum - shift)
                denominator = partial.denominator * decay + weights.sum(axis=-1)
                added = multiply("...qj,...jv->...qv", kept(weights).astype(tile_keys.value.dtype), tile_keys.value)
                return Partial(maximum, denominator, partial.numerator * decay[..., None] + added)

            return jax.lax.cond(_at(active.is_active, j), add, lambda partial: partial, partial)

        partial = jax.lax.fori_loop(active.start, active.stop, tile_of_keys, _at(partials, index))
        return _put_at(partials, index, partial), None

    indices = jnp.arange(query.shape[0], dtype=jnp.int32)
    tiles = indices, query, query_mask, mask.blocks.of_queries()
    partial, _ = jax.lax.scan(tile_of_queries, partial, tiles)
    return jax.tree.map(collapse.undo, partial, Partial(*shapes))


def _product(weighting: Weighting, *arrays: Array) -> Callable[..., Array]:
    """Returns an einsum that accumulates products of these arrays in the dtype of sums."""
    dtype = accumulation_dtype(*arrays)
    return functools.partial(jnp.einsum, precision=weighting.precision, preferred_element_type=dtype)


def _kept(of_queries: QueryMask, of_keys: KeyMask, weighting: Weighting) -> Callable[[Array], Array]:
    """Returns a function that zeroes what belongs to dropped weights of a tile, and scales up the rest."""

    def drop(array: Array) -> Array:
        start, step = (word[..., None] for word in of_queries.stream)
        is_kept = dropout.is_kept(start, step, of_keys.position[..., None, :], weighting.dropout_rate)
        return jnp.where(is_kept, array * weighting.kept_scale, 0)

    return drop if weighting.dropout_rate else lambda array: array


def finish(partial: Partial) -> tuple[Float[Array, "I B C K G Rq V"], Float[Array, "I B C K G Rq"]]:
    """Returns the output and the lse of each row: zeros and -inf for a row that attends to nothing."""
    divisor = divisor_of(partial.denominator)
    return partial.numerator / divisor[..., None], partial.maximum + jnp.log(divisor)


# The backward, which `_kernels.softmax` derives.


def start_gradients(queries: Queries, keys: Keys, zeros: Sequence[Array], **given: Array) -> Gradients:
    """Returns the gradients to add to, for tiles of queries and of keys: those given; others start as `zeros`."""
    # Keys' rows are last, so that products transpose the tile's queries, not its weights.
    last = lambda array: (*array.shape[:-2], array.shape[-1], array.shape[-2])
    shapes = {"query": queries.query.shape, "key": last(keys.key), "value": last(keys.value)}
    begin = lambda shape, zero: jnp.zeros_like(queries.query, zero.dtype, shape) + zero
    starts = {name: begin(shape, zero) for (name, shape), zero in zip(shapes.items(), zeros, strict=True)}
    return Gradients(**(starts | given))


@functools.partial(jax.jit, static_argnames="weighting")
def backward(queries: Queries, keys: Keys, mask: Mask, weighting: Weighting, grads: Gradients) -> Gradients:
    """Adds the contributions of the allowed pairs to sums of gradients."""
    shapes = jax.tree.map(jnp.shape, grads)
    collapse, query_mask, key_mask = _collapse_mask(queries.query, keys, mask)
    queries, query_grad = jax.tree.map(collapse.queries, (queries, grads.query))
    keys, keys_grad = jax.tree.map(collapse.keys, (keys, tuple(grads[1:])))

    def tile_of_keys(grads, tile):
        index, keys, key_mask, active = tile

        def tile_of_queries(i, grads):
            query_grads, key_grad, value_grad = grads
            number = active.number(i)
            tile_queries, tile_mask, query_grad = _at((queries, query_mask, query_grads), number)
            kept = _kept(tile_mask, key_mask, weighting)
            hide = lambda scores: masked(scores, tile_mask, key_mask)
            zeros = lambda: jax.tree.map(jnp.zeros_like, (query_grad, key_grad, value_grad))
            added = lambda: _tile_gradients(tile_queries, keys, hide, kept, weighting)
            dq, dk, dv = jax.lax.cond(_at(active.is_active, i), added, zeros)
            return _put_at(query_grads, number, query_grad + dq), key_grad + dk, value_grad + dv

        query_grads, *keys_grads = grads
        grads = query_grads, *_at(keys_grads, index)
        query_grads, *keys_grad = jax.lax.fori_loop(active.start, active.stop, tile_of_queries, grads)
        return (query_grads, *_put_at(keys_grads, index, keys_grad)), None

    indices = jnp.arange(keys.key.shape[0], dtype=jnp.int32)
    tiles = indices, keys, key_mask, mask.blocks.of_keys()
    (query_grad, *keys_grad), _ = jax.lax.scan(tile_of_keys, (query_grad, *keys_grad), tiles)
    return jax.tree.map(collapse.undo, Gradients(query_grad, *keys_grad), Gradients(*shapes))


def finish_gradients(grads: Gradients, weighting: Weighting) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries, keys and values, laid out as these are."""
    scale = weighting.scale
    return grads.query * scale, grads.key.swapaxes(-1, -2) * scale, grads.value.swapaxes(-1, -2)


# Indexing in few operations: in each of many places, jax's own operators would add the case of a negative index.


def _at(tiles: Any, index: Array) -> Any:
    rest = index - index

    def at(array: Array) -> Array:
        starts = (index, *[rest] * (array.ndim - 1))
        tile = jax.lax.dynamic_slice(array, starts, (1, *array.shape[1:]), allow_negative_indices=False)
        return jax.lax.squeeze(tile, (0,))

    return jax.tree.map(at, tiles)


def _put_at(tiles: Any, index: Array, tile: Any) -> Any:
    rest = index - index

    # Updates in place: an input and an output of a scan would be two arrays, and a scatter would be serial on CPUs.
    def put(array: Array, tile: Array) -> Array:
        starts = (index, *[rest] * tile.ndim)
        return jax.lax.dynamic_update_slice(array, tile[None], starts, allow_negative_indices=False)

    return jax.tree.map(put, tiles, tile)


def _tile_gradients(
    queries: Any, keys: Any, hide: Callable[[Array], Array], kept: Callable[[Array], Array], weighting: Weighting
) -> tuple[Float[Array, "*X Q H"], Float[Array, "*X H Rk"], Float[Array, "*X V Rk"]]:
    query, out_grad, lse, delta = queries
    key, value = keys
    multiply = _product(weighting, query, key, value)
    scores = weighting.scores(multiply("...qh,...jh->...qj", query, key))
    weights = jnp.exp(hide(scores) * weighting.logit_scale - lse[..., None])  # [*X, Q, Rk]
    weights_grad = kept(multiply("...qv,...jv->...qj", out_grad, value))
    # dx without its factor `scale`, which is applied to the sums.
    logits_grad = weights * (weights_grad - delta[..., None])
    if weighting.logits_soft_cap is not None:
        logits_grad *= 1 - scores**2
    logits_grad = logits_grad.astype(jnp.result_type(query, key))
    weights = kept(weights).astype(out_grad.dtype)
    value_grad = multiply("...qv,...qj->...vj", out_grad, weights)
    key_grad = multiply("...qh,...qj->...hj", query, logits_grad)
    query_grad = multiply("...qj,...jh->...qh", logits_grad, key)
    return query_grad, key_grad, value_grad
