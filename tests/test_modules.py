"""The Flax modules: Flax's own parameters and numbers, rotary positions, and sharding."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

import ringjax
from benchmarks.programs import has_dimension
from ringjax import Segments, rotary_embedding

LENGTH, WIDTH = 16, 24
PATTERN = {"segment_lengths": (4, 16), "dilation_rates": (1, 2), "is_causal": True}
KINDS = [AxisType.Auto, AxisType.Explicit]
NORMS = {"nnx": nnx.LayerNorm, "linen": linen.LayerNorm}


def inputs(length=LENGTH, batch=2):
    return jax.random.normal(jax.random.key(0), (batch, length, WIDTH), jnp.float32)


class Functional:
    """One face for both modules: named parameters, and a function of parameters and inputs."""

    def __init__(self, library, **arguments):
        call = {name: arguments.pop(name) for name in ("document_ids", "query_offset") if name in arguments}
        if hasattr(arguments.get("sinks"), "shape"):
            call["sinks"] = arguments.pop("sinks")
        if library == "nnx":
            module = ringjax.RingDilatedAttention(4, WIDTH, **arguments, rngs=nnx.Rngs(0))
            self.definition, self.params = nnx.split(module)
            self.apply = lambda params, *x: nnx.merge(self.definition, params)(*x, **call)
        else:
            module = ringjax.linen.RingDilatedAttention(4, **arguments)
            self.params = module.init(jax.random.key(0), inputs())
            self.apply = lambda params, *x: module.apply(params, *x, **call)


@pytest.mark.parametrize(
    ("features", "num_kv_heads", "normalize_qk"),
    [((None, None), None, False), ((None, None), 2, True), ((32, 20), 2, False), ((32, 20), None, True)],
)
def test_parameters_of_nnx_attention(features, num_kv_heads, normalize_qk):
    shared = {"num_kv_heads": num_kv_heads, "normalize_qk": normalize_qk, "rngs": nnx.Rngs(0)}
    ours = ringjax.RingDilatedAttention(4, WIDTH, *features, segment_lengths=(LENGTH,), dilation_rates=(1,), **shared)
    theirs = nnx.MultiHeadAttention(4, WIDTH, *features, decode=False, **{**shared, "rngs": nnx.Rngs(1)})
    assert not np.allclose(ours(inputs()), theirs(inputs()), atol=1e-3)
    nnx.update(theirs, jax.tree.map(varied, nnx.state(theirs, nnx.Param)))
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    if num_kv_heads is None:  # nnx's own attention function takes as many key/value heads as query heads
        np.testing.assert_allclose(ours(inputs()), theirs(inputs()), rtol=0, atol=2e-6)
    paths = lambda module: {str(path): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert paths(ours) == paths(theirs)


def test_the_seed_of_nnx_gives_the_parameters_of_flax():
    """With dropout too, whose stream is the last that is drawn from."""
    options = {"num_heads": 4, "in_features": WIDTH, "dropout_rate": 0.1}
    ours = ringjax.RingDilatedAttention(**options, **PATTERN, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(**options, decode=False, rngs=nnx.Rngs(0))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(module, nnx.Param) for module in (ours, theirs)))


def varied(array):
    """Parameters that begin as ones or zeros would hide who has which."""
    return array + (0.1 * np.sin(np.arange(array.size))).reshape(array.shape).astype(array.dtype)


@pytest.mark.parametrize(("features", "normalize_qk"), [((None, None), False), ((32, 20), True)])
def test_parameters_of_linen_attention(features, normalize_qk):
    shared = {"normalize_qk": normalize_qk}
    ours = ringjax.linen.RingDilatedAttention(4, *features, segment_lengths=(LENGTH,), dilation_rates=(1,), **shared)
    theirs = linen.MultiHeadDotProductAttention(4, qkv_features=features[0], out_features=features[1], **shared)
    params = jax.tree.map(varied, theirs.init(jax.random.key(1), inputs()))
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), inputs())) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(ours.apply(params, inputs()), theirs.apply(params, inputs()), rtol=0, atol=2e-6)


def test_the_modules_agree():
    arguments = {**PATTERN, "num_kv_heads": 2, "rope_theta": 100.0, "offsets": "blocked", "use_bias": False}
    arguments |= {"sinks": True, "sinks_init": jax.nn.initializers.normal(2.0), "normalize_qk": True}
    one, other = (Functional(library, **arguments, inner_norm=norm) for library, norm in NORMS.items())
    params = {"params": nnx.to_pure_dict(one.params)}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, other.params)
    np.testing.assert_array_equal(one.apply(one.params, inputs()), other.apply(params, inputs()))


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_sinks_of_a_call(library):
    """One for each row and head: those of the function, and of the module where they are the same in all rows."""
    rows = np.sin(np.arange(LENGTH * 4)).reshape(LENGTH, 4).astype(np.float32)
    module = Functional(library, **PATTERN, sinks=rows)
    of_heads = Functional(library, **PATTERN, sinks=rows[3])
    out = module.apply(module.params, inputs())
    np.testing.assert_allclose(out[:, 3], of_heads.apply(module.params, inputs())[:, 3], rtol=0, atol=2e-6)
    assert not np.allclose(out[:, 4], of_heads.apply(module.params, inputs())[:, 4], atol=1e-3)


def test_a_norm_of_all_heads_before_the_output():
    norm = functools.partial(nnx.LayerNorm, epsilon=1e-2)
    module = ringjax.RingDilatedAttention(4, WIDTH, 32, **PATTERN, inner_norm=norm, rngs=nnx.Rngs(0))
    plain = ringjax.RingDilatedAttention(4, WIDTH, 32, **PATTERN, rngs=nnx.Rngs(0))
    plain.out = lambda attended, **_: attended
    module.inner_norm.scale[...], module.inner_norm.bias[...] = (
        varied(jnp.ones(32, jnp.float32)),
        varied(jnp.zeros(32, jnp.float32)),
    )
    attended = plain(inputs()).reshape(*inputs().shape[:2], 32)
    centred = attended - attended.mean(axis=-1, keepdims=True)
    expected = centred / jnp.sqrt(centred.var(axis=-1, keepdims=True) + 1e-2)
    expected = expected * module.inner_norm.scale[...] + module.inner_norm.bias[...]
    expected = module.out(expected.reshape(*attended.shape[:2], 4, 8))
    np.testing.assert_allclose(module(inputs()), expected, rtol=0, atol=2e-6)


def test_a_sink_takes_its_share():
    """One so large that it takes all weight leaves the bias of the outputs."""
    module = ringjax.RingDilatedAttention(4, WIDTH, **PATTERN, sinks=True, rngs=nnx.Rngs(0))
    plain = ringjax.RingDilatedAttention(4, WIDTH, **PATTERN, rngs=nnx.Rngs(0))
    assert module.sinks[...].shape == (4,)
    assert not np.allclose(module(inputs()), plain(inputs()), atol=1e-3)
    module.sinks[...] = jnp.full(4, -jnp.inf)
    np.testing.assert_allclose(module(inputs()), plain(inputs()), rtol=0, atol=1e-6)
    module.sinks[...] = jnp.full(4, 1e4)
    np.testing.assert_allclose(module(inputs()), jnp.broadcast_to(module.out.bias[...], inputs().shape), atol=1e-6)


def test_a_pattern_in_place_of_lists():
    """In functions, modules and Flax's slot."""
    lists = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "merge": "union", "offsets": "blocked"}
    branches = [ringjax.Segments(8), ringjax.Segments(32, rate=4)]
    pattern = ringjax.DilatedPattern(branches, merge="union", offsets="blocked")
    forms = lists, {"pattern": pattern}, {"pattern": branches, "merge": "union", "offsets": "blocked"}
    heads = inputs().reshape(2, -1, 4, WIDTH // 4)

    def results(**form):
        yield ringjax.ring_dilated_attention(heads, heads, heads, **form)
        yield ringjax.dilated_attention_reference(heads, heads, heads, **form)
        yield ringjax.RingDilatedAttention(4, WIDTH, **form, rngs=nnx.Rngs(0))(inputs())
        yield ringjax.linen.RingDilatedAttention(4, **form).init_with_output(jax.random.key(0), inputs())[0]
        slot = ringjax.attention_fn(**form)
        yield nnx.MultiHeadAttention(4, WIDTH, attention_fn=slot, decode=False, rngs=nnx.Rngs(0))(inputs())

    expected, *others = (list(results(**form)) for form in forms)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, expected)


