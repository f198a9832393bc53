"""How the arrays of a call lie on its mesh, and functions of their shards."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ringjax._mesh.axes import Axes, AxisName, Cuts, cuts_of, named, reshard, varying_axes
from ringjax._mesh.mesh import check_abstract, find_mesh, kind_of, platform_of, sequence_axes


class Placement(NamedTuple):
    """How tokens and heads lie on a mesh, and which of its axes are still to be mapped over.

    `axes` are those of the sequence, major first, with their `sizes`. There are none where the mesh has no sequence
    axis: then each device holds all tokens. `mapped` holds the axes that shard_map has to make manual. It is empty
    where there is no mesh, or where the caller's own shard_map has made all of them manual. `batch`, `heads` and
    `kv_heads` say which axes cut these dimensions; the first `num_vmaps` of the batch dimensions are instances of
    vmaps. `unmapped` holds the Auto axes of several devices that are not mapped, `num_unmapped` devices in all: the
    compiler decides what they cut. `platform` is the name in lowering: "cuda", not "gpu". If it is known only at
    lowering, it is JAX's default platform until then.
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: Axes = ()
    sizes: tuple[int, ...] = ()
    mapped: frozenset[str] = frozenset()
    batch: tuple[Axes, ...] = ()
    heads: Axes = ()
    kv_heads: Axes = ()
    is_explicit: bool = False
    unmapped: Axes = ()
    platform: str = "cpu"
    is_platform_known: bool = True
    num_vmaps: int = 0
    num_unmapped: int = 1

    @property
    def axis_name(self) -> AxisName | None:
        """The axis of the sequence, or its axes, as callers name them; None if there is none."""
        return self.axes if len(self.axes) > 1 else next(iter(self.axes), None)

    @property
    def num_shards(self) -> int:
        """The devices along the sequence."""
        return math.prod(self.sizes)

    @property
    def are_axes_mapped(self) -> bool:
        """Whether shard_map has to make the axes of the sequence manual; else the arrays are the shards of a caller."""
        return bool(self.axes) and self.mapped.issuperset(self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether no axis cuts the arrays beyond those known here: without a known mesh, jit may still shard them."""
        is_seen = self.mesh is not None or bool(self.axes) or jax.device_count() == 1
        return is_seen and not self.unmapped

    def block(self, array: Array) -> tuple[int, ...]:
        """Returns the shape [*batch, heads] that a shard has of queries, as far as sizes and axes are known."""
        axes = (*self.batch, self.heads)
        cuts = [math.prod(self.mesh.shape[axis] for axis in of_one) if self.mesh else 1 for of_one in axes]
        sizes = (size if isinstance(size, int) else 1 for size in (*array.shape[:-3], array.shape[-2]))
        return tuple(size // cut for size, cut in zip(sizes, cuts, strict=True))

    @property
    def device_kind(self) -> str:
        """The kind of the devices, as far as it is known."""
        return kind_of(self.mesh, self.platform)

    def length(self, array: Array) -> int:
        """Returns the length of the whole sequence, given an array [*batch, T, heads, width] of it or of one shard."""
        return array.shape[-3] * (1 if self.are_axes_mapped else self.num_shards)

    def check_shards(self, shards: dict[str, Array], query_offset: Any) -> None:
        """Checks that arrays vary along the sequence axis and the offset does not, if the caller's shard_map tracks it.

        Raises:
          ValueError: naming the axis and the remedy.
        """
        if self.num_shards == 1 or self.are_axes_mapped:
            return
        axis, axes = self.axis_name, frozenset(self.axes)
        if not axes <= varying_axes(jax.lax.axis_index(self.axes)):  # inside a shard_map with check_vma=False
            return
        same = [name for name, array in shards.items() if not axes <= varying_axes(array)]
        if same:
            raise ValueError(
                f"{', '.join(same)} would be the same shard on all devices of axis_name={axis!r}, over which the "
                f"caller's shard_map maps: shard the length by its in_specs, such as P(None, {axis!r}), or leave "
                f"{axis!r} out of its axis_names"
            )
        if isinstance(query_offset, jax.Array) and axes & varying_axes(query_offset):
            raise ValueError(
                f"query_offset differs between the devices of axis_name={axis!r}: it is the position of the first "
                "query of the whole sequence; give all the same, 0 for a sequence from its beginning"
            )

    def map(self, function: Callable[..., Any], inputs: str, outputs: str) -> Callable[..., Any]:
        """Returns the function of shards as one of whole arrays.

        "q" is laid out as queries are, "k" as keys, "d" as queries without heads, "i" as the instances of vmaps, and
        "r" is the same everywhere. "Q" and "K" are like "q" and "k", but each device has the whole length.
        """
        if self.mesh is None:
            return function
        # An empty set means all axes; a vmap along one of them can then remove it.
        axis_names = frozenset() if self.mapped == set(self.mesh.axis_names) else self.mapped
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(map(self._spec, inputs)),
            out_specs=tuple(map(self._spec, outputs)),
            axis_names=axis_names,
        )

    def lay_out(self, array: Array, kind: str) -> Array:
        """Pads an array's length to equal shards, and gives it the sharding that `map` takes."""
        axis = array.ndim - (3 if kind in "qk" else 1)
        padding = -array.shape[axis] % self.num_shards if self.are_axes_mapped and kind not in "ri" else 0
        if padding:
            array = jnp.pad(array, [(0, padding if dim == axis else 0) for dim in range(array.ndim)])
        return self.reshard(array, kind)

    def idle_axes(self, count: int) -> Axes:
        """Returns the mapped Auto axes that cut nothing, as far as they divide so many instances of a vmap.

        Left idle, all devices along them would compute all instances.
        """
        used = {*self.axes, *self.heads, *itertools.chain.from_iterable(self.batch)}
        idle: Axes = ()
        for name, size, kind in () if self.mesh is None else _axes(self.mesh):
            if name in self.mapped - used and kind == AxisType.Auto and size > 1 and count % size == 0:
                idle, count = (*idle, name), count // size
        return idle

    def with_instances(self, axes: Axes) -> "Placement":
        """Returns the placement of all instances of a vmap, which these axes cut."""
        return self._replace(batch=(axes, *self.batch), num_vmaps=self.num_vmaps + 1)

    def take_back(self, array: Array, length: int, axis: int) -> Array:
        """Cuts the padding off a result that is laid out as queries are."""
        if array.shape[axis] == length:
            return array
        if self.is_explicit:  # a sharded length cannot be cut to one that the mesh does not divide
            array = self.reshard(array, "q", is_length_sharded=False)
        return jax.lax.slice_in_dim(array, 0, length, axis=axis)

    def _spec(self, kind: str, is_length_sharded: bool = True) -> P:
        if kind in "ri":
            return P(*(axes or None for axes in self.batch[: self.num_vmaps if kind == "i" else 0]))
        is_length_sharded, kind = is_length_sharded and kind.islower(), kind.lower()
        length = self.axis_name if is_length_sharded and self.are_axes_mapped else None
        heads = {"q": [self.heads or None], "k": [self.kv_heads or None], "d": []}[kind]
        return P(*(axes or None for axes in self.batch), length, *heads)

    def reshard(self, array: Array, kind: str, is_length_sharded: bool = True) -> Array:
        """Gives an array the sharding that `map` takes in its type, which only Explicit axes need."""
        if self.mesh is None or not self.is_explicit:
            return array
        return reshard(array, self.mesh, self._spec(kind, is_length_sharded))


def find_placement(
    query: Array,
    key: Array,
    value: Array,
    mesh: Mesh | AbstractMesh | None,
    axis_name: AxisName,
    spec: P | None = None,
) -> Placement:
    """Returns the placement of a call's arrays.

    The mesh is that of `find_mesh`. Its axes cut the arrays as `spec` says if given, else its Explicit axes cut them as
    their types say.

    Raises:
      ValueError: if `spec` names axes that the mesh does not have, or if a dimension is sharded over axes that it must
        not be sharded over.
    """
    check_abstract(mesh, (query, key, value))
    mesh, _ = find_mesh((query, key, value), mesh)
    platform, is_platform_known = platform_of(mesh, query)
    if spec is not None and mesh is not None:  # without a mesh it means nothing
        check_spec(spec, query, key.shape[-2], mesh, axis_name)
    if mesh is None:
        batch = ((),) * (query.ndim - 3)
        return Placement(batch=batch, platform=platform, is_platform_known=is_platform_known)

    types = {name: kind for name, _, kind in _axes(mesh)}
    explicit = {name for name, kind in types.items() if kind == AxisType.Explicit}
    axes = sequence_axes(mesh, axis_name)
    known = explicit if spec is None else {name for name, kind in types.items() if kind != AxisType.Manual}
    mapped = known | {axis for axis in axes if types[axis] != AxisType.Manual}
    # An axis of one device cuts nothing, but is mapped too, since kernels accept no Auto axis. Inside the caller's own
    # shard_map it stays Auto: mapping it would need another shard_map around this call.
    if (mapped or axes) and AxisType.Manual not in types.values():
        mapped |= {name for name, kind in types.items() if kind == AxisType.Auto and mesh.shape[name] == 1}
    arrays = {"query": query, "key": key, "value": value}
    cuts = {name: cuts_of(_spec_of(array) if spec is None else spec, array.ndim) for name, array in arrays.items()}
    _check_cuts(cuts, mesh, axis_name)
    typed = lambda axes: tuple(axis for axis in axes if axis in known)
    heads, *of_keys = (typed(cut.heads) for cut in cuts.values())
    unmapped = {
        name: mesh.shape[name]
        for name, kind in types.items()
        if kind == AxisType.Auto and name not in mapped and mesh.shape[name] > 1
    }
    return Placement(
        mesh=mesh if mapped else None,
        axes=axes,
        sizes=tuple(mesh.shape[axis] for axis in axes),
        mapped=frozenset(mapped),
        batch=tuple(map(typed, cuts["query"].batch)),
        **_split_heads(mesh, heads, dict(zip(("key", "value"), of_keys, strict=True)), key.shape[-2]),
        is_explicit=bool(explicit),
        unmapped=tuple(unmapped),
        platform=platform,
        is_platform_known=is_platform_known,
        num_vmaps=0,
        num_unmapped=math.prod(unmapped.values()),
    )


def _axes(mesh: Mesh | AbstractMesh) -> Iterator[tuple[str, int, AxisType]]:
    """Gives the name, the size and the type of each axis of a mesh."""
    return zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)


