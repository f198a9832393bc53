"""The strategy "all_gather": each shard gathers the keys of its segment, then computes."""

import jax.numpy as jnp
from jaxtyping import Array

from ringjax import _block
from ringjax._block import Keys, Mask, Partial, Queries
from ringjax._plan import Plan
from ringjax._rows import Rows, Slots, make_mask


def forward(query: Array, keys: Keys, rows: Rows, plan: Plan) -> Partial:
    """Returns the softmax of one branch; the queries are where they are computed, the keys where they are kept."""
    partial = _block.start(query, keys.value)
    return _block.forward(query, _gather(keys, rows, plan), _mask(rows), plan.scale, partial)


def backward(queries: Queries, keys: Keys, rows: Rows, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns what one branch adds to the gradients of its queries, where computed, and of its keys, where kept."""
    branch, keys = rows.branch, _gather(keys, rows, plan)
    grads = _block.backward(queries, keys, _mask(rows), plan.scale, _block.start_gradients(queries, keys))
    query_grad, key_grad, value_grad = _block.finish_gradients(grads, plan.scale)
    if branch.ring_size > 1:
        key_grad, value_grad = plan.scatter(branch, (key_grad, value_grad))
    return query_grad, key_grad, value_grad


def _gather(keys: Keys, rows: Rows, plan: Plan) -> Keys:
    return plan.gather(rows.branch, keys) if rows.branch.ring_size > 1 else keys


def _mask(rows: Rows) -> Mask:
    branch = rows.branch
    shards = rows.shard[None]
    if branch.ring_size > 1:
        size = branch.group_size
        shards = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    return make_mask(Slots(rows, rows.shard[None], branch.is_balanced), Slots(rows, shards, False))
