"""Which mesh a call runs on, and how its arrays lie on it."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ringjax._warning import warn

Axes = tuple[str, ...]


class Placement(NamedTuple):
    """How tokens and heads lie on a mesh, and which of its axes are still to be mapped over.

    `axis_name` is None where the mesh has no sequence axis: then each device holds all tokens. `mapped` holds the axes
    that shard_map has to make manual. It is empty where there is no mesh, or where the caller's own shard_map has made
    all of them manual. `batch`, `heads` and `kv_heads` say which axes cut these dimensions. `unmapped` holds the Auto
    axes of several devices that are not mapped: what they cut, the compiler decides. The `platform` has the name that
    programs are lowered for: "cuda", not "gpu". Until the call is lowered, one that is not known is jax's default one.
    """

    mesh: Mesh | AbstractMesh | None = None
    axis_name: str | None = None
    num_shards: int = 1
    mapped: frozenset[str] = frozenset()
    batch: tuple[Axes, ...] = ()
    heads: Axes = ()
    kv_heads: Axes = ()
    is_explicit: bool = False
    unmapped: Axes = ()
    platform: str = "cpu"
    is_platform_known: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether no axis cuts the arrays beyond what is known here: jit may shard them over a mesh that it hides."""
        is_seen = self.mesh is not None or self.axis_name is not None or jax.device_count() == 1
        return is_seen and not self.unmapped

    def block(self, array: Array) -> tuple[int, ...]:
        """Returns the shape [*batch, heads] that a shard has of queries, as far as sizes and axes are known."""
        batch = self.batch or ((),) * (array.ndim - 3)
        cuts = [math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1 for axes in (*batch, self.heads)]
        sizes = (size if isinstance(size, int) else 1 for size in (*array.shape[:-3], array.shape[-2]))
        return tuple(size // cut for size, cut in zip(sizes, cuts, strict=True))

    @property
    def device_kind(self) -> str:
        """The kind of the devices, as far as it is known."""
        if isinstance(self.mesh, Mesh):
            return self.mesh.devices.flat[0].device_kind
        kind = getattr(getattr(self.mesh, "abstract_device", None), "device_kind", None)
        is_default = self.platform == lowered_platform(jax.default_backend())
        return kind or (jax.devices()[0].device_kind if is_default else "")

    def length(self, array: Array) -> int:
        """Returns the number of tokens of the whole sequence that an array [*batch, T, heads, width] is, or is of."""
        is_shard = self.axis_name is not None and self.axis_name not in self.mapped
        return array.shape[-3] * (self.num_shards if is_shard else 1)

    def map(self, function: Callable[..., Any], inputs: str, outputs: str) -> Callable[..., Any]:
        """Returns the function of shards as one of whole arrays.

        "q" is laid out as queries are, "k" as keys, "d" as queries without heads, and "r" is the same everywhere; of
        "Q" and "K" each device has the whole length.
        """
        if self.mesh is None:
            return function
        # All axes are named by naming none: then a vmap along one of them can take it out.
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
        padding = -array.shape[axis] % self.num_shards if self.axis_name in self.mapped and kind != "r" else 0
        if padding:
            array = jnp.pad(array, [(0, padding if dim == axis else 0) for dim in range(array.ndim)])
        return self.reshard(array, kind)

    def take_back(self, array: Array, length: int, axis: int) -> Array:
        """Cuts the padding off a result that is laid out as queries are."""
        if array.shape[axis] == length:
            return array
        if self.is_explicit:  # a sharded length cannot be cut to one that the mesh does not divide
            array = self.reshard(array, "q", is_length_sharded=False)
        return jax.lax.slice_in_dim(array, 0, length, axis=axis)

    def _spec(self, kind: str, is_length_sharded: bool = True) -> P:
        if kind == "r":
            return P()
        is_length_sharded, kind = is_length_sharded and kind.islower(), kind.lower()
        length = self.axis_name if is_length_sharded and self.axis_name in self.mapped else None
        heads = {"q": [self.heads or None], "k": [self.kv_heads or None], "d": []}[kind]
        return P(*(axes or None for axes in self.batch), length, *heads)

    def reshard(self, array: Array, kind: str, is_length_sharded: bool = True) -> Array:
        """Gives an array the type that `map` takes; only typed axes ask for it."""
        if self.mesh is None or not self.is_explicit:
            return array
        return reshard(array, self.mesh, self._spec(kind, is_length_sharded))


def reshard(array: Array, mesh: Mesh | AbstractMesh, spec: P) -> Array:
    """Gives an array the type that a spec says, of the Explicit axes of a mesh, and constrains it to the Auto ones."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed, auto = (
        [tuple(axis for axis in axes if kinds[axis] == kind) for axes in _axes_of(spec)]
        for kind in (AxisType.Explicit, AxisType.Auto)
    )
    array = jax.sharding.reshard(array, NamedSharding(mesh, P(*(axes or None for axes in typed))))
    if not any(auto):
        return array
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*(axes or P.UNCONSTRAINED for axes in auto))))


def check_mesh(mesh: Any, axis_name: Any, spec: Any) -> None:
    """Checks what says where a call runs, as far as its arrays do not matter.

    Raises:
      TypeError, ValueError: naming the argument, its value and the remedy.
    """
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name={axis_name!r} must be the name of a mesh axis, such as 'seq'")
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh={mesh!r} must be a mesh, such as jax.make_mesh((8,), ('seq',)) returns")
    if mesh is not None and axis_name not in mesh.axis_names:
        raise ValueError(
            f"mesh={mesh} has no axis axis_name={axis_name!r}: name one of {mesh.axis_names}, or leave mesh out"
        )
    if spec is not None and not isinstance(spec, P):
        raise TypeError(f"spec={spec!r} must be a jax.sharding.PartitionSpec, such as P('data', 'seq', 'tensor')")


def find_placement(
    query: Array,
    key: Array,
    value: Array,
    mesh: Mesh | AbstractMesh | None,
    axis_name: str,
    spec: P | None = None,
) -> Placement:
    """Returns the placement of a call's arrays.

    The mesh is that of `find_mesh`. How its axes cut the arrays is what `spec` says if given, else what the types of
    the arrays say of Explicit axes.

    Raises:
      ValueError: if `spec` is given without a mesh or names axes that there are not, or if a
        dimension is sharded over axes that it must not be sharded over.
    """
    _check_abstract(mesh, (query, key, value))
    mesh, _ = find_mesh((query, key, value), mesh)
    platform, is_platform_known = _platform(mesh, query)
    if mesh is None:
        if spec is not None:
            raise ValueError(
                f"spec={spec} is given, but there is no mesh: pass mesh=, enter jax.set_mesh, or leave spec out"
            )
        return Placement(platform=platform, is_platform_known=is_platform_known)

    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name, kind in types.items() if kind == AxisType.Explicit}
    has_axis = axis_name in types
    known = explicit if spec is None else {name for name, kind in types.items() if kind != AxisType.Manual}
    mapped = known | {axis_name} if has_axis and types[axis_name] != AxisType.Manual else known
    if spec is not None:
        _check_spec(spec, query, mesh, known)
    cut = lambda array: _entries(_spec_of(array) if spec is None else spec, array.ndim)
    batch, length, heads, query_width = cut(query)
    _, key_length, kv_heads, key_width = cut(key)
    _, value_length, value_heads, value_width = cut(value)
    _check_lengths({"query": length, "key": key_length, "value": value_length}, axis_name)
    _check_widths({"query": query_width, "key": key_width, "value": value_width})
    if axis_name in (axis for axes in (*batch, heads, kv_heads, value_heads) for axis in axes):
        raise ValueError(
            f"batch or heads are sharded over axis_name={axis_name!r}, the axis of the sequence: shard them over others"
        )
    typed = lambda axes: tuple(axis for axis in axes if axis in known)
    return Placement(
        mesh=mesh if mapped else None,
        axis_name=axis_name if has_axis else None,
        num_shards=mesh.shape[axis_name] if has_axis else 1,
        mapped=frozenset(mapped),
        batch=tuple(map(typed, batch)),
        **_split_heads(mesh, typed(heads), {"key": typed(kv_heads), "value": typed(value_heads)}, key.shape[-2]),
        is_explicit=bool(explicit),
        unmapped=tuple(
            name
            for name, kind in types.items()
            if kind == AxisType.Auto and name not in mapped and mesh.shape[name] > 1
        ),
        platform=platform,
        is_platform_known=is_platform_known,
    )


def find_mesh(
    arrays: Iterable[Array], mesh: Mesh | AbstractMesh | None = None
) -> tuple[Mesh | AbstractMesh | None, str]:
    """Returns the mesh that a call runs on, if there is one, and where it is from.

    That of the caller's own shard_map, else the argument, else the one that the arrays carry, else `jax.set_mesh`'s.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:  # no other mesh is possible there
        return context, "the caller's shard_map"
    if mesh is not None:
        return mesh, "the argument mesh="
    carried = next(filter(None, map(_mesh_of, arrays)), None)
    if carried is not None:
        return carried, "the arrays"
    return (None, "nowhere") if context.empty else (context, "jax.set_mesh")


class MeshWarning(UserWarning):
    """A mesh is there, and its devices all compute the same: the attention, or what follows it.

    To stop instead of wasting devices, make the warning an error:

    Example:
      >>> import warnings
      >>> warnings.simplefilter("error", MeshWarning)  # for the rest of the program
      >>> query = jnp.ones((1, 16, 2, 8))
      >>> with jax.set_mesh(jax.make_mesh((8,), ("context",))):  # axis_name="context" is the remedy
      ...     ringjax.ring_dilated_attention(query, query, query, segment_lengths=(16,), dilation_rates=(1,))
      Traceback (most recent call last):
        ...
      ringjax._mesh.MeshWarning: the mesh from jax.set_mesh has no axis axis_name='seq', and nothing says that \
('context',) cut batches or heads: every device there computes all tokens; name the sequence's axis, such as \
axis_name='context'
    """


# What others call the axis of the sequence.
_LIKE_SEQUENCE = ("context", "cp", "ctx", "length", "ring", "sequence", "seq", "sp", "tokens")


def warn_of_mesh(placement: Placement, query: Array, axis_name: str) -> None:
    """Warns, once for each mesh, of axes that cut nothing where the sequence axis is missing."""
    mesh, source = find_mesh((query,))
    if placement.axis_name is not None or mesh is None:
        return
    cutting = {axis for axes in (*placement.batch, placement.heads) for axis in axes}
    idle = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in cutting)
    like_sequence = [name for name in idle if name.lower() in _LIKE_SEQUENCE]
    known = [size for size in (*query.shape[:-3], query.shape[-2]) if isinstance(size, int)]
    # Auto axes may cut batches and heads, unseen: as many as there are of both.
    is_too_many = math.prod(known) < math.prod(mesh.shape[name] for name in idle)
    if idle and (like_sequence or is_too_many):
        warn_of_idle(idle, (like_sequence or idle)[-1], source, axis_name)


