"""Documents, lengths, unions, groups of heads, caps and dropout: alone and together, against the oracle."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    assert_close,
    loss,
    make_mesh,
    random_arguments,
    random_documents,
    reference_results,
    ring_results,
    with_gradients,
)

from benchmarks.programs import has_dimension
from ringjax import DilatedPattern, Segments, Window, dilated_attention_reference, ring_dilated_attention
from ringjax._kernels.attention_step import AttentionStep, PaddedRows, make_mask, see_keys, see_queries
from ringjax._kernels.softmax import Weighting
from ringjax._mesh.placement import Placement
from ringjax._parallel.plan import Plan
from ringjax._schedule.make import make_schedule
from ringjax._tools.hlo import permutes

PATTERN = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "is_causal": True}
STRADDLING = {"segment_lengths": (7, 15), "dilation_rates": (2, 1)}
DENSE = {"segment_lengths": (64,), "dilation_rates": (1,), "is_causal": False}
OF_REFERENCE = {"uses", *inspect.signature(dilated_attention_reference).parameters}
OF_OURS = OF_REFERENCE | {"block_size", "exchange_size", "strategy", "balance"}

FEATURES = {
    "documents in any order and sinks": {
        "documents": "mixed",
        "block_size": 4,
        "is_causal": False,
        "dilation_rates": (2, 4),
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
    },
    "documents that straddle, gathered": {"documents": "sorted", "strategy": "all_gather", **STRADDLING, "uses": "lse"},
    "union of documents in blocks": {"merge": "union", "documents": "sorted", "block_size": 4, "uses": "both"},
    "union that straddles, not causal, with a sink for each row": {
        "merge": "union",
        "is_causal": False,
        "documents": "sorted",
        "sinks": np.sin(np.arange(2 * 32)).reshape(2, 32, 1),
        **STRADDLING,
    },
    "grouped": {"num_heads": (6, 3), "heads": "grouped", "uses": "lse"},
    "grouped by branch": {
        "num_heads": (4, 4),
        "heads": "grouped",
        "offsets": "branch",
        "logits_soft_cap": 0.7,
        "uses": "both",
    },
    "broadcast dropout": {"dropout_rate": 0.4, "dropout_seed": 3, "broadcast_dropout": True, "query_offset": 5},
    "far queries": {"length": 30, "query_offset": 40, "segment_lengths": (31,), "dilation_rates": (2,), "uses": "lse"},
    "fewer queries": {"length": 13, "key_length": 37, "query_offset": 11, "uses": "both"},
    "few queries": {"length": 7, "key_length": 61, "query_offset": 54, "documents": "sorted", "uses": "both"},
    "queries that go around": {
        "length": 26,
        "key_length": 64,
        "query_offset": 30,
        "num_heads": (2, 2),
        "documents": "mixed",
        "merge": "union",
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.2,
        "dropout_seed": 1,
        "uses": "both",
    },
    "dealt queries that go around": {
        "length": 26,
        "key_length": 64,
        "query_offset": 30,
        "num_heads": (2, 2),
        "documents": "sorted",
        "balance": "stripes",
        "block_size": 2,
        **DENSE,
        "uses": "both",
    },
    "few queries of a union": {
        "length": 5,
        "key_length": 61,
        "query_offset": 20,
        "segment_lengths": (61, 20),
        "dilation_rates": (3, 1),
        "merge": "union",
        "is_causal": False,
        "documents": "mixed",
        "dropout_rate": 0.4,
        "dropout_seed": 3,
        "block_size": 4,
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
        "uses": "both",
    },
    "few queries of windows": {
        "length": 3,
        "key_length": 61,
        "query_offset": 50,
        "pattern": [Window(9), Window(4, 4)],
        "logits_soft_cap": 2.0,
        "block_size": 4,
        "uses": "lse",
    },
    "more queries": {"length": 37, "key_length": 13, "documents": "sorted", **STRADDLING},
    "one query": {"length": 1, "key_length": 7, "segment_lengths": (7,), "dilation_rates": (2,), "uses": "lse"},
    "cross-attention with dropout": {
        "length": 16,
        "key_length": 24,
        "dropout_rate": 0.4,
        "dropout_seed": 2**40 + 3,
        "block_size": 4,
        **DENSE,
        "uses": "both",
    },
    "a window of several hops": {"pattern": [Window(11)], "is_causal": False, "documents": "sorted"},
    "phases": {"pattern": [Window(3, 4)], "is_causal": False, "logits_soft_cap": 2.0, "block_size": 2, "uses": "lse"},
    "mixed phases": {
        "pattern": [Window(4, 3)],
        "documents": "mixed",
        "dropout_rate": 0.4,
        "dropout_seed": 3,
        "uses": "both",
    },
    "windows and segments": {
        "pattern": [Window(4), Segments(12, 2), Window(3, 5)],
        "merge": "union",
        "block_size": 4,
    },
    "segments and windows": {
        "pattern": [Segments(8, 2), Window(7)],
        "merge": "union",
        "is_causal": False,
        "uses": "lse",
    },
    "a window of fewer queries": {
        "length": 13,
        "key_length": 37,
        "query_offset": 11,
        "pattern": [Window(6, 2)],
        "uses": "both",
    },
    "grouped windows": {
        "pattern": [Window(5), Segments(16, 2)],
        "heads": "grouped",
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
    },
    "gathered windows": {
        "pattern": [Window(5), Window(2, 4)],
        "strategy": "all_gather",
        "length": 29,
        "block_size": 4,
        "uses": "lse",
    },
    "exchanged by groups in a ring": {
        "strategy": "all_to_all",
        "exchange_size": 2,
        "documents": "mixed",
        "dropout_rate": 0.4,
        "dropout_seed": 3,
        "length": 29,
        "uses": "both",
    },
    "exchanged rows": {"strategy": "all_to_all", "exchange_size": 2, "merge": "union", "documents": "sorted"},
    "exchanged windows": {
        "pattern": [Window(11), Segments(12, 2)],
        "is_causal": False,
        "strategy": "all_to_all",
        "exchange_size": 2,
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
        "uses": "lse",
    },
    "exchanged groups of heads": {
        "strategy": "all_to_all",
        "num_heads": (8, 4),
        "heads": "grouped",
        "documents": "sorted",
        **STRADDLING,
        "uses": "both",
    },
    "dealt documents": {"balance": "stripes", "documents": "sorted", **DENSE, "is_causal": True, "uses": "both"},
    "dealt segments": {
        "balance": "stripes",
        "documents": "mixed",
        "segment_lengths": (16, 29),
        "dilation_rates": (2, 3),
        "merge": "union",
        "length": 29,
        "block_size": 2,
        "dropout_rate": 0.4,
        "dropout_seed": 3,
        "logits_soft_cap": 2.0,
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
        "uses": "both",
    },
    "dealt queries, gathered keys": {
        "balance": "stripes",
        "documents": "mixed",
        "strategy": "all_gather",
        **DENSE,
        "uses": "lse",
    },
    "dealt chunks": {
        "balance": "stripes",
        "documents": "sorted",
        "length": 13,
        "key_length": 37,
        "query_offset": 11,
        "uses": "both",
    },
    "dealt phases": {"balance": "stripes", "pattern": [Window(15, 2)], "documents": "sorted", "block_size": 2},
    "dealt groups of devices": {
        "balance": "stripes",
        "strategy": "all_to_all",
        "exchange_size": 2,
        "documents": "sorted",
        "segment_lengths": (32, 32),
        "dilation_rates": (1, 4),
        "block_size": 4,
        "uses": "both",
    },
    "each branch its own": {"strategy": "auto", "pattern": [Window(5), Segments(32, 4)], "documents": "sorted"},
    "all": {
        "length": 23,
        "key_length": 29,
        "query_offset": 4,
        "documents": "sorted",
        "merge": "union",
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.2,
        "dropout_seed": 1,
        "block_size": 4,
        "offsets": "blocked",
        "sinks": np.array([0.5, -1.0, 1.5, 0.0]),
        "uses": "lse",
    },
}


def make_arrays(length=32, key_length=None, num_heads=(4, 2), batch=(2,), documents=None, **_):
    arrays = random_arguments(length, num_heads, (3, 2), batch, key_length)
    if documents is None:
        return arrays
    lengths = (length,) if key_length is None else (length, key_length)
    is_sorted = documents == "sorted"
    return *arrays, *(random_documents(length, batch, is_sorted, seed) for seed, length in enumerate(lengths))


def of_reference(arguments):
    return {name: value for name, value in arguments.items() if name in OF_REFERENCE}


def check(mesh, arrays, arguments):
    if "pattern" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in PATTERN or name == "is_causal"}
    own = {name: value for name, value in arguments.items() if name in OF_OURS}
    assert_close(ring_results(arrays, mesh=mesh, **own), reference_results(arrays, **of_reference(arguments)))


# The other cases run on an Auto mesh.
ON_EXPLICIT_MESHES = {
    "documents that straddle, gathered",
    "union that straddles, not causal, with a sink for each row",
    "grouped by branch",
    "far queries",
    "more queries",
    "cross-attention with dropout",
    "phases",
    "windows and segments",
    "a window of fewer queries",
    "gathered windows",
    "exchanged rows",
    "exchanged groups of heads",
    "dealt segments",
    "dealt chunks",
    "dealt groups of devices",
    "few queries of a union",
    "all",
}
ON_ONE_DEVICE = ("union of documents in blocks", "grouped", "phases", "windows and segments", "all")


@pytest.mark.quick(
    "grouped by branch-4",
    "far queries-4",
    "windows and segments-1",
    "gathered windows-4",
    "exchanged rows-4",
    "dealt segments-4",
    "dealt phases-4",
    "few queries of a union-4",
    "queries that go around-4",
    "all-4",
)
@pytest.mark.parametrize(
    ("name", "ring_size"), [*((name, 4) for name in FEATURES), *((name, 1) for name in ON_ONE_DEVICE)]
)
def test_feature_equals_oracle(name, ring_size):
    arguments = {**PATTERN, **FEATURES[name]}
    kind = AxisType.Explicit if name in ON_EXPLICIT_MESHES else AxisType.Auto
    check(make_mesh(kind, seq=ring_size), make_arrays(**arguments), arguments)


@pytest.mark.slow
@pytest.mark.parametrize("ring_size", [1, 4])
def test_an_offset_that_is_an_array(ring_size):
    """One program for all chunks of a prompt, in a pattern that straddles; also under vmap, each at its own."""
    pattern = [Segments(7, 2), Window(9, 2), Segments(10**12, 3)]
    arguments = {"pattern": pattern, "is_causal": True}
    arrays = make_arrays(length=8, key_length=40, documents="sorted")
    traces = []

    def function(offset, *arrays):
        traces.append(offset)
        moved = loss(ring_dilated_attention, mesh=make_mesh(seq=ring_size), query_offset=offset, **arguments)
        return with_gradients(moved)(*arrays)

    jitted = jax.jit(function)
    offsets = (0, 8, 24, 33)
    expected = [reference_results(arrays, query_offset=offset, **arguments) for offset in offsets]
    known = jnp.int32(8)
    closed = jax.eval_shape(lambda: function(known, *arrays))
    assert closed[0].shape == expected[0][0].shape
    traces.clear()
    for offset, one in zip(offsets, expected, strict=True):
        assert_close(jax.device_get(jitted(jnp.int32(offset), *arrays)), one)
    assert len(traces) == 1
    if ring_size == 1:
        several = jax.vmap(function, (0, *[None] * len(arrays)))(jnp.array(offsets, jnp.uint32), *arrays)
        for index, one in enumerate(expected):
            assert_close([np.asarray(array)[index] for array in several], one)


@st.composite
def calls(draw):
    length = draw(st.integers(1, 29))
    count = draw(st.integers(1, 3))
    branches = [draw(st.sampled_from([Segments, Window])) for _ in range(count)]
    lengths = [draw(st.integers(1, 31)) for _ in range(count)]
    rates = [draw(st.integers(1, min(length, 6))) for length in lengths]
    kv_heads = draw(st.integers(1, 3))
    arguments = {
        "length": length,
        "key_length": draw(st.sampled_from([None, None, 7, 24])),
        "num_heads": (kv_heads * draw(st.integers(1, 2)), kv_heads),
        "batch": draw(st.sampled_from([(), (2,), (1, 2)])),
        "pattern": [branch(length, rate) for branch, length, rate in zip(branches, lengths, rates, strict=True)],
        "offsets": draw(st.sampled_from(["interleaved", "blocked", "branch"])),
        "merge": draw(st.sampled_from(["lse", "union"])),
        "heads": draw(st.sampled_from(["all", "grouped"])) if kv_heads >= count else "all",
        "is_causal": draw(st.booleans()),
        "query_offset": draw(st.sampled_from([0, 0, 3, 40])),
        "documents": draw(st.sampled_from([None, "sorted", "mixed"])),
        "logits_soft_cap": draw(st.sampled_from([None, 0.5])),
        "dropout_rate": draw(st.sampled_from([0.0, 0.5])),
        "dropout_seed": 7,
        "broadcast_dropout": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, -0.7])),
        "strategy": draw(st.sampled_from(["ring", "all_gather", "all_to_all"])),
        "block_size": draw(st.sampled_from([None, 4])),
        "uses": draw(st.sampled_from(["out", "lse", "both"])),
        "sinks": np.array([draw(st.floats(-3, 3))]) if draw(st.booleans()) else None,
    }
    return draw(st.sampled_from([1, 2, 3, 5, 8])), draw(st.sampled_from(list(AxisType)[:2])), arguments


@pytest.mark.slow
@given(calls())
@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
def test_features_compose(call):
    ring_size, kind, arguments = call
    check(make_mesh(kind, seq=ring_size), make_arrays(**arguments), arguments)


ALL = {
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 4),
    "is_causal": True,
    "logits_soft_cap": 2.0,
    "dropout_rate": 0.3,
    "dropout_seed": 11,
}


@pytest.mark.quick("AxisType.Explicit-{'strategy': 'all_to_all', 'heads': 'grouped'}")
@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        (AxisType.Auto, {"heads": "grouped"}),
        (AxisType.Explicit, {"merge": "union"}),
        (AxisType.Explicit, {"strategy": "all_to_all", "heads": "grouped"}),
    ],
    ids=str,
)
def test_numbers_are_global_on_a_mesh(kind, choices):
    """Dropout follows global batches and heads, groups of heads global heads, and documents their tokens."""
    arguments = {**ALL, **choices}
    arrays = make_arrays(num_heads=(12, 6), documents="sorted")
    expected = reference_results(arrays, **of_reference(arguments))
    mesh = make_mesh(kind, data=2, seq=2, tensor=2)
    put = lambda array: jax.device_put(
        array, NamedSharding(mesh, P(*("data", "seq", "tensor")[: 3 if array.ndim > 2 else 2]))
    )
    function = with_gradients(loss(ring_dilated_attention, block_size=4, **arguments))
    assert_close(jax.device_get(jax.jit(function)(*map(put, arrays))), expected)
    if kind == AxisType.Auto and "heads" in choices:  # the same with all axes named: then they are mapped over
        named = with_gradients(
            loss(ring_dilated_attention, mesh=mesh, spec=P("data", "seq", "tensor"), block_size=4, **arguments)
        )
        assert_close(jax.device_get(jax.jit(named)(*map(put, arrays))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [(6, 3), (8, 2)], ids=str)
def test_groups_that_a_tensor_axis_cuts(num_heads):
    """Three heads of which two devices share the second branch's, and two heads for four devices."""
    arguments = {**ALL, "heads": "grouped"}
    arrays = make_arrays(num_heads=num_heads, documents="mixed")
    tensor = 3 if num_heads[1] == 3 else 4
    mesh = make_mesh(AxisType.Explicit, seq=2, tensor=tensor)
    heads = [P(None, "seq", "tensor" if array.shape[2] % tensor == 0 else None) for array in arrays[:3]]
    specs = [*heads, P(None, "seq")]
    put = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    actual = jax.jit(with_gradients(loss(ring_dilated_attention, **arguments)))(*put)
    assert_close(jax.device_get(actual), reference_results(arrays, **arguments))