# Each library meets both kinds of mesh, in this test or in the one of what is gathered.
@pytest.mark.quick("linen-AxisType.Explicit")
@pytest.mark.parametrize(("library", "kind"), [("nnx", AxisType.Auto), ("linen", AxisType.Explicit)], ids=str)
def test_on_a_mesh_with_a_tensor_axis(library, kind):
    arguments = {**PATTERN, "num_kv_heads": 2, "rope_theta": 100.0, "use_bias": False, "normalize_qk": True}
    module = Functional(library, **arguments, sinks=True, inner_norm=NORMS[library])

    @jax.jit
    def results(params, x):
        def objective(params, x):
            out = module.apply(params, x)
            return jnp.sin(out).sum(), out

        return jax.grad(objective, (0, 1), has_aux=True)(params, x)

    expected_grads, expected = results(module.params, inputs())
    mesh = make_mesh(kind, data=2, seq=2, tensor=2)

    def place(path, array):
        heads = {3: (None, "tensor", None), 1: ()}[array.ndim]
        heads = ("tensor", None, None) if "'out'" in jax.tree_util.keystr(path) else heads
        return jax.device_put(array, NamedSharding(mesh, P(*heads)))

    params = jax.tree_util.tree_map_with_path(place, module.params)
    x = jax.device_put(inputs(), NamedSharding(mesh, P("data", "seq")))
    with jax.set_mesh(mesh):
        grads, out = results(params, x)
        assert tuple(out.sharding.spec)[:2] == ("data", "seq")
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-5), grads, expected_grads)
        # Inputs of one token, as they come when parameters are initialised, are not sharded along the sequence.
        out = jax.jit(module.apply)(params, inputs(length=1))
        assert out.shape == (2, 1, WIDTH)
        assert np.isfinite(out).all()


