"""Decoding with keys and values that the caller keeps: each device attends to its own rows, and results are merged.

B batch, c queries of each sequence, n rows of a shard, R of them that queries may see, K key/value heads, G query heads
of each, k either K or 1.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ringjax._decoding.decode import DecodedBranch, Decoder, merge_all


@functools.partial(jax.jit, static_argnums=0)
def attend_cached(
    decoder: Decoder,
    query: Float[Array, "*B c N H"],
    keys: Float[Array, "*B S K H"],
    values: Float[Array, "*B S K V"],
    lengths: Int[Array, "*B"],
    starts: Int[Array, "*B"],
) -> tuple[Float[Array, "*B c N V"], Float[Array, "*B c N"]]:
    """Returns the attention of the last c rows before each of `lengths`; positions count from `starts`."""
    placement = decoder.placement
    arrays = [placement.lay_out(array, "k") for array in (keys, values)]
    bounds = [placement.reshard(array[..., None], "D") for array in (lengths, starts)]  # [*B, 1]
    attend = functools.partial(_attend_shard, decoder)
    return placement.map(attend, inputs="QkkDD", outputs="QQ")(placement.reshard(query, "Q"), *arrays, *bounds)


def _attend_shard(
    decoder: Decoder, query: Array, keys: Array, values: Array, lengths: Array, starts: Array
) -> tuple[Array, Array]:
    (count, num_heads), num_kv_heads = query.shape[-3:-1], keys.shape[-2]
    grouped = query.reshape(*query.shape[:-2], num_kv_heads, num_heads // num_kv_heads, query.shape[-1])
    ends = lengths - starts  # [*B, 1], of positions
    token = ends - count + jnp.arange(count, dtype=jnp.int32)  # [*B, c]
    first = decoder.shard * keys.shape[-3] - starts  # [*B, 1], the position of the shard's first row
    parts = []
    for branch in decoder.branches():
        own = [array[..., branch.heads, :] for array in (keys, values)]
        rows = _take_recent(branch, token[..., -1:], count, first, *own)
        key, value, key_token = rows
        is_key = (key_token >= 0) & (key_token < ends[..., None]) & _is_here(key_token, first, keys.shape[-3])
        parts.append(decoder.attend_branch(branch, grouped, token, key, value, key_token, is_key))
    out, lse = decoder.over_shards(*merge_all(parts))
    out, lse = out.reshape(*query.shape[:-1], values.shape[-1]), lse.reshape(query.shape[:-1])  # [*B, c, N, V]
    is_query = token[..., None] >= 0
    return jnp.where(is_query[..., None], out, 0), jnp.where(is_query, lse, -jnp.inf)


def _is_here(token: Array, first: Array, length: int) -> Array:
    local = token - first[..., None]
    return (local >= 0) & (local < length)


def _take_recent(
    branch: DecodedBranch,
    last: Int[Array, "*B 1"],
    count: int,
    first: Int[Array, "*B 1"],
    keys: Float[Array, "*B n K H"],
    values: Float[Array, "*B n K V"],
) -> tuple[Float[Array, "*B R K H"], Float[Array, "*B R K V"], Int[Array, "*B k R"]]:
    """Returns the rows of a shard that the last queries may see in a branch, and their positions."""
    length = keys.shape[-3]
    of_heads = branch.branch.offset_rate > 1
    offset = branch.offset[:, 0] if of_heads else branch.offset[:1, 0]
    low = jnp.maximum(first, 0)
    token = branch.branch.recent(last, count, low, length, offset)  # [*B, k, R]
    if token is None:
        return keys, values, first[..., None] + jnp.arange(length, dtype=jnp.int32)
    index = jnp.clip(token - first[..., None], 0, length - 1).swapaxes(-2, -1)[..., None]  # [*B, R, k, 1]
    take = lambda array: jnp.take_along_axis(array, index, axis=-3, mode="promise_in_bounds")
    return take(keys), take(values), token
