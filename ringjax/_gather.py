"""The strategy "all_gather": each shard gathers the keys of its segment, then computes."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ringjax._meeting import Meeting, Noise, Slots, Tiles
from ringjax._plan import Plan
from ringjax._rows import Rows


def forward(queries: Tiles, keys: Tiles, rows: Rows, noise: Noise | None, plan: Plan) -> Any:
    """Returns the attention of one branch; the queries are where they are computed, the keys where they are kept."""
    implementation = plan.implementation(rows.branch)
    partial = implementation.start(queries.arrays, keys.arrays.value)
    keys = plan.gather(rows.branch, keys)
    meeting = _meeting(queries, keys, rows, noise, plan)
    return implementation.forward(queries.arrays, keys.arrays, meeting, plan.weighting, partial)


def backward(queries: Tiles, keys: Tiles, rows: Rows, noise: Noise | None, plan: Plan) -> tuple[Array, Array, Array]:
    """Returns what one branch adds to the gradients of its queries, where computed, and of its keys, where kept."""
    implementation = plan.implementation(rows.branch)
    keys = plan.gather(rows.branch, keys)
    grads = implementation.start_gradients(queries.arrays, keys.arrays)
    meeting = _meeting(queries, keys, rows, noise, plan)
    grads = implementation.backward(queries.arrays, keys.arrays, meeting, plan.weighting, grads)
    query_grad, *keys_grad = implementation.finish_gradients(grads, plan.weighting)
    return query_grad, *plan.scatter(rows.branch, tuple(keys_grad))


def _meeting(queries: Tiles, keys: Tiles, rows: Rows, noise: Noise | None, plan: Plan) -> Meeting:
    branch, size, implementation = rows.branch, rows.branch.gather_size, plan.implementation(rows.branch)
    gathered = rows.shard // size * size + jnp.arange(size, dtype=jnp.int32)
    own = Slots(rows, rows.shard[None], branch.is_balanced, queries.documents)
    others = Slots(rows.of_keys(), gathered, False, keys.documents)
    return Meeting(branch, implementation.see_queries(own, noise), implementation.see_keys(others))
