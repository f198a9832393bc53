"""The implementation "xla": tiles of rows, masked where they must be, in any geometry and on any device.

Laid out as `_block` has them: queries [I, B, C, K, G, R, H], keys [J, B, C, K, R, H].
"""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Shaped

from ringjax import _block
from ringjax._block import Gradients, Keys, Partial, Queries, Weighting
from ringjax._meeting import Meeting, make_mask, see_keys, see_queries
from ringjax._side import Side

# Of an array that is laid out, the axis along which the slots of a shard follow each other.
SLOTS_AXIS = 0
IS_FUSED = False

__all__ = ["see_keys", "see_queries"]  # what masks need to know of rows, wherever they are

start, finish = _block.start, _block.finish
start_gradients, finish_gradients = _block.start_gradients, _block.finish_gradients


def lay_out(side: Side, rows: Shaped[Array, "B m K D"], groups: int | None = None) -> Array:
    """Cuts rows into tiles; those of queries with their groups G apart."""
    sizes = {"C": side.chunks_per_tile, "R": side.block_rows}
    if groups is None:
        return rearrange(rows, "B (I C R) K H -> I B C K R H", **sizes)
    return rearrange(rows, "B (I C R) K (G H) -> I B C K G R H", G=groups, **sizes)


def take_back(side: Side, tiles: Array, heads: int) -> Shaped[Array, "B m K D"]:
    """Undoes `lay_out`, given the number of key/value heads."""
    del side, heads
    if tiles.ndim == 6:
        return rearrange(tiles, "I B C K R H -> B (I C R) K H")
    return rearrange(tiles, "I B C K G R H -> B (I C R) K (G H)")


def of_queries(
    out: Float[Array, "*B n N V"], lse: Float[Array, "*B n N"], out_grad: Float[Array, "*B n N V"], lse_grad: Any
) -> tuple[Array, ...]:
    """Returns what the backward needs of each query, beside itself: arrays [*B, n, N, ...] of any width."""
    delta = jnp.einsum("...v,...v->...", out_grad, out, preferred_element_type=lse.dtype)
    if lse_grad is not None:
        delta -= lse_grad
    # A row that attends to nothing has weights exp(S - inf) = 0, whatever its cotangents are.
    attends = lse > -jnp.inf
    lse, delta = jnp.where(attends, lse, jnp.inf), jnp.where(attends, delta, 0)
    return out_grad, lse[..., None], delta[..., None]


def make_queries(query: Array, out_grad: Array, lse: Array, delta: Array) -> Queries:
    """Makes what `backward` takes, of arrays that are laid out."""
    return Queries(query, out_grad, lse[..., 0], delta[..., 0])


def forward(query: Array, keys: Keys, meeting: Meeting, weighting: Weighting, partial: Partial) -> Partial:
    """Adds the attention of queries on keys to a softmax under way."""
    return _block.forward(query, keys, make_mask(meeting), weighting, partial)


def backward(queries: Queries, keys: Keys, meeting: Meeting, weighting: Weighting, grads: Gradients) -> Gradients:
    """Adds what the pairs that meet contribute to sums of gradients under way."""
    return _block.backward(queries, keys, make_mask(meeting), weighting, grads)
