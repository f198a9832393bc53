"""The planner: compares what strategies cost for a model and a mesh, before anything runs."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from ringjax._call import Call
from ringjax._kernels.interface import Request
from ringjax._mesh.axes import AxisName, named
from ringjax._mesh.mesh import check_axis_name
from ringjax._options import KernelOptions, needs_of
from ringjax._pattern.arguments import DTYPES
from ringjax._pattern.branch import MAX_POSITIONS, Branch
from ringjax._pattern.counts import check_count, check_flags, is_integer
from ringjax._pattern.option import read_options, taking
from ringjax._pattern.options import ChoiceOptions, pattern_of
from ringjax._pattern.other_names import OF_MAKING
from ringjax._pattern.pattern import DilatedPattern
from ringjax._tools.comparison import Comparison, compare
from ringjax._tools.machine import Machine, find_machine
from ringjax._tools.packing import pack

FEATURES = "document_ids", "logits_soft_cap", "dropout_rate", "return_max_logit"
_REMEDIES = OF_MAKING | {name: f"name it in features=({name!r},)" for name in FEATURES}
# Bounds of what a plan counts one by one; everything else is at most 2^20.
_MOST = {"num_tokens": MAX_POSITIONS, "num_heads": 2**12}


class PlanOptions(ChoiceOptions, KernelOptions, total=False):
    """The options of `plan`, except sizes; its `features` are options that few implementations serve."""


@taking(PlanOptions)
def plan(
    pattern: DilatedPattern | Sequence[Branch] | None = None,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    batch_size: int = 1,
    document_lengths: Sequence[int] | None = None,
    dtype: Any = "bfloat16",
    features: Sequence[str] = (),
    mesh: Mapping[str, int] | jax.sharding.Mesh | jax.sharding.AbstractMesh | int = 8,
    axis_name: AxisName = "seq",
    head_axes: str | Sequence[str] = ("tensor",),
    node_size: int | None = None,
    device: str | Machine = "H100",
    has_gradient: bool = True,
    **options: Unpack[PlanOptions],
) -> Comparison:
    """Compares the strategies for a model on a mesh, from integers alone: nothing is compiled, no array is made.

    Args:
      pattern: the branches, see :func:`ring_dilated_attention`.
      num_tokens: the length of the whole sequence.
      num_heads: the number of query heads N.
      num_kv_heads: the number of key/value heads K; N by default.
      head_dim: the width of queries and keys.
      value_dim: the width of values; `head_dim` by default.
      batch_size: the number of sequences on the whole mesh.
      document_lengths: the tokens of each document, if several are packed into a sequence, in order: then only pairs
        of one document are counted, and a ring takes as long as the busiest device of each step.
      dtype: the dtype of the arrays.
      features: which of ``"document_ids"``, ``"logits_soft_cap"``, ``"dropout_rate"`` and ``"return_max_logit"`` are
        used.
      mesh: the size of each mesh axis, such as ``{"data": 2, "seq": 8, "tensor": 2}``, or that of the sequence axis,
        if it is one; or a mesh.
      axis_name: the axis that the sequence is sharded along, or several, major first.
      head_axes: the axis or axes, besides the sequence's, that heads are sharded along; all others cut the batch.
      node_size: the devices of a node; what the device's figures say by default.
      device: ``"A100"``, ``"H100"``, ``"H200"``, ``"B200"``, ``"v5e"``, ``"v5p"``, ``"v6e"``, ``"cpu"``, or a file of
        figures in JSON.
      has_gradient: whether the gradient is counted too.
      **options: as :func:`ring_dilated_attention` takes them; `features` names what else a call uses.

    Returns:
      A comparison of the strategies: `print` it for a table; `to_json()` returns its figures, `forecasts` has all
      strategies, `best` the one with the least time bound, and `example` the call to paste. Each forecast has
      `seconds`, the time bound, `memory`, the bounds `at_least` and `at_most` of the bytes that a device holds, and
      `num_bytes("forward")` or `num_bytes("backward")`, the bytes that it sends.

    Raises:
      ValueError, TypeError: for a wrong pattern, sizes that do not divide, an unknown device, feature or axis.

    Example:
      >>> from ringjax import Segments
      >>> plan([Segments(2**20)], num_tokens=2**20, num_heads=32, num_kv_heads=8, is_causal=True, mesh=8).best.strategy
      'all_to_all'
    """
    asked = read_options(PlanOptions, options, _REMEDIES, "plan")
    asked.pattern = pattern
    pattern = pattern_of(asked)
    check_flags(has_gradient=has_gradient)
    devices = _Mesh.read(mesh, axis_name, head_axes)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    model = _Model(num_tokens, num_heads, num_kv_heads, head_dim, value_dim, batch_size).checked(devices)
    features = _read_features(features)
    packings, longest = (), None
    if document_lengths is not None:
        packings, features = pack(document_lengths, model.num_tokens), ("document_ids", *features)
        longest = min(max(map(int, document_lengths)), model.num_tokens)
    machine = find_machine(device)
    if node_size is not None:
        _check_counts({"node_size": node_size})
        machine = dataclasses.replace(machine, node_size=int(node_size))
    needs = tuple(dict.fromkeys((*features, *needs_of(asked))))
    arrays = model.arrays(_read_dtype(dtype))
    call = Call.of(
        asked,
        Request.of(asked, *arrays, machine.platform, needs=needs, device_kind=machine.name),
        pattern,
        num_queries=model.num_tokens,
        num_keys=model.num_tokens,
        query_offset=0,
        num_devices=math.prod(devices.sizes[axis] for axis in devices.axes),
        num_inner_devices=devices.sizes[devices.axes[-1]] if len(devices.axes) > 1 else None,
        batch=model.batch_size // devices.batch_parts,
        num_heads=model.num_heads // devices.head_parts,
        num_unmapped=1,
        document_itemsize=4 * ("document_ids" in features),
        packings=packings,
        longest_document=longest,
    )
    return compare(call, machine, bool(has_gradient), devices.axis_name, devices.spec)


class _Mesh(NamedTuple):
    """The sizes of the axes of a mesh: `axes` cut the sequence, `head_axes` heads, and all others the batch."""

    sizes: dict[str, int]
    axes: tuple[str, ...]
    head_axes: tuple[str, ...]

    @classmethod
    def read(cls, mesh: Any, axis_name: AxisName, head_axes: str | Sequence[str]) -> "_Mesh":
        """Reads a mesh, or the sizes of its axes, as Python's integers: JSON takes none of NumPy's.

        Raises:
          TypeError, ValueError: for a mesh of another type, a size that is no count, or a missing axis.
        """
        check_axis_name("axis_name", axis_name)
        axes = named(axis_name)
        head_axes = (head_axes,) if isinstance(head_axes, str) else _names("head_axes", head_axes, "tensor")
        sizes = {axes[0]: mesh} if is_integer(mesh) and len(axes) == 1 else getattr(mesh, "shape", mesh)
        if not isinstance(sizes, Mapping):
            alone = f", or that of {axis_name!r}" if len(axes) == 1 else ""
            raise TypeError(f"mesh={mesh!r} must be a mesh, or the size of each axis by its name{alone}")
        _check_counts({f"mesh[{name!r}]": size for name, size in sizes.items()})
        missing = [axis for axis in axes if axis not in sizes]
        if missing:
            several = ", or several, the outer one first" if len(sizes) > 1 else ""
            remedy = f"name one of {', '.join(map(str, sizes))}{several}" if sizes else "give its size"
            raise ValueError(f"mesh={dict(sizes)} has no axis {missing[0]!r} of axis_name={axis_name!r}: {remedy}")
        unknown = [axis for axis in head_axes if axis in axes or axis not in sizes]
        if unknown and head_axes != ("tensor",):  # the default, which a mesh need not have
            remedy = f"name axes of the mesh besides {axis_name!r}: {', '.join(map(str, sizes))}"
            raise ValueError(f"head_axes={head_axes} has {unknown[0]!r}, which cuts no heads: {remedy}")
        return cls({name: int(size) for name, size in sizes.items()}, axes, head_axes)

    @property
    def axis_name(self) -> AxisName:
        """The name of the sequence's axis, or of several."""
        first, *others = self.axes
        return self.axes if others else first

    @property
    def head_parts(self) -> int:
        """The number of parts into which the mesh cuts heads."""
        return math.prod(self.sizes.get(axis, 1) for axis in self.head_axes if axis not in self.axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that cut the batch: all that are named for nothing else."""
        return tuple(axis for axis in self.sizes if axis not in (*self.axes, *self.head_axes))

    @property
    def batch_parts(self) -> int:
        """The number of parts into which the mesh cuts the batch."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    @property
    def spec(self) -> tuple[Any, ...]:
        """The axes that cut batches, the sequence and heads; empty if the sequence has the only ones."""
        of_heads = tuple(axis for axis in self.sizes if axis in self.head_axes and axis not in self.axes)
        if not (self.batch_axes or of_heads):
            return ()
        of_batch, of_heads = (some[0] if len(some) == 1 else some or None for some in (self.batch_axes, of_heads))
        return (of_batch, self.axis_name, of_heads)[: 3 if of_heads else 2]


class _Model(NamedTuple):
    """The sizes of the attention."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    batch_size: int

    def checked(self, devices: _Mesh) -> "_Model":
        """Returns the sizes as Python's integers.

        Raises:
          TypeError, ValueError: for a size that is no count, or that the mesh does not divide.
        """
        _check_counts(self._asdict())
        num_heads, num_kv_heads, parts = self.num_heads, self.num_kv_heads, devices.head_parts
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        if num_heads % parts or (num_kv_heads % parts and parts % num_kv_heads):
            raise ValueError(
                f"num_heads={num_heads} and num_kv_heads={num_kv_heads} do not divide over the {parts} devices of "
                f"{devices.head_axes}: use fewer devices there"
            )
        if self.batch_size % devices.batch_parts:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide over the {devices.batch_parts} devices of "
                f"{devices.batch_axes}: make it a multiple, or name these axes in axis_name or head_axes"
            )
        return _Model(*map(int, self))

    def arrays(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes of queries, keys and values."""
        array = lambda *heads: jax.ShapeDtypeStruct((self.batch_size, self.num_tokens, *heads), dtype)
        key, value = array(self.num_kv_heads, self.head_dim), array(self.num_kv_heads, self.value_dim)
        return array(self.num_heads, self.head_dim), key, value


def _check_counts(counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        check_count(name, count)
        most = _MOST.get(name, 2**20)
        if count > most:
            raise ValueError(f"{name}={count} is above {most}: give fewer")


def _read_features(features: Sequence[str]) -> tuple[str, ...]:
    features = _names("features", features, FEATURES[0])
    unknown = [name for name in features if name not in FEATURES]
    if unknown:
        raise ValueError(f"features has {unknown[0]!r}: use some of {', '.join(FEATURES)}")
    return features


def _names(argument: str, names: Any, example: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{argument}={names!r} must be a sequence of names, such as ({example!r},)")
    return tuple(names)


def _read_dtype(dtype: Any) -> np.dtype:
    try:
        read = np.dtype(bool if dtype is None else jax.numpy.dtype(dtype))  # NumPy takes None for float64
    except TypeError:
        read = np.dtype(bool)
    if read.name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none that attention takes: use one of {', '.join(DTYPES)}")
    return read
