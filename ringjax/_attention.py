"""The public function: reads its arguments, plans the call, and runs the plan."""

import functools
import math
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ringjax._call import Call
from ringjax._kernels.interface import Request
from ringjax._kernels.softmax import Weighting, accumulation_dtype, with_positive_scale
from ringjax._mesh.axes import vary
from ringjax._mesh.mesh import find_mesh
from ringjax._mesh.placement import Placement, find_placement
from ringjax._mesh.unused import warn_of_length, warn_of_mesh
from ringjax._options import AllOptions, Options, needs_of, read_checked
from ringjax._parallel.device import Context
from ringjax._parallel.plan import Plan
from ringjax._parallel.rule import naming_the_reference, ring_attention
from ringjax._pattern.arguments import (
    check_arrays,
    check_positions,
    read_documents,
    read_seed,
)
from ringjax._pattern.option import taking
from ringjax._pattern.other_names import OF_FUNCTION
from ringjax._pattern.promotion import own_promotion
from ringjax._pattern.reach_warning import warn_of_reach
from ringjax._pattern.sinks import add_sinks, read_sinks
from ringjax._recording import Record, record


@overload
def ring_dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def ring_dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def ring_dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> Array: ...
@overload
def ring_dilated_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_residual: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Array, Array]: ...
@own_promotion()
@taking(AllOptions, in_full=True)
def ring_dilated_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    **options: Any,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "..."], ...]:
    """Computes exact dilated attention over a sequence that is sharded along a mesh axis, in O(T / p) memory.

    Equal to :func:`dilated_attention_reference` in value and gradient, whatever the mesh: each device picks the rows
    that its branches keep, and these travel around the ring of devices that share a segment (ring attention, arXiv
    2310.01889; LongNet, arXiv 2307.02486, equations 9 to 11). Tokens stay in the caller's order.

    The mesh is that of the caller's own shard_map, else `mesh`, else the one that the arrays carry, else the one that
    `jax.set_mesh` holds; while one is set, JAX accepts no other. If it has no axis `axis_name`, or if there is no mesh,
    each device computes all tokens. Inside the caller's own shard_map over `axis_name` the arguments are the local
    shards; the call assumes that there are no other batches and heads. A length that the mesh does not divide is padded
    inside. The whole output is then on each device, which computes all that follows: see :func:`pad_to_mesh`.

    Args:
      query: [..., T, N, H] in float32, bfloat16, float16 or float64, with any number of leading batch dimensions.
      key: [..., S, K, H], where K divides N: query head h uses key/value head ``h // (N // K)``.
      value: [..., S, K, V].
      **options: as follows.

    Returns:
      The output [..., T, N, V] in query's dtype. Where the mesh divides T, it is sharded along the sequence, even if
      query is not. Its other dimensions are sharded like query's. With `return_residual` also the log-sum-exp (lse)
      [..., T, N] of the weights before dropout, in float32 (float64 where an argument is); with `return_max_logit`,
      last, the greatest logit of each head [N] in the same dtype, over batches, tokens and devices; of the axes that
      the caller's own shard_map maps over, only over those of the sequence. A row that attends to nothing is zero, with
      an lse of minus infinity and zero gradient. Sums are accumulated in float32 at least. The backward needs the
      output and the lse: under `jax.checkpoint` a policy that saves the names ``"ringjax_out"`` and ``"ringjax_lse"``
      keeps it from running the forward again.

    Raises:
      ValueError: for shapes that disagree, heads that do not divide, a wrong pattern (see :class:`DilatedPattern`), an
        unknown strategy, an implementation that is unknown or cannot serve, a block size below 1, documents or sinks of
        another shape, a number out of its range, dropout without a seed, a `mesh` without `axis_name`, a `spec` with
        axes that the mesh has not, a number of devices that cannot exchange, or a length that is sharded over another
        axis.
      TypeError: for arguments of another dtype, and numbers that are not known when the call is traced.
      NotImplementedError: when differentiated twice.

    Example:
      >>> q = k = v = jnp.ones((1, 16, 4, 8))
      >>> out = ring_dilated_attention(q, k, v, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True)
      >>> out.shape
      (1, 16, 4, 8)
    """
    check_arrays(query, key, value)
    pattern, asked = read_checked(AllOptions, options, OF_FUNCTION, "ring_dilated_attention")
    documents = read_documents(asked.document_ids, query, key)
    sinks = read_sinks(asked.sinks, query)
    seed = read_seed(asked.dropout_seed, asked.dropout_rate)
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    key, scale = with_positive_scale(key, asked.scale)
    placement = find_placement(query, key, value, asked.mesh, asked.axis_name, asked.spec)
    placement.check_shards({"query": query, "key": key, "value": value}, asked.query_offset)
    warn_of_mesh(placement, (query, key, value), asked.axis_name)
    warn_of_length(placement, query.shape[-3])
    fixed_offset, moving_offset = _read_offset(asked.query_offset)
    lengths = placement.length(query), placement.length(key)
    check_positions(*lengths, 0 if isinstance(asked.query_offset, Tracer) else int(asked.query_offset))
    warn_of_reach(pattern, lengths[0], key.shape[-2], bool(asked.is_causal))
    request = Request.of(
        asked,
        query,
        key,
        value,
        placement.platform,
        unmapped=placement.unmapped,
        needs=needs_of(asked),
        needs_lse=asked.return_residual or sinks is not None,
        device_kind=placement.device_kind,
    )
    *batch, num_heads = placement.block(query)
    call = Call.of(
        asked,
        request,
        pattern,
        num_queries=lengths[0],
        num_keys=lengths[1],
        query_offset=fixed_offset,
        num_devices=placement.num_shards,
        num_inner_devices=placement.sizes[-1] if len(placement.sizes) > 1 else None,
        batch=math.prod(batch),
        num_heads=num_heads,
        num_unmapped=placement.num_unmapped,
        document_itemsize=0 if documents[0] is None else documents[0].dtype.itemsize,
    )
    record(Record(call, asked.strategy, placement, find_mesh((query, key, value), asked.mesh)[1]))
    soft_cap = None if asked.logits_soft_cap is None else float(asked.logits_soft_cap)
    weighting = Weighting(scale, soft_cap, float(asked.dropout_rate), asked.precision)
    plan = _make_plan(call, asked.strategy, placement, weighting, bool(asked.broadcast_dropout))
    if 0 in query.shape[:-3]:
        results = _nothing(query, key, value)
    else:
        context = Context(*documents, seed, moving_offset)
        with naming_the_reference():
            results = _attend(query, key, value, sinks, context, plan, has_lse=bool(asked.return_residual))
    asked_for = True, asked.return_residual, asked.return_max_logit
    out, *others = (result for result, is_asked in zip(results, asked_for, strict=True) if is_asked)
    return (out, *others) if others else out


