"""Under the settings and the transformations of jax that users have."""

import functools
import pickle
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import loss, make_mesh, random_arguments, reference_results, tolerance

import ringjax
from ringjax import dilated_attention_reference, ring_dilated_attention

PATTERN = {"segment_lengths": (8, 32), "dilation_rates": (1, 2), "is_causal": True}
ALL = {"merge": "union", "logits_soft_cap": 5.0, "dropout_rate": 0.5, "dropout_seed": 1}


def gradient(arrays, **arguments):
    call = lambda *arrays: ring_dilated_attention(*arrays, **PATTERN, **arguments).sum()
    return jax.jit(jax.grad(call, (0, 1, 2)))(*arrays)


@pytest.fixture(scope="module")
def arrays():
    return [jnp.asarray(array, jnp.float32) for array in random_arguments(32, (4, 2), (8, 8), (2,))]


@pytest.fixture(scope="module")
def documents():
    return jnp.asarray(np.repeat([[0] * 20 + [-1] * 12], 2, axis=0), jnp.int32)


@pytest.mark.slow
def test_strict_promotion(arrays, documents):
    mesh = make_mesh(seq=4)
    expected = gradient(arrays, mesh=mesh, document_ids=documents, **ALL)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = gradient(arrays, mesh=mesh, document_ids=documents, **ALL)
        attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, rope_theta=1e4, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((2, 32, 32))
        for count, prefill in ((5, True), (1, False)):
            inputs = jnp.ones((2, count, 32), jnp.float32)
            assert attention(inputs, prefill=prefill).shape == inputs.shape
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.quick("sizes1")
@pytest.mark.parametrize("sizes", [{"seq": 4}, {}])
def test_padding_makes_no_infinity(arrays, documents, sizes):
    """Also outside of jax.jit, where jax looks at what each call returns and at what it keeps for its gradient."""
    mesh = make_mesh(**sizes) if sizes else None
    attend = functools.partial(ring_dilated_attention, **PATTERN, document_ids=documents, mesh=mesh)
    with jax.debug_infs(True), jax.debug_nans(True):
        out, pull = jax.vjp(attend, *arrays)
        grads = pull(out)
    assert not np.asarray(out[:, 20:]).any()
    assert not any(np.asarray(grad[:, 20:]).any() for grad in grads)


def test_a_batch_of_nothing(arrays):
    nothing = [array[:0] for array in arrays]
    for mesh in (None, make_mesh(seq=4)):
        out, lse = ring_dilated_attention(*nothing, **PATTERN, mesh=mesh, return_residual=True)
        assert (out.shape, lse.shape) == ((0, 32, 4, 8), (0, 32, 4))
        assert [grad.shape for grad in gradient(nothing, mesh=mesh)] == [array.shape for array in nothing]


def test_export_with_a_symbolic_batch(arrays, documents):
    (batch,) = export.symbolic_shape("batch")
    given = *arrays, documents
    shapes = [jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype) for array in given]
    call = lambda *given: ring_dilated_attention(*given[:3], document_ids=given[3], **PATTERN)
    exported = export.export(jax.jit(call))(*shapes)
    np.testing.assert_allclose(exported.call(*given), call(*given), rtol=0, atol=1e-6)


