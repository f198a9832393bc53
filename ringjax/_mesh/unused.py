"""Warns of a mesh whose devices all compute the same."""

import math

from jaxtyping import Array

from ringjax._mesh.axes import AxisName, named
from ringjax._mesh.mesh import find_mesh
from ringjax._mesh.placement import Placement
from ringjax._pattern.warning import warn_once


class MeshWarning(UserWarning):
    """All devices of a mesh compute the same: the attention, or what follows it.

    To stop instead of wasting devices, make the warning an error:

    Example:
      >>> import warnings
      >>> warnings.simplefilter("error", MeshWarning)  # for the rest of the program
      >>> query = jnp.ones((1, 16, 2, 8))
      >>> with jax.set_mesh(jax.make_mesh((8,), ("context",))):  # axis_name="context" is the remedy
      ...     ringjax.ring_dilated_attention(query, query, query, segment_lengths=(16,), dilation_rates=(1,))
      Traceback (most recent call last):
        ...
      ringjax.MeshWarning: the mesh from jax.set_mesh has no axis axis_name='seq', and nothing says that \
('context',) cut batches or heads: every device there computes all tokens; name the sequence's axis, such as \
axis_name='context'
    """


# Common names for the axis of the sequence.
_LIKE_SEQUENCE = ("context", "cp", "ctx", "length", "ring", "sequence", "seq", "sp", "tokens")


def warn_of_mesh(placement: Placement, arrays: tuple[Array, ...], axis_name: AxisName) -> None:
    """Warns, once for each mesh, of axes that cut nothing where the sequence axis is missing."""
    query, (mesh, source) = arrays[0], find_mesh(arrays)
    if placement.axes or mesh is None:
        return
    cutting = {axis for axes in (*placement.batch, placement.heads) for axis in axes}
    idle = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in cutting)
    like_sequence = [name for name in idle if name.lower() in _LIKE_SEQUENCE]
    known = [size for size in (*query.shape[:-3], query.shape[-2]) if isinstance(size, int)]
    # Auto axes may cut batches and heads without being visible here, over at most as many devices as there are of both.
    is_too_many = math.prod(known) < math.prod(mesh.shape[name] for name in idle)
    if idle and (like_sequence or is_too_many):
        likely = (like_sequence or idle)[-1]
        warn_once(
            (idle, source, named(axis_name)),
            f"the mesh from {source} has no axis axis_name={axis_name!r}, and nothing says that {idle} cut batches or "
            f"heads: every device there computes all tokens; name the sequence's axis, such as axis_name={likely!r}",
            MeshWarning,
        )


def warn_of_length(placement: Placement, length: int) -> None:
    """Warns, once, of a length that the mesh does not divide: its results are whole on each device."""
    shards = placement.num_shards
    if placement.are_axes_mapped and length > shards and length % shards:
        warn_once(
            (placement.axes, shards),
            f"the {shards} devices of {placement.axis_name!r} do not divide the length of query: the output comes back "
            "whole on each, which then computes all that follows; pad tokens once, before the model, with "
            "ringjax.pad_to_mesh",
            MeshWarning,
        )