def _read_offset(query_offset: Any) -> tuple[int | None, Array | None]:
    """Returns the position of the first query: as an integer for the schedule, or as an array that programs read."""
    if isinstance(query_offset, jax.Array | np.ndarray):
        return None, jnp.asarray(query_offset)
    return int(query_offset), None


def _make_plan(
    call: Call, strategy: str | tuple[str, ...], placement: Placement, weighting: Weighting, broadcast_dropout: bool
) -> Plan:
    """Returns the plan of a call, with schedules for other platforms if its platform is not known before lowering."""
    schedules = call.schedules(strategy)
    implemented = call.implement(schedules, with_warning=True)
    is_elsewhere = call.implementation is None and implemented != schedules and not placement.is_platform_known
    return Plan(
        pattern=call.pattern,
        schedules=implemented,
        num_kv_heads=call.work.num_kv_heads,
        weighting=weighting,
        placement=placement,
        broadcast_dropout=broadcast_dropout,
        elsewhere=schedules if is_elsewhere else None,
        has_maximum=call.work.needs_maximum,
    )


def _nothing(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Returns the empty results of a call in which a batch dimension is 0."""
    dtype = accumulation_dtype(query, key, value)
    out = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    return out, jnp.zeros(query.shape[:-1], dtype), jnp.full(query.shape[-2], -jnp.inf, dtype)


# An lse that nobody asked for is not returned: it may be minus infinity, which `jax.debug_infs` reports.
@functools.partial(jax.jit, static_argnames=("plan", "has_lse"))
def _attend(
    query: Array, key: Array, value: Array, sinks: Array | None, context: Context, plan: Plan, has_lse: bool
) -> tuple[Array, Array | None, Array | None]:
    lay_out, take_back = plan.placement.lay_out, plan.placement.take_back
    kinds = zip(context, Context.KINDS, strict=True)
    laid_out = (None if array is None else lay_out(array, kind) for array, kind in kinds)
    results: Any = ring_attention(lay_out(query, "q"), lay_out(key, "k"), lay_out(value, "k"), Context(*laid_out), plan)
    out, lse, *maximum = (take_back(result, query.shape[-3], axis=query.ndim - 3) for result in results)
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    greatest = _greatest(maximum[0], plan.placement) if maximum else None
    return out, lse if has_lse else None, greatest


def _greatest(maximum: Float[Array, "*B T N"], placement: Placement) -> Float[Array, "N"]:
    """Returns the greatest logit of each head, given that of each query."""
    greatest = jax.lax.stop_gradient(maximum).max(axis=range(maximum.ndim - 1))
    if not placement.axes or placement.are_axes_mapped:
        return greatest
    # Inside the caller's own shard_map each device has some of the tokens.
    return jax.lax.pmax(vary(greatest, placement.axes), placement.axes)
