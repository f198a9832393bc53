"""Precision in every dtype, and values at the edges: rows without keys, large logits."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    NAMES,
    assert_close,
    loss,
    make_mesh,
    random_arguments,
    random_documents,
    reference_results,
    ring_results,
    with_gradients,
)

from ringjax import dilated_attention_reference, ring_dilated_attention
from ringjax._pattern.dropout import is_kept, make_seed, make_stream

# The library's own reference, which users compare with.
OF_REFERENCE = {
    "branches": {"segment_lengths": (6, 24), "dilation_rates": (2, 3), "is_causal": True, "query_offset": 4},
    "union, capped": {"segment_lengths": (6, 24), "dilation_rates": (1, 2), "merge": "union", "logits_soft_cap": 0.7},
    "grouped, dropped": {
        "segment_lengths": (6, 24),
        "dilation_rates": (2, 4),
        "heads": "grouped",
        "offsets": "blocked",
        "dropout_rate": 0.4,
        "dropout_seed": 2**40 + 3,
        "scale": -0.7,
    },
}


@pytest.mark.parametrize("name", OF_REFERENCE)
def test_the_reference_is_the_definition(name):
    arrays = *random_arguments(24, (4, 2), (3, 2), (2,)), random_documents(24, (2,))
    results = jax.jit(with_gradients(loss(dilated_attention_reference, **OF_REFERENCE[name])))(*arrays)
    assert_close(jax.device_get(results), reference_results(arrays, **OF_REFERENCE[name]), atol=1e-12)


ARGUMENTS = {"segment_lengths": (16, 64), "dilation_rates": (1, 2), "is_causal": True}


def errors(arrays, ring_size, dtype, **arguments):
    """The root mean square error of each result, over that of the float64 oracle's values on the same inputs."""
    arrays = [jnp.asarray(array, dtype) for array in arrays]
    exact = reference_results([array.astype(jnp.float64) for array in arrays], **arguments)
    actual = ring_results(arrays, mesh=make_mesh(seq=ring_size), **arguments)
    norm = lambda array: np.sqrt(np.mean(np.square(array)))
    return {
        name: norm(np.asarray(one, np.float64) - other) / norm(other)
        for name, one, other in zip(NAMES, actual, exact, strict=True)
    }


@pytest.mark.parametrize("ring_size", [1, 8])
def test_float32(ring_size):
    arrays = [array.astype(np.float32) for array in random_arguments(64, (4, 2), widths=(16, 16))]
    exact = reference_results([array.astype(np.float64) for array in arrays], **ARGUMENTS)
    assert_close(ring_results(arrays, mesh=make_mesh(seq=ring_size), **ARGUMENTS), exact, atol=2e-5)


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_in_half_precision_does_not_grow_with_the_ring(dtype):
    arrays = random_arguments(256, (4, 2), widths=(16, 16))
    arguments = {"segment_lengths": (256,), "dilation_rates": (1,), "is_causal": True}
    one, eight = (errors(arrays, ring_size, dtype, **arguments) for ring_size in (1, 8))
    for name, error in eight.items():
        assert error <= 1.1 * one[name], name
        assert error < 4 * jnp.finfo(dtype).eps, name


DTYPES = [
    ("bfloat16",) * 3,
    ("float16",) * 3,
    ("float32", "bfloat16", "float16"),
    ("float32", "float64", "bfloat16"),
    ("float16", "float32", "float64"),
]


