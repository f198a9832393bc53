"""Rotary embedding from global positions, in the rotate-half convention."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Positions are split at a power of two, so that no angle is large: at a million tokens, position times frequency in
# float32 would be wrong by some hundredths of a radian.
_SPAN = 1024


def rotary_embedding(
    array: Float[Array, "*B T N H"], positions: Int[Array, "T"], theta: float
) -> Float[Array, "*B T N H"]:
    """Rotates the pairs (i, i + H / 2) of each head's width by ``position * theta ** (-2 i / H)`` (arXiv 2104.09864).

    Args:
      array: [..., T, N, H], H even.
      positions: [T], the global position of each token.
      theta: the base of the frequencies, such as 10000.

    Returns:
      The rotated array, in its own dtype; the rotation is computed in float32 at least.
    """
    half = array.shape[-1] // 2
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    frequency = theta ** (-np.arange(half) / half)
    angle = (positions % _SPAN)[:, None] * jnp.asarray(frequency, dtype)
    angle += (positions // _SPAN)[:, None] * jnp.asarray(frequency * _SPAN % (2 * np.pi), dtype)  # [T, H / 2]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]  # [T, 1, H / 2]
    first, second = jnp.split(array.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(array.dtype)