def test_a_sink_that_takes_nothing():
    """Beside a row that sees no key it is a row of nothing: zeros, in the gradient too."""
    arrays = make_arrays(documents="mixed")
    arguments = {**PATTERN, "uses": "out", "sinks": np.array([-np.inf, 0.5, -np.inf, 1.0])}
    expected = ring_results(arrays, dilated_attention_reference, **arguments)
    assert (expected[1] == -np.inf).any()
    assert all(np.isfinite(array).all() for array in (expected[0], *expected[2:]))
    assert_close(ring_results(arrays, **arguments), expected)


@pytest.mark.slow
def test_documents_inside_the_callers_shard_map_and_under_vmap():
    arrays = make_arrays(documents="sorted")
    expected = reference_results(arrays, **PATTERN)
    mesh = make_mesh(seq=4)

    def attend(query, key, value, documents):
        return ring_dilated_attention(query, key, value, document_ids=documents, return_residual=True, **PATTERN)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    of_mapped = loss(lambda *arrays, document_ids, return_residual: mapped(*arrays, document_ids))
    assert_close(jax.device_get(jax.jit(with_gradients(of_mapped))(*arrays)), expected)
    with jax.set_mesh(mesh):
        of_vmapped = loss(lambda *arrays, document_ids, return_residual: jax.vmap(attend)(*arrays, document_ids))
        assert_close(jax.device_get(jax.jit(with_gradients(of_vmapped))(*arrays)), expected)


