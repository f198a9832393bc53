"""The attention weights of a few query rows, for pictures; no ring keeps them, so they are computed for these rows.

N query heads, K key/value heads, G query heads of each; R rows of queries.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ringjax._kernels.softmax import accumulation_dtype, divisor_of, shift_of
from ringjax._mesh.axes import AxisName, named
from ringjax._mesh.mesh import check_axis_name
from ringjax._mesh.sharded import take_whole
from ringjax._pattern.arguments import check_arrays, check_positions, read_documents
from ringjax._pattern.option import read_options, taking
from ringjax._pattern.options import WeightsOptions, pattern_of
from ringjax._pattern.other_names import OF_FUNCTION
from ringjax._pattern.pattern import DilatedPattern
from ringjax._pattern.promotion import own_promotion
from ringjax._pattern.sinks import read_sinks


class _Meaning(NamedTuple):
    """The static arguments of a call."""

    pattern: DilatedPattern
    is_causal: bool
    scale: float
    query_offset: int
    logits_soft_cap: float | None


@own_promotion()
@taking(WeightsOptions)
def attention_weights(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    rows: Sequence[int] | Int[Array | np.ndarray, "R"],
    *,
    axis_name: AxisName = "seq",
    **options: Unpack[WeightsOptions],
) -> Float[Array, "*B N R S"]:
    """Returns the weights with which some rows of :func:`ring_dilated_attention` attend to all keys.

    It takes O(R S) memory and time: use it to show what a token attends to, not for training. On a mesh the weights are
    sharded along the keys as `key` is.

    Args:
      query: [..., T, N, H], all queries; or the chunk of them that begins at `query_offset`.
      key: [..., S, K, H], all keys.
      rows: the numbers of R queries, from 0 to T - 1.
      axis_name: the mesh axis that the sequence is sharded along, or several; inside a shard_map over them, the call is
        an error.
      **options: as :func:`ring_dilated_attention` takes them.

    Returns:
      [..., N, R, S] in float32 at least, before dropout. The weights of a row sum to 1, or to less with a sink, and are
      zero if the row attends to nothing. The rows of the output are
      ``jnp.einsum("...nrs,...snv->...rnv", weights, value)``.

    Raises:
      ValueError: for rows that do not exist, shapes that disagree, and a wrong pattern; and inside a shard_map over the
        sequence.
      TypeError: for arguments of another dtype.

    Example:
      >>> q = k = jnp.ones((1, 8, 2, 4))
      >>> attention_weights(q, k, [5], segment_lengths=(4,), dilation_rates=(1,), is_causal=True)[0, 0, 0].tolist()
      [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    """
    asked = read_options(WeightsOptions, options, OF_FUNCTION, "attention_weights")
    check_arrays(query, key, key)
    check_axis_name("axis_name", axis_name)
    if {*named(axis_name)} & {*jax.sharding.get_abstract_mesh().manual_axes}:
        raise ValueError(f"attention_weights inside a shard_map over {axis_name!r} sees one shard: call it outside")
    if isinstance(asked.query_offset, Tracer):
        raise TypeError("query_offset is traced: attention_weights takes an integer, known when the call is traced")
    offset = int(asked.query_offset)
    check_positions(query.shape[-3], key.shape[-3], offset)
    documents, sinks = read_documents(asked.document_ids, query, key), read_sinks(asked.sinks, query)
    rows = _read_rows(rows, query.shape[-3])
    scale = 1 / math.sqrt(query.shape[-1]) if asked.scale is None else float(asked.scale)
    meaning = _Meaning(pattern_of(asked), bool(asked.is_causal), scale, offset, asked.logits_soft_cap)
    return _weigh(query, key, rows, documents, sinks, meaning)


def _read_rows(rows: Any, length: int) -> Int[Array, "R"]:
    """Returns the numbers of rows.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    is_known = not isinstance(rows, Tracer)
    rows = np.asarray(rows) if is_known else rows
    if rows.ndim != 1 or not (jnp.issubdtype(rows.dtype, jnp.integer) and rows.size):
        shown = rows.tolist() if is_known else rows
        raise TypeError(f"rows={shown!r} must be the numbers of some queries, such as [0]")
    if is_known and (rows.min() < 0 or rows.max() >= length):
        raise ValueError(f"rows={rows.tolist()!r} must be between 0 and {length - 1}: query has {length} rows")
    return jnp.asarray(rows, jnp.int32)


@functools.partial(jax.jit, static_argnames="meaning")
def _weigh(
    query: Array, key: Array, rows: Array, documents: tuple[Any, Any], sinks: Array | None, meaning: _Meaning
) -> Array:
    num_kv_heads, dtype = key.shape[-2], accumulation_dtype(query, key)
    groups = query.shape[-2] // num_kv_heads
    some = take_whole(query, rows, -3, num_kv_heads)  # [..., R, N, H]
    some = some.reshape(*some.shape[:-2], num_kv_heads, groups, some.shape[-1])
    logits = meaning.scale * jnp.einsum("...rkgh,...skh->...kgrs", some, key, preferred_element_type=dtype)
    if meaning.logits_soft_cap is not None:
        logits = meaning.logits_soft_cap * jnp.tanh(logits / meaning.logits_soft_cap)
    count = _count(query, key, rows, meaning)[:, None]  # [K, 1, R, S]
    if documents[0] is not None:
        of_rows = take_whole(documents[0], rows, -1)[..., None]  # [..., R, 1]
        is_shared = (of_rows == documents[1][..., None, :]) & (of_rows >= 0)
        count = jnp.where(is_shared[..., None, None, :, :], count, 0)  # [..., K, 1, R, S]
    logits = jnp.where(count > 0, logits + jnp.log(jnp.maximum(count, 1).astype(dtype)), -jnp.inf)
    maximum = logits.max(axis=-1, keepdims=True)  # [..., K, G, R, 1]
    sink = jnp.full_like(maximum, -jnp.inf)
    if sinks is not None:
        sink = _sinks_of(sinks.astype(dtype), query, rows).reshape(maximum.shape)
    shift = shift_of(jnp.maximum(maximum, sink))
    weights = jnp.exp(logits - shift)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - shift)
    weights = weights / divisor_of(total)
    return weights.reshape(*weights.shape[:-4], num_kv_heads * groups, *weights.shape[-2:])  # [..., N, R, S]