@functools.lru_cache(maxsize=64)
def warn_of_idle(idle: tuple[str, ...], likely: str, source: str, axis_name: str) -> None:
    """Warns of axes that nothing is cut over, the likely one of which is that of the sequence."""
    warn(
        f"the mesh from {source} has no axis axis_name={axis_name!r}, and nothing says that {idle} cut batches or "
        f"heads: every device there computes all tokens; name the sequence's axis, such as axis_name={likely!r}",
        MeshWarning,
    )


def warn_of_length(placement: Placement, length: int) -> None:
    """Warns, once, of a length that the mesh does not divide: its results are whole on each device."""
    shards = placement.num_shards
    if placement.axis_name in placement.mapped and length > shards and length % shards:
        warn_of_whole(placement.axis_name, shards)


@functools.lru_cache(maxsize=64)
def warn_of_whole(axis_name: str, shards: int) -> None:
    """Warns of results that are not sharded."""
    warn(
        f"the {shards} devices of {axis_name!r} do not divide the length of query: the output comes back whole on "
        "each, which then computes all that follows; pad tokens once, before the model, with ringjax.pad_to_mesh",
        MeshWarning,
    )


def _platform(mesh: Mesh | AbstractMesh | None, array: Array) -> tuple[str, bool]:
    """Returns the platform of a mesh or an array, else the default one, and whether a call will run on it."""
    if isinstance(mesh, Mesh):
        return lowered_platform(mesh.devices.flat[0].platform), True
    device: Any = getattr(mesh, "abstract_device", None)
    if getattr(device, "platform", None):
        return lowered_platform(device.platform), True
    if isinstance(array, Tracer):
        return lowered_platform(jax.default_backend()), False
    return lowered_platform(next(iter(array.devices())).platform), True