@pytest.mark.quick("AxisType.Auto")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_initialisation_under_a_mesh(kind):
    with jax.set_mesh(make_mesh(kind, seq=4)):
        module = ringjax.linen.RingDilatedAttention(4, **PATTERN, rope_theta=100.0)
        params = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 1, WIDTH)))
        expected = module.init(jax.random.key(0), jnp.ones((1, LENGTH, WIDTH)))
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)


@pytest.mark.quick("linen-AxisType.Auto")
@pytest.mark.parametrize(("library", "kind"), [("nnx", AxisType.Explicit), ("linen", AxisType.Auto)], ids=str)
def test_nothing_of_the_whole_length_is_gathered(library, kind):
    length = 8 * 37
    module = Functional(library, **PATTERN, rope_theta=100.0)
    mesh = make_mesh(kind, seq=8)
    params = jax.device_put(module.params, NamedSharding(mesh, P()))
    x = jax.device_put(inputs(length), NamedSharding(mesh, P(None, "seq")))
    with jax.set_mesh(mesh):
        objective = lambda params, x: jnp.sin(module.apply(params, x)).sum()
        text = jax.jit(jax.grad(objective)).lower(params, x).compile().as_text()
    assert "all-gather" not in text
    assert has_dimension(text, 37)
    assert not has_dimension(text, length)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_an_embedding_of_positions_of_ones_own(library):
    """It gets the global positions on a mesh, and knows queries from keys."""
    seen = []

    def embed(heads, positions, is_key):
        seen.append((heads.shape, positions.shape, is_key))
        return rotary_embedding(heads, positions, theta=100.0)

    arguments = {**PATTERN, "num_kv_heads": 2}
    expected = Functional(library, **arguments, rope_theta=100.0)
    found = Functional(library, **arguments, position_embedding=embed)
    x = inputs()
    with jax.set_mesh(make_mesh(seq=4)):
        results = [module.apply(module.params, x) for module in (expected, found)]
    np.testing.assert_array_equal(*results)
    shapes = {((2, LENGTH, 4, WIDTH // 4), (LENGTH,), False), ((2, LENGTH, 2, WIDTH // 4), (LENGTH,), True)}
    assert set(seen) >= shapes
    wrong = {**arguments, "position_embedding": lambda heads, *_: heads[..., :2]}
    with pytest.raises(ValueError, match="let it return heads of that shape"):
        Functional(library, **wrong).apply(found.params, x)


@pytest.mark.parametrize("axes", [("seq",), ("data", "seq")], ids="-".join)
def test_positions_are_global_inside_a_shard_map(axes):
    module = Functional("linen", **PATTERN, rope_theta=100.0)
    mesh = make_mesh(data=2, seq=4)
    spec = P(*(name if name in axes else None for name in ("data", "seq")))
    mapped = jax.shard_map(module.apply, mesh=mesh, in_specs=(P(), spec), out_specs=spec, axis_names=set(axes))
    out = jax.jit(mapped)(module.params, inputs())
    np.testing.assert_allclose(out, module.apply(module.params, inputs()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_eager_transformations_on_a_mesh_that_arrays_carry(kind):
    """There positions have to be where the traced tokens are, which nothing but these tells."""
    module, mesh = Functional("nnx", **PATTERN, rope_theta=100.0), make_mesh(kind, seq=4)
    expected = module.apply(module.params, inputs())
    params = jax.device_put(module.params, NamedSharding(mesh, P()))
    tokens = jax.device_put(inputs(), NamedSharding(mesh, P(None, "seq")))
    out, pull_back = jax.vjp(lambda tokens: module.apply(params, tokens), tokens)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    grads = jax.grad(lambda tokens: module.apply(module.params, tokens).sum())(inputs())
    np.testing.assert_allclose(pull_back(jnp.ones_like(out))[0], grads, rtol=0, atol=2e-5)
    module = Functional("nnx", **PATTERN, rope_theta=100.0, mesh=mesh)  # and where the arrays are on no mesh
    np.testing.assert_allclose(module.apply(module.params, inputs()), expected, rtol=0, atol=2e-6)


def test_dtypes():
    module = Functional("nnx", **PATTERN, dtype=jnp.bfloat16)
    assert module.apply(module.params, inputs()).dtype == jnp.bfloat16
    assert all(array.dtype == jnp.float32 for array in jax.tree.leaves(module.params))
    module = Functional("linen", **PATTERN, param_dtype=jnp.bfloat16)
    assert all(array.dtype == jnp.bfloat16 for array in jax.tree.leaves(module.params))
    assert module.apply(module.params, inputs()).dtype == jnp.float32


def packed(length=LENGTH):
    """Two documents and some padding."""
    documents = jnp.where(jnp.arange(length) < length // 3, 0, 1).at[-3:].set(-1).astype(jnp.int32)
    return jnp.broadcast_to(documents, (2, length))


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_documents_are_computed_apart(library):
    """Each document by itself gives the same, where segments do not cut it and positions do not count."""
    arguments = {"segment_lengths": (LENGTH,), "dilation_rates": (1,), "is_causal": True}
    together = Functional(library, document_ids=packed(), **arguments)
    apart = Functional(library, **arguments)
    out = together.apply(together.params, inputs())
    first = LENGTH // 3
    for tokens in (slice(0, first), slice(first, LENGTH - 3)):
        np.testing.assert_allclose(out[:, tokens], apart.apply(together.params, inputs()[:, tokens]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_cross_attention(library):
    """With one dense branch, what Flax computes of other inputs; queries further on with the rest of the sequence."""
    other = inputs(length=11)
    arguments = {"segment_lengths": (64,), "dilation_rates": (1,)}
    module = Functional(library, **arguments)
    if library == "nnx":
        theirs = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
        nnx.update(theirs, module.params)
        expected = theirs(inputs(), other)
    else:
        expected = linen.MultiHeadDotProductAttention(4).apply(module.params, inputs(), other)
    np.testing.assert_allclose(module.apply(module.params, inputs(), other), expected, rtol=0, atol=2e-6)
    causal = Functional(library, **PATTERN, rope_theta=100.0)
    last = Functional(library, **PATTERN, rope_theta=100.0, query_offset=LENGTH - 5)
    actual = last.apply(causal.params, inputs()[:, -5:], inputs())
    np.testing.assert_allclose(actual, causal.apply(causal.params, inputs())[:, -5:], rtol=0, atol=2e-6)


def test_dropout_of_nnx():
    module = ringjax.RingDilatedAttention(4, WIDTH, **PATTERN, dropout_rate=0.5, rngs=nnx.Rngs(0, dropout=1))
    with pytest.raises(ValueError, match="dropout_rate=0.5, but deterministic=None: say to the module or to the call"):
        module(inputs())
    plain = module(inputs(), deterministic=True)
    one, other = (module(inputs(), deterministic=False) for _ in range(2))
    assert not np.allclose(one, other)
    assert not np.allclose(one, plain)
    again = [module(inputs(), deterministic=False, rngs=nnx.Rngs(dropout=3)) for _ in range(2)]
    np.testing.assert_array_equal(*again)
    mesh = make_mesh(seq=4)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(inputs(), NamedSharding(mesh, P(None, "seq")))
        on_mesh = module(sharded, deterministic=False, rngs=nnx.Rngs(dropout=3))
    np.testing.assert_allclose(on_mesh, again[0], rtol=0, atol=2e-6)
    module.set_attributes(deterministic=True)
    np.testing.assert_array_equal(module(inputs()), plain)


def test_dropout_of_linen():
    module = ringjax.linen.RingDilatedAttention(4, **PATTERN, dropout_rate=0.5)
    params = module.init(jax.random.key(0), inputs(), deterministic=True)
    one, again, other = (
        module.apply(params, inputs(), deterministic=False, rngs={"dropout": jax.random.key(seed)})
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


# Flax's own modules, with this attention in their slot.


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_the_slot_of_nnx(num_kv_heads):
    options = {**PATTERN, "offsets": "blocked", "merge": "union"}
    ours = ringjax.RingDilatedAttention(4, WIDTH, **options, num_kv_heads=num_kv_heads, rngs=nnx.Rngs(0))
    attend = ringjax.attention_fn(**options)
    theirs = nnx.MultiHeadAttention(
        4, WIDTH, attention_fn=attend, num_kv_heads=num_kv_heads, decode=False, rngs=nnx.Rngs(0)
    )
    nnx.update(theirs, nnx.state(ours, nnx.Param))
    np.testing.assert_array_equal(theirs(inputs()), ours(inputs()))


@pytest.mark.parametrize("form", [{"pattern": [Segments(16)]}, {"segment_lengths": [16], "dilation_rates": [1]}])
def test_linen_modules_are_static_arguments(form):
    """A list in one hinders neither its hash, nor that two of the same are one."""
    one, other = (ringjax.linen.RingDilatedAttention(4, **form) for _ in range(2))
    assert hash(one) == hash(other)
    assert one == other


def test_linen_modules_are_tabulated():
    """What a module's own methods return is no warning."""
    module = ringjax.linen.RingDilatedAttention(4, pattern=[Segments(16)])
    assert "query" in module.tabulate(jax.random.key(0), inputs())


def test_the_slot_of_linen():
    module = linen.MultiHeadDotProductAttention(4, attention_fn=ringjax.attention_fn(**PATTERN))
    ours = ringjax.linen.RingDilatedAttention(4, **PATTERN)
    params = ours.init(jax.random.key(0), inputs())
    np.testing.assert_array_equal(module.apply(params, inputs()), ours.apply(params, inputs()))


@pytest.mark.parametrize("broadcast_dropout", [True, False])
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_dropout_in_the_slots(library, broadcast_dropout):
    attend = ringjax.attention_fn(segment_lengths=(LENGTH,), dilation_rates=(1,))
    shared = {"attention_fn": attend, "dropout_rate": 0.5, "broadcast_dropout": broadcast_dropout}
    same = jnp.broadcast_to(inputs()[:1], inputs().shape)  # two batches of the same numbers
    if library == "nnx":
        module = nnx.MultiHeadAttention(4, WIDTH, **shared, decode=False, rngs=nnx.Rngs(0))
        out = module(same, deterministic=False)
        plain = module(same, deterministic=True)
    else:
        module = linen.MultiHeadDotProductAttention(4, **shared)
        params = module.init(jax.random.key(0), same, deterministic=True)
        out = module.apply(params, same, deterministic=False, rngs={"dropout": jax.random.key(1)})
        plain = module.apply(params, same, deterministic=True)
    assert not np.allclose(out, plain)
    assert np.array_equal(out[0], out[1]) == broadcast_dropout


def test_the_slots_refuse_what_they_cannot_honour(unchecked):
    attend = ringjax.attention_fn(**PATTERN)
    module = nnx.MultiHeadAttention(4, WIDTH, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
    mask = jnp.ones((2, 1, LENGTH, LENGTH), bool)
    with pytest.raises(
        ValueError, match="mask is given to ringjax's attention_fn, which cannot honour it: say is_causal"
    ):
        module(inputs(), mask=mask)
    with pytest.raises(ValueError, match="module is given .* leave sow_weights out"):
        module(inputs(), sow_weights=True)
    flax_linen = linen.MultiHeadDotProductAttention(4, attention_fn=attend)
    params = flax_linen.init(jax.random.key(0), inputs())
    with pytest.raises(ValueError, match="mask is given"):
        flax_linen.apply(params, inputs(), mask=mask)
    with pytest.raises(ValueError, match="module is given"):
        flax_linen.apply(params, inputs(), sow_weights=True)
    decoding = linen.MultiHeadDotProductAttention(4, attention_fn=attend, decode=True)
    variables = decoding.init(jax.random.key(0), inputs())
    with pytest.raises(ValueError, match="under decode=True, take .* ringjax.linen.RingDilatedAttention"):
        decoding.apply(variables, inputs()[:, :1], mutable=["cache"])
    heads = jnp.ones((1, 4, 2, 3))
    with pytest.raises(ValueError, match="bias is given"):
        attend(heads, heads, heads, bias=jnp.zeros((1, 2, 4, 4)))
    with pytest.raises(TypeError, match="attention_fn has no argument 'rates': it takes axis_name"):
        ringjax.attention_fn(**PATTERN, rates=(1,))
    with pytest.raises(ValueError, match="merge='sum' is unknown: use one of 'lse', 'union'"):
        ringjax.attention_fn(**PATTERN, merge="sum")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"qkv_features": 30}, "qkv_features=30 does not divide over num_heads=4"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be a positive integer"),
        ({"qkv_features": 20, "rope_theta": 100.0}, "a head has the odd width 5"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 must be positive"),
        ({"rope_theta": 100.0, "position_embedding": rotary_embedding}, "given beside position_embedding: give either"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0 must be in [0, 1)"),
        ({"heads": "grouped", "num_kv_heads": 1}, "heads='grouped' deals 1 key/value heads out over 2 branches"),
        ({"dilation_rates": (1, 32)}, "rate 32 above its segment length 16"),
    ],
)
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_wrong_arguments(library, arguments, words, unchecked):
    with pytest.raises(ValueError, match=".") as caught:
        Functional(library, **{**PATTERN, **arguments})
    assert words in str(caught.value)


def test_slots_of_the_same_options_are_equal():
    """Then Flax traces modules with them once, and can pickle them."""
    make = lambda **more: ringjax.attention_fn(**{**PATTERN, **more})
    assert make() == make() == pickle.loads(pickle.dumps(make()))
    assert hash(make()) == hash(make())
    assert make() != make(is_causal=False)
    assert make() != make(strategy="all_gather")
    with_arrays = make(sinks=np.ones(4, np.float32))
    assert with_arrays in {with_arrays}
    assert with_arrays != make(sinks=np.ones(4, np.float32))


def test_attributes_are_those_of_flax():
    arguments = {"param_dtype": jnp.bfloat16, "use_bias": False, "normalize_qk": True}
    ours = ringjax.RingDilatedAttention(4, WIDTH, **PATTERN, **arguments, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, WIDTH, **arguments, decode=False, rngs=nnx.Rngs(0))
    for name in ("num_heads", "head_dim", "qkv_features", "dtype", *arguments):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.is_causal == PATTERN["is_causal"]
