"""The ring: one rotation, one scan for each direction, and the differentiation rule around them.

The only module that communicates along a mesh axis. Everything below the rule sees one shard: B batch, n tokens of the
shard, K key/value heads, G query heads of each, N = K * G, H and V the widths.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ringjax import _block
from ringjax._block import Keys, Queries
from ringjax._mesh import Placement
from ringjax._pattern import DilatedPattern
from ringjax._rows import Rows, make_mask
from ringjax._schedule import BranchSchedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in one call: the schedule of each branch, and where shards and heads lie on the mesh."""

    pattern: DilatedPattern
    branches: tuple[BranchSchedule, ...]
    num_kv_heads: int
    is_causal: bool
    scale: float
    placement: Placement

    @property
    def first_head(self) -> Any:
        """The global number of this shard's first key/value head."""
        axes = self.placement.heads
        return jax.lax.axis_index(axes) * self.num_kv_heads // jax.lax.axis_size(axes) if axes else 0

    @property
    def local_heads(self) -> int:
        """The number of key/value heads that this shard's queries use."""
        return max(1, self.num_kv_heads // jax.lax.axis_size(self.placement.heads))

    def rows(self, branch: BranchSchedule) -> Rows:
        """Returns the rows that this shard keeps; the offsets follow the heads' global numbers."""
        axis_name = self.placement.axis_name
        shard = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
        offset = lambda head: self.pattern.offset(head, branch.dilation_rate, self.num_kv_heads)
        all_offsets = jnp.asarray(np.unique(offset(np.arange(self.num_kv_heads))), jnp.uint32)
        if all_offsets.size == 1:
            return Rows(branch, shard, all_offsets, all_offsets)
        head = (self.first_head + jnp.arange(self.local_heads, dtype=jnp.int32)).astype(jnp.uint32)
        return Rows(branch, shard, offset(head), all_offsets)

    def rotate(self, branch: BranchSchedule, arrays: Any, hops: int = 1) -> Any:
        """Moves every shard's arrays by `hops` shards along its ring."""
        return jax.lax.ppermute(arrays, self.placement.axis_name, branch.permutation(hops))


# The rule stands outside shard_map: its residuals are the arguments and the results, sharded as the caller has them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ring_attention(
    query: Float[Array, "*B T N H"], key: Float[Array, "*B T K H"], value: Float[Array, "*B T K V"], plan: Plan
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Computes the output and the lse of attention over all shards, as the plan says."""
    shard = functools.partial(_shard_forward, plan=plan)
    return plan.placement.map(shard, inputs="qkk", outputs="qq")(query, key, value)


def _ring_attention_fwd(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Any, Any]:
    results: Any = ring_attention(query, key, value, plan)
    return results, (query, key, value, *results)


def _ring_attention_bwd(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Array, Array, Array]:
    # The cotangent of a result that nobody used comes as zeros without the result's sharding.
    out_grad, lse_grad = (plan.placement.reshard(cotangent, "q") for cotangent in cotangents)
    return _backward(*residuals, out_grad, lse_grad, plan)


ring_attention.defvjp(_ring_attention_fwd, _ring_attention_bwd)


# Second derivatives would differentiate the backward's loops, whose lengths are data: refused here, by name.
@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, out_grad: Array, lse_grad: Array, plan: Plan
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
) -> tuple[Float[Array, "b n k G H"], Float[Array, "b n k H"], Float[Array, "b n k V"]]:
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


def _group_heads(array: Float[Array, "*B n N H"], plan: Plan) -> Float[Array, "b n k G H"]:
    length, heads, width = array.shape[-3:]
    return array.reshape(-1, length, plan.local_heads, heads // plan.local_heads, width)


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


def _shard_forward(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Array]:
    grouped = _group(query, key, value, plan)
    results = (_branch_forward(*grouped, plan, branch) for branch in plan.branches)
    out, lse = functools.reduce(lambda merged, branch: _block.merge(*merged, *branch), results)
    return out.astype(query.dtype).reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])


def _shard_backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, out_grad: Array, lse_grad: Array, plan: Plan
) -> tuple[Array, Array, Array]:
    # Grouping is linear: its transpose sums a gradient over the axes along which its argument is the same.
    (grouped, *keys), ungroup = jax.vjp(functools.partial(_group, plan=plan), query, key, value)
    # A compiler that merged this ring's permutes with the forward's would keep every shard alive in between.
    grouped, keys, out_grad = jax.lax.optimization_barrier((grouped, keys, out_grad))
    dtype = lse.dtype
    delta = jnp.einsum("...v,...v->...", out_grad, out, preferred_element_type=dtype) - lse_grad
    # A row that attends to nothing has weights exp(S - inf) = 0, whatever its cotangents are.
    attends = lse > -jnp.inf
    lse, delta = jnp.where(attends, lse, jnp.inf), jnp.where(attends, delta, 0)
    row = lambda array: _group_heads(array[..., None], plan)[..., 0]
    queries = Queries(grouped, _group_heads(out_grad, plan), row(lse), row(delta))
    grads = (_branch_backward(queries, Keys(*keys), plan, branch) for branch in plan.branches)
    query_grad, keys_grad = functools.reduce(_add, grads)
    grads = zip((query_grad, *keys_grad), (grouped, *keys), strict=True)
    return ungroup(tuple(grad.astype(array.dtype) for grad, array in grads))


def _branch_forward(query: Array, key: Array, value: Array, plan: Plan, branch: BranchSchedule) -> tuple[Array, Array]:
    rows = plan.rows(branch)
    query, keys = rows.take(query), Keys(rows.take(key), rows.take(value))

    def attend(step: Any, keys: Keys, partial: _block.Partial) -> _block.Partial:
        mask = make_mask(rows, rows.after(step), plan.is_causal, branch.is_new(rows.shard, step))
        return _block.forward(query, keys, mask, plan.scale, partial)

    def rotate_and_attend(carry: Any, step: Array) -> tuple[Any, None]:
        keys, partial = carry
        arriving = plan.rotate(branch, keys)
        return (arriving, attend(step, keys, partial)), None

    carry: Any = (keys, _block.start(query, keys.value))
    if branch.ring_size > 1:
        carry, _ = jax.lax.scan(rotate_and_attend, carry, jnp.arange(branch.ring_size - 1, dtype=jnp.int32))
    out, lse = _block.finish(attend(branch.ring_size - 1, *carry))
    return rows.put(out), rows.put(lse[..., None], -jnp.inf)[..., 0]


def _branch_backward(queries: Queries, keys: Keys, plan: Plan, branch: BranchSchedule) -> tuple[Array, Keys]:
    rows = plan.rows(branch)
    queries = Queries(
        rows.take(queries.query),
        rows.take(queries.out_grad),
        rows.take(queries.lse[..., None])[..., 0],
        rows.take(queries.delta[..., None])[..., 0],
    )
    keys = Keys(*map(rows.take, keys))
    mask = lambda query_rows, key_rows, step: make_mask(
        query_rows, key_rows, plan.is_causal, branch.is_new(rows.shard, step)
    )

    def visit_keys(step: Any, queries: Queries) -> tuple[Array, Keys]:
        return _block.backward(queries, keys, mask(rows.after(step), rows, step), plan.scale)

    def visit_queries(step: Any, keys: Keys) -> tuple[Keys, Array]:
        query_grad, keys_grad = _block.backward(queries, keys, mask(rows, rows.after(step), step), plan.scale)
        return keys_grad, query_grad

    dtype = queries.lse.dtype
    if _travelling_bytes(queries, (queries.query,), dtype) < _travelling_bytes(keys, keys, dtype):
        query_grad, keys_grad = _travel(visit_keys, queries, plan, branch)
    else:
        keys_grad, query_grad = _travel(visit_queries, keys, plan, branch)
    return rows.put(query_grad), Keys(*map(rows.put, keys_grad))


def _travelling_bytes(arrays: tuple[Array, ...], with_gradient: tuple[Array, ...], dtype: jnp.dtype) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays) + sum(
        array.size * dtype.itemsize for array in with_gradient
    )


def _travel(visit: Callable[[Any, Any], tuple[Any, Any]], own: Any, plan: Plan, branch: BranchSchedule) -> Any:
    """Sends every shard's arrays around its ring, and returns the gradients of the travelling and the resident arrays.

    `visit(step, arrays)` gives what one meeting adds to both. What a shard adds to the gradient of its own arrays stays
    there: size - 1 permutes of the arrays and as many of their gradient. Each is issued before the computation of a
    step and not needed until after it, so that the two can overlap.
    """
    size = branch.ring_size
    own_grad, resident_grad = visit(0, own)
    if size == 1:
        return own_grad, resident_grad

    def rotate_and_visit(carry: Any, step: Any) -> tuple[Any, None]:
        arrays, grad, resident_grad = carry
        arriving, grad = plan.rotate(branch, arrays), plan.rotate(branch, grad)
        return (arriving, *_add((grad, resident_grad), visit(step, arrays))), None

    arrays = plan.rotate(branch, own)
    grad, addend = visit(1, arrays)
    resident_grad = _add(resident_grad, addend)
    if size > 2:
        carry = (plan.rotate(branch, arrays), grad, resident_grad)
        carry, _ = jax.lax.scan(rotate_and_visit, carry, jnp.arange(2, size - 1, dtype=jnp.int32))
        arrays, grad, resident_grad = carry
        grad, resident_grad = _add((plan.rotate(branch, grad), resident_grad), visit(size - 1, arrays))
    return _add(own_grad, plan.rotate(branch, grad, hops=1 - size)), resident_grad


def _add(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)