def lowered_platform(platform: str) -> str:
    """Returns the name of a platform as programs are lowered for it, given what its devices say."""
    return {"gpu": "cuda"}.get(platform, platform)


def _mesh_of(array: Array) -> Mesh | AbstractMesh | None:
    # A traced array shows its mesh in its type alone; a concrete one has a mesh of devices.
    if isinstance(array, Tracer):
        mesh = jax.typeof(array).sharding.mesh
    else:
        mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return None if mesh is None or mesh.empty else mesh


def _spec_of(array: Array) -> P:
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.spec
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()


def _entries(spec: P, ndim: int) -> tuple[tuple[Axes, ...], Axes, Axes, Axes]:
    """Returns the mesh axes that cut an array's batch dimensions, its length, its heads and its width."""
    entries = _axes_of(spec) + [()] * (ndim - len(spec))
    *batch, length, heads, width = entries
    return tuple(batch), length, heads, width


def _axes_of(spec: P) -> list[Axes]:
    """Returns the mesh axes of each entry of a spec."""
    return [entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else () for entry in spec]


def _check_abstract(mesh: Any, arrays: tuple[Array, ...]) -> None:
    is_placed = any(isinstance(array, Tracer) or _mesh_of(array) is not None for array in arrays)
    if isinstance(mesh, AbstractMesh) and not is_placed and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"mesh={mesh} is abstract, and nothing says on which devices it is: give the mesh of these, or call under "
            "jax.jit with arrays on them"
        )