@pytest.mark.parametrize("uses", ["out", "lse"])
def test_the_gradient_of_one_result_on_a_mesh_that_arrays_carry(arrays, uses):
    mesh = make_mesh(AxisType.Explicit, data=2, seq=4)
    put = [jax.device_put(array, NamedSharding(mesh, P("data", "seq"))) for array in arrays]
    of_result = loss(ring_dilated_attention, uses, **PATTERN)
    grads, _ = jax.jit(jax.grad(of_result, (0, 1, 2), has_aux=True))(*put)
    for one, other in zip(grads, reference_results(arrays, uses, **PATTERN)[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_along_an_axis_of_the_mesh(arrays, documents, kind):
    """Each instance draws the weights that it would drop alone, and skips its own tiles; the values are of all."""
    mesh = make_mesh(kind, data=2, seq=4)
    sharding = NamedSharding(mesh, P("data", "seq"))
    query, key, value = arrays
    value, seeds = value[0], np.array([3, 8], np.uint32)

    def results(attend, *given, name=None):
        one = lambda query, key, value, ids, seed: attend(
            query, key, value, document_ids=ids, dropout_seed=seed, dropout_rate=0.3, **PATTERN
        )
        instances = jax.vmap(one, (0, 0, None, 0, 0), spmd_axis_name=name)
        of_result = lambda *given: jnp.sin(instances(*given)).sum()
        return jax.device_get(jax.jit(jax.value_and_grad(of_result, (0, 1, 2)))(*given))

    expected = results(dilated_attention_reference, query, key, value, documents, seeds)
    query, key, documents = (jax.device_put(array, sharding) for array in (query, key, documents))
    seeds = jax.device_put(seeds, NamedSharding(mesh, P("data")))
    value = jax.device_put(value, NamedSharding(mesh, P("seq")))
    attend = functools.partial(ring_dilated_attention, mesh=mesh)
    actual = results(attend, query, key, value, documents, seeds, name="data" if kind == AxisType.Auto else None)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_axes_that_cut_nothing_else_cut_the_instances_of_a_vmap(arrays):
    """Else each device along them would compute all instances, in silence."""
    mesh = make_mesh(data=2, seq=4)
    attend = functools.partial(ring_dilated_attention, **PATTERN, mesh=mesh, spec=P(None, "seq"))
    instances = jax.vmap(attend, spmd_axis_name="data")
    stacked = [np.stack([array, -array]) for array in arrays]
    compiled = jax.jit(instances).lower(*stacked).compile()
    assert compiled.output_shardings.spec[0] == "data"
    expected = np.stack([attend(*arrays), attend(*(-array for array in arrays))])
    np.testing.assert_allclose(compiled(*stacked), expected, rtol=0, atol=tolerance())


def test_offsets_of_instances_that_a_mesh_cuts_are_refused(arrays):
    mesh = make_mesh(data=2, seq=4)
    attend = lambda offset, *arrays: ring_dilated_attention(*arrays, **PATTERN, query_offset=offset, mesh=mesh)
    with pytest.raises(NotImplementedError, match="query_offset differs between the instances of a jax.vmap"):
        jax.eval_shape(jax.vmap(attend, spmd_axis_name="data"), jnp.arange(2), *arrays)
    mesh = make_mesh(AxisType.Explicit, data=2, seq=4)
    put = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (jnp.arange(2), *arrays)]
    with pytest.raises(NotImplementedError, match="shard no dimension that it maps along an Explicit axis"):
        jax.eval_shape(jax.vmap(attend), *put)


@pytest.mark.quick("sizes0")
@pytest.mark.parametrize("sizes", [{"data": 2, "seq": 4}, {"data": 2}])
def test_a_scan_over_decoding_steps_on_an_explicit_mesh(sizes):
    mesh = make_mesh(AxisType.Explicit, **sizes)
    with jax.set_mesh(mesh):
        attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((2, 32, 32), spec=P(*sizes))
        inputs = np.random.default_rng(0).normal(size=(5, 2, 1, 32)).astype(np.float32)
        graph, state = nnx.split(attention)

        def step(state, token):
            attention = nnx.merge(graph, state)
            out = attention(token)
            return nnx.state(attention), out

        put = jax.device_put(inputs, NamedSharding(mesh, P(None, "data")))
        _, outs = jax.jit(lambda state, inputs: jax.lax.scan(step, state, inputs))(state, put)
    attention.decode = False
    expected = attention(jnp.asarray(inputs[:, :, 0].swapaxes(0, 1)))
    np.testing.assert_allclose(outs[:, :, 0].swapaxes(0, 1), expected, rtol=0, atol=1e-5)


def test_decoding_on_an_explicit_mesh_that_is_an_argument_alone():
    mesh = make_mesh(AxisType.Explicit, data=2, seq=4)
    options = {"num_heads": 4, "in_features": 32, "decode": True, **PATTERN}
    attention = ringjax.RingDilatedAttention(**options, mesh=mesh, rngs=nnx.Rngs(0))
    attention.init_cache((2, 32, 32), spec=P("data", "seq"))
    assert attention.cached_key.get_value()[0].sharding.spec == P("data", "seq", None)
    alone = ringjax.RingDilatedAttention(**options, rngs=nnx.Rngs(0))
    alone.init_cache((2, 32, 32))
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)), jnp.float32)
    for prefill, tokens in ((True, inputs[:, :5]), (False, inputs[:, 5:])):
        expected = alone(tokens, prefill=prefill)
        np.testing.assert_allclose(attention(tokens, prefill=prefill), expected, rtol=0, atol=1e-5)


