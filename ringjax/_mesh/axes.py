"""The axes of a mesh that cut an array, as its spec says."""

from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

Axes = tuple[str, ...]


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
    """Gives an array the type that a spec says, of the Explicit axes of a mesh, and constrains it to the Auto ones."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed, auto = (
        [tuple(axis for axis in axes if kinds[axis] == kind) for axes in axes_of(spec)]
        for kind in (AxisType.Explicit, AxisType.Auto)
    )
    array = jax.sharding.reshard(array, NamedSharding(mesh, P(*(axes or None for axes in typed))))
    if not any(auto):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*(axes or P.UNCONSTRAINED for axes in auto))))