def _check_spec(spec: P, query: Array, mesh: Mesh | AbstractMesh, known: set[str]) -> None:
    if len(spec) > query.ndim:
        raise ValueError(f"spec={spec} has more entries than query has dimensions, {query.shape}: leave some out")
    batch, length, heads, width = _entries(spec, query.ndim)
    for dimension, axes in enumerate((*batch, length, heads, width)):
        for name in axes:
            if name not in known:
                raise ValueError(
                    f"spec={spec} names the axis {name!r}, but the mesh has {sorted(known)}: name one of these"
                )
        shards = math.prod(mesh.shape[name] for name in axes)
        if query.shape[dimension] % shards and dimension != query.ndim - 3:  # the length is padded
            raise ValueError(
                f"spec={spec} cuts dimension {dimension} of query, {query.shape}, over the {shards} devices of {axes}: "
                "leave these axes out, or make the dimension a multiple"
            )


def _check_lengths(lengths: dict[str, Axes], axis_name: str) -> None:
    for name, axes in lengths.items():
        if axes not in ((), (axis_name,)):
            raise ValueError(
                f"the length of {name} is sharded over {axes}, but axis_name={axis_name!r}: "
                f"shard the length over {axis_name!r} alone, or name its one axis with axis_name"
            )


def _check_widths(widths: dict[str, Axes]) -> None:
    for name, axes in widths.items():
        if axes:
            raise ValueError(f"the last dimension of {name} is sharded over {axes}: shard its heads instead")