@pytest.mark.quick("('float32', 'float64', 'bfloat16')", "('float16', 'float16', 'float16')")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dtypes_of_results(dtypes):
    arrays = [jnp.asarray(array, dtype) for array, dtype in zip(random_arguments(16), dtypes, strict=True)]
    arguments = {"segment_lengths": (16,), "dilation_rates": (1,)}
    results = ring_results(arrays, mesh=make_mesh(seq=2), **arguments)
    of_lse = "float64" if "float64" in dtypes else "float32"
    assert [result.dtype.name for result in results] == [dtypes[0], of_lse, *dtypes]
    for found, expected in zip(results, reference_results(arrays, **arguments), strict=True):
        eps = max(float(jnp.finfo(dtype).eps) for dtype in {found.dtype.name, *dtypes})
        np.testing.assert_allclose(np.float64(found), expected, rtol=0, atol=4 * eps * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_groups_of_segments_in_half_precision(strategy):
    """A local branch alone, computed group by group: nothing is added to results that are as narrow as the arrays."""
    arrays = [jnp.asarray(array, "bfloat16") for array in random_arguments(32, (2, 1))]
    arguments = {"segment_lengths": (4,), "dilation_rates": (1,)}
    results = ring_results(arrays, mesh=make_mesh(seq=2), block_size=4, strategy=strategy, **arguments)
    for found, expected in zip(results, reference_results(arrays, **arguments), strict=True):
        eps = float(jnp.finfo("bfloat16").eps)
        np.testing.assert_allclose(np.float64(found), expected, rtol=0, atol=4 * eps * max(1, np.abs(expected).max()))


def test_rows_that_no_branch_covers_are_zero_with_zero_gradient():
    arguments = {"segment_lengths": (8, 16), "dilation_rates": (4, 4)}
    arrays = random_arguments(32, (2, 2))
    out, lse, *grads = ring_results(arrays, mesh=make_mesh(seq=4), **arguments)
    covered = np.zeros((32, 2), bool)
    covered[np.arange(32) % 4 == 0, 0] = covered[np.arange(32) % 4 == 1, 1] = True
    assert (out[:, ~covered] == 0).all()
    assert (lse[:, ~covered] == -np.inf).all()
    assert np.isfinite(lse[:, covered]).all()
    for grad in grads:
        assert (grad[:, ~covered] == 0).all()
        assert (grad[:, covered] != 0).any(axis=-1).all()


def test_cotangents_of_rows_without_keys_do_not_matter():
    arrays = random_arguments(32, (2, 2))
    call = lambda *arrays: ring_dilated_attention(
        *arrays, segment_lengths=(8,), dilation_rates=(4,), return_residual=True, mesh=make_mesh(seq=2)
    )
    (out, lse), pullback = jax.vjp(call, *arrays)
    hostile = jnp.where(jnp.isfinite(lse), 0, jnp.nan)
    for grad in pullback((jnp.zeros_like(out), hostile)):
        assert (grad == 0).all()


@pytest.mark.quick("float32-4", "float64-1")
@pytest.mark.parametrize("ring_size", [1, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_large_logits(dtype, ring_size):
    """Logits of +-1e4 overflow every exponential that is not shifted; here the weights are all but one-hot."""
    query, key, value = random_arguments(32, (2, 1), widths=(4, 3))
    query, key = 100 * np.sign(query), 50 * np.sign(key)
    arrays = [array.astype(dtype) for array in (query, key, value)]
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 2), "is_causal": True, "scale": 0.5}
    actual = ring_results(arrays, mesh=make_mesh(seq=ring_size), **arguments)
    chex.assert_tree_all_finite(actual)
    assert np.abs(actual[1]).max() > 9e3
    expected = reference_results([array.astype(np.float64) for array in arrays], **arguments)
    tolerance = 2e4 * np.finfo(dtype).eps  # neighboring numbers of the size of these logits differ by that much
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max()))


@pytest.mark.parametrize("size", [1e5, 1e8])
def test_the_reference_divides_by_its_own_sum(size):
    """Of weights exp(logit - lse), those of logits whose lse is rounded to them would sum to 2."""
    ones, key = jnp.ones((1, 2, 1, 1), jnp.float32), jnp.full((1, 2, 1, 1), size, jnp.float32)
    pattern = {"segment_lengths": (2,), "dilation_rates": (1,)}
    attend = lambda value: dilated_attention_reference(ones, key, value, **pattern)
    out, pullback = jax.vjp(attend, ones)
    np.testing.assert_array_equal(out, ones)
    np.testing.assert_array_equal(pullback(ones)[0], ones)
    np.testing.assert_array_equal(ring_dilated_attention(ones, key, ones, **pattern), ones)


@pytest.mark.parametrize("size", [100, 10_000])
def test_gradients_of_large_logits_err_by_their_rounding(size):
    """What docs/guarantees.md says of one branch: weights of the gradient err by that of the lse."""
    query, key, value = random_arguments(32, (2, 1), widths=(4, 3))
    arrays = [array.astype(np.float32) for array in (np.ones_like(query), key + size, value)]
    arguments = {"segment_lengths": (32,), "dilation_rates": (1,), "scale": 0.25}  # logits of about `size`
    actual = ring_results(arrays, **arguments)
    expected = reference_results([array.astype(np.float64) for array in arrays], **arguments)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * size * 2**-23 * np.abs(other).max())