def test_decoding_refuses_what_its_cache_cannot_hold(unchecked):
    attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, decode=True, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="dtype=.*int8.* must be a floating dtype"):
        attention.init_cache((2, 32, 32), jnp.int8)
    for shape, words in (
        ((32,), "input_shape=\\(32,\\) must be \\[..., T, in_features\\]"),
        ((1, -5, 32), "input_shape=\\(1, -5, 32\\) must be"),
        ((1, 0, 32), "input_shape=\\(1, 0, 32\\) has 0 tokens: make that between 1 and 2147483647"),
        ((1, 2**31, 32), "has 2147483648 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            attention.init_cache(shape)
    attention.init_cache((2, 32, 32))
    for prefill in (False, True):
        with pytest.raises(ValueError, match="the inputs have the batch \\(1,\\), and the cache \\(2,\\)"):
            attention(jnp.ones((1, 4, 32)), prefill=prefill)
    with pytest.raises(ValueError, match="decode one token at least"):
        attention(jnp.ones((2, 0, 32)))


@pytest.mark.quick("True")
@pytest.mark.parametrize("has_x64", [False, True])
def test_decoding_with_segments_beyond_32_bits(has_x64):
    calls = []
    with jax.enable_x64(has_x64):
        for segment_length in (32, 10**12):
            pattern = {"segment_lengths": (segment_length,), "dilation_rates": (3,), "is_causal": True}
            attention = ringjax.RingDilatedAttention(4, 32, **pattern, decode=True, rngs=nnx.Rngs(0))
            attention.init_cache((2, 32, 32))
            inputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)), jnp.float32)
            calls.append([attention(inputs[:, :5], prefill=True), attention(inputs[:, 5:])])
    jax.tree.map(np.testing.assert_array_equal, *calls)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (P(None, None, "seq"), ValueError, "batch or heads of queries are sharded over axis_name='seq'"),
        (P(None, "data"), ValueError, "the length of queries is sharded over \\('data',\\)"),
        (P(None, None, None, "data"), ValueError, "the last dimension of queries is sharded over \\('data',\\)"),
        (
            P(None, None, None, None, "data"),
            ValueError,
            "has more entries than queries has dimensions, \\(3, 32, 4, 8\\)",
        ),
        (P("data"), ValueError, "cuts dimension 0 of queries, \\(3, 32, 4, 8\\), over the 2 devices"),
        (P("model"), ValueError, "names the axis 'model', but the mesh has \\['data', 'seq'\\]"),
        ("data", TypeError, "spec='data' must be a jax.sharding.PartitionSpec"),
    ],
)
def test_a_cache_lies_as_queries_can(spec, error, words, unchecked):
    attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, decode=True, rngs=nnx.Rngs(0))
    with jax.set_mesh(make_mesh(data=2, seq=4)), pytest.raises(error, match=words):
        attention.init_cache((3, 32, 32), spec=spec)
    if isinstance(spec, P):
        attention.init_cache((3, 32, 32), spec=spec)  # without a mesh it means nothing


def test_a_cache_without_a_mesh_leaves_the_spec_of_its_module_for_later(unchecked):
    options = {**PATTERN, "decode": True, "num_kv_heads": 3, "spec": P("data", "seq", "tensor")}
    attention = ringjax.RingDilatedAttention(6, 24, **options, rngs=nnx.Rngs(0))
    attention.init_cache((2, 32, 24))
    words = "3 key/value heads do not divide over the 2 devices of \\('tensor',\\)"
    with jax.set_mesh(make_mesh(data=2, seq=2, tensor=2)), pytest.raises(ValueError, match=words):
        attention.init_cache((2, 32, 24))


