"""The differentiation rule around all branches, outside shard_map, and what one shard does for it.

Below the rule everything sees one shard: B batch, n tokens of the shard, K key/value heads, G query heads of each,
N = K * G, H and V the widths.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ringjax import _gather, _ring
from ringjax._block import Keys, accumulation_dtype, merge
from ringjax._branches import Addition, Layout, add_branches
from ringjax._plan import Plan
from ringjax._rows import Rows

# Each strategy is a module of two functions: `forward` and `backward` of one branch on one shard.
STRATEGIES: dict[str, Any] = {"ring": _ring, "all_gather": _gather}


# The rule stands outside shard_map: its residuals are the arguments and the results, sharded as the caller has them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ring_attention(
    query: Float[Array, "*B T N H"], key: Float[Array, "*B T K H"], value: Float[Array, "*B T K V"], plan: Plan
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes the output and the lse of attention over all shards, as the plan says."""
    shard = functools.partial(_shard_forward, plan=plan)
    return plan.placement.map(shard, inputs="qkk", outputs="qq")(query, key, value)


def _ring_attention_fwd(query: Any, key: Any, value: Any, plan: Plan) -> tuple[Any, Any]:
    arrays = query.value, key.value, value.value
    # Named, so that rematerialisation can keep them: then its second forward does not go around the ring.
    results: Any = ring_attention(*arrays, plan)
    out, lse = map(checkpoint_name, results, ("ringjax_out", "ringjax_lse"))
    return (out, lse), (*arrays, out, lse)


def _ring_attention_bwd(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Array, Array, Array]:
    out = residuals[3]
    # A result that nobody used has a symbol for its cotangent: of the lse, which few use, it is worth knowing.
    is_zero = [isinstance(cotangent, SymbolicZero) for cotangent in cotangents]
    out_grad = jnp.zeros_like(out) if is_zero[0] else cotangents[0]
    lse_grad = None if is_zero[1] else cotangents[1]
    return _backward(*residuals, out_grad, lse_grad, plan)


ring_attention.defvjp(_ring_attention_fwd, _ring_attention_bwd, symbolic_zeros=True)


# Second derivatives would differentiate the backward's loops, whose lengths are data: refused here, by name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, out_grad: Array, lse_grad: Any, plan: Plan
) -> tuple[Array, Array, Array]:
    shard = functools.partial(_shard_backward, plan=plan)
    mapped = plan.placement.map(shard, inputs="qkkqqqq", outputs="qkk")
    return mapped(query, key, value, out, lse, out_grad, lse_grad)


def _no_second_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "ring_dilated_attention has no second derivative: differentiate dilated_attention_reference instead"
    )


_backward.defvjp(_no_second_derivative, _no_second_derivative)


def _group(
    query: Float[Array, "*B n N H"], key: Float[Array, "*B n K H"], value: Float[Array, "*B n K V"], plan: Plan
) -> tuple[Float[Array, "b n k GH"], Float[Array, "b n k H"], Float[Array, "b n k V"]]:
    """Gives all arguments the same mesh axes to vary along, one batch dimension, and heads that match."""
    axes = frozenset().union(*map(_varying_axes, (query, key, value)))
    if plan.placement.axis_name is not None:
        axes |= {plan.placement.axis_name}
    cast = lambda array: jax.lax.pcast(array, tuple(axes - _varying_axes(array)), to="varying")
    query, key, value = (cast(array).reshape(-1, *array.shape[-3:]) for array in (query, key, value))
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


def _shard_forward(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Array]:
    arrays = _group(query, key, value, plan)
    groups = query.shape[-2] // plan.local_heads

    def attend(layout: Layout, arrays: Any) -> Any:
        query, key, value = arrays
        out, lse = _branch_forward(
            layout.take(query, groups), Keys(layout.take(key), layout.take(value)), layout.rows, plan
        )
        return out, lse[..., None]

    def merge_one(layout: Layout, total: Any, results: Any) -> Any:
        before = tuple(layout.take(array, groups) for array in total)
        return tuple(map(layout.put, total, merge_many([before, results])))

    def merge_many(parts: list[Any]) -> Any:
        out, lse = merge([out for out, _ in parts], [lse[..., 0] for _, lse in parts])
        return out, lse[..., None]

    out_shape = (*query.shape[:-1], value.shape[-1])
    out = jnp.zeros_like(query, accumulation_dtype(query, key, value), shape=out_shape)
    total: Any = _group_heads(out, plan), _group_heads(out[..., :1] - jnp.inf, plan)
    addition = Addition((0.0, -jnp.inf), (groups, groups), merge_one, merge_many)
    out, lse = add_branches(attend, addition, arrays, total, plan)
    return out.astype(query.dtype).reshape(out_shape), lse.reshape(query.shape[:-1])


def _branch_forward(query: Array, keys: Keys, rows: Rows, plan: Plan) -> tuple[Array, Array]:
    query = plan.swap(rows.branch, query)
    partial = STRATEGIES[plan.strategy].forward(query, keys, rows, plan)
    return plan.swap_back(rows.branch, plan.implementation(rows.branch).finish(partial))


def _shard_backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, out_grad: Array, lse_grad: Any, plan: Plan
) -> tuple[Array, Array, Array]:
    # Grouping is linear: its transpose sums a gradient over the axes along which its argument is the same.
    arrays, ungroup = jax.vjp(functools.partial(_group, plan=plan), query, key, value)
    dtype = lse.dtype
    # A compiler that merged this ring's permutes with the forward's would keep every shard alive in between, and one
    # that knew that the gradients begin as zeros would make these arrays long before they are needed.
    arrays, out_grad, zero = jax.lax.optimization_barrier((arrays, out_grad, jnp.zeros((), dtype)))
    groups = query.shape[-2] // plan.local_heads
    # What the backward of each implementation needs of a query, before any rows are taken.
    of_queries = {
        branch.implementation: [
            _group_heads(array, plan) for array in plan.implementation(branch).of_queries(out, lse, out_grad, lse_grad)
        ]
        for branch in plan.branches
    }

    def differentiate(layout: Layout, arrays: Any) -> Any:
        (query, key, value), of_queries = arrays
        more = of_queries[layout.rows.branch.implementation]
        queries = layout.implementation.make_queries(*(layout.take(array, groups) for array in (query, *more)))
        return _branch_backward(queries, Keys(layout.take(key), layout.take(value)), layout.rows, plan)

    def add_one(layout: Layout, total: Any, addends: Any) -> Any:
        return tuple(layout.put(grad, addend, jnp.add) for grad, addend in zip(total, addends, strict=True))

    def add_many(parts: list[Any]) -> Any:
        return functools.reduce(lambda some, others: jax.tree.map(jnp.add, some, others), parts)

    grads = tuple(jnp.zeros_like(array, dtype) + zero for array in arrays)
    addition = Addition((0.0, 0.0, 0.0), (groups, 1, 1), add_one, add_many)
    grads = add_branches(differentiate, addition, (arrays, of_queries), grads, plan)
    return ungroup(tuple(grad.astype(array.dtype) for grad, array in zip(grads, arrays, strict=True)))


def _branch_backward(queries: Any, keys: Keys, rows: Rows, plan: Plan) -> tuple[Array, Array, Array]:
    queries = plan.swap(rows.branch, queries)
    query_grad, *keys_grad = STRATEGIES[plan.strategy].backward(queries, keys, rows, plan)
    return plan.swap_back(rows.branch, query_grad), *keys_grad
