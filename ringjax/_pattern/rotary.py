"""Rotary embedding from global positions, as precise at the millionth token as at the first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Integer

from ringjax._pattern.counts import is_flag, is_real

_TURN = 2**32


def rotary_embedding(
    heads: Float[Array, "*B T N H"],
    positions: Integer[Array | np.ndarray, "*batch T"],
    *,
    theta: float | None = None,
    frequencies: Any = None,
    factor: float = 1.0,
    interleaved: bool = False,
) -> Float[Array, "*B T N H"]:
    """Rotates the pairs of each head's first R dimensions by their frequency times the position (arXiv 2104.09864).

    Angles are accurate to 1e-6 radians at every position, even where position times frequency in float32 is off by
    hundredths of a radian. Pass exactly one of `theta` and `frequencies`.

    Args:
      heads: [..., T, N, H], of any floating dtype; the rotation is computed in float32 at least.
      positions: integers [T], or [..., T] with batch dimensions that broadcast to those of `heads`.
      theta: the base of the frequencies ``theta ** (-2 i / H)``, such as 10000; then R is H.
      frequencies: [R / 2], in radians per token, known when the call is traced; :func:`rope_frequencies` returns them
        in float64, and float32 frequencies are taken as exact.
      factor: the factor of cosines and sines, as in YaRN and LongRoPE.
      interleaved: whether the pairs are (2 i, 2 i + 1), as in GPT-J; else (i, i + R / 2), as in Llama.

    Returns:
      The heads with their first R dimensions rotated, in their own dtype.

    Raises:
      ValueError: unless exactly one of `theta` and `frequencies` is given, and for frequencies of another shape, more
        than H / 2 of them, or an odd width.
      TypeError: for frequencies that are not known when the call is traced.

    Example:
      >>> heads = jnp.ones((1, 3, 2, 8))
      >>> rotary_embedding(heads, jnp.arange(3), theta=10_000.0).shape
      (1, 3, 2, 8)
    """
    frequency = read_frequencies("theta", theta, frequencies, heads.shape[-1])
    if not is_real(factor):
        raise TypeError(f"factor={factor!r} must be a number, such as 1.0")
    if not is_flag(interleaved):
        raise TypeError(f"interleaved={interleaved!r} must be True or False")
    check_positions("positions", positions, heads.shape[-3])
    dtype = jnp.promote_types(heads.dtype, jnp.float32)
    angle = _angles(jnp.asarray(positions), frequency, dtype)[..., None, :]  # [*batch, T, 1, R / 2]
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    rotated, rest = jnp.split(heads, [2 * frequency.size], axis=-1)
    wide = rotated.astype(dtype)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    pairs = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.stack(pairs, -1).reshape(wide.shape) if interleaved else jnp.concatenate(pairs, -1)
    return jnp.concatenate([rotated.astype(heads.dtype), rest], axis=-1)  # [*B, T, N, H]


def read_frequencies(name: str, theta: Any, frequencies: Any, width: int) -> Float[np.ndarray, "pairs"]:
    """Returns the frequencies [R / 2] in float64, either given or computed from a base.

    Raises:
      TypeError, ValueError: naming the argument `name`, its value and the remedy.
    """
    if (theta is None) == (frequencies is None):
        given = "neither" if theta is None else "both"
        raise ValueError(f"theta and frequencies: {given} of them is given; pass exactly one")
    if theta is not None:
        if not is_real(theta):
            raise TypeError(f"{name}={theta!r} must be a number, such as 10000")
        if width % 2:
            raise ValueError(f"{name}={theta} rotates pairs, but a head has the odd width {width}: make it even")
        if not 0 < theta < np.inf:
            raise ValueError(f"{name}={theta} must be positive, such as 10000")
        return theta ** (-np.arange(width // 2) / (width // 2))
    if isinstance(frequencies, Tracer):
        raise TypeError(f"{name} has traced frequencies: compute them with NumPy, outside of what is traced")
    array = np.asarray(frequencies, np.float64)
    if array.ndim != 1 or not 0 < 2 * array.size <= width:
        raise ValueError(
            f"{name} has frequencies of the shape {array.shape}: pass [R / 2], with R at most the width {width}"
        )
    return array


def check_positions(name: str, positions: Any, length: int) -> None:
    """Checks the positions of `length` tokens.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    dtype, shape = getattr(positions, "dtype", None), np.shape(positions)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name} must be an array of integers, such as jnp.arange(length): it is of {dtype}")
    if not shape or shape[-1] != length:
        raise ValueError(f"{name} has the shape {shape}: pass [..., {length}], one for each of the {length} tokens")


def _angles(positions: Array, frequency: np.ndarray, dtype: Any) -> Array:
    """Returns positions times frequencies modulo whole turns, [*positions, R / 2]."""
    positions = positions[..., None]
    if dtype == jnp.float64:
        return positions * jnp.asarray(frequency, dtype)
    # A turn has 2**32 units: a 32-bit unsigned product drops whole turns and nothing else. The fraction that rounding
    # the frequency to whole units leaves, at most a half, is small enough for a float32 product.
    units = frequency / (2 * np.pi) % 1 * _TURN
    whole = np.round(units)
    product = positions.astype(jnp.uint32) * jnp.asarray(whole % _TURN, jnp.uint32)
    signed = jax.lax.bitcast_convert_type(product, jnp.int32).astype(dtype)  # within half a turn
    turns = signed + positions.astype(dtype) * jnp.asarray(units - whole, dtype)
    return turns * jnp.asarray(2 * np.pi / _TURN, dtype)
