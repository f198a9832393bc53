"""Every r-th token of each head: how these are taken and put back, and how all tokens are sorted by phase.

B batch, n tokens, r the rate, m = n / r, N heads, O their offsets: 1 if all have the same, else N.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int, Shaped, UInt

Combine = Callable[[Array, Array], Array]


def put(token: Array, row: Array) -> Array:
    """Returns the row, which replaces its token."""
    del token
    return row


def combined_dtype(tokens: Array, rows: Array, combine: Combine = put) -> jnp.dtype:
    """Returns the dtype of `combine(tokens, rows)`."""
    of = lambda array: jax.ShapeDtypeStruct((), array.dtype)
    return jax.eval_shape(combine, of(tokens), of(rows)).dtype


class Strides:
    """The fastest operations of XLA for each platform."""

    def take(
        self, tokens: Shaped[Array, "B n N D"], rate: int, offset: UInt[Array | np.ndarray, "O"], is_whole: bool
    ) -> Shaped[Array, "B m N D"]:
        """Returns token number `offset` of every r tokens; `is_whole` is that of `Rows`."""
        by_platform = {"cpu": take_slices, "default": take_selected} | ({"cuda": take_vectors} if is_whole else {})
        by_platform = {
            platform: functools.partial(function, offset=offset) for platform, function in by_platform.items()
        }
        return jax.lax.platform_dependent(_split(tokens, rate), **by_platform)

    def put(
        self,
        tokens: Shaped[Array, "B n N D"],
        rows: Shaped[Array, "B m N D"],
        rate: int,
        offset: UInt[Array | np.ndarray, "O"],
        combine: Combine,
    ) -> Shaped[Array, "B n N D"]:
        """Replaces token number `offset` of every r tokens by `combine(token, row)`."""
        by_platform = {"cpu": put_slices, "tpu": put_in_one_pass, "default": put_selected}
        more = {"offset": offset, "combine": combine}
        by_platform = {name: functools.partial(function, **more) for name, function in by_platform.items()}
        return jax.lax.platform_dependent(_split(tokens, rate), rows, **by_platform).reshape(tokens.shape)

    def sort(self, tokens: Shaped[Array, "B n N D"], rate: int) -> Shaped[Array, "B n N D"]:
        """Returns the tokens sorted by phase: the first of every r tokens, then the second, and so on."""
        return rearrange(tokens, "B (m r) ... -> B (r m) ...", r=rate)

    def put_sorted(self, tokens: Array, rows: Array, rate: int, combine: Combine) -> Shaped[Array, "B n N D"]:
        """Replaces each token by `combine(token, row)`, given rows sorted by phase."""
        return combine(tokens, rearrange(rows, "B (r m) ... -> B (m r) ...", r=rate))


def _split(tokens: Shaped[Array, "B n N D"], rate: int) -> Shaped[Array, "B m r N D"]:
    return rearrange(tokens, "B (m r) ... -> B m r ...", r=rate)


# CPUs copy one slice for each head, with heads as a batch dimension, and touch no other tokens. GPUs gather single
# vectors, which touches no others either, but needs all other dimensions flattened: only if the compiler does not shard
# them. Otherwise gathers and scatters would transpose their whole operand, while a selection is one fused pass.


def take_selected(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, by selection."""
    return jnp.where(is_offset(split.shape[2], offset), split, 0).sum(axis=2, dtype=split.dtype)


def put_selected(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Replaces the token number `offset` of each r, by selection."""
    return jnp.where(is_offset(split.shape[2], offset), combine(split, rows[:, :, None]), split)


def put_in_one_pass(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Does what `put_selected` does, with a barrier that keeps later operations out of the fused pass.

    Otherwise XLA:TPU makes an array with each row r times before the pass.
    """
    return jax.lax.optimization_barrier(put_selected(split, rows, offset, combine))


def is_offset(rate: int, offset: UInt[Array | np.ndarray, "O"]) -> Bool[Array | np.ndarray, "rate O 1"]:
    """Returns a mask of r tokens for each offset, true for the token at the offset."""
    return (np.arange(rate, dtype=np.uint32)[:, None] == offset)[..., None]


def take_slices(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, slice by slice."""
    batch, count, _, heads, width = split.shape
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(0, 1, 3),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(3,),
        start_indices_batching_dims=(0,),
    )
    sizes = (batch, count, 1, 1, width)
    return jax.lax.gather(split, _of_heads(offset, heads), numbers, sizes, mode="promise_in_bounds")


def put_slices(
    split: Shaped[Array, "B m r N D"],
    rows: Shaped[Array, "B m N D"],
    offset: UInt[Array | np.ndarray, "O"],
    combine: Combine,
) -> Shaped[Array, "B m r N D"]:
    """Replaces the token number `offset` of each r, slice by slice."""
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 1, 3),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(3,),
        scatter_indices_batching_dims=(0,),
    )
    index = _of_heads(offset, split.shape[3])
    rows = combine(take_slices(split, offset), rows)
    return jax.lax.scatter(
        split, index, rows, numbers, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
    )


def take_vectors(split: Shaped[Array, "B m r N D"], offset: UInt[Array | np.ndarray, "O"]) -> Shaped[Array, "B m N D"]:
    """Returns the token number `offset` of each r, vector by vector."""
    batch, count, rate, heads, width = split.shape
    of_first = jnp.arange(batch * count, dtype=jnp.uint32).reshape(batch, count, 1) * np.uint32(rate * heads)
    index = of_first + (offset * np.uint32(heads) + np.arange(heads, dtype=np.uint32))
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0,))
    vectors = split.reshape(-1, width)
    return jax.lax.gather(vectors, index[..., None], numbers, (1, width), unique_indices=True, mode="promise_in_bounds")


def _of_heads(offset: UInt[Array | np.ndarray, "O"], heads: int) -> Int[Array | np.ndarray, "N 1"]:
    return (offset + np.zeros(heads, np.uint32)).astype(np.int32)[:, None]
