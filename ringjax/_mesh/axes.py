"""The axes of a mesh that cut an array, as its spec says."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

Axes = tuple[str, ...]
# The axis of the sequence as callers name it, or its axes, major first.
AxisName = str | tuple[str, ...]


def named(axis_name: AxisName) -> Axes:
    """Returns the axes that a caller names."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name


def axes_of(spec: P) -> list[Axes]:
    """Returns the mesh axes of each entry of a spec."""
    return [entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in spec]


class Cuts(NamedTuple):
    """The mesh axes that cut the dimensions of an array [*batch, length, heads, width]."""

    batch: tuple[Axes, ...]
    length: Axes
    heads: Axes
    width: Axes


def cuts_of(spec: P, ndim: int) -> Cuts:
    """Returns the mesh axes that cut an array of so many dimensions."""
    *batch, length, heads, width = axes_of(spec) + [()] * (ndim - len(spec))
    return Cuts(tuple(batch), length, heads, width)


def cut_of_batch(array: Array) -> Axes:
    """Returns the mesh axes that cut the first dimension of an array, as its type says."""
    return next(iter(axes_of(jax.typeof(array).sharding.spec)), ())


def reshard(array: Array, mesh: Mesh | AbstractMesh, spec: P) -> Array:
    """Reshards an array as a spec says: by its type along Explicit mesh axes, by a constraint along Auto axes."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed, auto = (
        [tuple(axis for axis in axes if kinds[axis] == kind) for axes in axes_of(spec)]
        for kind in (AxisType.Explicit, AxisType.Auto)
    )
    array = jax.sharding.reshard(array, NamedSharding(mesh, P(*(axes or None for axes in typed))))
    if not any(auto):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*(axes or P.UNCONSTRAINED for axes in auto))))


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes that an array varies along, as its type says."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


# Sums over devices are in float32 at least. Below it, XLA:CPU aborts inside a shard_map that leaves other axes to the
# compiler, and elsewhere sums would lose a digit with every doubling of the devices.


def vary(array: Array, axes: Iterable[str]) -> Array:
    """Returns the array as one that varies along mesh axes; its gradient is summed over these, in float32 at least."""
    missing = tuple(frozenset(axes) - varying_axes(array))
    if not missing:
        return array
    return jax.lax.pcast(_widen(array), missing, to="varying").astype(array.dtype)


def psum(array: Array, axes: str | Axes) -> Array:
    """Returns the sum over mesh axes, computed in float32 at least, in the dtype of the array."""
    return jax.lax.psum(_widen(array), axes).astype(array.dtype)


def permute(arrays: Any, axes: Axes, pairs: Iterable[tuple[int, int]]) -> Any:
    """Sends arrays from the first to the second device of each pair, numbered along mesh axes, the first one major."""
    if len(axes) == 1:
        return jax.lax.ppermute(arrays, axes, list(pairs))
    # JAX numbers the devices of a permute in the order of the mesh's axes, whatever the order of their names.
    in_order = sorted(axes, key=jax.sharding.get_abstract_mesh().axis_names.index)
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose([axes.index(axis) for axis in in_order])
    device = np.argsort(numbers.reshape(-1)).tolist()
    return jax.lax.ppermute(arrays, tuple(in_order), [(device[here], device[there]) for here, there in pairs])


def _widen(array: Array) -> Array:
    is_floating = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32)) if is_floating else array
