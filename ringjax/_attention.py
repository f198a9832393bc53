"""The public function: reads its arguments, plans the call, and runs the plan."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Integer

from ringjax._call import Call
from ringjax._kernels.implementation import ImplementationName
from ringjax._kernels.interface import Request
from ringjax._kernels.softmax import Weighting, accumulation_dtype
from ringjax._mesh.mesh import find_mesh
from ringjax._mesh.placement import Placement, find_placement
from ringjax._mesh.unused import warn_of_length, warn_of_mesh
from ringjax._options import Documents, Options, check_options
from ringjax._parallel.device import Context
from ringjax._parallel.plan import Plan
from ringjax._parallel.rule import naming_the_reference, ring_attention
from ringjax._pattern.arguments import (
    check_arrays,
    check_positions,
    read_documents,
    read_seed,
)
from ringjax._pattern.branch import Branch
from ringjax._pattern.other_names import OF_FUNCTION, naming_what_serves
from ringjax._pattern.pattern import DilatedPattern, Heads, Merge, Offsets, read_pattern
from ringjax._pattern.promotion import with_own_promotion
from ringjax._pattern.reach_warning import warn_of_reach
from ringjax._pattern.sinks import add_sinks, read_sinks
from ringjax._recording import Record, record
from ringjax._schedule.strategy import Strategy, read_strategy


@overload
def ring_dilated_attention(
    query: Array, key: Array, value: Array, *, return_residual: Literal[True], **options: Unpack[Options]
) -> tuple[Array, Array]: ...
@overload
def ring_dilated_attention(
    query: Array, key: Array, value: Array, *, return_residual: Literal[False] = False, **options: Unpack[Options]
) -> Array: ...
@naming_what_serves(OF_FUNCTION)
@with_own_promotion
def ring_dilated_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    *,
    pattern: DilatedPattern | Sequence[Branch] | None = None,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    offsets: Offsets = "interleaved",
    merge: Merge = "lse",
    heads: Heads = "all",
    document_ids: Documents | None = None,
    documents_are_sorted: bool | None = None,
    query_offset: int | Integer[Array | np.ndarray, ""] = 0,
    logits_soft_cap: float | None = None,
    sinks: Float[Array | np.ndarray, "..."] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    return_residual: bool = False,
    strategy: Strategy = "ring",
    exchange_size: int | None = None,
    implementation: ImplementationName | None = None,
    block_size: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str = "seq",
    spec: PartitionSpec | None = None,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes exact dilated attention over a sequence that is sharded along a mesh axis, in O(T / p) memory.

    Equal to :func:`dilated_attention_reference` in value and gradient, whatever the mesh: each device picks the rows
    that its branches keep, and these travel around the ring of devices that share a segment (ring attention, arXiv
    2310.01889; LongNet, arXiv 2307.02486, equations 9 to 11). Tokens stay in the caller's order.

    The mesh is that of the caller's own shard_map, else `mesh`, else the one that the arrays carry, else the one that
    `jax.set_mesh` holds; beside this jax takes no other. If it has no axis `axis_name`, or if there is no mesh, each
    device computes all tokens. Inside the caller's own shard_map over `axis_name` the arguments are the local shards;
    their batches and heads are taken to be all there are. A length that the mesh does not divide is padded inside. Its
    output then lies whole on each device, and each device computes all that follows: see :func:`pad_to_mesh`.

    Args:
      query: [..., T, N, H] in float32, bfloat16, float16 or float64, with any number of leading batch dimensions.
      key: [..., S, K, H], where K divides N: query head h uses key/value head ``h // (N // K)``.
      value: [..., S, K, V].
      pattern: the branches, a sequence of :class:`Segments` and :class:`Window`, or a :class:`DilatedPattern`, which
        also says `offsets`, `merge` and `heads`.
      segment_lengths: instead of a pattern, the segment length of each branch, in tokens; any, dividing T or not.
      dilation_rates: the dilation rate of each branch, at most its segment length.
      is_causal: whether a query sees only keys whose position is not after its own: a token that changes, from one
        finite value to another, changes no row before it.
      scale: what the logits are multiplied with, a number, 0 or between 1e-18 and 1e18 in size; ``1 / sqrt(H)`` by
        default.
      offsets: ``"interleaved"``, ``"blocked"`` or ``"branch"``, see :class:`DilatedPattern`.
      merge: ``"lse"``, where a pair counts once for each branch that holds it, or ``"union"``, where it counts once.
      heads: ``"all"``, where every head runs every branch, or ``"grouped"``, where each runs one.
      document_ids: integers [..., T], or a pair of [..., T] and [..., S] for queries and keys. Where S is not T, it
        must be a pair. Tokens attend only within their own document. Tokens with a negative number attend to nothing
        and give zeros. Tiles whose documents do not meet are skipped. The numbers must fit 32 bits, which is checked
        where they are known.
      documents_are_sorted: whether the numbers of documents do not decrease along a sequence, and negative ones stand
        only between documents or at the ends: then cuDNN's kernel serves packed documents, on GPUs where no other does.
        Nobody looks at the numbers: a wrong True gives NaN where the kernel would be wrong.
      query_offset: the position of the first query, not negative; that of the first key is 0. All positions are below
        2**31 - 1. Each integer compiles a program of its own. A scalar integer array serves all offsets with one
        program, in which every device receives keys of all others.
      logits_soft_cap: the cap c of scaled logits, which are then ``c tanh(logits / c)``; none by default.
      sinks: a logit for each query head, [N] or what broadcasts to [..., T, N]: it takes part in the softmax of the
        head's rows and has no value (gpt-oss; zeros are "softmax off by one"). It is differentiated, neither scaled nor
        capped nor dropped, and is part of the lse.
      dropout_rate: the probability with which an attention weight is dropped, in [0, 1); kept weights are divided by
        ``1 - dropout_rate``. Which weights are dropped depends only on the seed, the batch, the head and the positions
        of query and key, not on the mesh. Where several branches hold a pair, all of them drop it or none does.
      dropout_seed: an integer of 64 bits, an array of one, or a key of `jax.random`; asked for where weights are
        dropped.
      broadcast_dropout: whether all batches and heads drop the same weights.
      precision: the precision of products, as :func:`jax.numpy.einsum` takes it; jax's default by default.
      return_residual: whether to return the log-sum-exp of each row too, with its exact gradient.
      strategy: a name for all branches, or a tuple with one for each. ``"ring"`` sends keys and values around, in
        O(T / p) memory. ``"all_gather"`` brings those of a segment to each of its devices at once, in O(segment length
        / dilation rate) memory, but what neighbours alone see as in a ring. ``"all_to_all"`` gives each device all
        tokens of some heads, in O(T / p) memory (DeepSpeed-Ulysses, arXiv 2309.14509), with a ring between groups of
        devices where heads do not suffice for all (USP, arXiv 2405.07719). ``"auto"``, for all branches, is what
        :func:`plan` recommends for these devices. The results are the same.
      exchange_size: the number u of consecutive devices that exchange in ``"all_to_all"`` and ``"auto"``, where u
        divides the devices along the sequence and the query heads of a device; its key/value heads are a multiple or a
        divisor of u. By default the smallest u after which nothing else travels, else the largest.
      implementation: ``"xla"``, which computes everything everywhere, ``"cudnn"``, a fused kernel for NVIDIA GPUs, or
        ``"mosaic"``, kernels for TPUs and Hopper GPUs. By default each branch takes the fastest that can compute it on
        these devices, but not the kernels for TPUs, which no TPU has run yet: they serve by name alone. cuDNN takes
        bfloat16 and float16. It takes segments of rate 1; other segments whose rate divides them, and which divide, or
        are divided by, what a device holds; and causal windows, with limits. The kernels for TPUs take bfloat16 and
        float32. Those for Hopper GPUs take bfloat16 and float16, and heads that are at most 128 wide.
      block_size: the most rows of queries, and of keys, whose logits are computed at once. By default it is chosen from
        shapes and devices. cuDNN and the kernels for Hopper GPUs ignore it. Smaller blocks take less memory, and less
        work where a mask cuts them; larger ones run faster.
      mesh: the mesh to run on.
      axis_name: the mesh axis that the sequence is sharded along.
      spec: how query lies on the mesh, such as ``P("data", "seq", "tensor")``; key and value lie likewise. By default
        what the arrays' types say. Where the mesh has other Auto axes, ``"cudnn"`` and ``"mosaic"`` need it. Without a
        mesh it means nothing.

    Returns:
      The output [..., T, N, V] in query's dtype. Where the mesh divides T, it is sharded along the sequence, even if
      query is not. Its other dimensions are sharded like query's. With `return_residual` also the log-sum-exp (lse)
      [..., T, N] of the weights before dropout, in float32 (float64 where an argument is). A row that attends to
      nothing is zero, with an lse of minus infinity and zero gradient. Sums are accumulated in float32 at least. The
      backward needs the output and the lse: under `jax.checkpoint` a policy that saves the names ``"ringjax_out"`` and
      ``"ringjax_lse"`` keeps it from running the forward again.

    Raises:
      ValueError: for shapes that disagree, heads that do not divide, a wrong pattern (see :class:`DilatedPattern`), an
        unknown strategy, an implementation that is unknown or cannot serve, a block size below 1, documents or sinks of
        another shape, a number out of its range, dropout without a seed, a `mesh` without `axis_name`, a `spec` with
        axes that the mesh has not, an `exchange_size` that does not serve, or a length that is sharded over another
        axis.
      TypeError: for arguments of another dtype, and numbers that are not known when the call is traced.
      NotImplementedError: when differentiated twice.

    Example:
      >>> q = k = v = jnp.ones((1, 16, 4, 8))
      >>> out = ring_dilated_attention(q, k, v, segment_lengths=(4, 16), dilation_rates=(1, 4), is_causal=True)
      >>> out.shape
      (1, 16, 4, 8)
    """
    pattern = read_pattern(pattern, segment_lengths, dilation_rates, offsets, merge, heads)
    check_arrays(query, key, value)
    check_options(
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        return_residual=return_residual,
        documents_are_sorted=documents_are_sorted,
        strategy=strategy,
        exchange_size=exchange_size,
        implementation=implementation,
        block_size=block_size,
        mesh=mesh,
        axis_name=axis_name,
        spec=spec,
    )
    strategies = read_strategy(strategy, len(pattern.branches))
    documents = read_documents(document_ids, query, key)
    sinks = read_sinks(sinks, query)
    seed = read_seed(dropout_seed, dropout_rate)
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    key, scale = _with_positive_scale(key, scale)
    placement = find_placement(query, key, value, mesh, axis_name, spec)
    placement.check_shards({"query": query, "key": key, "value": value}, query_offset)
    warn_of_mesh(placement, (query, key, value), axis_name)
    warn_of_length(placement, query.shape[-3])
    fixed_offset, moving_offset = _read_offset(query_offset)
    lengths = placement.length(query), placement.length(key)
    check_positions(*lengths, 0 if isinstance(query_offset, Tracer) else int(query_offset))
    warn_of_reach(pattern, lengths[0], key.shape[-2], bool(is_causal))
    request = Request(
        query,
        key,
        value,
        platform=placement.platform,
        unmapped=placement.unmapped,
        needs=_needs(document_ids, logits_soft_cap, dropout_rate, precision),
        needs_lse=return_residual or sinks is not None,
        device_kind=placement.device_kind,
        block_size=None if block_size is None else int(block_size),
        precision=precision,
        documents_are_sorted=bool(documents_are_sorted),
    )
    *batch, num_heads = placement.block(query)
    call = Call(
        request,
        pattern=pattern,
        num_queries=lengths[0],
        num_keys=lengths[1],
        query_offset=fixed_offset,
        num_devices=placement.num_shards,
        batch=math.prod(batch),
        num_heads=num_heads,
        num_unmapped=placement.num_unmapped,
        document_itemsize=0 if documents[0] is None else documents[0].dtype.itemsize,
        is_causal=bool(is_causal),
        exchange_size=None if exchange_size is None else int(exchange_size),
        implementation=implementation,
    )
    record(Record(call, strategies, placement, find_mesh((query, key, value), mesh)[1]))
    soft_cap = None if logits_soft_cap is None else float(logits_soft_cap)
    weighting = Weighting(scale, soft_cap, float(dropout_rate), precision)
    plan = _make_plan(call, strategies, placement, weighting, bool(broadcast_dropout))
    if 0 in query.shape[:-3]:
        out, lse = _nothing(query, key, value)
    else:
        context = Context(*documents, seed, moving_offset)
        with naming_the_reference():
            out, lse = _attend(query, key, value, sinks, context, plan, has_lse=bool(return_residual))
    return (out, lse) if return_residual else out


