"""The weights of some rows: the rows of attention's output, whatever the pattern, and sharded as the keys are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh, random_arguments, random_documents, reference_results, tolerance

import ringjax

ROWS = [0, 17, 30, 5]
SEGMENTS = {"segment_lengths": (8, 31), "dilation_rates": (1, 3)}
CASES = {
    "plain": SEGMENTS,
    "causal union": {**SEGMENTS, "is_causal": True, "merge": "union", "offsets": "blocked"},
    "grouped": {**SEGMENTS, "heads": "grouped", "scale": 0.7, "logits_soft_cap": 0.5},
    "a window, sinks": {
        "pattern": [ringjax.Window(4, rate=2), ringjax.Segments(2**31 - 1)],
        "is_causal": True,
        "sinks": np.array([1.0, -2.0, 0.0, 3.0]),
    },
    "documents": {**SEGMENTS, "is_causal": True, "documents": True},
    "other lengths": {**SEGMENTS, "query_offset": 9, "key_length": 44},
}


@pytest.mark.parametrize("name", CASES)
def test_weights_times_values_are_rows_of_the_output(name):
    arguments = dict(CASES[name])
    arrays = random_arguments(31, (4, 2), batch=(2,), key_length=arguments.pop("key_length", None))
    more = (random_documents(31, (2,)),) if arguments.pop("documents", False) else ()
    expected = reference_results([*arrays, *more], **arguments)[0]
    query, key, value = map(jnp.asarray, arrays)
    documents = {"document_ids": jnp.asarray(more[0])} if more else {}
    weights = ringjax.attention_weights(query, key, ROWS, **arguments, **documents)
    assert weights.shape == (2, 4, len(ROWS), key.shape[1])
    out = np.einsum("bnrs,bsnv->brnv", weights, np.repeat(value, 2, axis=2))
    np.testing.assert_allclose(out, expected[:, ROWS], rtol=0, atol=tolerance(1e-12))
    assert (weights >= 0).all()
    if "sinks" not in arguments:
        np.testing.assert_allclose(weights.sum(-1), (weights > 0).any(-1), rtol=0, atol=tolerance(1e-12))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_they_are_sharded_as_the_keys_are(kind):
    mesh = make_mesh(kind, data=2, seq=4)
    query, key, _ = map(jnp.asarray, random_arguments(32, (4, 2), batch=(2,)))
    documents = jnp.asarray(random_documents(32, (2,)))
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 2)}
    expected = ringjax.attention_weights(query, key, ROWS, document_ids=documents, **arguments)
    place = lambda array: jax.device_put(array, NamedSharding(mesh, P("data", "seq")))
    call = jax.jit(lambda q, k, d, rows: ringjax.attention_weights(q, k, rows, document_ids=d, **arguments))
    with jax.set_mesh(mesh):
        placed = place(query), place(key), place(documents), jnp.array(ROWS)
        weights = call(*placed)
        assert "all-gather" not in call.lower(*placed).compile().as_text()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance(1e-12))
    assert weights.sharding.shard_shape(weights.shape) == (1, 4, len(ROWS), 8)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([32], ValueError, "rows=[32] must be between 0 and 31"),
        ([-1, 2], ValueError, "rows=[-1, 2] must be between 0 and 31"),
        ([0.5], TypeError, "rows=[0.5] must be the numbers of some queries, such as [0]"),
        ([], TypeError, "rows=[] must be the numbers of some queries"),
    ],
    ids=str,
)
def test_wrong_rows(rows, error, words, unchecked):
    query, key, _ = map(jnp.asarray, random_arguments(32))
    with pytest.raises(error, match=re.escape(words)):
        ringjax.attention_weights(query, key, rows, segment_lengths=(32,), dilation_rates=(1,))


def test_wrong_arguments(unchecked):
    query, key, _ = map(jnp.asarray, random_arguments(32))
    weigh = lambda **more: ringjax.attention_weights(
        query, key, [0], segment_lengths=(32,), dilation_rates=(1,), **more
    )
    with pytest.raises(TypeError, match="is_causal='no' must be True or False"):
        weigh(is_causal="no")
    with pytest.raises(TypeError, match="query_offset is traced: attention_weights takes an integer"):
        jax.eval_shape(lambda offset: weigh(query_offset=offset), jnp.int32(0))


def test_where_they_are_not_to_be_had(unchecked):
    query, key, _ = map(jnp.asarray, random_arguments(32))
    weigh = functools.partial(ringjax.attention_weights, segment_lengths=(32,), dilation_rates=(1,))
    mapped = jax.shard_map(
        lambda query, key: weigh(query, key, [0]), mesh=make_mesh(seq=4), in_specs=P(None, "seq"), out_specs=P()
    )
    with pytest.raises(ValueError, match="attention_weights inside a shard_map over 'seq' sees one shard: call it"):
        mapped(query, key)
    for rows in (jnp.array([1.5]), jnp.array(1)):
        with pytest.raises(TypeError, match="must be the numbers of some queries"):
            jax.eval_shape(functools.partial(weigh, query, key), rows)
    assert weigh(query[:0], key[:0], [1]).shape == (0, 2, 1, 32)


def test_heads_that_share_few_of_the_keys():
    """Eight query heads over four devices, and two of keys and values."""
    query, key, _ = map(jnp.asarray, random_arguments(32, (8, 2)))
    weigh = functools.partial(ringjax.attention_weights, rows=ROWS, segment_lengths=(8, 32), dilation_rates=(1, 2))
    mesh = make_mesh(AxisType.Explicit, seq=2, tensor=4)
    place = lambda array, *axes: jax.device_put(array, NamedSharding(mesh, P(None, "seq", *axes)))
    np.testing.assert_allclose(
        weigh(place(query, "tensor"), place(key)), weigh(query, key), rtol=0, atol=tolerance(1e-12)
    )
