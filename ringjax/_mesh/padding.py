"""Padding of sequences to lengths that a mesh divides, once, before a model, so that its arrays can stay sharded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Integer, Shaped

from ringjax._mesh.axes import Axes, AxisName, reshard
from ringjax._mesh.mesh import check_axis_name, check_has_axis, check_mesh, find_mesh, sequence_axes
from ringjax._pattern.arguments import read_ids
from ringjax._pattern.counts import is_integer

PADDING = -1  # the document of padding tokens


def pad_to_mesh(
    tokens: Shaped[Array | np.ndarray, "..."],
    document_ids: Integer[Array | np.ndarray, "*B T"] | None = None,
    *,
    axis: int = -2,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: AxisName = "seq",
) -> tuple[Shaped[Array, "..."], Int[Array, "*B P"]]:
    """Pads sequences with zeros to the next length P that the mesh divides, and shards them along it.

    Where the mesh does not divide the length, attention returns its whole output on every device, and each device
    computes all that follows. So pad once, where tokens enter the model. Give the documents to each attention. Leave
    the padding out of the loss, or cut it off the results with :func:`unpad`.

    Args:
      tokens: [..., T, D], embeddings; or [..., T] with ``axis=-1``, such as the numbers of tokens.
      document_ids: integers [..., T], the document of each token; by default all tokens are of document 0.
      axis: the axis of T, from the end: -1, -2, ...
      mesh: the mesh; by default that of `tokens`, or the one that :func:`jax.set_mesh` holds. Without one, or without
        its axis `axis_name`, nothing is padded.
      axis_name: the mesh axis to shard along, or a tuple of axes, major first.

    Returns:
      The padded tokens [..., P, D], and their documents [..., P], which are -1 for padding: no token attends to it.

    Raises:
      ValueError: for an `axis` that is not negative or does not exist, for documents of another shape, for a `mesh`
        without `axis_name`, and inside a shard_map over `axis_name`, where no shard may be padded by itself.
      TypeError: for documents that are no integers.

    Example:
      >>> tokens, document_ids = pad_to_mesh(jnp.ones((2, 13, 4)), mesh=jax.make_mesh((8,), ("seq",)))
      >>> tokens.shape, jax.device_get(document_ids)[0, 11:].tolist()
      ((2, 16, 4), [0, 0, -1, -1, -1])
      >>> unpad(tokens, 13).shape
      (2, 13, 4)
    """
    check_mesh("mesh", mesh)
    check_axis_name("axis_name", axis_name)
    check_has_axis(mesh, axis_name)
    if not getattr(tokens, "ndim", 0):
        raise TypeError(f"tokens={tokens!r} must be an array [..., T, D], or [..., T] with axis=-1")
    tokens = jnp.asarray(tokens)
    _check_axis(tokens, axis)
    shape = tokens.shape[: tokens.ndim + axis + 1]
    ids = jnp.zeros(shape, jnp.int32) if document_ids is None else read_ids("document_ids", document_ids, shape)
    found, _ = find_mesh((tokens,), mesh)
    if found is None or not (axes := sequence_axes(found, axis_name)):
        return tokens, ids
    if {*axes} & {*getattr(found, "manual_axes", ())}:
        raise ValueError(f"pad_to_mesh inside a shard_map over {axis_name!r} sees one shard: call it before")
    # Outside jax.jit, the devices of an abstract mesh may be known from the tokens alone: so one jit pads both arrays.
    pad = _pad if isinstance(found, Mesh) else jax.jit(_pad, static_argnums=(2, 3, 4))
    return pad(tokens, ids, axis, found, axes)


def _pad(tokens: Array, ids: Array, axis: int, mesh: Mesh | AbstractMesh, axes: Axes) -> tuple[Array, Array]:
    missing = -tokens.shape[axis] % math.prod(mesh.shape[name] for name in axes)

    def pad(array: Array, axis: int, value: int) -> Array:
        ends = [(0, missing if axis == number - array.ndim else 0) for number in range(array.ndim)]
        return _shard(jnp.pad(array, ends, constant_values=value), axis, mesh, axes)

    return pad(tokens, axis, 0), pad(ids, -1, PADDING)


def unpad(array: Shaped[Array | np.ndarray, "..."], length: int, *, axis: int = -2) -> Shaped[Array, "..."]:
    """Cuts padding off: the inverse of :func:`pad_to_mesh`, after which the length is whole on each device.

    Args:
      array: [..., P, D], or with another `axis`.
      length: the number T of tokens to keep.
      axis: the axis of P, from the end: -1, -2, ...

    Returns:
      [..., T, D].

    Raises:
      ValueError: for an `axis` that is not negative or does not exist, or a length beyond P.
      TypeError: for a length that is no integer.

    Example:
      >>> unpad(jnp.ones((2, 16)), 13, axis=-1).shape
      (2, 13)
    """
    array = jnp.asarray(array)
    _check_axis(array, axis)
    if not is_integer(length):
        raise TypeError(f"length={length!r} must be an integer: how many tokens to keep")
    if not 0 <= length <= array.shape[axis]:
        raise ValueError(f"length={length} is not between 0 and the {array.shape[axis]} tokens that there are")
    if length < array.shape[axis]:  # a sharded length cannot be cut to one that the mesh does not divide
        array = _shard(array, axis, find_mesh((array,))[0], ())
    return jax.lax.slice_in_dim(array, 0, length, axis=axis)


def _shard(array: Array, axis: int, mesh: Any, axes: Axes) -> Array:
    """Shards a dimension along axes of a mesh, or along none, and leaves the other dimensions as they are."""
    if mesh is None:
        return array
    if AxisType.Explicit in mesh.axis_types:
        spec = list(jax.typeof(array).sharding.spec)
        spec[axis] = axes or None
        return reshard(array, mesh, P(*spec))
    if not axes:
        return array
    spec: list[Any] = [P.UNCONSTRAINED] * array.ndim
    spec[axis] = axes
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*spec)))


def _check_axis(array: Any, axis: int) -> None:
    if not -array.ndim <= axis < 0:
        raise ValueError(f"axis={axis} must be between {-array.ndim} and -1: the axis of tokens, from the end")
