"""What one device does: in each part of the plan it exchanges tokens for heads, computes, and exchanges back.

B batch, n tokens of the device, K key/value heads, G query heads of each, N = K * G, H and V the widths.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, UInt

from ringjax._kernels.attention_step import DropoutCounters
from ringjax._kernels.implementation import IMPLEMENTATIONS
from ringjax._kernels.softmax import accumulation_dtype
from ringjax._mesh.axes import vary, varying_axes
from ringjax._mesh.order import after, zeros_behind
from ringjax._parallel.combine import Gradients, Outputs, combine
from ringjax._parallel.plan import Plan


class Context(NamedTuple):
    """The inputs of attention that have no gradient.

    `KINDS` says how each lies on the mesh, in the letters of `Placement.map`.
    """

    KINDS = "ddir"

    query_documents: Int[Array, "*B T"] | None = None
    key_documents: Int[Array, "*B S"] | None = None
    seed: UInt[Array, "*instances 2"] | None = None
    query_offset: Integer[Array, ""] | None = None

    @property
    def documents(self) -> tuple[Array | None, Array | None]:
        """The documents of queries and of keys."""
        return self.query_documents, self.key_documents


class Backward(NamedTuple):
    """The inputs of the backward: the arguments, the results, and the cotangents of results that were used.

    `KINDS` is as in `Context`.
    """

    KINDS = "qkkqqqq"

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K V"]
    out: Float[Array, "*B T N V"]
    lse: Float[Array, "*B T N"]
    out_grad: Float[Array, "*B T N V"] | None
    lse_grad: Float[Array, "*B T N"] | None


def device_forward(query: Array, key: Array, value: Array, *context: Any, plan: Plan) -> tuple[Array, ...]:
    """Returns the output, the lse and perhaps the greatest logit of a device's queries."""
    plan = plan.at(Context(*context).query_offset)
    axes = _axes((query, key, value, context), plan)
    arrays, context = _group(query, key, value, axes, plan), _group_context(Context(*context), axes)
    batch_shape, heads, dtype = query.shape[:-3], query.shape[-2], accumulation_dtype(query, key, value)
    results: Any = []
    for part in plan.parts:
        earlier = results[-1] if results else None
        tokens = queries, _, _ = _enter(part, arrays[:1], arrays[1:], context, earlier)
        is_final = len(plan.parts) == 1
        zeros = lambda width, query=queries[0]: jnp.zeros_like(query, dtype, shape=(*query.shape[:-1], width))
        kind = Outputs(part, *_of_heads(part, context, batch_shape, heads), (is_final,))
        empty = zeros(value.shape[-1]), *(zeros(1) + fill for fill in kind.identity[1:])
        out, *narrow = combine(kind, tokens, empty, earlier)
        if is_final:  # nothing is added to it: it is exchanged and returned in the caller's dtype
            out = out.astype(query.dtype)
        results.append(_leave(part, (out, *narrow), (), arrays, kind.identity))
    out, *narrow = results[0] if len(results) == 1 else Outputs.merge(results)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).astype(query.dtype)
    return out, *(array.reshape(query.shape[:-1]) for array in narrow)


def device_backward(*given: Any, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns the gradients of a device's queries, keys and values, given what is in `Backward` and in `Context`."""
    size = len(Backward._fields)
    query, key, value, out, lse, out_grad, lse_grad = Backward(*given[:size])
    context = Context(*given[size:])
    plan = plan.at(context.query_offset)
    axes = _axes((query, key, value, context), plan)
    # `_group` is linear: its transpose sums a gradient over the axes along which the argument is replicated.
    arrays, ungroup = jax.vjp(functools.partial(_group, axes=axes, plan=plan), query, key, value)
    context = _group_context(context, axes)
    batch_shape, heads = query.shape[:-3], query.shape[-2]
    cotangent: Any = jnp.zeros_like(out) if out_grad is None else out_grad
    # Reading an element of an array that the compiler may shard would be a collective.
    is_seen = plan.placement.is_whole and all(schedule.is_local for schedule in plan.schedules)
    (zero,) = zeros_behind(lse if is_seen else (), lse.dtype, 1)
    # Without the barrier XLA could merge this ring's permutes with the forward's, and keep every shard live in between.
    # It could also see that the gradients start as zeros, and allocate these arrays long before they are needed.
    arrays, cotangent, zero = jax.lax.optimization_barrier((arrays, cotangent, zero))
    # A barrier of its own, as nothing has to wait for `out`. Sums of its products have a wider dtype: if XLA:TPU saw
    # where `out` comes from, it would relayout it in that dtype.
    out = jax.lax.optimization_barrier(out)
    # The residuals that the backward of each implementation needs, for all queries, before any rows are taken.
    residuals = {
        implementation: [
            array.reshape(-1, *array.shape[-3:])
            for array in IMPLEMENTATIONS[implementation].residuals(out, lse, cotangent, lse_grad)
        ]
        for implementation in dict.fromkeys(schedule.implementation for schedule in plan.schedules)
    }
    # These rings start after those of the forward, and after the backward of later layers.
    earlier: Any = lse, cotangent, lse_grad
    grads: Any = []
    for part in plan.parts:
        queries = (
            arrays[0],
            {schedule.implementation: residuals[schedule.implementation] for schedule in part.schedules},
        )
        tokens = (own, _), keys, _ = _enter(part, queries, arrays[1:], context, earlier)
        # A gradient that nothing is added to is exchanged in the dtype of the caller's array.
        is_final, num_copies = len(plan.parts) == 1, part.ulysses.num_copies(arrays[1].shape[2])
        are_final = is_final, *2 * [is_final and num_copies == 1]
        kind = Gradients(part, *_of_heads(part, context, batch_shape, heads), are_final)
        total = tuple(jnp.zeros_like(array, zero.dtype) + zero for array in (own, *keys))
        of_part = combine(kind, tokens, total, earlier)
        narrow = lambda grad, array, is_final: grad.astype(array.dtype) if is_final else grad
        of_query, *of_keys = map(narrow, of_part, arrays, are_final)
        earlier = _leave(part, (of_query,), tuple(of_keys), arrays, (0.0, 0.0, 0.0))
        grads.append(earlier)
    grads = functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), grads)
    return ungroup(tuple(grad.astype(array.dtype) for grad, array in zip(grads, arrays, strict=True)))


