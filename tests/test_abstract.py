"""Calls of the sizes that are trained, traced and not compiled: all results have their shapes and dtypes."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from oracle import make_mesh

from ringjax import Segments, Window, ring_dilated_attention

DTYPES = [
    *[(dtype,) * 3 for dtype in ("bfloat16", "float16", "float32")],
    ("float32", "bfloat16", "float16"),
    ("bfloat16", "float32", "bfloat16"),
]


@st.composite
def calls(draw):
    one_of = lambda *values: draw(st.sampled_from(values))
    length, kv_heads = one_of(1024, 4096, 5000, 16384), one_of(1, 2, 4)
    branches = [
        one_of(
            Window(one_of(64, 500, 2048), one_of(1, 2, 4)),
            Segments(one_of(128, 256, 512, 1000, 2048, length), one_of(1, 1, 2, 4)),
        )
        for _ in range(one_of(1, 1, 2, 3))
    ]
    options = {
        "pattern": branches,
        "is_causal": draw(st.booleans()),
        "strategy": one_of("ring", "all_gather", "all_to_all"),
        "merge": one_of("lse", "lse", "union"),
        "heads": one_of("all", "grouped") if len(branches) <= kv_heads else "all",
        "logits_soft_cap": one_of(None, None, 5.0),
        "dropout_rate": one_of(0.0, 0.0, 0.1),
        "dropout_seed": 1,
    }
    heads = kv_heads * one_of(1, 2, 4), kv_heads
    mesh = one_of(1, 2, 4, 8), one_of(AxisType.Auto, AxisType.Explicit)
    return length, heads, one_of(*DTYPES), draw(st.booleans()), mesh, options


def check(call):
    length, (heads, kv_heads), dtypes, has_documents, (devices, kind), options = call
    counts = (heads, kv_heads, kv_heads)
    arrays = [jax.ShapeDtypeStruct((1, length, n, 16), dtype) for n, dtype in zip(counts, dtypes, strict=True)]
    documents = [jax.ShapeDtypeStruct((1, length), jnp.int32)] if has_documents else []
    mesh = make_mesh(kind, seq=devices)

    def loss(query, key, value, *documents):
        ids = documents[0] if documents else None
        attend = ring_dilated_attention(
            query, key, value, document_ids=ids, mesh=mesh, return_residual=True, implementation="xla", **options
        )
        return sum(array.astype(jnp.float32).sum() for array in attend), attend

    with jax.enable_x64(False):
        grads, (out, lse) = jax.eval_shape(jax.grad(loss, (0, 1, 2), has_aux=True), *arrays, *documents)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(array.shape, array.dtype) for array in arrays]
    assert (out.shape, out.dtype) == (arrays[0].shape, arrays[0].dtype)
    assert (lse.shape, lse.dtype) == ((1, length, heads), jnp.float32)


@pytest.mark.slow
@given(calls())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_results_have_their_shapes_and_dtypes(call):
    check(call)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("rate", [1, 2])
def test_a_local_branch_alone_in_half_precision(strategy, rate):
    """In as many groups of segments as there are; sums of one group are not those of all."""
    options = {"pattern": [Segments(256, rate)], "strategy": strategy}
    check((4096, (4, 2), ("bfloat16",) * 3, False, (8, AxisType.Auto), options))


@pytest.mark.parametrize("exchange_size", [None, 1])
def test_one_head_has_nothing_to_exchange(exchange_size):
    """Nor has any number of heads among one device: rows are then not marked as exchanged."""
    heads = (1, 1) if exchange_size is None else (4, 2)
    options = {"pattern": [Segments(1024, 2)], "strategy": "all_to_all", "exchange_size": exchange_size}
    check((1024, heads, ("float32",) * 3, False, (2, AxisType.Auto), options))
