"""Attention sinks: an extra logit in the softmax of each row, which has no value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# With L the lse of a row over its keys and b its sink, the softmax over both has the lse and the output
#
#     L' = log(exp L + exp b) = L + softplus(b - L)
#     out' = sum_s exp(S_s - L') v_s = exp(L - L') out = sigmoid(L - b) out
#
# So sinks take one pass over the results of any implementation, and their gradient follows from the exact ones of out
# and L. A row that attends to nothing has L = -inf and out = 0: then L' = b and out' = 0.


def add_sinks(
    out: Float[Array, "*B T N V"], lse: Float[Array, "*B T N"], sinks: Float[Array, "..."]
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Returns the output and the lse of a softmax that has a sink in each row."""
    sinks = sinks.astype(lse.dtype)
    is_empty = lse == -jnp.inf
    difference = jnp.where(is_empty, 0, lse) - sinks
    share = jnp.where(is_empty, 0, jax.nn.sigmoid(difference))
    total = jnp.where(is_empty, 0, lse) + jax.nn.softplus(-difference)
    # The sink of an empty row is minus its difference, which is sharded like the lse.
    return (out * share[..., None]).astype(out.dtype), jnp.where(is_empty, -difference, total)


def check_sinks(name: str, sinks: Any) -> None:
    """Checks that sinks are an array of floats, or None for none.

    Raises:
      TypeError: naming the argument, its type and the remedy.
    """
    dtype = getattr(sinks, "dtype", type(sinks).__name__)
    if sinks is not None and not (hasattr(sinks, "dtype") and jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(f"{name} is of {dtype}: pass an array of floats, one logit for each query head")


def read_sinks(sinks: Any, query: Any) -> Array | None:
    """Returns the sinks as an array that broadcasts to one number for each row of queries.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if sinks is None:
        return None
    check_sinks("sinks", sinks)
    rows = query.shape[:-1]
    pairs = zip(sinks.shape[::-1], rows[::-1], strict=False)
    if sinks.ndim > len(rows) or any(size not in (1, expected) for size, expected in pairs):
        raise ValueError(
            f"sinks has the shape {sinks.shape}: give one logit for each of the {rows[-1]} query heads, "
            f"or what broadcasts to {rows}"
        )
    return jnp.asarray(sinks) if isinstance(sinks, np.ndarray) else sinks