def _enter(
    part: Plan,
    queries: tuple[Any, ...],
    keys: tuple[Array, ...],
    context: Context,
    earlier: Any,
) -> tuple[tuple[Any, ...], tuple[Array, ...], tuple[Array | None, ...]]:
    """Returns the queries, the keys and the documents of a part of the plan, after the exchange of tokens for heads."""
    ulysses, documents = part.ulysses, context.documents
    if ulysses.size > 1:
        if rows := part.rows_exchanged(queries[0].shape[2]):
            of_queries, of_keys = rows
            queries, keys = jax.tree.map(of_queries.take, queries), jax.tree.map(of_keys.take, keys)
        documents = ulysses.gather(after(documents, earlier))
        spread = jax.tree.map(ulysses.spread_keys, keys)
        leaves, tree = jax.tree.flatten(after((queries, spread), (documents, earlier)))
        queries, keys = tree.unflatten(ulysses.to_heads(leaves))
    return queries, keys, documents


def _of_heads(
    part: Plan, context: Context, batch_shape: tuple[Any, ...], num_heads: int
) -> tuple[DropoutCounters | None, int]:
    """Returns the dropout counters of a rank, and how many query heads share a key/value head."""
    num_heads //= part.ulysses_size
    return part.counters(context.seed, batch_shape, num_heads), num_heads // part.local_heads


def _leave(
    part: Plan, queries: tuple[Array, ...], keys: tuple[Array, ...], arrays: Any, fills: tuple[float, ...]
) -> tuple[Array, ...]:
    """Returns results of queries and of keys after the exchange back to a device's own tokens, `fills` elsewhere."""
    ulysses, (batch, length, num_kv_heads, _) = part.ulysses, arrays[1].shape
    if ulysses.size == 1:
        return *queries, *keys
    moved = ulysses.to_tokens((*queries, *keys))
    queries = moved[: len(queries)]
    keys = tuple(ulysses.add_copies(array, num_kv_heads) for array in moved[len(queries) :])
    rows = part.rows_exchanged(arrays[0].shape[2])
    if rows is None:
        return *queries, *keys
    of_queries, of_keys = rows
    rows_of_each = len(queries) * (of_queries,) + len(keys) * (of_keys,)
    empty = lambda array, fill: jnp.full_like(array, fill, shape=(batch, length, *array.shape[2:]))
    results = zip(rows_of_each, (*queries, *keys), fills, strict=True)
    return tuple(one.put(empty(array, fill), array) for one, array, fill in results)


def _group_context(context: Context, axes: frozenset[str]) -> Context:
    """Gives documents one batch dimension, and makes them vary along the mesh axes of the arguments."""
    cast = lambda array: None if array is None else vary(array.reshape(-1, array.shape[-1]), axes)
    return context._replace(query_documents=cast(context.query_documents), key_documents=cast(context.key_documents))


def _axes(arrays: Any, plan: Plan) -> frozenset[str]:
    """Returns the mesh axes along which any of the arrays varies, and the axes of the sequence."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    return axes.union(plan.placement.axes)


def _group(
    query: Float[Array, "*B n N H"],
    key: Float[Array, "*B s K H"],
    value: Float[Array, "*B s K V"],
    axes: frozenset[str],
    plan: Plan,
) -> tuple[Float[Array, "b n N H"], Float[Array, "b s k H"], Float[Array, "b s k V"]]:
    """Makes all arguments vary along the same mesh axes, with one batch dimension, and picks matching heads."""
    query, key, value = (vary(array, axes).reshape(-1, *array.shape[-3:]) for array in (query, key, value))
    if plan.local_heads < key.shape[2]:  # fewer key/value heads than devices along the heads: each needs one of them
        pick = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=plan.first_head, slice_size=plan.local_heads, axis=2
        )
        key, value = pick(key), pick(value)
    return query, key, value
