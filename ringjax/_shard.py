"""What one shard does: the results of all branches, forward and backward.

B batch, n tokens of the shard, K key/value heads, G query heads of each, N = K * G, H and V the widths.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, UInt

from ringjax import _gather, _ring
from ringjax._addition import Addition, add_branches
from ringjax._block import accumulation_dtype, merge
from ringjax._layout import Layout, Operand, Task, operand_of_keys
from ringjax._meeting import Noise
from ringjax._plan import Plan
from ringjax._rows import Combine, put

# Each strategy is a module of two functions: `forward` and `backward` of one task.
STRATEGIES: dict[str, Any] = {"ring": _ring, "all_gather": _gather}


class Context(NamedTuple):
    """What attention depends on beside its arguments, and is not differentiated by."""

    query_documents: Int[Array, "*B T"] | None = None
    key_documents: Int[Array, "*B S"] | None = None
    seed: UInt[Array, "2"] | None = None
    query_offset: Integer[Array, ""] | None = None

    @property
    def documents(self) -> tuple[Array | None, Array | None]:
        """The documents of queries and of keys."""
        return self.query_documents, self.key_documents


def shard_forward(query: Array, key: Array, value: Array, *context: Any, plan: Plan) -> tuple[Array, Array]:
    """Returns the output and the lse of a shard's queries."""
    plan = plan.at(Context(*context).query_offset)
    axes = _axes((query, key, value, context), plan)
    arrays, context = _group(query, key, value, axes, plan), _group_context(Context(*context), axes)
    noise = plan.noise(context.seed, query.shape[:-3], query.shape[-2])
    groups = query.shape[-2] // plan.local_heads
    forward = STRATEGIES[plan.strategy].forward

    def attend(layout: Layout, arrays: Any, earlier: Any) -> Any:
        (query, key, value), documents = arrays
        queries = Operand(layout, (query,), documents[0], lambda query: query, groups)
        keys = operand_of_keys(layout, key, value, documents[1])
        partial = forward(Task(queries, keys, _noise_of(layout, noise), plan, earlier))
        out, lse = plan.swap_back(layout.rows.branch, layout.implementation.finish(partial))
        return out, lse[..., None]

    def merge_one(layout: Layout, total: Any, results: Any) -> Any:
        before = tuple(layout.take(array, groups) for array in total)
        return tuple(map(layout.put, total, merge_many([before, results])))

    def put_first(layout: Layout, total: Any, results: Any) -> Any:
        return tuple(map(layout.put, total, results))

    def merge_many(parts: list[Any]) -> Any:
        out, lse = merge([out for out, _ in parts], [lse[..., 0] for _, lse in parts])
        return out, lse[..., None]

    out_shape = (*query.shape[:-1], value.shape[-1])
    out = jnp.zeros_like(query, accumulation_dtype(query, key, value), shape=out_shape)
    total: Any = _group_heads(out, plan), _group_heads(out[..., :1] - jnp.inf, plan)
    total = jax.tree.map(lambda array: _cast(array, axes), total)
    addition = Addition((0.0, -jnp.inf), (groups, groups), merge_one, put_first, merge_many)
    out, lse = add_branches(attend, addition, (arrays, context.documents), total, plan)
    return out.astype(query.dtype).reshape(out_shape), lse.reshape(query.shape[:-1])


def _group_context(context: Context, axes: frozenset[str]) -> Context:
    """Gives documents one batch dimension, and the mesh axes that the arguments vary along."""
    cast = lambda array: None if array is None else _cast(array.reshape(-1, array.shape[-1]), axes)
    return context._replace(query_documents=cast(context.query_documents), key_documents=cast(context.key_documents))


