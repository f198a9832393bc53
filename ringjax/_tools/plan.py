"""The planner: compares what strategies cost for a model and a mesh, before anything runs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

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

FEATURES = "document_ids", "logits_soft_cap", "dropout_rate"
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
      features: which of ``"document_ids"``, ``"logits_soft_cap"`` and ``"dropout_rate"`` are used.
      mesh: the size of each mesh axis, such as ``{"data": 2, "seq": 8, "tensor": 2}``, or that of the sequence axis,
        if it is one; or a mesh.
      axis_name: the axis that the sequence is sharded along, or several, major first.
      head_axes: the axis or axes, besides the sequence's, that heads are sharded along; all others cut the batch.
      node_size: the devices of a node; what the device's figures say by default.
      device: ``"A100"``, ``"H100"``, ``"H200"``, ``"B200"``, ``"v5e"``, ``"v5p"``, ``"v6e"``, ``"cpu"``, or a file of
        figures in JSON.
      has_gradient: whether the gradient is counted too.
      **options: as :func:`ring_dilated_attention` takes them.

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
    asked = read_options(PlanOptions, options, OF_MAKING, "plan")
    asked.pattern = pattern
    packings, longest = (), None
    pattern = pattern_of(asked)
    if isinstance(features, str):
        raise TypeError(f"features={features!r} must be a sequence of names, such as ({features!r},)")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    check_flags(has_gradient=has_gradient)
    check_axis_name("axis_name", axis_name)
    sizes = _read_mesh(mesh, axis_name)
    head_axes = (head_axes,) if isinstance(head_axes, str) else tuple(head_axes)
    counts = {"num_tokens": num_tokens, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    counts |= {"value_dim": value_dim, "batch_size": batch_size, **{f"mesh[{name!r}]": n for name, n in sizes.items()}}
    counts |= {} if node_size is None else {"node_size": node_size}
    _check(counts, sizes, axis_name, features)
    axes = *across, around = named(axis_name)
    # JSON takes no NumPy integers.
    num_tokens, num_heads, num_kv_heads, batch_size = map(int, (num_tokens, num_heads, num_kv_heads, batch_size))
    head_dim, value_dim, sizes = int(head_dim), int(value_dim), {name: int(size) for name, size in sizes.items()}
    head_parts = math.prod(sizes.get(axis, 1) for axis in head_axes if axis not in axes)
    batch_parts = math.prod(size for axis, size in sizes.items() if axis not in (*axes, *head_axes))
    _check_parts(counts, head_parts, batch_parts, head_axes)
    if document_lengths is not None:
        packings, features = pack(document_lengths, num_tokens), ("document_ids", *features)
        longest = min(max(map(int, document_lengths)), num_tokens)
    machine = find_machine(device)
    if node_size is not None:
        machine = dataclasses.replace(machine, node_size=int(node_size))
    dtype = _read_dtype(dtype)
    shape = lambda heads, width: jax.ShapeDtypeStruct((batch_size, num_tokens, heads, width), dtype)
    arrays = shape(num_heads, head_dim), shape(num_kv_heads, head_dim), shape(num_kv_heads, value_dim)
    call = Call.of(
        asked,
        Request.of(
            asked,
            *arrays,
            machine.platform,
            needs=tuple(dict.fromkeys((*features, *needs_of(asked)))),
            device_kind=machine.name,
        ),
        pattern,
        num_queries=num_tokens,
        num_keys=num_tokens,
        query_offset=0,
        num_devices=math.prod(sizes[axis] for axis in axes),
        num_inner_devices=sizes[around] if across else None,
        batch=batch_size // batch_parts,
        num_heads=num_heads // head_parts,
        num_unmapped=1,
        document_itemsize=4 * ("document_ids" in features),
        packings=packings,
        longest_document=longest,
    )
    axis_name = axes if across else around
    return compare(call, machine, has_gradient, axis_name, _spec(sizes, axis_name, head_axes))


def _spec(sizes: dict[str, int], axis_name: AxisName, head_axes: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the axes that cut batches, the sequence and heads; empty if the sequence's axis is the only one."""
    axes = [axis for axis in sizes if axis not in named(axis_name)]
    if not axes:
        return ()
    of_batch, of_heads = (tuple(axis for axis in axes if (axis in head_axes) == is_of) for is_of in (False, True))
    one_of = lambda some: some[0] if len(some) == 1 else some or None
    return (one_of(of_batch), axis_name, one_of(of_heads))[: 3 if of_heads else 2]


def _read_mesh(mesh: Any, axis_name: AxisName) -> dict[str, int]:
    """Returns the size of each axis of a mesh.

    Raises:
      TypeError: for a mesh of another type.
    """
    if is_integer(mesh) and len(named(axis_name)) == 1:
        return {named(axis_name)[0]: int(mesh)}
    sizes = getattr(mesh, "shape", mesh)
    if not isinstance(sizes, Mapping):
        alone = f", or that of {axis_name!r}" if len(named(axis_name)) == 1 else ""
        raise TypeError(f"mesh={mesh!r} must be a mesh, or the size of each axis by its name{alone}")
    return dict(sizes)


def _read_dtype(dtype: Any) -> np.dtype:
    try:
        read = np.dtype(bool if dtype is None else jax.numpy.dtype(dtype))
    except TypeError:
        read = np.dtype(bool)
    if read.name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none that attention takes: use one of {', '.join(DTYPES)}")
    return read


def _check(counts: dict[str, Any], sizes: dict[str, int], axis_name: AxisName, features: Sequence[str]) -> None:
    for name, count in counts.items():
        check_count(name, count)
        most = _MOST.get(name, 2**20)
        if count > most:
            raise ValueError(f"{name}={count} is above {most}: give fewer")
    if not sizes.keys() >= {*named(axis_name)}:
        raise ValueError(f"mesh={sizes} has no axis axis_name={axis_name!r}: name one of {', '.join(sizes)}")
    unknown = [name for name in features if name not in FEATURES]
    if unknown:
        raise ValueError(f"features has {unknown[0]!r}: use some of {', '.join(FEATURES)}")


def _check_parts(counts: dict[str, Any], head_parts: int, batch_parts: int, head_axes: tuple[str, ...]) -> None:
    num_heads, num_kv_heads, batch_size = counts["num_heads"], counts["num_kv_heads"], counts["batch_size"]
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if num_heads % head_parts or (num_kv_heads % head_parts and head_parts % num_kv_heads):
        raise ValueError(
            f"num_heads={num_heads} and num_kv_heads={num_kv_heads} do not divide over the {head_parts} devices of "
            f"{head_axes}: use fewer"
        )
    if batch_size % batch_parts:
        raise ValueError(f"batch_size={batch_size} does not divide over {batch_parts} devices: make it a multiple")