def _with_positive_scale(key: Array, scale: Any) -> tuple[Array, float]:
    """Returns keys and the scale of products with them, which is positive from here on: keys take its sign."""
    scale = 1 / math.sqrt(key.shape[-1]) if scale is None else float(scale)
    return (key, scale) if scale > 0 else (key * np.sign(scale).astype(key.dtype), abs(scale) or 1.0)


def _read_offset(query_offset: Any) -> tuple[int | None, Array | None]:
    """Returns the position of the first query: as an integer for the schedule, or as an array that programs read."""
    if isinstance(query_offset, jax.Array | np.ndarray):
        return None, jnp.asarray(query_offset)
    return int(query_offset), None


def _needs(document_ids: Any, logits_soft_cap: Any, dropout_rate: Any, precision: Any) -> tuple[str, ...]:
    """Returns the arguments that ask for what few implementations serve."""
    asked = {
        "document_ids": document_ids is not None,
        "logits_soft_cap": logits_soft_cap is not None,
        "dropout_rate": dropout_rate > 0,
        "precision": precision not in (None, "default", jax.lax.Precision.DEFAULT),
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def _make_plan(
    call: Call, strategy: str | tuple[str, ...], placement: Placement, weighting: Weighting, broadcast_dropout: bool
) -> Plan:
    """Returns the plan of a call; where nothing says on which platform it will run, for others too."""
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
    )


def _nothing(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Returns the results of no batches."""
    dtype = accumulation_dtype(query, key, value)
    return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), jnp.zeros(query.shape[:-1], dtype)


# An lse that nobody asked for is not returned: it may be minus infinity, which jax reports to who looks for that.
@functools.partial(jax.jit, static_argnames=("plan", "has_lse"))
def _attend(
    query: Array, key: Array, value: Array, sinks: Array | None, context: Context, plan: Plan, has_lse: bool
) -> tuple[Array, Array | None]:
    lay_out, take_back = plan.placement.lay_out, plan.placement.take_back
    kinds = zip(context, Context.KINDS, strict=True)
    laid_out = (None if array is None else lay_out(array, kind) for array, kind in kinds)
    results: Any = ring_attention(lay_out(query, "q"), lay_out(key, "k"), lay_out(value, "k"), Context(*laid_out), plan)
    out, lse = (take_back(result, query.shape[-3], axis=query.ndim - 3) for result in results)
    out, lse = (out, lse) if sinks is None else add_sinks(out, lse, sinks)
    return out, lse if has_lse else None
