"""The oracle: dense attention with log M added to the logits, written straight from the definition."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax._pattern import DilatedPattern, Offsets


def dilated_attention_reference(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K V"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    scale: float | None = None,
    offsets: Offsets = "interleaved",
    return_residual: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes dilated attention densely, in O(T^2) memory: the definition that everything else is held to.

    The pair (t, s) counts as many times as there are branches that hold it, M[h, t, s]:
    ``out[t] = sum_s M exp(q_t.k_s) v_s / sum_s M exp(q_t.k_s)``. That is LongNet's mixture of branches by their softmax
    denominators (arXiv 2307.02486, equations 10 and 11).

    Args:
      query: [..., T, N, H], a floating dtype.
      key: [..., T, K, H], where K divides N: query head h uses key/value head ``h // (N // K)``.
      value: [..., T, K, V].
      segment_lengths: the segment length of each branch, in tokens.
      dilation_rates: the dilation rate of each branch.
      is_causal: whether token t sees only tokens s <= t.
      scale: what the logits are multiplied with; ``1 / sqrt(H)`` by default.
      offsets: ``"interleaved"`` or ``"blocked"``, see :class:`DilatedPattern`.
      return_residual: whether to return the log-sum-exp of each row too.

    Returns:
      The output [..., T, N, V] in query's dtype; with ``return_residual`` also the lse [..., T, N], in float32 at
      least. A row that no branch covers is zero, with an lse of minus infinity and zero gradient.

    Raises:
      ValueError: for a wrong pattern, see :class:`DilatedPattern`.

    Example:
      >>> q = k = v = jnp.ones((1, 6, 2, 4))
      >>> dilated_attention_reference(q, k, v, segment_lengths=(3,), dilation_rates=(1,)).shape
      (1, 6, 2, 4)
    """
    pattern = DilatedPattern(tuple(segment_lengths), tuple(dilation_rates), offsets)
    length, num_heads, head_dim = query.shape[-3:]
    num_kv_heads = key.shape[-2]
    groups = num_heads // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    multiplicity = jnp.asarray(pattern.multiplicity(length, num_kv_heads, is_causal))
    multiplicity = jnp.repeat(multiplicity, groups, axis=0)  # [N, T, T]
    key = jnp.repeat(key, groups, axis=-2).astype(dtype)  # [..., T, N, H]
    value = jnp.repeat(value, groups, axis=-2).astype(dtype)  # [..., T, N, V]

    logits = scale * jnp.einsum("...tnh,...snh->...nts", query.astype(dtype), key)
    logits = jnp.where(multiplicity > 0, logits + jnp.log(jnp.maximum(multiplicity, 1)).astype(dtype), -jnp.inf)
    covered = (multiplicity > 0).any(axis=-1)  # [N, T]
    # Rows without a key would give NaN gradients through -inf - -inf: they are computed on zeros and cleared after.
    logits = jnp.where(covered[..., None], logits, 0)
    lse = jax.nn.logsumexp(logits, axis=-1)  # [..., N, T]
    weights = jnp.where(covered[..., None], jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("...nts,...snv->...tnv", weights, value).astype(query.dtype)
    lse = jnp.moveaxis(jnp.where(covered, lse, -jnp.inf), -1, -2)  # [..., T, N]
    return (out, lse) if return_residual else out
