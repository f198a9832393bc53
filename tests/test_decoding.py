"""Decoding: the numbers of the full forward, token by token, from caches as small as segments."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh
from parts.byte_model import NGRAMS, ByteModel, features

import ringjax

BATCH, LENGTH, WIDTH, PROMPT = 2, 32, 24, 16
PATTERNS = {
    "longnet": {"segment_lengths": (8, 32), "dilation_rates": (1, 2)},
    "straddling union": {
        "segment_lengths": (7, 20),
        "dilation_rates": (2, 3),
        "merge": "union",
        "logits_soft_cap": 2.0,
    },
    "windows": {
        "pattern": (ringjax.Window(3), ringjax.Segments(20, 2), ringjax.Window(3, 4)),
        "merge": "union",
        "sinks": True,
        "sinks_init": jax.nn.initializers.normal(2.0),
    },
    "a window": {
        "pattern": (ringjax.Window(6),),
        "inner_norm": nnx.RMSNorm,
        "sinks": True,
        "sinks_init": jax.nn.initializers.normal(2.0),
    },
    "grouped windows": {
        "pattern": (ringjax.Window(5, 2), ringjax.Segments(9)),
        "heads": "grouped",
        "sinks": True,
        "sinks_init": jax.nn.initializers.normal(2.0),
    },
    "grouped": {
        "segment_lengths": (5, 64),
        "dilation_rates": (1, 3),
        "heads": "grouped",
        "offsets": "branch",
        "normalize_qk": True,
        "sinks": True,
        "sinks_init": jax.nn.initializers.normal(2.0),
    },
}
MESHES = {"none": None, "auto": AxisType.Auto, "explicit": AxisType.Explicit}
CALLS = 1, 1, 5, 5, 1  # the tokens of each call: some cross the boundary of a segment


def inputs(length=LENGTH):
    return jax.random.normal(jax.random.key(0), (BATCH, length, WIDTH), jnp.float32)


def make(**arguments):
    shared = {"num_kv_heads": 2, "is_causal": True, "rope_theta": 100.0, "rngs": nnx.Rngs(0)}
    pattern = {} if "pattern" in arguments else PATTERNS["longnet"]
    return ringjax.RingDilatedAttention(4, WIDTH, **{**pattern, **shared, **arguments})


def enter(kind, **sizes):
    """Enters a mesh, and returns how inputs are sharded along its sequence."""
    stack = contextlib.ExitStack()
    if kind is None:
        return stack, lambda array: array
    mesh = make_mesh(kind, **(sizes or {"seq": 4}))
    stack.enter_context(jax.set_mesh(mesh))
    data = "data" if "data" in sizes else None
    return stack, lambda array: jax.device_put(array, NamedSharding(mesh, P(data, "seq")))


@nnx.jit(static_argnames=("decode", "prefill"))
def call(module, x, **options):
    return module(x, **options)


def continued(step, length=PROMPT):
    """The outputs of calls for the tokens that follow the prompt."""
    outs = []
    for count in CALLS:
        outs.append(jax.device_get(step(inputs()[:, length : length + count])))
        length += count
    return np.concatenate(outs, axis=1)


@pytest.mark.quick("longnet-none", "windows-auto")
@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [
        ("longnet", "none"),
        ("straddling union", "auto"),
        ("windows", "auto"),
        ("a window", "none"),
        ("grouped windows", "explicit"),
        ("grouped", "explicit"),
    ],
)
def test_prefill_and_decoding_give_the_full_forward(pattern, mesh):
    module = make(**PATTERNS[pattern])
    expected = call(module, inputs())
    stack, shard = enter(MESHES[mesh])
    with stack:
        module.decode = True
        module.init_cache((BATCH, LENGTH, WIDTH))
        out = call(module, shard(inputs()[:, :PROMPT]), prefill=True)
        np.testing.assert_allclose(out, expected[:, :PROMPT], rtol=0, atol=1e-5)
        actual = continued(lambda x: call(module, x))
    np.testing.assert_allclose(actual, expected[:, PROMPT : PROMPT + sum(CALLS)], rtol=0, atol=1e-5)
    assert int(module.cache_index.get_value()) == PROMPT + sum(CALLS)


@pytest.mark.slow
def test_a_cache_that_no_mesh_was_there_for():
    """Made outside set_mesh, and used on a mesh that the inputs carry, which does not divide its rows."""
    module = make(segment_lengths=(7, 32), dilation_rates=(1, 2))
    expected = call(module, inputs())
    module.init_cache((BATCH, LENGTH, WIDTH))
    mesh = make_mesh(AxisType.Explicit, seq=4)
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    out = call(module, place(inputs()[:, :PROMPT], None, "seq"), decode=True, prefill=True)
    np.testing.assert_allclose(out, expected[:, :PROMPT], rtol=0, atol=1e-5)
    out = call(module, place(inputs()[:, PROMPT : PROMPT + 5]), decode=True)
    np.testing.assert_allclose(out, expected[:, PROMPT : PROMPT + 5], rtol=0, atol=1e-5)


@pytest.mark.quick("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_decoding_beside_data_and_tensor_axes(kind):
    """Four key/value heads over two devices at a rate of four: offsets that followed local numbers would be wrong."""
    module = make(dilation_rates=(1, 4), num_kv_heads=4)
    expected = call(module, inputs())
    stack, shard = enter(kind, data=2, seq=2, tensor=2)
    with stack:
        mesh = jax.sharding.get_mesh()

        def place(path, array):
            heads = ("tensor", None, None) if "out" in jax.tree_util.keystr(path) else (None, "tensor", None)
            return jax.device_put(array, NamedSharding(mesh, P(*heads) if array.ndim == 3 else P()))

        nnx.update(module, jax.tree_util.tree_map_with_path(place, nnx.state(module, nnx.Param)))
        module.init_cache((BATCH, LENGTH, WIDTH))
        out = call(module, shard(inputs()[:, :PROMPT]), decode=True, prefill=True)
        np.testing.assert_allclose(out, expected[:, :PROMPT], rtol=0, atol=1e-5)
        actual = continued(lambda x: call(module, jax.device_put(x, NamedSharding(mesh, P("data"))), decode=True))
    np.testing.assert_allclose(actual, expected[:, PROMPT : PROMPT + sum(CALLS)], rtol=0, atol=1e-5)


@pytest.mark.quick("straddling union-1")
@pytest.mark.parametrize(("pattern", "num_layers"), [("longnet", 2), ("straddling union", 1), ("grouped", 1)])
def test_a_model_decodes_the_logits_of_its_full_forward(pattern, num_layers):
    """A prompt on the mesh, then byte by byte; a pattern that the example lets through as it is."""
    pattern = {name: PATTERNS[pattern][name] for name in ("segment_lengths", "dilation_rates")}
    sizes = {"width": 16, "num_layers": num_layers, "num_heads": 2}
    model = ByteModel(**sizes, **pattern, ngram_bits=8, dtype=jnp.float32, rngs=nnx.Rngs(0))
    text = np.random.default_rng(1).integers(0, 256, (BATCH, LENGTH + max(NGRAMS) - 1))
    tokens = jnp.asarray(np.stack(list(map(features, text))))  # [B, T, 5]
    expected = call(model, tokens)
    stack, shard = enter(AxisType.Auto)
    with stack:
        model.init_cache(BATCH, LENGTH)
        logits = [call(model, shard(tokens[:, :PROMPT]), decode=True, prefill=True)]
        logits += [call(model, tokens[:, t : t + 1], decode=True) for t in range(PROMPT, LENGTH)]
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=0, atol=1e-5)


def test_linen_decodes_by_its_own_protocol():
    arguments = {**PATTERNS["longnet"], "is_causal": True, "num_kv_heads": 2, "rope_theta": 100.0}
    module = ringjax.linen.RingDilatedAttention(4, **arguments, decode=True)
    variables = module.init(jax.random.key(0), inputs())
    full = ringjax.linen.RingDilatedAttention(4, **arguments)
    params = {"params": variables["params"]}
    expected = full.apply(params, inputs())
    assert jax.tree.map(jnp.shape, full.init(jax.random.key(0), inputs())) == jax.tree.map(jnp.shape, params)
    cache = variables["cache"]
    out, changed = module.apply({**params, "cache": cache}, inputs()[:, :PROMPT], prefill=True, mutable=["cache"])
    np.testing.assert_allclose(out, expected[:, :PROMPT], rtol=0, atol=1e-5)
    jitted = jax.jit(lambda cache, x: module.apply({**params, "cache": cache}, x, mutable=["cache"]))

    def step(x):
        nonlocal changed
        out, changed = jitted(changed["cache"], x)
        return out

    np.testing.assert_allclose(continued(step), expected[:, PROMPT : PROMPT + sum(CALLS)], rtol=0, atol=1e-5)
    # Without a prompt: the first tokens too come one by one.
    changed = {"cache": cache}
    outs = [step(inputs()[:, token : token + 1]) for token in range(PROMPT)]
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected[:, :PROMPT], rtol=0, atol=1e-5)


def test_caches_hold_the_kept_rows_of_a_segment():
    module = make(segment_lengths=(7, 20, 1000), dilation_rates=(2, 3, 5), decode=True)
    module.init_cache((BATCH, 100, WIDTH), jnp.bfloat16)
    shapes = [array.shape for array in module.cached_key.get_value()]
    assert shapes == [(BATCH, rows, 2, 6) for rows in (4, 7, 20)]
    assert all(array.dtype == jnp.bfloat16 for array in module.cached_value.get_value())
    grouped = make(heads="grouped", decode=True)
    grouped.init_cache((BATCH, 100, WIDTH))
    assert [array.shape for array in grouped.cached_key.get_value()] == [(BATCH, 8, 1, 6), (BATCH, 16, 1, 6)]


def test_the_cache_of_a_window_does_not_grow():
    """A ring of its last rows, whatever the context; a shorter one needs fewer."""
    for length, rows in ((8, [8, 8]), (100, [12, 15]), (10**6, [12, 15])):
        module = make(pattern=(ringjax.Window(12), ringjax.Window(5, 3)), decode=True)
        module.init_cache((BATCH, length, WIDTH))
        assert [array.shape[1] for array in module.cached_key.get_value()] == rows


def test_a_window_beyond_all_positions_decodes():
    module = make(pattern=(ringjax.Window(2**30, 2),), decode=True)
    module.init_cache((BATCH, LENGTH, WIDTH))
    out = [module(inputs()[:, token : token + 1]) for token in range(5)]
    expected = make(pattern=(ringjax.Window(2**30, 2),))(inputs()[:, :5])
    np.testing.assert_allclose(np.concatenate(out, axis=1), expected, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_inside_the_callers_shard_map():
    """Where each device sees its own tokens of it, and the next ones are the same for all."""
    module, mesh, x = make(decode=True), make_mesh(seq=4), inputs()[:, :10]
    with jax.set_mesh(mesh):
        module.init_cache((BATCH, LENGTH, WIDTH))
    definition, cache, rest = nnx.split(module, nnx.Cache, ...)
    of_cache = jax.tree.map(lambda array: P(None, "seq") if array.ndim == 4 else P(), cache)

    def run(cache, prompt, following):
        module = nnx.merge(definition, cache, rest)
        return module(prompt, prefill=True), module(following), module.cache_index.get_value()

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(of_cache, P(None, "seq"), P()), out_specs=(P(None, "seq"), P(), P())
    )
    *out, length = jax.jit(mapped)(cache, x[:, :8], x[:, 8:])
    assert int(length) == 10
    np.testing.assert_allclose(np.concatenate(out, axis=1), make()(x), atol=1e-5)


@pytest.mark.parametrize(
    ("sinks", "error", "words"),
    [
        (
            jnp.ones((BATCH, 1, 3, 4)),
            ValueError,
            r"sinks has the shape \(.*, 1, 3, 4\): give one logit for each of the 4",
        ),
        (jnp.ones(4, jnp.int32), TypeError, "sinks is of int32: pass an array of floats"),
        ([1.0] * 4, TypeError, "sinks is of list: pass an array of floats"),
    ],
    ids=str,
)
def test_wrong_sinks_are_refused_in_steps(sinks, error, words, unchecked):
    module = make(decode=True)
    module.init_cache((BATCH, LENGTH, WIDTH))
    with pytest.raises(error, match=words):
        module(inputs()[:, :3], sinks=sinks)


def test_caches_are_sharded_along_the_sequence():
    stack, shard = enter(AxisType.Auto)
    with stack:
        module = make(decode=True)
        module.init_cache((BATCH, 4 * LENGTH, WIDTH))
        for array in module.cached_key.get_value():
            assert array.sharding.shard_shape(array.shape)[1] * 4 == array.shape[1]
        state = nnx.split(module)

        def step(definition, state, x):
            module = nnx.merge(definition, state)
            return module(x), nnx.state(module, nnx.Cache)

        compiled = jax.jit(step, static_argnums=0).lower(*state, inputs()[:, :1]).compile()
        assert "all-gather" not in compiled.as_text()
        assert "all-reduce" in compiled.as_text()
        module(shard(inputs()), prefill=True)
        for array in module.cached_key.get_value():
            assert array.sharding.shard_shape(array.shape)[1] * 4 == array.shape[1]


def test_view_makes_a_cache():
    module = make()
    decoding = nnx.view(module, decode=True, batch_size=BATCH, max_length=LENGTH)
    assert decoding(inputs()[:, :1]).shape == (BATCH, 1, WIDTH)
    assert int(decoding.cache_index.get_value()) == 1
    with pytest.raises(TypeError, match="batch_size=None and max_length=None must be given"):
        make().set_view(decode=True)


def test_a_full_cache():
    module = make(decode=True)
    module.init_cache((BATCH, 4, WIDTH))
    jitted = nnx.jit(lambda module, x: module(x))
    assert np.isfinite(jitted(module, inputs()[:, :3])).all()
    with pytest.raises(ValueError, match="the cache holds 3 tokens of at most 4, and 2 come: call init_cache with"):
        module(inputs()[:, :2])
    assert np.isnan(jitted(module, inputs()[:, :2])).all()
    with pytest.raises(ValueError, match="the cache is for 4 tokens, and the inputs have 5: call init_cache with"):
        module(inputs()[:, :5], prefill=True)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ({"is_causal": False}, {}, "with is_causal=False tokens see later ones: make it True"),
        ({}, {}, "there is no cache: call init_cache first"),
        (
            {},
            {"document_ids": jnp.zeros((BATCH, 1), jnp.int32)},
            "document_ids is given, but decode=True continues one",
        ),
        ({}, {"query_offset": 3}, "query_offset=3, but decode=True knows the position"),
        ({}, {"inputs_k": jnp.ones((BATCH, 1, WIDTH))}, "inputs_k or inputs_v is given, but decode=True"),
        ({"dropout_rate": 0.1}, {"deterministic": False}, "deterministic=False, but decode=True draws no dropout"),
        ({}, {"prefill": True, "decode": False}, "prefill=True, but decode=False leaves the cache as it is"),
    ],
)
def test_what_means_nothing_in_decoding_is_refused(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments, decode=True)(inputs()[:, :1], **options)


# Sequences of several lengths, and tokens that are taken back.

RAGGED = {
    "windows and segments": {"pattern": (ringjax.Window(5), ringjax.Segments(12), ringjax.Segments(24, 2))},
    "union": {"pattern": (ringjax.Window(3, 4), ringjax.Segments(20, 3)), "merge": "union"},
    "grouped": {"pattern": (ringjax.Window(4), ringjax.Segments(9)), "heads": "grouped"},
}


def of_each(array, starts, count):
    """The next tokens of each sequence, from its own place on."""
    return jnp.stack([row[start : start + count] for row, start in zip(array, starts, strict=True)])


@pytest.mark.quick("grouped-none")
@pytest.mark.parametrize(
    ("pattern", "mesh"), [("windows and segments", "auto"), ("union", "explicit"), ("grouped", "none")]
)
def test_sequences_of_several_lengths(pattern, mesh):
    """Prompts with padding behind them, then steps of each from its own place, in one program for all lengths."""
    module = make(**RAGGED[pattern])
    expected = call(module, inputs())
    stack, shard = enter(MESHES[mesh])
    with stack:
        module.init_cache((BATCH, LENGTH, WIDTH), per_sequence=True)
        for begun in ([5, 16], [11, 0]):
            lengths = np.array(begun, np.int32)
            is_prompt = np.arange(PROMPT) < lengths[:, None]
            prompt = jnp.where(is_prompt[..., None], inputs()[:, :PROMPT], 7.0)
            out = call(module, shard(prompt), decode=True, prefill=True, lengths=lengths)
            np.testing.assert_allclose(out, jnp.where(is_prompt[..., None], expected[:, :PROMPT], 0), rtol=0, atol=1e-5)
            assert not np.asarray(out)[~is_prompt].any()
            for count in (1, 5, 1):
                out = call(module, of_each(inputs(), lengths, count), decode=True)
                np.testing.assert_allclose(out, of_each(expected, lengths, count), rtol=0, atol=1e-5)
                lengths += count
                np.testing.assert_array_equal(module.cache_index.get_value(), lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("per_sequence", "mesh"), [(False, "auto"), (True, "none")])
def test_tokens_that_are_taken_back(per_sequence, mesh):
    """So many as was said are exact; further back it is NaN where rows are lost: the window's row of token 41."""
    module = make(pattern=(ringjax.Window(5), ringjax.Segments(8), ringjax.Segments(10, 2)))
    long = inputs(64)
    expected = call(module, long)
    stack, _ = enter(MESHES[mesh])
    with stack:
        module.init_cache((BATCH, 64, WIDTH), per_sequence=per_sequence, rewind=17)
        call(module, long[:, :40], decode=True)
        length = 40
        for back in (1, 4, 17):
            call(module, -long[:, :back], decode=True)  # tokens that turn out to be wrong
            module.cache_index.set_value(module.cache_index.get_value() - back)
            out = call(module, long[:, length : length + 2], decode=True)
            np.testing.assert_allclose(out, expected[:, length : length + 2], rtol=0, atol=1e-5)
            length += 2
        call(module, -long[:, :18], decode=True)
        module.cache_index.set_value(module.cache_index.get_value() - 19)
        assert np.isnan(call(module, long[:, length - 1 : length], decode=True)).all()