def _split_heads(
    mesh: Mesh | AbstractMesh, heads: Axes, kv_heads: dict[str, Axes], num_kv_heads: int
) -> dict[str, Axes]:
    # Key/value heads follow the query heads where the axes divide them. Fewer heads than devices stay whole, and each
    # device picks the one that its query heads share.
    shards = math.prod(mesh.shape[axis] for axis in heads)
    for name, axes in kv_heads.items():
        if axes not in ((), heads):
            raise ValueError(
                f"the heads of {name} are sharded over {axes} and those of query over {heads}: "
                "shard them over the same axes"
            )
    if num_kv_heads % shards and shards % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} key/value heads do not divide over the {shards} devices of {heads}, nor those over them: "
            "use a number of key/value heads that divides them or is divided by them"
        )
    return {"heads": heads, "kv_heads": heads if num_kv_heads % shards == 0 else ()}


def find_axis(mesh: Mesh | AbstractMesh | None, axis_name: str) -> tuple[Mesh | AbstractMesh | None, int]:
    """Returns the mesh that is given or that `jax.set_mesh` holds, None if it lacks the axis, and the axis' size."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types.get(axis_name, AxisType.Manual) == AxisType.Manual:
        return None, 1
    return mesh, mesh.shape[axis_name]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def sharded_zeros(
    shape: tuple[int, ...], dtype: Any, mesh: Mesh | AbstractMesh | None, axis_name: str, spec: P | None = None
) -> Array:
    """Returns zeros [*batch, rows, heads, width] whose rows are sharded along an axis of the mesh, if there is one.

    Their batch and heads are sharded as `spec` says of queries; heads that these axes do not divide are whole.
    """
    zeros = jnp.zeros(shape, dtype)
    if mesh is None:
        return zeros
    batch, _, heads, _ = _entries(P() if spec is None else spec, len(shape))
    fits = shape[-2] % math.prod(mesh.shape[axis] for axis in heads) == 0
    spec = P(*(axes or None for axes in batch), axis_name, heads if fits and heads else None)
    if AxisType.Explicit in mesh.axis_types:
        return reshard(zeros, mesh, spec)
    return jax.lax.with_sharding_constraint(zeros, NamedSharding(mesh, spec))


def token_positions(array: Array, mesh: Mesh | AbstractMesh | None, axis_name: str) -> Int[Array, "T"]:
    """Returns the global position of each token of an array [*batch, T, heads, width], sharded as the tokens are."""
    placement = find_placement(array, array, array, mesh, axis_name)
    length = array.shape[-3]
    positions = jnp.arange(length, dtype=jnp.int32)
    if placement.axis_name is None:
        return positions
    if placement.axis_name not in placement.mapped:  # inside the caller's shard_map: the positions of one shard
        return positions + jax.lax.axis_index(placement.axis_name) * length
    if placement.mesh is None or length % placement.num_shards:
        return positions
    typed = jax.typeof(array).sharding
    kinds = dict(zip(typed.mesh.axis_names, typed.mesh.axis_types, strict=True))
    if kinds.get(placement.axis_name) == AxisType.Explicit:
        sharding = NamedSharding(typed.mesh, P(typed.spec[-3]))
        return jax.lax.broadcasted_iota(jnp.int32, (length,), 0, out_sharding=sharding)
    return jax.lax.with_sharding_constraint(positions, NamedSharding(placement.mesh, P(placement.axis_name)))


def take_whole(array: Array, rows: Int[Array, "R"], axis: int, kv_heads: int = 0) -> Array:
    """Returns some rows along an axis, counted from the end, which every device along it gets.

    Heads behind these are whole as well where what cuts them does not divide so many key/value heads.
    """
    index = (..., rows, *[slice(None)] * (-1 - axis))
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return array.at[index].get(mode="promise_in_bounds")
    spec = list(sharding.spec)
    spec[axis] = None
    if kv_heads and kv_heads % math.prod(sharding.mesh.shape[name] for name in _axes_of(P(spec[axis + 1]))[0]):
        spec[axis + 1] = None
    return array.at[index].get(mode="promise_in_bounds", out_sharding=NamedSharding(sharding.mesh, P(*spec)))
