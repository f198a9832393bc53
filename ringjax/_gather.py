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
    return _block.forward(query, plan.gather(rows.branch, keys), _mask(rows), plan.scale, partial)


def backward(queries: Queries, keys: Keys, rows: Rows, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns what one branch adds to the gradients of its queries, where computed, and of its keys, where kept."""
    keys = plan.gather(rows.branch, keys)
    grads = _block.backward(queries, keys, _mask(rows), plan.scale, _block.start_gradients(queries, keys))
    query_grad, *keys_grad = _block.finish_gradients(grads, plan.scale)
    return query_grad, *plan.scatter(rows.branch, tuple(keys_grad))


def _mask(rows: Rows) -> Mask:
    branch, size = rows.branch, rows.branch.gather_size
    gathered = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    return make_mask(Slots(rows, rows.shard[None], branch.is_balanced), Slots(rows, gathered, False))