@pytest.mark.parametrize("pattern", [(ringjax.Window(6),), (ringjax.Segments(8),), (ringjax.Segments(9, 3),)], ids=str)
def test_an_index_that_is_set_back_is_never_silently_wrong(pattern):
    """To any token, from any, without rows kept for it: what comes is right, or NaN, and right at a segment's start."""
    module = make(pattern=pattern)
    expected = call(module, inputs())
    right = 0
    for end, back in [(9, 1), (9, 4), (16, 3), (16, 8), (16, 11), (29, 2), (29, 5), (29, 11), (29, 20)]:
        module.init_cache((BATCH, LENGTH, WIDTH))
        call(module, inputs()[:, :end], decode=True)
        module.cache_index.set_value(jnp.int32(end - back))
        out = call(module, inputs()[:, end - back : end - back + 1], decode=True)
        is_right = np.isclose(out, expected[:, end - back : end - back + 1], rtol=0, atol=1e-5)
        assert (is_right | np.isnan(out)).all()
        right += is_right.all()
    assert 0 < right < 9


def test_linen_caches_of_several_lengths():
    arguments = {**RAGGED["windows and segments"], "is_causal": True, "num_kv_heads": 2, "rope_theta": 100.0}
    module = ringjax.linen.RingDilatedAttention(4, **arguments, decode=True, per_sequence=True, rewind=2)
    variables = module.init(jax.random.key(0), inputs())
    expected = ringjax.linen.RingDilatedAttention(4, **arguments).apply({"params": variables["params"]}, inputs())
    lengths = np.array([5, 16], np.int32)
    out, changed = module.apply(variables, inputs()[:, :PROMPT], prefill=True, lengths=lengths, mutable=["cache"])
    np.testing.assert_allclose(out[1], expected[1, :PROMPT], rtol=0, atol=1e-5)
    assert not out[0, 5:].any()
    next_tokens = of_each(inputs(), lengths, 3)
    out, _ = module.apply({**variables, **changed}, next_tokens, mutable=["cache"])
    np.testing.assert_allclose(out, of_each(expected, lengths, 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "arguments", "error", "words"),
    [
        ({}, {"prefill": True, "lengths": np.array([1, 2])}, ValueError, "to a cache of init_cache"),
        (
            {"per_sequence": True},
            {"prefill": True, "lengths": np.array([1])},
            ValueError,
            r"lengths has the shape \(1,\)",
        ),
        ({"per_sequence": True}, {"lengths": np.array([1, 2])}, ValueError, "lengths is given, but prefill=False"),
        ({"per_sequence": True}, {"prefill": True, "lengths": [1, 2]}, TypeError, "lengths is of list"),
        ({"rewind": -1}, {}, ValueError, "rewind=-1 must be the number of tokens"),
        ({"per_sequence": 1}, {}, TypeError, "per_sequence=1 must be True or False"),
    ],
)
def test_wrong_lengths(sizes, arguments, error, words):
    module = make(decode=True)

    def run():
        module.init_cache((BATCH, LENGTH, WIDTH), **sizes)
        module(inputs()[:, :4], **arguments)

    with pytest.raises(error, match=words):
        run()