def shard_backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    out_grad: Array | None,
    lse_grad: Array | None,
    *context: Any,
    plan: Plan,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of a shard's queries, keys and values."""
    plan = plan.at(Context(*context).query_offset)
    axes = _axes((query, key, value, context), plan)
    # Grouping is linear: its transpose sums a gradient over the axes along which its argument is the same.
    arrays, ungroup = jax.vjp(functools.partial(_group, axes=axes, plan=plan), query, key, value)
    context = _group_context(Context(*context), axes)
    noise = plan.noise(context.seed, query.shape[:-3], query.shape[-2])
    dtype = lse.dtype
    cotangent: Any = jnp.zeros_like(out) if out_grad is None else out_grad
    # A compiler that merged this ring's permutes with the forward's would keep every shard alive in between, and one
    # that knew that the gradients begin as zeros would make these arrays long before they are needed.
    arrays, cotangent, zero = jax.lax.optimization_barrier((arrays, cotangent, jnp.zeros((), dtype)))
    groups = query.shape[-2] // plan.local_heads
    # What the backward of each implementation needs of a query, before any rows are taken.
    of_queries = {
        branch.implementation: [
            _group_heads(array, plan) for array in plan.implementation(branch).of_queries(out, lse, cotangent, lse_grad)
        ]
        for branch in plan.branches
    }

    backward = STRATEGIES[plan.strategy].backward

    def differentiate(layout: Layout, arrays: Any, earlier: Any) -> Any:
        (query, key, value), of_queries, documents = arrays
        tokens = query, *of_queries[layout.rows.branch.implementation]
        queries = Operand(layout, tokens, documents[0], layout.implementation.make_queries, groups)
        keys = operand_of_keys(layout, key, value, documents[1])
        addends = backward(Task(queries, keys, _noise_of(layout, noise), plan, earlier))
        return addends._replace(query=plan.swap_back(layout.rows.branch, addends.query))

    def add_one(layout: Layout, total: Any, addends: Any, combine: Combine = put) -> Any:
        *tiles, parts = addends
        layouts, grads = (layout, layout.of_keys(), layout.of_keys()), list(total)
        for number, (one, addend) in enumerate(zip(layouts, tiles, strict=True)):
            if addend is not None:
                grads[number] = one.put(grads[number], addend, combine)
        for number, part, rows in parts:
            grads[number] = part.put_rows(grads[number], rows, jnp.add)
        return tuple(grads)

    def add_many(parts: list[Any]) -> Any:
        return functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), parts)

    grads = tuple(jnp.zeros_like(array, dtype) + zero for array in arrays)
    add_to = functools.partial(add_one, combine=jnp.add)
    addition = Addition((0.0, 0.0, 0.0), (groups, 1, 1), add_to, add_one, add_many)
    # The forward's rings come first, and those of layers behind it.
    earlier = lse, cotangent, lse_grad
    grads = add_branches(differentiate, addition, (arrays, of_queries, context.documents), grads, plan, earlier)
    return ungroup(tuple(grad.astype(array.dtype) for grad, array in zip(grads, arrays, strict=True)))


def _noise_of(layout: Layout, noise: Noise | None) -> Noise | None:
    return noise if noise is None else noise._replace(head=layout.rows.heads.of_heads(noise.head))


def _axes(arrays: Any, plan: Plan) -> frozenset[str]:
    """The mesh axes along which any of the arrays varies, and the sequence's."""
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(arrays)))
    return axes if plan.placement.axis_name is None else axes | {plan.placement.axis_name}


def _cast(array: Array, axes: frozenset[str]) -> Array:
    return jax.lax.pcast(array, tuple(axes - _varying_axes(array)), to="varying")


def _group(
    query: Float[Array, "*B n N H"],
    key: Float[Array, "*B s K H"],
    value: Float[Array, "*B s K V"],
    axes: frozenset[str],
    plan: Plan,
) -> tuple[Float[Array, "b n k GH"], Float[Array, "b s k H"], Float[Array, "b s k V"]]:
    """Gives all arguments the same mesh axes to vary along, one batch dimension, and heads that match."""
    query, key, value = (_cast(array, axes).reshape(-1, *array.shape[-3:]) for array in (query, key, value))
    if plan.local_heads < key.shape[2]:  # fewer key/value heads than devices along the heads: each needs one of them
        pick = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=plan.first_head, slice_size=plan.local_heads, axis=2
        )
        key, value = pick(key), pick(value)
    return _group_heads(query, plan), key, value


def _group_heads(array: Float[Array, "*B n N H"], plan: Plan) -> Float[Array, "b n k GH"]:
    # Side by side: a dimension of their own would be of size one for many, which XLA:CPU may lay out anew.
    length, heads, width = array.shape[-3:]
    return array.reshape(-1, length, plan.local_heads, heads // plan.local_heads * width)


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