@pytest.mark.slow
def test_an_exchange_under_vmap_and_checkpoint():
    """Each instance draws for itself, in groups of two devices."""
    arguments = {**PATTERN, "dropout_rate": 0.3, "strategy": "all_to_all", "exchange_size": 2}
    arrays, seeds = make_arrays(batch=(2, 1)), np.array([3, 8], np.uint32)

    def results(attend, arguments):
        one = lambda seed, *arrays: attend(*arrays, dropout_seed=seed, return_residual=True, **arguments)
        call = lambda *arrays, return_residual: jax.vmap(jax.checkpoint(one))(seeds, *arrays)
        return jax.device_get(jax.jit(with_gradients(loss(call)))(*arrays))

    expected = results(dilated_attention_reference, of_reference(arguments))
    assert_close(results(ring_dilated_attention, {**arguments, "mesh": make_mesh(seq=4)}), expected)


@pytest.mark.quick("True")
@pytest.mark.parametrize("gradient", [False, True])
def test_all_features_stay_on_their_shards(gradient):
    """No device gets anything of the whole length, and documents travel with the keys: four bytes for each row."""
    length, shards, width = 8 * 37, 8, 6
    mesh = make_mesh(seq=shards)
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = jax.ShapeDtypeStruct((1, length, 2, width), jnp.float32, sharding=sharding)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    arguments = {"segment_lengths": (37, length), "dilation_rates": (1, 1), "merge": "union", "mesh": mesh}
    arguments |= {"logits_soft_cap": 5.0, "dropout_rate": 0.1, "dropout_seed": 0}

    def attend(query, key, value, document_ids):
        return ring_dilated_attention(query, key, value, document_ids=document_ids, **arguments)

    call = jax.grad(lambda *arrays: jnp.sin(attend(*arrays)).sum(), (0, 1, 2)) if gradient else attend
    text = jax.jit(call).lower(shape, shape, shape, ids).compile().as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce"):
        assert collective not in text
    assert has_dimension(text, 37)
    assert not has_dimension(text, length)
    if not gradient:
        sent = sum(permute.trips * permute.bytes for permute in permutes(text))
        assert sent == (shards - 1) * 37 * (2 * 2 * width * 4 + 4)


