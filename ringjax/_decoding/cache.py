"""The cache of decoding: the rows that later tokens may still see, however long the context is.

Where the mesh has a sequence axis, the rows of each cache are sharded along it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Float, Int

from ringjax._mesh.axes import AxisName
from ringjax._mesh.mesh import find_axes
from ringjax._mesh.placement import check_spec
from ringjax._mesh.sharded import sharded_zeros
from ringjax._pattern.branch import MAX_POSITIONS
from ringjax._pattern.counts import is_integer
from ringjax._pattern.pattern import DilatedPattern


class Cache(NamedTuple):
    """The cached rows of each branch, the number of tokens so far, and the most tokens that the cache is for.

    `tokens` has one more than the token in each row, and 0 where there is none: so a length that is set back shows
    which rows later tokens have taken. The length is that of each sequence, or of all. `VARIABLES` are what modules
    call these.
    """

    VARIABLES = "cached_key", "cached_value", "cached_token", "cache_index", "cache_length"

    keys: tuple[Float[Array, "*B R K H"], ...]
    values: tuple[Float[Array, "*B R K V"], ...]
    tokens: tuple[Int[Array, "*B R K 1"], ...]
    length: Int[Array, "*#B"]
    max_length: Int[Array, ""]


def read_shape(input_shape: Sequence[int], in_features: int) -> tuple[tuple[int, ...], int]:
    """Returns the batch and the number of tokens T of inputs [..., T, in_features].

    Raises:
      ValueError: for another shape, or more tokens than there are positions.
    """
    if hasattr(input_shape, "shape"):
        raise ValueError(f"input_shape is an array of the shape {input_shape.shape}: give that shape")  # pyright: ignore
    shape = tuple(input_shape) if isinstance(input_shape, Iterable) else input_shape
    if not isinstance(shape, tuple) or len(shape) < 2 or not all(is_integer(size) and size >= 0 for size in shape):
        raise ValueError(f"input_shape={shape} must be [..., T, in_features]: the shape of inputs")
    if shape[-1] != in_features:
        raise ValueError(f"input_shape={shape} ends in {shape[-1]}, but in_features={in_features}: give that of inputs")
    if not 1 <= shape[-2] <= MAX_POSITIONS:
        raise ValueError(f"input_shape={shape} has {shape[-2]} tokens: make that between 1 and {MAX_POSITIONS}")
    return shape[:-2], shape[-2]


def num_rows(pattern: DilatedPattern, max_length: int, num_shards: int = 1, rewind: int = 0) -> list[int]:
    """Returns the number of rows that each branch caches, rounded up to equal shards."""
    rows = (branch.num_cached(max_length, rewind) for branch in pattern.branches)
    return [-(-count // num_shards) * num_shards for count in rows]


def make_cache(
    pattern: DilatedPattern,
    queries: jax.ShapeDtypeStruct,
    num_kv_heads: int,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: AxisName = "seq",
    spec: PartitionSpec | None = None,
    *,
    per_sequence: bool = False,
    rewind: int = 0,
) -> Cache:
    """Returns an empty cache for T tokens, given all queries [*batch, T, N, H], which lie on a mesh as `spec` says.

    It counts the tokens of each sequence, or of all, and so many of them can be taken back.

    Raises:
      ValueError: if queries cannot lie so.
    """
    mesh, axes = find_axes(mesh, axis_name)
    num_shards = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
    context = get_abstract_mesh()
    if mesh is None and spec is not None and not context.empty:
        # A mesh without a sequence axis may still cut batch and heads.
        check_spec(spec, queries, num_kv_heads, context, axis_name, "queries")
        mesh = None if context.manual_axes else context
    elif mesh is not None and spec is not None:
        check_spec(spec, queries, num_kv_heads, mesh, axis_name, "queries")
    *batch, max_length, _, width = queries.shape

    def zeros(width: int, dtype: Any) -> tuple[Array, ...]:
        heads = (len(pattern.heads_of(number, num_kv_heads)) for number, _ in enumerate(pattern.branches))
        rows = num_rows(pattern, max_length, num_shards, rewind)
        shapes = ((*batch, *shape, width) for shape in zip(rows, heads, strict=True))
        return tuple(sharded_zeros(shape, dtype, mesh, axes, spec) for shape in shapes)

    of_heads = zeros(width, queries.dtype), zeros(width, queries.dtype)
    length = jnp.zeros(tuple(batch) if per_sequence else (), jnp.int32)
    return Cache(*of_heads, zeros(1, jnp.int32), length, jnp.int32(max_length))
