"""Decoding over a cache that the caller keeps: the numbers of each sequence alone, with nothing sent but statistics."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

from ringjax import DilatedPattern, Segments, Window, decode_attention, dilated_attention_reference

ROWS, HEADS, KV_HEADS, WIDTH = 512, 4, 2, 8
PATTERNS = {
    "dense": [Segments(ROWS)],
    "window": [Window(64)],
    "segments": [Segments(64)],
    "window and dilated segments": [Window(64), Segments(512, rate=4)],
    "union": DilatedPattern([Window(5), Segments(48, rate=3), Window(3, rate=7)], merge="union"),
    "grouped": DilatedPattern([Segments(20, rate=2), Window(9)], heads="grouped"),
    "long window": [Window(100, rate=3)],
}
LENGTHS, STARTS = np.array([33, 401, 64, 512], np.int32), np.array([0, 17, 60, 130], np.int32)


def random_arrays(count, dtype, batch=len(LENGTHS), rows=ROWS):
    rng = np.random.default_rng(0)
    shapes = (batch, count, HEADS, WIDTH), (batch, rows, KV_HEADS, WIDTH), (batch, rows, KV_HEADS, WIDTH + 2)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def expected_of(query, keys, values, lengths, starts, sinks=None, **options):
    """Each sequence alone, by the reference; zeros for queries before its start."""
    out = np.zeros((*query.shape[:-1], values.shape[-1]))
    lse = np.full(query.shape[:-1], -np.inf) if sinks is None else np.broadcast_to(sinks, query.shape[:-1]).copy()
    for number, (length, start) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        count = min(query.shape[1], length - start)
        if count <= 0:
            continue
        own = (query[number, -count:], keys[number, start:length], values[number, start:length])
        more = {"query_offset": length - start - count, "is_causal": True, "return_residual": True, "sinks": sinks}
        out[number, -count:], lse[number, -count:] = dilated_attention_reference(*own, **more, **options)
    return out, lse


@pytest.mark.quick(
    "dense-1-float64",
    "window-5-float32",
    "segments-1-float32",
    "union-5-float64",
    "window and dilated segments-1-float32",
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", PATTERNS)
def test_each_sequence_has_the_numbers_that_it_has_alone(name, count, dtype):
    arrays = random_arrays(count, dtype)
    options = {"pattern": PATTERNS[name], "scale": -0.4 if name == "union" else None}
    options |= {"logits_soft_cap": 2.0} if name == "segments" else {}
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0], dtype) if name == "window" else None
    expected = expected_of(*arrays, LENGTHS, STARTS, sinks, **options)
    atol = 1e-9 if dtype == jnp.float64 else 3e-6
    decode = functools.partial(decode_attention, **options, sinks=sinks, return_residual=True)
    for mesh in (None, make_mesh(seq=8)):
        found = jax.jit(functools.partial(decode, mesh=mesh))(*arrays, lengths=LENGTHS, starts=STARTS)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_of_several_axes(kind):
    """Batches, the sequence and heads are cut, and one program serves all lengths."""
    arrays, mesh = random_arrays(3, jnp.float32), make_mesh(kind, data=2, seq=2, tensor=2)
    sharded = [
        jax.device_put(array, NamedSharding(mesh, P("data", "seq" if number else None, "tensor")))
        for number, array in enumerate(arrays)
    ]
    of_batch = lambda rows: jax.device_put(rows, NamedSharding(mesh, P("data")))
    spec = P("data", "seq", "tensor") if kind == AxisType.Auto else None
    decode = jax.jit(functools.partial(decode_attention, pattern=PATTERNS["window and dilated segments"], spec=spec))
    with jax.set_mesh(mesh):
        for lengths in (LENGTHS, LENGTHS - 9):
            out = decode(*sharded, lengths=of_batch(lengths), starts=of_batch(STARTS))
            expected, _ = expected_of(*arrays, lengths, STARTS, pattern=PATTERNS["window and dilated segments"])
            np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)
    assert decode._cache_size() == 1


def test_queries_that_are_not_there_and_lengths_that_cannot_be():
    query, keys, values = random_arrays(5, jnp.float32)
    lengths, starts = np.array([3, 0, 513, 20], np.int32), np.array([0, 0, 0, 18], np.int32)
    out = decode_attention(
        query, keys, values, lengths=lengths, starts=starts, pattern=[Window(9)], mesh=make_mesh(seq=4)
    )
    assert not out[0, :2].any()
    assert out[0, 2:].all()
    assert not out[1].any()
    assert jnp.isnan(out[2]).all()
    assert not out[3, :3].any()
    assert out[3, 3:].all()


def test_what_other_rows_hold_does_not_matter():
    arrays = random_arrays(2, jnp.float32)
    row = np.arange(ROWS)
    is_own = (row >= STARTS[:, None]) & (row < LENGTHS[:, None])
    other = lambda array: jnp.where(is_own[..., None, None], array, 1e4)
    decode = functools.partial(
        decode_attention, lengths=LENGTHS, starts=STARTS, pattern=PATTERNS["union"], mesh=make_mesh(seq=8)
    )
    np.testing.assert_array_equal(decode(*arrays), decode(arrays[0], *map(other, arrays[1:])))


@pytest.mark.parametrize("name", ["dense", "window and dilated segments"])
def test_statistics_alone_are_sent(name):
    arrays, mesh = random_arrays(3, jnp.float32), make_mesh(seq=8)
    arrays = [
        jax.device_put(array, NamedSharding(mesh, P(None, "seq" if number else None)))
        for number, array in enumerate(arrays)
    ]
    decode = jax.jit(functools.partial(decode_attention, pattern=PATTERNS[name], mesh=mesh))
    text = decode.lower(*arrays, lengths=LENGTHS, starts=STARTS).compile().as_text()
    assert not re.search(r"collective-permute|all-gather|all-to-all|reduce-scatter", text)
    sizes = [
        np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]\S* all-reduce\(", text)
    ]
    batch, count = arrays[0].shape[:2]
    assert 0 < sum(sizes) <= batch * count * HEADS * (WIDTH + 2 + 2)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "branch",
    [Window(5), Window(3, rate=4), Segments(7), Segments(12, rate=5), Segments(64, rate=3)],
    ids=str,
)
def test_few_rows_are_read_and_all_that_are_seen(branch, count):
    """Of a window size + c - 1, of segments the kept rows of those that c queries can be in."""
    length, rate = 32, branch.offset_rate
    for last, offset in [(0, 0), (13, 0), (20, rate - 1), (63, rate - 1), (95, 0)]:
        for start in range(0, 96, length):
            low = np.array([start], np.int32)
            token = branch.recent(np.array([last], np.int32), count, low, length, np.array([offset], np.int32))
            shard = np.arange(start, start + length)
            read = shard if token is None else np.ravel(token)
            for query in range(max(0, last - count + 1), last + 1):
                seen = shard[branch.holds(query, shard, offset, is_causal=True)]
                assert {*seen} <= {*read}
            if isinstance(branch, Window):
                most = branch.size * count if branch.rate > 1 else branch.size + count - 1
            else:
                most = ((count - 2) // branch.length + 2 if count > 1 else 1) * -(-branch.length // branch.rate)
            assert len(read) <= min(length, most)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"is_causal": False}, ValueError, "is_causal=False, but tokens that are decoded see no later ones"),
        (
            {"lengths": np.array([1, 2], np.int32)},
            ValueError,
            r"lengths has the shape \(2,\): pass one for each sequence",
        ),
        ({"starts": np.zeros(4)}, TypeError, "starts is of float64: pass an array of integers"),
        ({"lengths": 7}, TypeError, "lengths is of int: pass an array of integers"),
        ({"dropout_rate": 0.1}, TypeError, "decode_attention has no argument 'dropout_rate'"),
    ],
)
def test_wrong_arguments(arguments, error, words, unchecked):
    with pytest.raises(error, match=words):
        decode_attention(*random_arrays(1, jnp.float32), **{"lengths": LENGTHS, "pattern": [Window(4)], **arguments})