def test_what_nnx_alone_checks(unchecked):
    make = functools.partial(ringjax.RingDilatedAttention, 4, 8, **PATTERN)
    with pytest.raises(TypeError, match=r"rngs=0 must be random streams, such as nnx.Rngs\(0\)"):
        make(rngs=0)
    attention = make(rngs=nnx.Rngs(0))
    for arguments, error, words in (
        ((5,), ValueError, r"input_shape=5 must be \[..., T, in_features\]: the shape of inputs"),
        (((1, 16, 8), "abc"), TypeError, "dtype='abc' must be a floating dtype"),
        (((1, 16, 9),), ValueError, r"input_shape=\(1, 16, 9\) ends in 9, but in_features=8: give that of inputs"),
    ):
        with pytest.raises(error, match=words):
            attention.init_cache(*arguments)
    with pytest.raises(ValueError, match=r"input_shape is an array of the shape \(1, 16, 8\): give that shape"):
        attention.init_cache(jnp.ones((1, 16, 8)))
    with pytest.raises(TypeError, match="dtype=None must be a floating dtype"):
        attention.init_cache((1, 16, 8), None)
    with pytest.raises(TypeError, match="decode='yes' must be True or False"):
        attention.set_view(decode="yes")
    causal = make(rngs=nnx.Rngs(0), is_causal=True)
    for name in ("batch_size", "max_length"):
        with pytest.raises(ValueError, match=f"{name}='a' must be a positive integer"):
            causal.set_view(decode=True, **{"batch_size": 2, "max_length": 16, name: "a"})
    causal.set_view(decode=True, batch_size=np.int64(2), max_length=16)
    assert causal.cached_key is not None
    with pytest.raises(TypeError, match="inner_norm is a module: give what makes it, such as nnx.LayerNorm"):
        make(rngs=nnx.Rngs(0), inner_norm=nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="has no argument 'causal': say is_causal"):
        make(rngs=nnx.Rngs(0), causal=True)
    dropping = make(rngs=nnx.Rngs(0), dropout_rate=0.5, deterministic=False, keep_rngs=False)
    for rngs in (3, jax.random.key(0), nnx.Rngs(params=0)):
        with pytest.raises(TypeError, match=r"must be random streams with dropout, such as nnx.Rngs\(dropout=0\)"):
            dropping(jnp.ones((1, 16, 8)), rngs=rngs)
    assert dropping(jnp.ones((1, 16, 8)), rngs=nnx.Rngs(0)).shape == (1, 16, 8)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_modules_check_their_inputs(flavor, unchecked):
    if flavor == "nnx":
        attend = ringjax.RingDilatedAttention(4, 8, **PATTERN, rngs=nnx.Rngs(0))
        words = r"Incompatible input dimension, got 7 but module expects 8: inputs_q has the shape \(1, 16, 7\)"
        with pytest.raises(ValueError, match=words):
            attend(jnp.ones((1, 16, 7)))
    else:
        module = ringjax.linen.RingDilatedAttention(4, **PATTERN)
        attend = lambda *args, **kwargs: module.init(jax.random.key(0), *args, **kwargs)
    with pytest.raises(ValueError, match=r"inputs_q has the shape \(8,\): pass at least \[length, features\]"):
        attend(jnp.ones(8))
    for inputs, kind in ((None, "NoneType"), ([1.0], "list")):
        with pytest.raises(TypeError, match=rf"inputs_q is of {kind}: pass an array \[..., length, features\]"):
            attend(inputs)
    with pytest.raises(TypeError, match="has no argument 'is_causal': say it when the module is made"):
        attend(jnp.ones((1, 16, 8)), is_causal=True)


def test_modules_go_through_pickle():
    attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, rngs=nnx.Rngs(0))
    inputs = jnp.ones((2, 32, 32))
    copy = pickle.loads(pickle.dumps(attention))
    np.testing.assert_array_equal(copy(inputs), attention(inputs))
    attention = ringjax.RingDilatedAttention(4, 32, **PATTERN, mesh=make_mesh(seq=4), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="enter jax.set_mesh instead of mesh="):
        pickle.dumps(attention)


