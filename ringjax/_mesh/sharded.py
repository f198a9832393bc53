"""Arrays that are made with the sharding of a mesh's tokens, and rows that are replicated on all its devices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ringjax._mesh.axes import Axes, AxisName, axes_of, cuts_of, reshard
from ringjax._mesh.placement import find_placement


def sharded_zeros(
    shape: tuple[int, ...], dtype: Any, mesh: Mesh | AbstractMesh | None, axes: Axes, spec: P | None = None
) -> Array:
    """Returns zeros [*batch, rows, heads, width] whose rows are sharded along axes of the mesh, if there are any.

    Their batch and heads are sharded as `spec` says of queries; heads that its axes do not divide are replicated.
    """
    if mesh is None:
        return jnp.zeros(shape, dtype)
    batch, _, heads, _ = cuts_of(P() if spec is None else spec, len(shape))
    fits = shape[-2] % math.prod(mesh.shape[axis] for axis in heads) == 0
    spec = P(*(one or None for one in batch), axes or None, heads if fits and heads else None)
    if isinstance(mesh, Mesh) and jax.sharding.get_abstract_mesh().empty:  # only the mesh says on which devices to run
        return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=NamedSharding(mesh, spec))(shape, dtype)
    return _constrained_zeros(shape, dtype, mesh, spec)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _constrained_zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh | AbstractMesh, spec: P) -> Array:
    zeros = jnp.zeros(shape, dtype)
    if AxisType.Explicit in mesh.axis_types:
        return reshard(zeros, mesh, spec)
    return jax.lax.with_sharding_constraint(zeros, NamedSharding(mesh, spec))


def token_positions(array: Array, mesh: Mesh | AbstractMesh | None, axis_name: AxisName) -> Int[Array, "T"]:
    """Returns the global position of each token of an array [*batch, T, heads, width], sharded as the tokens are."""
    placement = find_placement(array, array, array, mesh, axis_name)
    length = array.shape[-3]
    positions = jnp.arange(length, dtype=jnp.int32)
    if not placement.axes:
        return positions
    if not placement.are_axes_mapped:  # inside the caller's shard_map: the positions of one shard
        return positions + jax.lax.axis_index(placement.axes) * length
    if placement.mesh is None or length % placement.num_shards:
        return positions
    return _sharded_positions(array, placement.mesh, placement.axes)


# Jitted with the array as an argument: outside jax.jit, only the array says on which devices an abstract mesh is.
@functools.partial(jax.jit, static_argnums=(1, 2), keep_unused=True)
def _sharded_positions(array: Array, mesh: Mesh | AbstractMesh, axes: Axes) -> Int[Array, "T"]:
    length, typed = array.shape[-3], jax.typeof(array).sharding
    kinds = lambda mesh: [kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if name in axes]
    if AxisType.Explicit in kinds(typed.mesh):
        sharding = NamedSharding(typed.mesh, P(typed.spec[-3]))
        return jax.lax.broadcasted_iota(jnp.int32, (length,), 0, out_sharding=sharding)
    positions = jnp.arange(length, dtype=jnp.int32)
    if AxisType.Explicit in kinds(mesh):  # the tokens are not on this mesh yet
        return positions
    return jax.lax.with_sharding_constraint(positions, NamedSharding(mesh, P(axes)))


def take_whole(array: Array, rows: Int[Array, "R"], axis: int, kv_heads: int = 0) -> Array:
    """Returns some rows along an axis, counted from the end, replicated over the devices along it.

    The next axis, of heads, is replicated as well if the mesh axes that cut it do not divide `kv_heads`.
    """
    index = (..., rows, *[slice(None)] * (-1 - axis))
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return array.at[index].get(mode="promise_in_bounds")
    spec = list(sharding.spec)
    spec[axis] = None
    if kv_heads and kv_heads % math.prod(sharding.mesh.shape[name] for name in axes_of(P(spec[axis + 1]))[0]):
        spec[axis + 1] = None
    return array.at[index].get(mode="promise_in_bounds", out_sharding=NamedSharding(sharding.mesh, P(*spec)))
