"""The strategy "ring": rows travel around the shards that share a segment, one scan for each direction."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ringjax._cost import RowBytes, queries_travel
from ringjax._meeting import Meeting, Noise, Slots, Tiles
from ringjax._plan import Plan
from ringjax._rows import Rows
from ringjax._schedule import BranchSchedule


def forward(queries: Tiles, keys: Tiles, rows: Rows, noise: Noise | None, plan: Plan) -> Any:
    """Returns the attention of one branch; the queries are where they are computed, the keys where they are kept."""
    branch = rows.branch
    implementation = plan.implementation(branch)
    own = implementation.see_queries(_slots(rows, queries, 0), noise)

    def attend(step: Any, keys: Tiles, partial: Any) -> Any:
        meeting = _meeting(rows, own, implementation.see_keys(_slots(rows.of_keys(), keys, step)), step)
        return implementation.forward(queries.arrays, keys.arrays, meeting, plan.weighting, partial)

    def rotate_and_attend(carry: Any, step: Array) -> tuple[Any, None]:
        keys, partial = carry
        arriving = plan.rotate(branch, keys)
        return (arriving, attend(step, keys, partial)), None

    carry: Any = (plan.swap(branch, keys), implementation.start(queries.arrays, keys.arrays.value))
    if branch.ring_size > 1:
        carry, _ = jax.lax.scan(rotate_and_attend, carry, jnp.arange(branch.ring_size - 1, dtype=jnp.uint32))
    return attend(branch.ring_size - 1, *carry)


def backward(queries: Tiles, keys: Tiles, rows: Rows, noise: Noise | None, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns what one branch adds to the gradients of its queries, where computed, and of its keys, where kept."""
    branch = rows.branch
    implementation = plan.implementation(branch)
    keys = plan.swap(branch, keys)
    start = functools.partial(implementation.start_gradients, queries.arrays, keys.arrays)
    see_queries = lambda queries, step: implementation.see_queries(_slots(rows, queries, step), noise)
    see_keys = lambda keys, step: implementation.see_keys(_slots(rows.of_keys(), keys, step))
    grads = start()
    do_queries_travel = queries_travel(branch, _row_bytes(queries, keys, grads, branch))
    own = see_keys(keys, 0) if do_queries_travel else see_queries(queries, 0)

    def visit_keys(step: Any, queries: Tiles, keys_grad: Any) -> tuple[Any, Any]:
        grads = start(step, key=keys_grad[0], value=keys_grad[1])
        meeting = _meeting(rows, see_queries(queries, step), own, step)
        grads = implementation.backward(queries.arrays, keys.arrays, meeting, plan.weighting, grads)
        return grads.query, (grads.key, grads.value)

    def visit_queries(step: Any, keys: Tiles, query_grad: Array) -> tuple[Any, Any]:
        grads = start(step, query=query_grad)
        meeting = _meeting(rows, own, see_keys(keys, step), step)
        grads = implementation.backward(queries.arrays, keys.arrays, meeting, plan.weighting, grads)
        return (grads.key, grads.value), grads.query

    if do_queries_travel:
        query_grad, keys_grad = _travel(visit_keys, queries, tuple(grads[1:]), plan, branch)
    else:
        keys_grad, query_grad = _travel(visit_queries, keys, grads.query, plan, branch)
    query_grad, *keys_grad = implementation.finish_gradients(type(grads)(query_grad, *keys_grad), plan.weighting)
    return query_grad, *plan.swap_back(branch, tuple(keys_grad))


def _slots(rows: Rows, tiles: Tiles, rotations: Any) -> Slots:
    """The slots of tiles that have made so many rotations."""
    branch = rows.branch
    shard = branch.source(rows.shard.astype(jnp.uint32), rotations)
    return Slots(rows, shard[None], branch.is_balanced, tiles.documents)


def _meeting(rows: Rows, queries: Any, keys: Any, step: Any) -> Meeting:
    return Meeting(rows.branch, queries, keys, rows.branch.is_new(rows.shard, step))


def _row_bytes(queries: Tiles, keys: Tiles, grads: Any, branch: BranchSchedule) -> RowBytes:
    count = lambda tree: sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))
    return RowBytes(
        queries=count(queries) // branch.num_slots,
        keys=count(keys) // branch.of_keys.num_slots,
        query_grad=count(grads.query) // branch.num_slots,
        keys_grad=count(tuple(grads[1:])) // branch.of_keys.num_slots,
    )


def _travel(visit: Callable[..., Any], own: Any, resident_grad: Any, plan: Plan, branch: BranchSchedule) -> Any:
    """Sends every shard's arrays around its ring, and returns the gradients of the travelling and the resident arrays.

    `visit(step, arrays, resident_grad)` gives what one meeting contributes to the gradient of the travelling arrays,
    and adds the rest to the other. What a shard contributes to the gradient of its own arrays stays there: size - 1
    permutes of the arrays and as many of their gradient. Each is issued before the computation of a step and not needed
    until after it, so that the two can overlap.
    """
    size = branch.ring_size
    own_grad, resident_grad = visit(0, own, resident_grad)
    if size == 1:
        return own_grad, resident_grad

    def rotate_and_visit(carry: Any, step: Any) -> tuple[Any, None]:
        arrays, grad, resident_grad = carry
        arriving, grad = plan.rotate(branch, arrays), plan.rotate(branch, grad)
        addend, resident_grad = visit(step, arrays, resident_grad)
        return (arriving, _add(grad, addend), resident_grad), None

    arrays = plan.rotate(branch, own)
    grad, resident_grad = visit(1, arrays, resident_grad)
    if size > 2:
        carry = (plan.rotate(branch, arrays), grad, resident_grad)
        carry, _ = jax.lax.scan(rotate_and_visit, carry, jnp.arange(2, size - 1, dtype=jnp.uint32))
        arrays, grad, resident_grad = carry
        addend, resident_grad = visit(size - 1, arrays, resident_grad)
        grad = _add(plan.rotate(branch, grad), addend)
    return _add(own_grad, plan.rotate(branch, grad, hops=1 - size)), resident_grad


def _add(some: Any, others: Any) -> Any:
    return jax.tree.map(jnp.add, some, others)