def test_the_last_positions(unchecked):
    """Segments that end at the last number of 32 bits."""
    arrays = [array[:, :16] for array in random_arguments(16, (2, 1), (4, 4), (1,))]
    arguments = {"segment_lengths": (2**30,), "dilation_rates": (3,), "query_offset": 2**30 - 8}
    _, lse = ring_dilated_attention(*arrays, **arguments, return_residual=True)
    np.testing.assert_allclose(lse, reference_results(arrays, **arguments)[1], rtol=0, atol=tolerance())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"implementation": "fast"}, ValueError, "implementation='fast' is unknown"),
        ({"strategy": "tree"}, ValueError, "strategy='tree' is unknown"),
        ({"precision": "exact"}, ValueError, "precision='exact' is none that products can be of"),
        ({"exchange_size": 2}, ValueError, "exchange_size=2 is given, but strategy='ring' exchanges nothing"),
        ({"logits_soft_cap": 1e300}, ValueError, "logits_soft_cap=1e\\+300 must be positive"),
        ({"spec": "data"}, TypeError, "spec='data' must be a jax.sharding.PartitionSpec"),
        ({"rope_theta": "a"}, TypeError, "rope_theta='a' must be a number"),
        ({"is_causal": "no"}, TypeError, "is_causal='no' must be True or False"),
        ({"num_heads": 0}, ValueError, "num_heads=0 must be a positive integer"),
        ({"num_heads": "4"}, ValueError, "num_heads='4' must be a positive integer"),
        ({"num_kv_heads": 1.5}, ValueError, "num_kv_heads=1.5 must be a positive integer"),
        ({"broadcast_dropout": "no"}, TypeError, "broadcast_dropout='no' must be True or False"),
        ({"use_bias": "no"}, TypeError, "use_bias='no' must be True or False"),
        ({"normalize_qk": 1}, TypeError, "normalize_qk=1 must be True or False"),
        ({"decode": "no"}, TypeError, "decode='no' must be True or False"),
        (
            {"decode": True, "is_causal": False},
            ValueError,
            "decode=True continues a sequence, but with is_causal=False",
        ),
        (
            {"strategy": ["ring"]},
            ValueError,
            "strategy=.*'ring'.* has 1 entries, and pattern 2 branches",
        ),
        ({"implementation": ["xla"]}, ValueError, "implementation=.*'xla'.* is unknown"),
        ({"strategy": "all_to_all", "exchange_size": 0}, ValueError, "exchange_size=0 must be a positive integer"),
        ({"documents_are_sorted": 1}, TypeError, "documents_are_sorted=1 must be True, False or None"),
        ({"documents_are_sorted": np.zeros(2)}, TypeError, "documents_are_sorted=.* must be True, False or None"),
        ({"deterministic": "no"}, TypeError, "deterministic='no' must be True, False or None"),
        ({"logits_soft_cap": True}, TypeError, "logits_soft_cap=True must be a number"),
        ({"rope_theta": True}, TypeError, "rope_theta=True must be a number"),
        ({"dtype": jnp.int32}, TypeError, "dtype=.*int32.* must be a floating dtype"),
        ({"dtype": "abc"}, TypeError, "dtype='abc' must be a floating dtype, one of float32, bfloat16"),
        ({"param_dtype": "abc"}, TypeError, "param_dtype='abc' must be a floating dtype, one of float32, bfloat16"),
        ({"dtype": jnp.float8_e4m3fn}, TypeError, "dtype=.*float8.* must be a floating dtype"),
        ({"inner_norm": 3}, TypeError, "inner_norm=3 must be a function or a class that makes it"),
        ({"kernel_init": 3}, TypeError, "kernel_init=3 must be a function or a class that makes it"),
        ({"out_features": 0}, ValueError, "out_features=0 must be a positive integer"),
    ],
    ids=lambda argument: next(iter(argument)) if isinstance(argument, dict) else "",
)
def test_modules_check_when_they_are_made(arguments, error, words, unchecked):
    options = {"num_heads": 4, **PATTERN, **arguments}
    with pytest.raises(error, match=words):
        ringjax.RingDilatedAttention(**options, in_features=32, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=words):
        ringjax.linen.RingDilatedAttention(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"strategy": "tree"}, ValueError, "strategy='tree' is unknown"),
        ({"is_causal": "no"}, TypeError, "is_causal='no' must be True or False"),
        ({"query_offset": -1}, ValueError, "query_offset=-1 must not be negative"),
        ({"mesh": "seq"}, TypeError, "mesh='seq' must be a mesh"),
        ({"width": 3}, TypeError, "attention_fn has no argument 'width'"),
        ({"sinks": "a"}, TypeError, "sinks is of str: pass an array of floats"),
        ({"document_ids": "a"}, TypeError, "document_ids is of str: pass an array of integers"),
        (
            {"document_ids": (np.zeros(4),) * 2},
            TypeError,
            "document_ids\\[0\\] is of float64: pass an array",
        ),
    ],
    ids=lambda argument: next(iter(argument)) if isinstance(argument, dict) else "",
)
def test_the_function_for_slots_checks_when_it_is_made(arguments, error, words, unchecked):
    with pytest.raises(error, match=words):
        ringjax.attention_fn(**{**PATTERN, **arguments})