def _count(query: Array, key: Array, rows: Array, meaning: _Meaning) -> Int[Array, "K R S"]:
    """Returns how often each pair counts for a head."""
    pattern, num_kv_heads = meaning.pattern, key.shape[-2]
    end = max(meaning.query_offset + query.shape[-3], key.shape[-3])
    row, column = (meaning.query_offset + rows)[:, None], jnp.arange(key.shape[-3], dtype=jnp.int32)
    head = np.arange(num_kv_heads)[:, None, None]
    count = jnp.zeros((num_kv_heads, *jnp.broadcast_shapes(row.shape, column.shape)), jnp.int32)
    for number, branch in enumerate(pattern.within(end, num_kv_heads)):
        members = pattern.heads_of(number, num_kv_heads)
        offset = pattern.offset(head, branch, number, num_kv_heads).astype(np.int32)
        count += branch.holds(row, column, offset) & (head >= members.start) & (head < members.stop)
    count = jnp.minimum(count, 1) if pattern.merge == "union" else count
    return jnp.where(column <= row, count, 0) if meaning.is_causal else count


def _sinks_of(sinks: Array, query: Array, rows: Array) -> Float[Array, "*B N R"]:
    whole = jnp.broadcast_to(sinks, query.shape[:-1])  # [..., T, N]
    return jnp.swapaxes(take_whole(whole, rows, -2), -1, -2)
