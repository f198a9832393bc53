"""Counter-based dropout: whether a weight is dropped depends on its pair, not on where or when it is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Integer, UInt

# Each row of weights is a stream of SplitMix (Steele, Lea, Flood, OOPSLA 2014) with its own start and its own odd step:
# the weight of the key at position s takes number s of the stream, mixed by MurmurHash3's finalizer. Start and step are
# hashes of the seed, the batch, the head and the position of the query. Each weight costs a few integer operations.
_GOLDEN = 0x9E3779B9


def make_seed(seed: Any) -> UInt[Array, "2"]:
    """Returns the two words of a seed: an integer, a scalar integer array, or a key of `jax.random`."""
    if isinstance(seed, int | np.integer):
        return jnp.asarray([int(seed) & 0xFFFFFFFF, int(seed) >> 32 & 0xFFFFFFFF], jnp.uint32)
    if seed.ndim or not jnp.issubdtype(seed.dtype, jnp.integer):
        return jax.random.bits(seed, (2,), jnp.uint32)
    # Sign extension gives a negative number the same words in any width.
    half = 31 if seed.dtype.itemsize < 8 else 32
    high = seed >> half if jnp.issubdtype(seed.dtype, jnp.signedinteger) or half == 32 else seed * 0
    return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])


def make_stream(
    seed: UInt[Array, "2 *#X"],
    batch: Integer[Array, "*#X"],
    head: Integer[Array, "*#X"],
    position: Integer[Array, "*#X"],
) -> tuple[UInt[Array, "*X"], UInt[Array, "*X"]]:
    """Returns the start and the step of the streams of queries, given by numbers that broadcast."""
    states = []
    for salt in (0, 1):
        state: Any = jnp.uint32(salt)
        for word in (seed[0], seed[1], batch, head, position):
            state = _mix((state + jnp.uint32(_GOLDEN)) ^ word.astype(jnp.uint32))
        states.append(state)
    return states[0], states[1] | jnp.uint32(1)


def is_kept(
    start: UInt[Array, "*#X"], step: UInt[Array, "*#X"], position: Integer[Array, "*#X"], rate: float
) -> Bool[Array, "*X"]:
    """Returns whether the weights of keys are kept, each with probability ``1 - rate``."""
    return _mix(start + step * position.astype(jnp.uint32)) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(state: Array) -> Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> jnp.uint32(shift))) * jnp.uint32(factor)
    return state ^ (state >> jnp.uint32(16))