def test_a_sink_that_is_no_number_is_seen():
    """Also in the lse of a row without keys."""
    arrays = [jnp.asarray(array, jnp.float32) for array in random_arguments(4, (2, 2))]
    options = {"segment_lengths": (4,), "dilation_rates": (2,), "sinks": jnp.array([jnp.nan, 0.0])}
    ours, reference = (
        attend(*arrays, return_residual=True, **options)
        for attend in (ring_dilated_attention, dilated_attention_reference)
    )
    assert np.isnan(reference[1][..., 0]).all()
    for one, other in zip(ours, reference, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_the_oracle_is_softmax_attention():
    """With one branch (T, 1) the oracle is plain attention, in NumPy and in JAX's own float32 implementation."""
    query, key, value = random_arguments(16, (4, 2), widths=(6, 6))
    for is_causal in (False, True):
        out = reference_results((query, key, value), segment_lengths=(16,), dilation_rates=(1,), is_causal=is_causal)[0]
        logits = np.einsum("btnh,bsnh->bnts", query, key.repeat(2, axis=2)) / np.sqrt(6)
        weights = np.exp(np.where(np.tri(16, dtype=bool) | (not is_causal), logits, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("bnts,bsnv->btnv", weights, value.repeat(2, axis=2))
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
        peer = jax.nn.dot_product_attention(*map(jnp.asarray, (query, key, value)), is_causal=is_causal)
        np.testing.assert_allclose(out, peer, rtol=0, atol=1e-6)


def test_the_oracle_masks_and_caps():
    """Documents, an offset, a cap and dropout once more, in NumPy, pair by pair."""
    length, key_length, offset, cap, rate = 6, 9, 2, 1.5, 0.4
    query, key, value = random_arguments(length, (2, 1), widths=(4, 3), key_length=key_length)
    documents = np.array([[0, 0, 1, 1, -1, 2]]), np.array([[0, 0, 0, 1, 1, 1, -1, -1, 2]])
    options = {"is_causal": True, "query_offset": offset, "logits_soft_cap": cap, "segment_lengths": (20,)}
    options |= {"dilation_rates": (1,), "document_ids": documents, "return_residual": True}
    out, lse = dilated_attention_reference(*map(jnp.asarray, (query, key, value)), **options)
    seeded = {"dropout_rate": rate, "dropout_seed": 3}
    dropped, same_lse = dilated_attention_reference(*map(jnp.asarray, (query, key, value)), **options, **seeded)
    np.testing.assert_array_equal(lse, same_lse)
    for head, t in itertools.product(range(2), range(length)):
        seen = [s for s in range(key_length) if documents[0][0, t] == documents[1][0, s] >= 0 and s <= t + offset]
        logits = cap * np.tanh(query[0, t, head] @ key[0, seen, 0].T / 2 / cap)
        weights = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(out[0, t, head], weights @ value[0, seen, 0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(lse[0, t, head], np.log(np.exp(logits).sum()) if seen else -np.inf, atol=1e-12)
        stream = make_stream(make_seed(3), jnp.int32(0), jnp.int32(head), jnp.int32(t + offset))
        kept = np.asarray(is_kept(*stream, jnp.asarray(seen, jnp.int32), rate)) / (1 - rate)
        np.testing.assert_allclose(dropped[0, t, head], (weights * kept) @ value[0, seen, 0], rtol=0, atol=1e-12)


def test_the_oracle_mixes_branches_by_their_denominators():
    """LongNet's own form: each branch's softmax apart, mixed with weights that are their denominators' shares."""
    arrays = random_arguments(24, (2, 2))
    branches = [reference_results(arrays, segment_lengths=(w,), dilation_rates=(r,))[:2] for w, r in ((6, 1), (12, 2))]
    shares = np.exp(np.stack([lse for _, lse in branches]))
    shares /= shares.sum(axis=0)
    mixed = sum(share[..., None] * out for share, (out, _) in zip(shares, branches, strict=True))
    together = reference_results(arrays, segment_lengths=(6, 12), dilation_rates=(1, 2))[0]
    np.testing.assert_allclose(together, mixed, rtol=0, atol=1e-12)