def _spec_of(array: Array) -> P:
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.spec
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()


def check_spec(
    spec: P,
    query: Array | jax.ShapeDtypeStruct,
    num_kv_heads: int,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    name: str = "query",
) -> None:
    """Checks that queries [*batch, T, N, H], and `num_kv_heads` key/value heads, can lie on a mesh as a spec says.

    Raises:
      ValueError: naming the spec and the remedy.
    """
    known = {name for name, _, kind in _axes(mesh) if kind != AxisType.Manual}
    if len(spec) > query.ndim:
        raise ValueError(f"spec={spec} has more entries than {name} has dimensions, {query.shape}: leave some out")
    batch, length, heads, width = cuts_of(spec, query.ndim)
    for dimension, axes in enumerate((*batch, length, heads, width)):
        for axis in axes:
            if axis in mesh.axis_names and axis not in known:
                raise ValueError(
                    f"spec={spec} names the axis {axis!r}, over which the caller's shard_map maps already: leave it out"
                )
            if axis not in known:
                raise ValueError(
                    f"spec={spec} names the axis {axis!r}, but the mesh has {sorted(known)}: name one of these"
                )
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if query.shape[dimension] % shards and dimension != query.ndim - 3:  # the length is padded
            raise ValueError(
                f"spec={spec} cuts dimension {dimension} of {name}, {query.shape}, over the {shards} devices of {axes}"
                ": leave these axes out, or make the dimension a multiple"
            )
    _check_cuts({name: cuts_of(spec, query.ndim)}, mesh, axis_name)
    _check_kv_heads(mesh, heads, num_kv_heads)


