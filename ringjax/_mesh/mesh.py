"""Which mesh a call runs on, and its platform."""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ringjax._mesh.axes import Axes, AxisName, named


def check_mesh(name: str, mesh: Any) -> None:
    """Checks the mesh that a call is given, or None.

    Raises:
      TypeError: naming the argument, its value and the remedy.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{name}={mesh!r} must be a mesh, such as jax.make_mesh((8,), ('seq',)) returns")


def check_axis_name(name: str, axis: Any) -> None:
    """Checks the name of the sequence's axis, or the names of its axes.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    names = axis if isinstance(axis, tuple) else (axis,)
    if not (names and all(isinstance(one, str) for one in names)):
        raise TypeError(f"{name}={axis!r} must be the name of a mesh axis, such as 'seq', or a tuple of names")
    if len({*names}) < len(names):
        raise ValueError(f"{name}={axis!r} has a name twice: give each axis once")


def check_spec(name: str, spec: Any) -> None:
    """Checks the spec of arrays, or None if their types say how they lie.

    Raises:
      TypeError: naming the argument, its value and the remedy.
    """
    if spec is not None and not isinstance(spec, P):
        raise TypeError(f"{name}={spec!r} must be a jax.sharding.PartitionSpec, such as P('data', 'seq', 'tensor')")


def check_has_axis(mesh: Mesh | AbstractMesh | None, axis_name: AxisName) -> None:
    """Checks that a mesh, if there is one, has the axes of the sequence.

    Raises:
      ValueError: naming the argument, its value and the remedy.
    """
    if mesh is not None and not sequence_axes(mesh, axis_name):
        raise ValueError(
            f"mesh={mesh} has no axis axis_name={axis_name!r}: name one of {mesh.axis_names}, or leave mesh out"
        )


def find_mesh(
    arrays: Iterable[Array], mesh: Mesh | AbstractMesh | None = None
) -> tuple[Mesh | AbstractMesh | None, str]:
    """Returns the mesh that a call runs on, if there is one, and where it is from.

    It is that of the caller's own shard_map, else the argument, else that of the arrays, else that of `jax.set_mesh`.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:  # no other mesh is possible there
        return context, "the caller's shard_map"
    if mesh is not None:
        return mesh, "the argument mesh="
    carried = next(filter(None, map(mesh_of, arrays)), None)
    if carried is not None:  # traced arrays carry the mesh of jax.set_mesh
        return carried, "jax.set_mesh" if getattr(carried, "abstract_mesh", carried) == context else "the arrays"
    return (None, "nowhere") if context.empty else (context, "jax.set_mesh")


def find_axes(mesh: Mesh | AbstractMesh | None, axis_name: AxisName) -> tuple[Mesh | AbstractMesh | None, Axes]:
    """Returns the given mesh, or that of `jax.set_mesh`, and its sequence axes; None if none are there to map over."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = sequence_axes(mesh, axis_name)
    return (mesh, axes) if axes and types[axes[0]] != AxisType.Manual else (None, ())


def sequence_axes(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> Axes:
    """Returns the axes of the sequence, or none if a mesh has none of them.

    Raises:
      ValueError: if it has only some of them, if the caller's shard_map maps over only some of them, or if they are of
        several types.
    """
    axes = tuple(axis for axis in named(axis_name) if axis in mesh.axis_names)
    if axes not in ((), named(axis_name)):
        raise ValueError(
            f"of axis_name={axis_name!r} the mesh has {axes} alone, its axes are {mesh.axis_names}: name these alone, "
            "or give the mesh the others, with size one"
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = tuple(axis for axis in axes if types[axis] == AxisType.Manual)
    if manual not in ((), axes):
        raise ValueError(
            f"the caller's shard_map maps over {manual} of axis_name={axis_name!r}: map over all of these or none, or "
            "name those alone"
        )
    kinds = sorted({types[axis].name for axis in axes if mesh.shape[axis] > 1})
    if len(kinds) > 1:
        raise ValueError(
            f"the axes of axis_name={axis_name!r} are of several types, {', '.join(kinds)}: make the "
            "mesh with one type for all of these"
        )
    return axes


def mesh_of(array: Array) -> Mesh | AbstractMesh | None:
    """Returns the mesh that an array carries, if it carries one."""
    # A traced array has its mesh only in its type; a concrete one has a mesh of devices.
    if isinstance(array, Tracer):
        mesh = jax.typeof(array).sharding.mesh
    else:
        mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return None if mesh is None or mesh.empty else mesh


def check_abstract(mesh: Any, arrays: tuple[Array, ...]) -> None:
    """Checks that the devices of an abstract mesh are known.

    Raises:
      ValueError: naming the mesh and the remedy.
    """
    is_placed = any(isinstance(array, Tracer) or mesh_of(array) is not None for array in arrays)
    if isinstance(mesh, AbstractMesh) and not is_placed and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"mesh={mesh} is abstract, and nothing says on which devices it is: give the mesh of these, or call under "
            "jax.jit with arrays on them"
        )


class Target(NamedTuple):
    """A platform, by its name in lowering, and the kind of its devices, by JAX's name."""

    platform: str
    device_kind: str


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def traced_for(target: Target | None) -> Iterator[None]:
    """Traces calls inside the context as if they ran on the devices of `target`, which need not be present."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def kind_of(mesh: Mesh | AbstractMesh | None, platform: str) -> str:
    """Returns the kind of the devices of a mesh or of a platform, as far as it is known."""
    target = _TARGET.get()
    if target is not None:
        return target.device_kind
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    kind = getattr(getattr(mesh, "abstract_device", None), "device_kind", None)
    is_default = platform == lowered_platform(jax.default_backend())
    return kind or (jax.devices()[0].device_kind if is_default else "")


def platform_of(mesh: Mesh | AbstractMesh | None, array: Array) -> tuple[str, bool]:
    """Returns the platform of a mesh or an array, else the default, and whether a call is known to run on it."""
    target = _TARGET.get()
    if target is not None:
        return target.platform, True
    if isinstance(mesh, Mesh):
        return lowered_platform(mesh.devices.flat[0].platform), True
    device: Any = getattr(mesh, "abstract_device", None)
    if getattr(device, "platform", None):
        return lowered_platform(device.platform), True
    if isinstance(array, Tracer):
        return lowered_platform(jax.default_backend()), False
    return lowered_platform(next(iter(array.devices())).platform), True


def lowered_platform(platform: str) -> str:
    """Returns the name of a platform in lowering, given the name that its devices have."""
    return {"gpu": "cuda"}.get(platform, platform)
