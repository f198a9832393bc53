"""The strategy "all_gather": each shard gathers the keys of its segment, then computes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ringjax._block import Keys
from ringjax._plan import Plan
from ringjax._rows import Meeting, Rows, Slots


def forward(query: Array, keys: Keys, rows: Rows, plan: Plan) -> Any:
    """Returns the attention of one branch; the queries are where they are computed, the keys where they are kept."""
    implementation = plan.implementation(rows.branch)
    partial = implementation.start(query, keys.value)
    return implementation.forward(query, plan.gather(rows.branch, keys), _meeting(rows), plan.scale, partial)


def backward(queries: Any, keys: Keys, rows: Rows, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns what one branch adds to the gradients of its queries, where computed, and of its keys, where kept."""
    implementation = plan.implementation(rows.branch)
    keys = plan.gather(rows.branch, keys)
    grads = implementation.start_gradients(queries, keys)
    grads = implementation.backward(queries, keys, _meeting(rows), plan.scale, grads)
    query_grad, *keys_grad = implementation.finish_gradients(grads, plan.scale)
    return query_grad, *plan.scatter(rows.branch, tuple(keys_grad))


def _meeting(rows: Rows) -> Meeting:
    branch, size = rows.branch, rows.branch.gather_size
    gathered = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    return Meeting(Slots(rows, rows.shard[None], branch.is_balanced), Slots(rows, gathered, False))
