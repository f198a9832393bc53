"""The reference: dense attention with log M added to the logits, written straight from the definition."""

import math
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ringjax._pattern import dropout
from ringjax._pattern.arguments import check_arrays, read_seed
from ringjax._pattern.option import read_options, taking
from ringjax._pattern.options import AllReferenceOptions, ReferenceOptions, pattern_of
from ringjax._pattern.other_names import OF_FUNCTION
from ringjax._pattern.promotion import own_promotion


@overload
def dilated_attention_reference(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[ReferenceOptions],
) -> tuple[Array, Array]: ...
@overload
def dilated_attention_reference(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[ReferenceOptions],
) -> Array: ...
@overload
def dilated_attention_reference(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: bool = False,
    return_max_logit: Literal[True],
    **options: Unpack[ReferenceOptions],
) -> tuple[Array, ...]: ...
@own_promotion()
@taking(AllReferenceOptions)
def dilated_attention_reference(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    **options: Any,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "..."], ...]:
    """Computes dilated attention densely, in O(T S) memory: the definition that all implementations must match.

    The pair (t, s) counts M[h, t, s] times, the number of branches that hold it:
    ``out[t] = sum_s M exp(q_t.k_s) v_s / sum_s M exp(q_t.k_s)``. That is LongNet's mixture of branches by their softmax
    denominators (arXiv 2307.02486, equations 10 and 11). If an Explicit mesh shards the arrays along the sequence,
    first gather them with :func:`jax.sharding.reshard`.

    Args:
      query: [..., T, N, H], a floating dtype.
      key: [..., S, K, H], where K divides N: query head h uses key/value head ``h // (N // K)``.
      value: [..., S, K, V].
      **options: as :func:`ring_dilated_attention` takes them.

    Returns:
      The output [..., T, N, V] in query's dtype; with ``return_residual`` also the lse [..., T, N], in float32 at
      least; with ``return_max_logit``, last, the greatest logit of each head [N] over batches and tokens, in the same
      dtype. A row that no branch covers is zero, with an lse of minus infinity and zero gradient.

    Raises:
      ValueError: for a wrong pattern, see :class:`DilatedPattern`; shapes that disagree, heads that do not divide, a
        number out of its range, or dropout without a seed.
      TypeError: for a `query_offset` that is an array, and arguments of another dtype.

    Example:
      >>> q = k = v = jnp.ones((1, 6, 2, 4))
      >>> dilated_attention_reference(q, k, v, segment_lengths=(3,), dilation_rates=(1,)).shape
      (1, 6, 2, 4)
    """
    asked = read_options(AllReferenceOptions, options, OF_FUNCTION, "dilated_attention_reference")
    pattern, query_offset = pattern_of(asked), asked.query_offset
    if isinstance(query_offset, jax.Array):
        raise TypeError("query_offset is an array: the reference takes an integer, known when the call is traced")
    check_arrays(query, key, value)
    (*batch, length, num_heads, head_dim), (key_length, num_kv_heads) = query.shape, key.shape[-3:-1]
    groups = num_heads // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if asked.scale is None else asked.scale
    dtype = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)

    multiplicity = jnp.asarray(pattern.multiplicity(length, num_kv_heads, asked.is_causal, key_length, query_offset))
    multiplicity = jnp.repeat(multiplicity, groups, axis=0)  # [N, T, S]
    if asked.document_ids is not None:
        multiplicity = jnp.where(_share_document(asked.document_ids), multiplicity, 0)  # [..., N, T, S]
    key = jnp.repeat(key, groups, axis=-2).astype(dtype)  # [..., S, N, H]
    value = jnp.repeat(value, groups, axis=-2).astype(dtype)  # [..., S, N, V]

    logits = scale * jnp.einsum("...tnh,...snh->...nts", query.astype(dtype), key)
    if asked.logits_soft_cap is not None:
        logits = asked.logits_soft_cap * jnp.tanh(logits / asked.logits_soft_cap)
    greatest = _greatest(logits, multiplicity) if asked.return_max_logit else None  # [N]
    logits = jnp.where(multiplicity > 0, logits + jnp.log(jnp.maximum(multiplicity, 1)).astype(dtype), -jnp.inf)
    covered = jnp.broadcast_to((multiplicity > 0).any(axis=-1), logits.shape[:-1])  # [..., N, T]
    if asked.sinks is not None:
        sink = jnp.moveaxis(jnp.broadcast_to(jnp.asarray(asked.sinks, dtype), query.shape[:-1]), -1, -2)  # [..., N, T]
        logits = jnp.concatenate([logits, sink[..., None]], axis=-1)  # [..., N, T, S + 1]
        covered |= sink != -jnp.inf
    # Rows without a finite logit would have NaN gradients (-inf - -inf): they are computed on zeros, then cleared.
    logits = jnp.where(covered[..., None], logits, 0)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [..., N, T]
    # softmax divides by its own sum: exp(logits - lse) would carry the rounding error of a large lse.
    weights = jnp.where(multiplicity > 0, jax.nn.softmax(logits, axis=-1)[..., :key_length], 0)  # [..., N, T, S]
    if asked.dropout_rate > 0:
        batch_number = jnp.arange(math.prod(batch)).reshape(*batch, 1, 1, 1) * (not asked.broadcast_dropout)
        head_number = jnp.arange(num_heads)[:, None, None] * (not asked.broadcast_dropout)
        seed: Any = read_seed(asked.dropout_seed, asked.dropout_rate)
        position = query_offset + jnp.arange(length)[:, None]
        start, step = dropout.make_stream(seed, batch_number, head_number, position)  # [..., N, T, 1]
        is_kept = dropout.is_kept(start, step, jnp.arange(key_length), asked.dropout_rate)  # [..., N, T, S]
        weights = jnp.where(is_kept, weights / (1 - asked.dropout_rate), 0)
    out = jnp.einsum("...nts,...snv->...tnv", weights, value).astype(query.dtype)
    lse = jnp.moveaxis(jnp.where(covered, lse, -jnp.inf), -1, -2)  # [..., T, N]
    others = ([lse] if asked.return_residual else []) + ([] if greatest is None else [greatest])
    return (out, *others) if others else out


def _greatest(logits: Float[Array, "*B N T S"], multiplicity: Any) -> Float[Array, "N"]:
    seen = jax.lax.stop_gradient(jnp.where(multiplicity > 0, logits, -jnp.inf))
    return seen.max(axis=[axis for axis in range(seen.ndim) if axis != seen.ndim - 3], initial=-jnp.inf)


def _share_document(document_ids: Any) -> Bool[Array, "*B 1 T S"]:
    of_queries, of_keys = document_ids if isinstance(document_ids, tuple | list) else (document_ids, document_ids)
    of_queries, of_keys = jnp.asarray(of_queries)[..., None, :, None], jnp.asarray(of_keys)[..., None, None, :]
    return (of_queries == of_keys) & (of_queries >= 0)