def _check_cuts(cuts: dict[str, Cuts], mesh: Mesh | AbstractMesh, axis_name: AxisName) -> None:
    axes = named(axis_name)
    # XLA leaves axes of one device out of the shardings of its results.
    cutting = lambda axes: tuple(axis for axis in axes if axis not in mesh.axis_names or mesh.shape[axis] > 1)
    for name, (batch, length, heads, width) in cuts.items():
        if cutting(length) not in ((), cutting(axes)):
            raise ValueError(
                f"the length of {name} is sharded over {length}, but axis_name={axis_name!r}: "
                f"shard the length over {axis_name!r} alone, or name its axes with axis_name"
            )
        if width:
            raise ValueError(f"the last dimension of {name} is sharded over {width}: shard its heads instead")
        if {*axes} & {*itertools.chain(heads, *batch)}:
            raise ValueError(
                f"batch or heads of {name} are sharded over axis_name={axis_name!r}, the axis of the sequence: shard "
                "them over others"
            )


def _split_heads(
    mesh: Mesh | AbstractMesh, heads: Axes, kv_heads: dict[str, Axes], num_kv_heads: int
) -> dict[str, Axes]:
    # Key/value heads are cut like query heads if the axes divide them. If they are fewer than the devices, every device
    # has all of them, and picks the one that its query heads share.
    shards = math.prod(mesh.shape[axis] for axis in heads)
    for name, axes in kv_heads.items():
        if axes not in ((), heads):
            raise ValueError(
                f"the heads of {name} are sharded over {axes} and those of query over {heads}: "
                "shard them over the same axes"
            )
    _check_kv_heads(mesh, heads, num_kv_heads)
    return {"heads": heads, "kv_heads": heads if num_kv_heads % shards == 0 else ()}


def _check_kv_heads(mesh: Mesh | AbstractMesh, heads: Axes, num_kv_heads: int) -> None:
    shards = math.prod(mesh.shape[axis] for axis in heads)
    if num_kv_heads % shards and shards % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} key/value heads do not divide over the {shards} devices of {heads}, nor those over them: "
            "use a number of key/value heads that divides them or is divided by them"
        )
