"""The public function that decodes over keys and values that the caller keeps."""

from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ringjax._decoding.cached_rows import attend_cached
from ringjax._decoding.decode import make_decoder
from ringjax._kernels.softmax import Weighting, with_positive_scale
from ringjax._mesh.mesh import check_has_axis
from ringjax._mesh.placement import find_placement
from ringjax._options import AllDecodeOptions, DecodeOptions
from ringjax._pattern.arguments import check_arrays
from ringjax._pattern.option import read_options, taking
from ringjax._pattern.options import pattern_of
from ringjax._pattern.other_names import OF_FUNCTION
from ringjax._pattern.promotion import own_promotion
from ringjax._pattern.sinks import add_sinks, read_sinks

Lengths = Integer[Array | np.ndarray, "*B"]


@overload
def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    *,
    lengths: Any,
    starts: Any = None,
    return_residual: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Array, Array]: ...
@overload
def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    *,
    lengths: Any,
    starts: Any = None,
    return_residual: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Array: ...
@own_promotion()
@taking(AllDecodeOptions)
def decode_attention(
    query: Float[Array, "*B c N H"],
    keys: Float[Array, "*B S K H"],
    values: Float[Array, "*B S K V"],
    *,
    lengths: Lengths,
    starts: Lengths | None = None,
    **options: Any,
) -> Float[Array, "*B c N V"] | tuple[Float[Array, "*B c N V"], Float[Array, "*B c N"]]:
    """Computes the attention of the last tokens of each sequence over keys and values that the caller has cached.

    Equal to the last rows of :func:`ring_dilated_attention` over each sequence alone, always causal. No key or value
    travels: each device attends to its own, and the statistics of rows are merged by all-reduces of B c N (V + 2)
    numbers. Of windows and segments it reads the rows that these queries see, and no others.

    Args:
      query: [..., c, N, H], the last c tokens of each sequence.
      keys: [..., S, K, H], sharded along the mesh axis of the sequence, those of the queries' tokens written; rows
        outside of the sequence may hold anything finite.
      values: [..., S, K, V], likewise.
      lengths: integers [...], the row behind the last token of each sequence. One program serves all lengths.
      starts: integers [...], the row of the first token of each sequence, from which positions count, such as the
        number of padding tokens to the left; zeros by default.
      **options: as :func:`ring_dilated_attention` takes them.

    Returns:
      [..., c, N, V] in query's dtype, the same on all devices along the sequence; with `return_residual` also the
      log-sum-exp [..., c, N] in float32 at least. A query before the start of its sequence gives zeros, and a length
      above S NaN.

    Raises:
      ValueError: for shapes that disagree, a wrong pattern, and what :func:`ring_dilated_attention` raises of a mesh.
      TypeError: for arguments of another dtype.

    Example:
      >>> keys = values = jnp.ones((2, 16, 4, 8))  # room for 16 tokens, of which there are 7 and 12
      >>> query = jnp.ones((2, 1, 4, 8))
      >>> lengths = jnp.array([7, 12])
      >>> decode_attention(query, keys, values, lengths=lengths, segment_lengths=(8,), dilation_rates=(2,)).shape
      (2, 1, 4, 8)
    """
    check_arrays(query, keys, values)
    asked = read_options(AllDecodeOptions, options, OF_FUNCTION, "decode_attention")
    pattern = pattern_of(asked)
    if not asked.is_causal:
        raise ValueError("is_causal=False, but tokens that are decoded see no later ones: leave it out")
    check_has_axis(asked.mesh, asked.axis_name)
    sinks = read_sinks(asked.sinks, query)
    query, keys, values = (jnp.asarray(array) for array in (query, keys, values))
    batch = query.shape[:-3]
    lengths = _read_rows("lengths", lengths, batch)
    starts = jnp.zeros_like(lengths) if starts is None else _read_rows("starts", starts, batch)
    placement = find_placement(query, keys, values, asked.mesh, asked.axis_name, asked.spec)
    size = placement.length(keys)
    query, scale = with_positive_scale(query, asked.scale)
    weighting = Weighting(scale, asked.logits_soft_cap, precision=asked.precision)
    decoder = make_decoder(pattern, keys.shape[-2], weighting, placement)
    out, lse = attend_cached(decoder, query, keys, values, lengths, starts)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    is_within = (lengths <= size)[..., None, None]  # [*B, 1, 1]
    out = jnp.where(is_within[..., None], out.astype(query.dtype), jnp.nan)
    return (out, jnp.where(is_within, lse, jnp.nan)) if asked.return_residual else out


def _read_rows(name: str, rows: Any, batch: tuple[int, ...]) -> Integer[Array, "*B"]:
    """Returns a row of each sequence."""
    dtype = getattr(rows, "dtype", type(rows).__name__)
    if not (hasattr(rows, "dtype") and jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{name} is of {dtype}: pass an array of integers, one for each sequence")
    if rows.shape != batch:
        raise ValueError(f"{name} has the shape {rows.shape}: pass one for each sequence of the batch {batch}")
    return jnp.asarray(rows, jnp.int32)
