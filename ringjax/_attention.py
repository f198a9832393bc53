"""The public function: validates, finds the mesh, makes the schedule, and maps the ring over the shards."""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

from ringjax._implementation import Implementation, implement
from ringjax._mesh import find_placement
from ringjax._pattern import DilatedPattern, Offsets
from ringjax._plan import Plan
from ringjax._rule import STRATEGIES, ring_attention
from ringjax._schedule import choose_block_size, make_schedule

Strategy = Literal["ring", "all_gather"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def ring_dilated_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K V"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    scale: float | None = None,
    offsets: Offsets = "interleaved",
    return_residual: bool = False,
    strategy: Strategy = "ring",
    implementation: Implementation | None = None,
    block_size: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str = "seq",
    spec: PartitionSpec | None = None,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes exact dilated attention over a sequence that is sharded along a mesh axis, in O(T / p) memory.

    Equal to :func:`dilated_attention_reference` in value and gradient, whatever the mesh: each device picks the rows
    that its branches keep, and these travel around the ring of devices that share a segment (ring attention, arXiv
    2310.01889; LongNet, arXiv 2307.02486, equations 9 to 11). Tokens stay in the caller's order.

    The mesh is `mesh` if given, else the one that the arrays carry, else the one that `jax.set_mesh` holds. If it has
    no axis `axis_name`, or if there is none, each device computes all tokens. Inside the caller's own shard_map over
    `axis_name` the arguments are the local shards, and their heads count as all heads. A length that the mesh does not
    divide is padded inside; its output is not sharded along the sequence.

    Args:
      query: [..., T, N, H] in float32, bfloat16, float16 or float64, with any number of leading batch dimensions.
      key: [..., T, K, H], where K divides N: query head h uses key/value head ``h // (N // K)``.
      value: [..., T, K, V].
      segment_lengths: the segment length of each branch, in tokens; any, dividing T or not.
      dilation_rates: the dilation rate of each branch, at most its segment length.
      is_causal: whether token t sees only tokens s <= t.
      scale: what the logits are multiplied with, a number; ``1 / sqrt(H)`` by default.
      offsets: ``"interleaved"`` or ``"blocked"``, see :class:`DilatedPattern`.
      return_residual: whether to return the log-sum-exp of each row too, with its exact gradient.
      strategy: ``"ring"`` to send keys and values around, in O(T / p) memory, or ``"all_gather"`` to bring those of a
        segment to each of its devices at once, in O(segment length / dilation rate) memory; the results are the same.
      implementation: ``"xla"``, which computes everything everywhere, or ``"cudnn"``, a fused kernel for NVIDIA GPUs;
        by default the fastest that can compute a branch on the devices that there are. The kernel takes bfloat16 and
        float16, and branches whose dilation rate divides their segment and whose segments divide, or are divided by,
        what a device holds.
      block_size: the most rows of queries, and of keys, whose logits ``"xla"`` computes at once; chosen from shapes and
        devices by default. Smaller blocks take less memory and less work where a mask cuts them; larger ones run
        faster.
      mesh: the mesh to run on.
      axis_name: the mesh axis that the sequence is sharded along.
      spec: how query lies on the mesh, such as ``P("data", "seq", "tensor")``; key and value lie likewise. By default
        what the arrays' types say. Only fused kernels ask for it, where a mesh has other axes that are Auto.

    Returns:
      The output [..., T, N, V] in query's dtype, sharded like query; with `return_residual` also the lse [..., T, N] in
      float32 (float64 where an argument is). A row that no branch covers is zero, with an lse of minus infinity and
      zero gradient. Sums are accumulated in float32 at least. The backward needs both: under `jax.checkpoint` a policy
      that saves the names ``"ringjax_out"`` and ``"ringjax_lse"`` keeps it from running the forward again.

    Raises:
      ValueError: for shapes that disagree, heads that do not divide, a wrong pattern (see :class:`DilatedPattern`), an
        unknown strategy, an implementation that is unknown or cannot serve, a block size below 1, a `mesh` without
        `axis_name`, a `spec` with axes that the mesh has not, or a length that is sharded over another axis.
      TypeError: for arguments of another dtype.
      NotImplementedError: when differentiated twice.

    Example:
      >>> q = k = v = jnp.ones((1, 16, 4, 8))
      >>> out = ring_dilated_attention(q, k, v, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True)
      >>> out.shape
      (1, 16, 4, 8)
    """
    pattern = DilatedPattern(tuple(segment_lengths), tuple(dilation_rates), offsets)
    _check_arrays(query, key, value)
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif not isinstance(scale, numbers.Real):
        raise TypeError(f"scale={scale!r} must be a number, known when the call is traced")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown: use one of {', '.join(map(repr, STRATEGIES))}")
    if block_size is not None and (not isinstance(block_size, numbers.Integral) or block_size < 1):
        raise ValueError(f"block_size={block_size!r} must be a positive integer: leave it out for the default")
    if scale <= 0:  # below, scales are positive: the sign goes to the keys
        key, scale = key * np.sign(scale).astype(key.dtype), abs(scale) or 1.0
    placement = find_placement(query, key, value, mesh, axis_name, spec)
    if block_size is None:
        batch_heads = math.prod(query.shape[:-3]) * query.shape[-2]
        share_cache = placement.platform == "cpu" and placement.num_shards > 1
        block_size = choose_block_size(batch_heads, query.dtype.itemsize, share_cache)
    branches = make_schedule(
        pattern,
        placement.length(query),
        placement.num_shards,
        key.shape[-2],
        is_causal=bool(is_causal),
        max_block_rows=int(block_size),
    )
    arrays = query, key, value
    plan = Plan(
        pattern=pattern,
        branches=implement(branches, implementation, arrays, placement.platform, strategy, placement.unmapped),
        num_kv_heads=key.shape[-2],
        scale=float(scale),
        placement=placement,
        strategy=strategy,
    )
    out, lse = _attend(query, key, value, plan)
    return (out, lse) if return_residual else out


@functools.partial(jax.jit, static_argnames="plan")
def _attend(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Array]:
    lay_out, take_back = plan.placement.lay_out, plan.placement.take_back
    results: Any = ring_attention(lay_out(query, "q"), lay_out(key, "k"), lay_out(value, "k"), plan)
    out, lse = (take_back(result, query.shape[-3], axis=query.ndim - 3) for result in results)
    return out, lse


def _check_arrays(query: Any, key: Any, value: Any) -> None:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        if not hasattr(array, "dtype") or jnp.dtype(array.dtype).name not in _DTYPES:
            kind = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} is of {kind}: pass an array of one of {', '.join(_DTYPES)}")
        if array.ndim < 3:
            raise ValueError(f"{name} has the shape {array.shape}: pass at least [length, heads, width]")
        if 0 in array.shape[-3:]:
            raise ValueError(f"{name} has the shape {array.shape}: length, heads and width must be at least 1")
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    for name in ("key", "value"):
        if arrays[name].shape[:-2] != query.shape[:-2]:
            raise ValueError(f"{name} and query differ in batch or length: {shapes}; make these dimensions equal")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value differ in their heads: {shapes}; give both the same number")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key and query differ in their width: {shapes}; make their last dimensions equal")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} heads and key has {key.shape[-2]}: "
            "the number of key/value heads must divide the number of query heads"
        )