def visits_of(documents, branches=(Segments(128),), block_size=16, shards=1, **arguments):
    """The tiles that meet, and those that are whole, on one shard with one head."""
    pattern = DilatedPattern(branches, **arguments)
    schedule = make_schedule(pattern, documents.shape[1], shards, 1, True, block_size)[-1]
    rows = Plan(pattern, (schedule,), 1, Weighting(1.0), Placement()).rows(schedule)._replace(is_whole=True)
    tiles = documents.reshape(documents.shape[0], -1, 1, 1, schedule.queries.block_rows).swapaxes(0, 1)
    padded = PaddedRows(rows, rows.shard[None], False, jnp.asarray(tiles))
    return make_mask(AttentionStep(padded.schedule, see_queries(padded), see_keys(padded))).blocks


def test_blocks_whose_documents_do_not_meet_are_skipped():
    """In each batch for itself: of 36 tiles up to the diagonal the ones within a document are left."""
    documents = np.stack([np.arange(128) // 32, np.arange(128) // 64, np.zeros(128, int)])
    blocks = visits_of(documents)
    assert blocks.is_active.sum(axis=(1, 2)).tolist() == [4 * 3, 2 * 10, 36]
    assert blocks.is_full.sum(axis=(1, 2)).tolist() == [4 * 1, 2 * 6, 28]
    for of_tiles in (blocks.of_queries(), blocks.of_keys()):  # what forward and backward see
        assert int((of_tiles.stop - of_tiles.start).sum()) == int(blocks.is_active.sum())
    # From the first to the last tile that meets, those in between that do not are left out.
    mixed = np.where(np.arange(128) // 16 % 2, 1, 2)[None]
    _, start, stop, is_active = visits_of(mixed).of_queries()
    assert (start.tolist(), stop.tolist()) == ([0, 1] + [0, 1] * 3, list(range(1, 9)))
    assert int(is_active.sum()) == 2 * 10
    padding = np.full((1, 128), -1)
    assert not visits_of(padding).is_active.any()


def test_a_union_skips_what_earlier_branches_hold():
    documents = np.zeros((1, 128), int)
    blocks = visits_of(documents, (Segments(32), Segments(128)), merge="union")
    # Of 36 tiles up to the diagonal, the 4 * 3 within segments of 32 are left out, and no other is cut.
    assert int(blocks.is_active.sum()) == int(blocks.is_full.sum()) == 36 - 12


def test_tiles_outside_a_window_are_not_visited():
    documents = np.zeros((1, 128), int)
    blocks = visits_of(documents, (Window(40),))
    assert int(blocks.is_active.sum()) == 1 + 2 + 3 + 5 * 4  # a tile's first query sees 39 tokens before it
    assert int(blocks.is_full.sum()) == 7  # the tile before, but not the two in which the window ends
    # Segments leave out what a window has computed: 36 tiles up to the diagonal, but those within it as a whole.
    blocks = visits_of(documents, (Window(40), Segments(128)), merge="union")
    assert int(blocks.is_active.sum()) == 36 - 8 - 7


def dropped(seed, rate=0.3, length=256, **arguments):
    """Which weights [B, N, T, S] are dropped: with equal logits, values that are one-hot show the weights."""
    query = jnp.zeros((2, length, 2, 1), jnp.float32)
    value = jnp.broadcast_to(jnp.eye(length, dtype=jnp.float32)[:, None], (2, length, 2, length))
    arguments = {"segment_lengths": (length,), "dilation_rates": (1,), "dropout_rate": rate, **arguments}
    out = ring_dilated_attention(query, query, value, dropout_seed=seed, **arguments)
    return np.moveaxis(np.asarray(out), 2, 1) * length


def test_dropout_has_its_rate_everywhere():
    weights = dropped(seed=5)
    np.testing.assert_allclose(np.unique(weights), [0, 1 / 0.7], rtol=1e-5)
    is_dropped = weights == 0
    deviation = np.sqrt(0.3 * 0.7 / 256)
    assert abs(is_dropped.mean() - 0.3) < 5 * deviation / np.sqrt(is_dropped.size / 256)
    for axis in (2, 3):  # of queries, of keys: independent draws, so the deviation is the binomial's
        means = is_dropped.mean(axis=axis)
        assert np.abs(means - 0.3).max() < 5 * deviation
        assert abs(means.std() / deviation - 1) < 0.1


def test_dropout_draws_are_independent():
    one = dropped(seed=5) == 0
    others = {
        "seed": dropped(seed=6) == 0,
        "high word of the seed": dropped(seed=5 + 2**32) == 0,
        "batch": one[::-1],
        "head": one[:, ::-1],
        "next query": np.roll(one, 1, axis=2),
        "next key": np.roll(one, 1, axis=3),
        "transpose": one.swapaxes(2, 3),
    }
    for name, other in others.items():
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size / 2), name
    broadcast = dropped(seed=5, broadcast_dropout=True) == 0
    assert (broadcast == broadcast[0, 0]).all()
    np.testing.assert_array_equal(broadcast[0, 0], one[0, 0])


def test_seeds():
    """An integer, an array of one, and a key of jax.random, typed or not."""
    for same in (np.int32(5), jnp.int32(5), jnp.uint8(5)):
        np.testing.assert_array_equal(dropped(5), dropped(same))
    np.testing.assert_array_equal(dropped(2**40 + 5), dropped(jnp.int64(2**40 + 5)))
    key = jax.random.key(5)
    np.testing.assert_array_equal(dropped(key), dropped(jax.random.key_data(key)))
    assert (dropped(key) != dropped(jax.random.key(6))).any()


def test_dropout_bits_are_the_documented_streams():
    """Written again in NumPy: MurmurHash3's finalizer over a chain of words, then over start + step * position."""

    def mix(state):
        state = np.uint64(state)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = ((state ^ (state >> np.uint64(shift))) * np.uint64(factor)) % 2**32
        return state ^ (state >> np.uint64(16))

    def is_dropped(seed, batch, head, t, s, rate):
        words = []
        for salt in (0, 1):
            state = np.uint64(salt)
            for word in (seed % 2**32, seed >> 32, batch, head, t):
                state = mix(((state + np.uint64(0x9E3779B9)) % 2**32) ^ np.uint64(word))
            words.append(state)
        return mix((words[0] + (words[1] | np.uint64(1)) * np.uint64(s)) % 2**32) < round(rate * 2**32)

    with np.errstate(over="ignore"):
        actual = dropped(seed=2**33 + 5) == 0
        for batch, head, t, s in np.random.default_rng(0).integers(0, (2, 2, 256, 256), size=(200, 4)):
            assert actual[batch, head, t, s] == is_dropped(2**33 + 5, batch, head, t, s, 0.3)
