"""Orders the devices of a mesh so that a ring hops between neighbors: inside a node, and along a TPU's grid."""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ringjax._mesh.axes import AxisName, named
from ringjax._mesh.mesh import check_axis_name
from ringjax._pattern.counts import is_integer

Cell = tuple[int, ...]


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: tuple[AxisType, ...] | None = None,
    *,
    axis_name: AxisName = "seq",
    inner_axes: Sequence[str] = ("tensor",),
    exchange_size: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh like :func:`jax.make_mesh`, whose rings along the sequence axis hop between near neighbors.

    The sequence axis, at any place among the axes, goes through the devices of one node (of one slice) before those of
    the next, so that the fewest hops cross the network; so does the last of several. On a TPU a ring walks around a box
    of the grid, each hop to a neighboring chip, and the axes of `inner_axes` lead to adjacent boxes. Unlike
    :func:`jax.make_mesh` it accepts devices of several nodes or slices.

    Args:
      axis_shapes: the size of each axis.
      axis_names: the name of each axis.
      axis_types: the type of each axis; by default they are Explicit, as in :func:`jax.make_mesh`.
      axis_name: the mesh axis that the sequence is sharded along, or several, major first: those before the last lead
        from ring to ring, between nodes or slices.
      inner_axes: axes whose devices are to be nearer still, as they communicate in every layer and wait for it; names
        that the mesh does not have are ignored.
      exchange_size: how many devices exchange tokens for heads, where ``strategy="all_to_all"`` has a ring between such
        groups, see :func:`ring_dilated_attention`. On a TPU that ring then hops between neighbors, and the devices of
        a group lie further apart.
      devices: the devices; by default all. If there are more than the mesh needs, it uses the first ones.

    Returns:
      The mesh, with the axes in the order of `axis_names`.

    Raises:
      ValueError: if an axis has no size or no name of its own, if `axis_name` is none of them, if its size is no
        multiple of `exchange_size`, or if there are too few devices.

    Example:
      >>> dict(make_mesh((1, 1), ("data", "seq")).shape)
      {'data': 1, 'seq': 1}
    """
    names, devices = tuple(axis_names), list(jax.devices() if devices is None else devices)
    is_size = lambda size: is_integer(size) and size > 0
    if len(names) != len(axis_shapes) or not all(map(is_size, axis_shapes)) or not names:
        raise ValueError(f"axis_shapes={axis_shapes} does not fit {axis_names=}: give each name a positive whole size")
    if len(set(names)) < len(names):
        raise ValueError(f"{axis_names=} has a name twice: give each axis a name of its own")
    sizes, count = dict(zip(names, axis_shapes, strict=True)), math.prod(axis_shapes)
    check_axis_name("axis_name", axis_name)
    *across, around = named(axis_name)
    if not sizes.keys() >= {*across, around}:
        raise ValueError(f"axis_name={axis_name!r} is not among {axis_names=}: name the axis of the sequence")
    if not (is_size(exchange_size) and sizes[around] % exchange_size == 0):
        raise ValueError(
            f"{exchange_size=} does not divide the {sizes[around]} devices of the axis {around!r}: give how many "
            "of these exchange tokens for heads"
        )
    if count > len(devices):
        raise ValueError(
            f"axis_shapes={tuple(axis_shapes)} asks for {count} devices, but there are {len(devices)}: ask for fewer"
        )
    inner = [name for name in names if name in inner_axes and name not in (*across, around)]
    outer = [name for name in names if name not in (*across, around, *inner)]
    rings = _rings(devices[:count], sizes[around], math.prod(sizes[name] for name in inner), exchange_size)
    order = [*outer, *across, around, *inner]
    array = rings.reshape([sizes[name] for name in order]).transpose([order.index(name) for name in names])
    return Mesh(array, names, axis_types=axis_types or (AxisType.Explicit,) * len(names))


def _rings(devices: list[Any], ring: int, inner: int, exchange_size: int) -> np.ndarray:
    """Returns the devices [outer, ring, inner]."""
    slices = collections.defaultdict(list)
    for device in devices:
        slices[getattr(device, "slice_index", None) or 0].append(device)
    grids = [_grid(slices[index]) for index in sorted(slices)]
    if all(len(grid) == len(grids[0]) for grid in grids) and all(grids):
        size = math.gcd(ring, len(grids[0]))
        # Each member of a group has a ring of its own through the groups. The groups follow each other in the mesh.
        members = math.gcd(size, exchange_size)
        walks = np.array([walk for grid in grids for walk in _walks(grid, size // members)], object)
        walks = walks.reshape(-1, members, size // members).swapaxes(1, 2)  # [., groups, members]
        return walks.reshape(-1, inner, ring).swapaxes(1, 2)  # [outer, ring, inner]
    key = lambda device: (getattr(device, "slice_index", None) or 0, device.process_index, device.id)
    return np.array(sorted(devices, key=key), object).reshape(-1, ring, inner)  # [outer, ring, inner]


def _grid(devices: list[Any]) -> dict[Cell, Any]:
    """Returns the devices by their coordinates in a TPU's grid; {} if they have none or do not fill a box of it."""
    if devices[0].platform != "tpu":
        return {}
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(axis=0)
    grid = dict(zip(map(tuple, places.tolist()), devices, strict=True))
    return grid if len(grid) == np.prod(places.max(axis=0) + 1) else {}


def _walks(grid: dict[Cell, Any], size: int) -> list[list[Any]]:
    """Returns the devices of each box of a grid cut into boxes of one size, in the order of a walk around the box."""
    shape = tuple(side + 1 for side in max(grid))
    divisors = [[part for part in range(1, side + 1) if side % part == 0] for side in shape]
    boxes = [box for box in itertools.product(*divisors) if math.prod(box) == size]
    box = min(boxes, key=lambda box: (not is_round(box), max(box), box))
    corners = snake(tuple(side // part for side, part in zip(shape, box, strict=True)))
    place = lambda corner, cell: tuple(c * part + i for c, part, i in zip(corner, box, cell, strict=True))
    return [[grid[place(corner, cell)] for cell in round_walk(box)] for corner in corners]


def snake(shape: Cell) -> list[Cell]:
    """Returns the cells of a box so that each differs from the one before it by one, in one coordinate."""
    if not shape:
        return [()]
    rest = snake(shape[1:])
    return [(i, *cell) for i in range(shape[0]) for cell in (rest[::-1] if i % 2 else rest)]


def is_round(shape: Cell) -> bool:
    """Returns whether a walk through all cells of a box can end beside its beginning."""
    sides = [side for side in shape if side > 1]
    return math.prod(sides) <= 2 or (len(sides) > 1 and math.prod(sides) % 2 == 0)


def round_walk(shape: Cell) -> list[Cell]:
    """Returns the cells of a box in the order of :func:`snake`, the last beside the first wherever possible.

    One even side counts the rows, and a snake through the other sides counts the columns. The walk goes back and forth
    through the rows without their first column, and returns along that column.
    """
    if not is_round(shape) or math.prod(shape) <= 2:
        return snake(shape)
    side = max((side for side in range(len(shape)) if shape[side] % 2 == 0), key=lambda side: shape[side])
    first, *columns = snake((*shape[:side], *shape[side + 1 :]))
    cells = [(row, column) for row in range(shape[side]) for column in (columns[::-1] if row % 2 else columns)]
    cells += [(row, first) for row in reversed(range(shape[side]))]
    return [(*column[:side], row, *column[side:]) for row, column in cells]
