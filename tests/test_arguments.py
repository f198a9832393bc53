"""Wrong arguments are refused before anything runs, with the argument, its value and the remedy."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

import ringjax
from ringjax import ring_dilated_attention
from ringjax._pattern.arguments import read_ids

PATTERN = {"segment_lengths": (4,), "dilation_rates": (1,)}
SHAPES = {"query": (1, 8, 4, 6), "key": (1, 8, 2, 6), "value": (1, 8, 2, 5)}


def call(dtype=np.float32, shapes=None, **arguments):
    arrays = {name: np.ones(shape, dtype) for name, shape in {**SHAPES, **(shapes or {})}.items()}
    return ring_dilated_attention(**arrays, **{**PATTERN, **arguments})


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"query": (8, 4)}, "query has the shape (8, 4): pass at least [length, heads, width]"),
        ({"value": (1, 8, 0, 5)}, "value has the shape (1, 8, 0, 5): length, heads and width must be at least 1"),
        ({"query": (1, 0, 4, 6)}, "query has the shape (1, 0, 4, 6)"),
        (
            {"key": (1, 7, 2, 6)},
            "key and value differ in length: query (1, 8, 4, 6), key (1, 7, 2, 6), value (1, 8, 2, 5)",
        ),
        ({"value": (2, 8, 2, 5)}, "value and query differ in batch"),
        ({"key": (8, 2, 6)}, "key and query differ in batch"),
        ({"value": (1, 8, 4, 5)}, "key and value differ in their heads"),
        ({"key": (1, 8, 2, 7)}, "key and query differ in their width"),
        ({"key": (1, 8, 3, 6), "value": (1, 8, 3, 5)}, "query has 4 heads and key has 3"),
    ],
)
def test_shapes(shapes, words, unchecked):
    with pytest.raises(ValueError, match=".") as caught:
        call(shapes=shapes)
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, jnp.float8_e4m3fn])
def test_dtypes(dtype, unchecked):
    with pytest.raises(TypeError, match=f"query is of {np.dtype(dtype).name}: pass an array of one of float32, bfloat"):
        call(dtype)


def test_balances(unchecked):
    with pytest.raises(ValueError, match="balance='dealt' is unknown: use one of 'none', 'zigzag', 'stripes', or None"):
        call(balance="dealt")


def test_strategies(unchecked):
    with pytest.raises(ValueError, match="strategy='tree' is unknown: use one of 'ring', 'all_gather', 'all_to_all'"):
        call(strategy="tree")
    with pytest.raises(
        ValueError, match=r"strategy=\('ring', 'auto'\) has 'auto': use one of 'ring', 'all_gather', 'al"
    ):
        call(strategy=("ring", "auto"))
    with pytest.raises(ValueError, match=r"strategy=\('ring',\) has 1 entries, and pattern 2 branches: give one"):
        call(strategy=("ring",), segment_lengths=(4, 8), dilation_rates=(1, 2))


def test_exchange_sizes(unchecked):
    exchange = functools.partial(call, strategy="all_to_all", mesh=make_mesh(seq=4))
    with pytest.raises(ValueError, match="exchange_size=2 is given, but strategy='ring' exchanges nothing: leave"):
        call(exchange_size=2)
    with pytest.raises(ValueError, match="exchange_size=2.0 must be a positive integer: leave it out"):
        exchange(exchange_size=2.0)
    with pytest.raises(ValueError, match="exchange_size=3 does not serve 4 devices, each with .*: use one of 1, 2"):
        exchange(exchange_size=3)
    with pytest.raises(ValueError, match="exchange_size=3 does not serve 4 devices"):
        exchange(exchange_size=np.int64(3))


@pytest.mark.parametrize("block_size", [0, -1, 2.5, True])
def test_block_sizes(block_size, unchecked):
    with pytest.raises(ValueError, match=f"block_size={block_size} must be a positive integer: leave it out"):
        call(block_size=block_size)


def test_where_a_call_runs(unchecked):
    arrays = [jnp.ones(shape) for shape in SHAPES.values()]
    attend = functools.partial(ring_dilated_attention, **PATTERN)
    abstract = AbstractMesh((4,), ("seq",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="is abstract, and nothing says on which devices it is: give the mesh of"):
        attend(*arrays, mesh=abstract)
    with pytest.raises(ValueError, match="batch or heads of query are sharded over axis_name='seq'"):
        attend(*arrays, mesh=make_mesh(seq=2), spec=P(None, None, "seq"))


def test_a_symbolic_length(unchecked):
    length, *_ = jax.export.symbolic_shape("length")
    shapes = [jax.ShapeDtypeStruct((1, length, *shape[2:]), jnp.float32) for shape in SHAPES.values()]
    with pytest.raises(TypeError, match="query has the shape .*: of symbolic dimensions only those of batches may be"):
        jax.export.export(jax.jit(functools.partial(ring_dilated_attention, **PATTERN)))(*shapes)


def test_an_offset_may_be_an_array_of_numpy(unchecked):
    shape = jax.eval_shape(lambda: call(query_offset=np.array(3)))
    assert shape.shape == (1, 8, 4, 5)


def test_documents_of_other_processes_are_not_read(monkeypatch):
    ids = jnp.zeros((1, 8), jnp.int64)
    monkeypatch.setattr(type(ids), "is_fully_addressable", False)
    monkeypatch.setattr(np, "asarray", lambda *_: pytest.fail("read"))
    assert read_ids("document_ids", ids, (1, 8)).dtype == jnp.int32


def test_documents_of_32_bits_are_not_read(monkeypatch):
    """An eager call would wait for the device, and look at each of a million tokens."""
    ids = jnp.zeros((1, 8), jnp.int32)
    arrays = [jnp.ones(shape, jnp.float32) for shape in SHAPES.values()]
    monkeypatch.setattr(type(ids), "__array__", lambda *_, **__: pytest.fail("read"))
    ring_dilated_attention(*arrays, **PATTERN, document_ids=ids)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": None}, "has no argument 'mask': no array of pairs exists; say is_causal, document_ids or query_off"),
        ({"attn_mask": 1}, "has no argument 'attn_mask': no array of pairs exists; say is_causal"),
        ({"bias": 1}, "has no argument 'bias': no array of pairs exists, and none can be added to logits"),
        ({"segment_ids": 1}, "has no argument 'segment_ids': say document_ids; segments are those of a pattern"),
        ({"causal": True}, "has no argument 'causal': say is_causal"),
        ({"dropout_p": 0.1}, "has no argument 'dropout_p': say dropout_rate"),
        ({"window_size": 4}, "has no argument 'window_size': say pattern=[ringjax.Window(size)]"),
    ],
    ids=str,
)
def test_names_of_other_libraries_lead_to_ours(arguments, words, unchecked):
    for attend in (ring_dilated_attention, ringjax.dilated_attention_reference):
        with pytest.raises(TypeError, match=re.escape(f"{attend.__name__} {words}")):
            attend(*(np.ones(shape, np.float32) for shape in SHAPES.values()), **PATTERN, **arguments)


def test_forward_mode_names_the_reference():
    array = jnp.ones((1, 8, 2, 4), jnp.float32)
    attend = lambda array: ring_dilated_attention(array, array, array, **PATTERN)
    for differentiate in (jax.jacfwd(attend), lambda array: jax.jvp(attend, (array,), (array,))):
        with pytest.raises(TypeError, match="no forward mode .*: differentiate dilated_attention_reference instead"):
            differentiate(array)


def test_a_spec_means_nothing_without_a_mesh():
    """A model that is trained on a mesh is evaluated on one device as it is."""
    module = ringjax.RingDilatedAttention(2, 8, **PATTERN, spec=P("data", "seq"), rngs=nnx.Rngs(0))
    assert module(jnp.ones((1, 8, 8))).shape == (1, 8, 8)
    causal = ringjax.RingDilatedAttention(2, 8, **PATTERN, is_causal=True, spec=P("data", "seq"), rngs=nnx.Rngs(0))
    causal.init_cache((1, 8, 8))
    assert causal(jnp.ones((1, 8, 8)), decode=True).shape == (1, 8, 8)


def test_the_function_for_slots_leads_to_our_names():
    with pytest.raises(TypeError, match="attention_fn has no argument 'causal': say is_causal"):
        ringjax.attention_fn(**PATTERN, causal=True)


@pytest.mark.parametrize("tokens", [None, 3])
def test_what_has_no_tokens_is_not_padded(tokens, unchecked):
    with pytest.raises(TypeError, match=f"tokens={tokens} must be an array "):
        ringjax.pad_to_mesh(tokens)


def test_unsigned_documents_are_integers(unchecked):
    documents = np.repeat(np.array([[3, 200]], np.uint8), 4, axis=1)
    out = call(document_ids=documents)
    np.testing.assert_array_equal(out, call(document_ids=documents.astype(np.int32)))


def test_a_seed_may_be_an_array_of_one_key(unchecked):
    keys = jax.random.split(jax.random.key(0), 1)
    dropped = [call(dropout_rate=0.5, dropout_seed=seed) for seed in (keys, keys[0])]
    np.testing.assert_array_equal(*dropped)


IDS = np.zeros((1, 8), np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"document_ids": IDS[0]},
            ValueError,
            "document_ids has the shape (8,): it numbers the document of each token",
        ),
        ({"document_ids": (IDS, IDS[:, 1:])}, ValueError, "document_ids[1] has the shape (1, 7)"),
        ({"document_ids": (IDS,)}, ValueError, "document_ids has 1 entries: give one array, or two"),
        ({"document_ids": IDS.astype(np.float32)}, TypeError, "document_ids is of float32: pass an array of integers"),
        ({"document_ids": 3}, TypeError, "document_ids is of int"),
        ({"dropout_rate": 1.0, "dropout_seed": 1}, ValueError, "dropout_rate=1.0 must be in [0, 1)"),
        ({"dropout_rate": -0.1, "dropout_seed": 1}, ValueError, "dropout_rate=-0.1 must be in [0, 1)"),
        ({"dropout_rate": jnp.float32(0.1)}, TypeError, "must be a number, known when the call is traced"),
        ({"dropout_rate": None}, TypeError, "dropout_rate=None must be a number"),
        (
            {"dropout_rate": 0.1},
            ValueError,
            "dropout_rate=0.1 needs a dropout_seed: use an integer of 64 bits, an array of one, or a key",
        ),
        (
            {"dropout_rate": 0.1, "dropout_seed": "x"},
            TypeError,
            "dropout_seed='x' is of <class 'str'>: use an integer of 64 bits",
        ),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0.0 must be positive"),
        ({"sinks": 1.0}, TypeError, "sinks is of float: pass an array of floats"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks has the shape (3,): give one logit for each of the"),
        ({"query_offset": -1}, ValueError, "query_offset=-1 must not be negative"),
        (
            {"query_offset": 2**31 - 8},
            ValueError,
            "query_offset=2147483640 and 8 queries end beyond position 2147483647",
        ),
        (
            {"query_offset": jnp.int32(2**31 - 8)},
            ValueError,
            "query_offset=2147483640 and 8 queries end beyond position 2147483647",
        ),
        ({"document_ids": IDS.astype(np.int64) + 2**31}, ValueError, "document_ids has numbers from 2147483648 to"),
        ({"document_ids": IDS.astype(np.uint32) + 2**31}, ValueError, "document_ids has numbers from 2147483648 to"),
        *[
            ({name: number}, ValueError, f"{name}={number!r} must be ")
            for name, numbers in {
                "scale": (float("nan"), float("inf"), 1e39, 1e-46),
                "logits_soft_cap": (1e-46, 1e38, 1e300, float("nan")),
            }.items()
            for number in numbers
        ],
        *[
            ({"dropout_rate": 0.1, "dropout_seed": seed}, error, words)
            for seed, error, words in (
                (1.5, TypeError, "dropout_seed=1.5 is of <class 'float'>"),
                (True, TypeError, "dropout_seed=True is of <class 'bool'>"),
                (np.float32(1), TypeError, "is of float32: use an integer"),
                (np.array([1, 2, 3]), ValueError, "dropout_seed has the shape (3,)"),
                (2**64, ValueError, "dropout_seed=18446744073709551616 has more than 64 bits"),
            )
        ],
        ({"is_causal": "no"}, TypeError, "is_causal='no' must be True or False"),
        ({"return_residual": "no"}, TypeError, "return_residual='no' must be True or False"),
        ({"mesh": "seq"}, TypeError, "mesh='seq' must be a mesh, such as jax.make_mesh"),
        ({"spec": "data"}, TypeError, "spec='data' must be a jax.sharding.PartitionSpec"),
        ({"axis_name": 1}, TypeError, "axis_name=1 must be the name of a mesh axis"),
        ({"segment_lengths": 4}, TypeError, "segment_lengths=4 must be a sequence of integers"),
        ({"dilation_rates": None}, ValueError, "dilation_rates is missing: say which tokens attend with pattern="),
        ({"pattern": (4,)}, ValueError, "pattern=(4,) is given beside segment_lengths=(4,): leave one out"),
        ({"query_offset": 0.5}, TypeError, "query_offset=0.5 must be one integer"),
        *[
            ({"precision": value}, ValueError, f"precision={value!r} is none that products can be of: pass 'default'")
            for value in ("exact", 3, ["high", "high"])
        ],
        ({"merge": "sum"}, ValueError, "merge='sum' is unknown: use one of 'lse', 'union'"),
        ({"heads": "some"}, ValueError, "heads='some' is unknown: use one of 'all', 'grouped'"),
        (
            {"heads": "grouped", "segment_lengths": (4,) * 3, "dilation_rates": (1,) * 3},
            ValueError,
            "heads='grouped' deals 2 key/value heads out over 3 branches: use at least as many heads",
        ),
    ],
    ids=lambda argument: next(iter(argument)) if isinstance(argument, dict) else "",
)
def test_features(arguments, error, words, unchecked):
    with pytest.raises(error) as caught:
        call(**arguments)
    assert words in str(caught.value)


def test_a_seed_is_the_same_in_every_form(unchecked):
    forms = (-1, np.int32(-1), np.int64(-1), jnp.int32(-1), jnp.array([-1]))
    results = [call(dropout_rate=0.5, dropout_seed=seed) for seed in forms]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert not np.array_equal(results[0], call(dropout_rate=0.5, dropout_seed=7))


def test_documents_of_one_side(unchecked):
    shapes = {"key": (1, 7, 2, 6), "value": (1, 7, 2, 5)}
    with pytest.raises(ValueError, match="document_ids is one array for 8 queries and 7 keys: give a pair"):
        call(shapes=shapes, document_ids=IDS)


def test_lists_are_no_arrays(unchecked):
    with pytest.raises(TypeError, match="query is of list: pass an array"):
        ring_dilated_attention([[[1.0]]], [[[1.0]]], [[[1.0]]], **PATTERN)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"segment_lengths": ()}, "segment_lengths=() is empty"),
        ({"segment_lengths": (4, 8)}, "2 and 1 entries"),
        ({"dilation_rates": (0,)}, "value below 1"),
        ({"dilation_rates": (5,)}, "rate 5 above its segment length 4"),
        ({"offsets": "none"}, "offsets='none' is unknown"),
    ],
)
def test_patterns(arguments, words, unchecked):
    with pytest.raises(ValueError, match=".") as caught:
        call(**arguments)
    assert words in str(caught.value)


def test_scale(unchecked):
    with pytest.raises(TypeError, match="must be a number, known when the call is traced"):
        call(scale=jnp.float32(1))
    assert call(scale=np.float32(2)).shape == (1, 8, 4, 5)


def test_mesh_without_the_axis(unchecked):
    with pytest.raises(ValueError, match="has no axis axis_name='seq': name one of \\('data',\\)"):
        call(mesh=make_mesh(data=2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_length_over_another_axis(kind, unchecked):
    mesh = make_mesh(kind, seq=2, model=2)
    arrays = [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(None, "model"))) for shape in SHAPES.values()
    ]
    for options in ({}, {"mesh": mesh}):
        with pytest.raises(ValueError, match="the length of query is sharded over \\('model',\\), but axis_name='seq'"):
            ring_dilated_attention(*arrays, **PATTERN, **options)


def test_typed_axes_that_do_not_fit(unchecked):
    mesh = make_mesh(AxisType.Explicit, seq=2, model=2)
    put = lambda shape, *spec: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))
    query, key, value = (put(shape) for shape in SHAPES.values())
    with pytest.raises(ValueError, match="the last dimension of query is sharded over \\('model',\\)"):
        ring_dilated_attention(put(SHAPES["query"], None, None, None, "model"), key, value, **PATTERN)
    with pytest.raises(ValueError, match="the heads of key are sharded over \\('model',\\) and those of query over"):
        ring_dilated_attention(query, put(SHAPES["key"], None, None, "model"), value, **PATTERN)


def test_second_derivatives_are_refused():
    arrays = [jnp.ones(shape) for shape in SHAPES.values()]
    total = lambda query: ring_dilated_attention(query, *arrays[1:], **PATTERN).sum()
    with pytest.raises(NotImplementedError, match="ring_dilated_attention has no second derivative"):
        jax.grad(lambda query: jax.grad(total)(query).sum())(arrays[0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dropout_rate": 0.5}, ValueError, "dropout_rate=0.5 needs a dropout_seed"),
        ({"shapes": {"query": (1, 8, 3, 6)}}, ValueError, "query has 3 heads and key has 2"),
        ({"query_offset": jnp.int32(1)}, TypeError, "query_offset is an array: the reference takes an integer"),
        ({"scale": np.nan}, ValueError, "scale=nan must be 0, or between"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap=-1.0 must be positive"),
    ],
    ids=str,
)
def test_what_the_reference_refuses(arguments, error, words, unchecked):
    arguments = dict(arguments)
    shapes = {**SHAPES, **arguments.pop("shapes", {})}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(error, match=words):
        ringjax.dilated_attention_reference(**arrays, **PATTERN, **arguments)
