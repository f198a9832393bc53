"""The softmax that all implementations share: its weights, the merging of partial results, and its derivative.

Independent of
tiles. Letters: B batch, N query heads, K key/value heads, H width of queries and keys, V width of values.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Weighting(NamedTuple):
    """How weights are made of products of queries and keys: ``exp(cap(scale * product))``, some of them dropped."""

    scale: float  # positive
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    precision: Any = None  # of the products, as `jax.numpy.einsum` takes it

    @property
    def logit_scale(self) -> float:
        """The factor that turns scores into logits."""
        return self.logits_soft_cap or self.scale

    def scores(self, product: Array) -> Array:
        """Returns logits without their positive factor `logit_scale`, which callers apply in passes made anyway."""
        if self.logits_soft_cap is None:
            return product
        return jnp.tanh(product * (self.scale / self.logits_soft_cap))

    @property
    def kept_scale(self) -> float:
        """The factor of weights that are not dropped, which preserves their mean."""
        return 1 / (1 - self.dropout_rate)


def with_positive_scale(array: Array, scale: Any) -> tuple[Array, float]:
    """Returns queries or keys times the sign of the scale, and the scale of their products without it, positive."""
    scale = 1 / math.sqrt(array.shape[-1]) if scale is None else float(scale)
    return (array, scale) if scale > 0 else (array * np.sign(scale).astype(array.dtype), abs(scale) or 1.0)


class Keys(NamedTuple):
    """Rows of keys and values, as an implementation lays them out."""

    key: Float[Array, "*rows H"]
    value: Float[Array, "*rows V"]


class Queries(NamedTuple):
    """What the backward needs of each row of queries; `lse` is +inf where the row attends to nothing."""

    query: Float[Array, "*rows H"]
    out_grad: Float[Array, "*rows V"]
    lse: Float[Array, "*rows"]
    delta: Float[Array, "*rows"]


def accumulation_dtype(*arrays: Any) -> jnp.dtype:
    """Returns the dtype of sums over arrays, or their shapes: float32 at least."""
    return jnp.promote_types(jnp.result_type(*(array.dtype for array in arrays)), jnp.float32)


def shift_of(maximum: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Returns the shift of logits: their maximum, or 0 for a row without any, which avoids -inf - -inf."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


def divisor_of(denominator: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Returns the divisor of numerators: their denominator, or 1 for a row that attends to nothing."""
    return jnp.where(denominator == 0, 1, denominator)


def merge(
    outs: Sequence[Float[Array, "*rows V"]], lses: Sequence[Float[Array, "*rows"]]
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Returns the output and the lse of the softmax over the keys of all partial results, duplicates included."""
    shares, lse = find_shares(lses)
    return add_shares(outs, [share[..., None] for share in shares]), lse


def merge_rows(results: Sequence[tuple[Array, ...]], width_axis: int) -> tuple[Array, ...]:
    """Returns the output, the lse and the maximum, if there are any, of several results, whose widths lie at an axis.

    Per-row values may have that axis, or lack it.
    """
    outs, lses, *maxima = zip(*results, strict=True)
    shares, lse = find_shares(lses)
    if lse.ndim < outs[0].ndim:
        shares = [jnp.expand_dims(share, width_axis) for share in shares]
    return add_shares(outs, shares), lse, *(functools.reduce(jnp.maximum, of_all) for of_all in maxima)


def find_shares(lses: Sequence[Float[Array, "*rows"]]) -> tuple[list[Float[Array, "*rows"]], Float[Array, "*rows"]]:
    """Returns the share of each partial result in the softmax over the keys of all, and its lse."""
    maximum = functools.reduce(jnp.maximum, lses)
    shift = shift_of(maximum)
    weights = [jnp.exp(lse - shift) for lse in lses]
    divisor = divisor_of(functools.reduce(jnp.add, weights))
    return [weight / divisor for weight in weights], maximum + jnp.log(divisor)


def add_shares(outs: Sequence[Array], shares: Sequence[Array]) -> Array:
    """Returns the sum of outputs, each times its share; a share has width one."""
    return functools.reduce(jnp.add, (out * share for out, share in zip(outs, shares, strict=True)))


# The backward. With L the global lse of a row, P = exp(S - L) are its weights over all keys of all branches, wherever
# those were computed: out = sum_s P v_s with sum_s P = 1, and L = log sum_s exp(S). For cotangents g of out and l of L,
#
#     dv_s = sum_t P_ts g_t                              out is linear in v
#     dP_ts = g_t . v_s
#     dS_ts = P_ts (dP_ts - sum_u P_tu dP_tu) + P_ts l_t  the softmax's Jacobian, and dL/dS = P
#           = P_ts (dP_ts - delta_t),                    delta_t = g_t . out_t - l_t
#     dq_t = scale sum_s dS_ts k_s,   dk_s = scale sum_t dS_ts q_t
# because sum_u P_tu dP_tu = g_t . sum_u P_tu v_u = g_t . out_t. Each term needs one pair (t, s) and the row's own L and
# delta: the sums may be split over branches, tiles and devices in any way, and a pair in two branches counts twice.
#
# Dropout multiplies P_ts in out with m_ts, 0 or 1 / (1 - rate), and leaves L as it is: dv_s = sum_t m_ts P_ts g_t and
# dP_ts = m_ts g_t . v_s, and the rest is unchanged. A cap c turns logits x_ts into S_ts = c u with u = tanh(x_ts / c):
# then dx_ts = dS_ts (1 - u^2) replaces dS_ts in dq and dk.


def residuals(
    out: Float[Array, "*B n N V"], lse: Float[Array, "*B n N"], out_grad: Float[Array, "*B n N V"], lse_grad: Any
) -> tuple[Array, ...]:
    """Returns the cotangent, the lse and the delta of each query, all with a last dimension."""
    delta = jnp.einsum("...v,...v->...", out_grad, out, preferred_element_type=lse.dtype)
    if lse_grad is not None:
        delta -= lse_grad
    # A row that attends to nothing has weights exp(S - inf) = 0, whatever its cotangents are.
    attends = lse > -jnp.inf
    lse, delta = jnp.where(attends, lse, jnp.inf), jnp.where(attends, delta, 0)
    return out_grad, lse[..., None], delta[..., None]