def test_modules_are_told_whether_they_have_sinks(unchecked):
    words = "sinks must be True or False, not of .*Array.*: for a parameter pass True and sinks_init"
    with pytest.raises(TypeError, match=words):
        ringjax.RingDilatedAttention(4, 32, **PATTERN, sinks=jnp.zeros(4), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=words):
        ringjax.linen.RingDilatedAttention(4, **PATTERN, sinks=jnp.zeros(4)).init(jax.random.key(0), jnp.ones((8, 32)))


def test_truth_values_of_numpy_are_taken(unchecked):
    options = dict.fromkeys(("sinks", "is_causal", "normalize_qk", "documents_are_sorted"), np.True_)
    attention = ringjax.RingDilatedAttention(4, 32, **{**PATTERN, **options}, rngs=nnx.Rngs(0))
    assert attention.sinks is not None
    assert attention.query_ln is not None


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_calls_are_told_whether_to_drop_by_truth_values(library, unchecked):
    inputs, options = jnp.ones((8, 32)), {**PATTERN, "dropout_rate": 0.5}
    if library == "nnx":
        call = ringjax.RingDilatedAttention(4, 32, **options, rngs=nnx.Rngs(0))
    else:
        call = functools.partial(ringjax.linen.RingDilatedAttention(4, **options).init, jax.random.key(0))
    with pytest.raises(TypeError, match="deterministic='no' must be True, False or None"):
        call(inputs, deterministic="no")
    with pytest.raises(TypeError, match="deterministic is traced, but must be known before"):
        jax.eval_shape(lambda flag: call(inputs, deterministic=flag), np.True_)
    jax.eval_shape(lambda: call(inputs, deterministic=np.array(True)))


def test_a_width_of_zero_is_none_in_linen(unchecked):
    """Not that of the inputs."""
    with pytest.raises(ValueError, match="qkv_features=0 must be a positive integer"):
        ringjax.linen.RingDilatedAttention(4, qkv_features=0, **PATTERN).init(jax.random.key(0), jnp.ones((8, 32)))


def test_arguments_of_flax(arrays):
    inputs = jnp.ones((2, 32, 32))
    attention = ringjax.RingDilatedAttention(
        4, 32, in_kv_features=16, **PATTERN, precision="highest", dropout_rate=0.5, keep_rngs=False, rngs=nnx.Rngs(0)
    )
    assert (attention.num_heads, attention.head_dim, attention.qkv_features) == (4, 8, 32)
    assert len(repr(attention.settings)) < 200
    assert attention(inputs, inputs[..., :16], deterministic=True).shape == (2, 32, 32)
    with pytest.raises(ValueError, match="keep_rngs=False keeps no stream"):
        attention(inputs, inputs[..., :16], deterministic=False)
    module = ringjax.linen.RingDilatedAttention(4, **PATTERN, force_fp32_for_softmax=True, dropout_rate=0.5)
    variables = module.init(jax.random.key(0), inputs, deterministic=True)
    out = module.apply(variables, inputs, inputs_kv=inputs, deterministic=True)
    np.testing.assert_array_equal(out, module.apply(variables, inputs, deterministic=True))
    assert module.apply(variables, inputs, deterministic=False, dropout_rng=jax.random.key(1)).shape == out.shape
    for refused in ({"mask": jnp.ones((2, 1, 32, 32))}, {"sow_weights": True}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            module.apply(variables, inputs, deterministic=True, **refused)
    attend = ringjax.attention_fn(**PATTERN)
    np.testing.assert_array_equal(attend(*arrays, precision=jax.lax.Precision.DEFAULT), attend(*arrays))


def test_without_flax_the_function_is_there(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "flax"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ringjax.nn", raising=False)
    monkeypatch.delattr(ringjax, "nn", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"ringjax.RingDilatedAttention needs Flax: pip install flax"):
        _ = ringjax.RingDilatedAttention
