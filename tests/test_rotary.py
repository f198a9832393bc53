"""Rotary embedding: its definition, its precision, scaled frequencies, and what modules do with them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh, tolerance

import ringjax
from ringjax import rope_frequencies, rotary_embedding

# Made by `python -m benchmarks.peer_outputs rope`.
RECORDED = np.load(Path(__file__).parent / "data" / "transformers_rope.npz")
CASES = sorted({key.rpartition("/")[0] for key in RECORDED})


def rotated(array, positions, frequencies, interleaved=False, factor=1.0):
    """What the definition says, one pair after the other: [T, N, H]."""
    out = np.array(array, np.float64)
    count = len(frequencies)
    for token, position in enumerate(positions):
        for i, frequency in enumerate(frequencies):
            pair = [2 * i, 2 * i + 1] if interleaved else [i, i + count]
            cos, sin = (factor * f(float(position) * frequency) for f in (np.cos, np.sin))
            first, second = np.array(array[token, :, pair], np.float64)
            out[token][:, pair] = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_rotated_by_their_angles(interleaved):
    array = np.random.default_rng(0).normal(size=(5, 2, 10))
    positions = np.array([0, 1, 1023, 1024, 1_000_003])
    frequencies = 50.0 ** -np.linspace(0, 1, 4)  # of the first eight dimensions
    out = rotary_embedding(
        jnp.asarray(array), jnp.asarray(positions), frequencies=frequencies, factor=1.5, interleaved=interleaved
    )
    expected = rotated(array, positions, frequencies, interleaved, 1.5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e2 * tolerance())
    np.testing.assert_array_equal(out[..., 8:], array[..., 8:])


def test_a_base_names_its_frequencies():
    array = jax.random.normal(jax.random.key(0), (2, 7, 3, 6))
    of_theta = rotary_embedding(array, jnp.arange(7), theta=50.0)
    frequencies = 50.0 ** (-2 * np.arange(3) / 6)
    np.testing.assert_array_equal(of_theta, rotary_embedding(array, jnp.arange(7), frequencies=frequencies))


def test_positions_of_each_sequence():
    array = jax.random.normal(jax.random.key(0), (2, 7, 3, 6))
    positions = jnp.stack([jnp.arange(7), 5 + 3 * jnp.arange(7)])
    both = rotary_embedding(array, positions, theta=50.0)
    for number in range(2):
        np.testing.assert_array_equal(both[number], rotary_embedding(array[number], positions[number], theta=50.0))


@pytest.mark.parametrize("position", [1023, 2**20 - 1, 2**20, 10_000_019, 2**31 - 2])
def test_angles_are_right_at_every_position(position):
    frequencies = np.array([1.0, 0.7, 1e-3, 3e-7, 2.5])
    array = jnp.concatenate([jnp.ones(5, jnp.float32), jnp.zeros(5, jnp.float32)])[None, None]
    out = rotary_embedding(array, jnp.array([position], jnp.int32), frequencies=frequencies)
    angle = position * frequencies
    np.testing.assert_allclose(out[0, 0], np.concatenate([np.cos(angle), np.sin(angle)]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_of_transformers(case):
    parameters, head_dim, most, length = json.loads(str(RECORDED[f"{case}/arguments"]))
    found = rope_frequencies(parameters, head_dim, length=length, max_position_embeddings=most)
    assert found[0].dtype == np.float64
    np.testing.assert_allclose(found[0], RECORDED[f"{case}/frequencies"], rtol=1e-6)
    assert found[1] == pytest.approx(float(RECORDED[f"{case}/factor"]), rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "su", "rope_theta": 1e4}, "rope_type='su' is unknown: use one of 'default', 'linear'"),
        ({"type": "linear", "rope_theta": 1e4}, "no 'factor', which rope_type='linear' needs"),
        ({"rope_type": "default"}, "no 'rope_theta'"),
        ({"rope_theta": -1.0}, r"rope_parameters\['rope_theta'\]=-1.0 must be a positive number"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.3}, "head_dim=10 leaves 3 dimensions to rotate"),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "no 'original_max_position_embeddings'"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0],
                "original_max_position_embeddings": 8,
                "factor": 2.0,
            },
            "scales to a length: pass length",
        ),
    ],
)
def test_wrong_parameters(parameters, words):
    with pytest.raises(ValueError, match=words):
        rope_frequencies(parameters, 10)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "neither of them is given"),
        ({"theta": 10.0, "frequencies": [1.0]}, ValueError, "both of them is given"),
        ({"frequencies": np.ones(4)}, ValueError, r"frequencies of the shape \(4,\)"),
        ({"theta": 10.0, "positions": np.ones(5)}, TypeError, "positions must be an array of integers"),
        ({"theta": 10.0, "positions": np.arange(4)}, ValueError, r"positions has the shape \(4,\)"),
        ({"theta": 10.0, "factor": "a"}, TypeError, "factor='a' must be a number"),
        ({"theta": 10.0, "interleaved": 1}, TypeError, "interleaved=1 must be True or False"),
    ],
)
def test_wrong_arguments(arguments, error, words, unchecked):
    arguments = {"positions": np.arange(5), **arguments}
    with pytest.raises(error, match=words):
        rotary_embedding(jnp.ones((5, 2, 6)), **arguments)


# The modules.

LENGTH, WIDTH, HEAD = 16, 24, 8
PATTERN = {"segment_lengths": (4, 16), "dilation_rates": (1, 2), "is_causal": True, "num_kv_heads": 2}
FREQUENCIES = np.array([0.9, 0.07, 0.003])


def inputs(seed=0):
    return jax.random.normal(jax.random.key(seed), (2, LENGTH, WIDTH), jnp.float32)


def make(library, **arguments):
    """A function of the inputs and of what a call takes, with the same parameters in both libraries."""
    norm = {"nnx": nnx.RMSNorm, "linen": linen.RMSNorm}
    module = ringjax.RingDilatedAttention(4, WIDTH, **_with_norm(arguments, norm["nnx"]), rngs=nnx.Rngs(0))
    varied = lambda array: array + (0.1 * np.sin(np.arange(array.size))).reshape(array.shape).astype(array.dtype)
    nnx.update(module, jax.tree.map(varied, nnx.state(module, nnx.Param)))
    if library == "nnx":
        return module
    params = {"params": nnx.to_pure_dict(nnx.state(module, nnx.Param))}
    of_linen = ringjax.linen.RingDilatedAttention(4, **_with_norm(arguments, norm["linen"]))
    return functools.partial(of_linen.apply, params)


def _with_norm(arguments, norm):
    return {**arguments, "qk_norm": functools.partial(norm, epsilon=1e-3)} if "qk_norm" in arguments else arguments


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_a_module_of_a_pretrained_model(library):
    """Wide heads, an RMSNorm, scaled frequencies, a scale, and no bias of the output: said again in plain products."""
    options = {"head_dim": HEAD, "rope": (FREQUENCIES, 1.25), "scale": -0.6, "use_out_bias": False, "qk_norm": True}
    apply, module = make(library, **PATTERN, **options), make("nnx", **PATTERN, **options)
    assert module.out.bias is None
    assert (module.qkv_features, module.query.kernel.shape) == (32, (WIDTH, 4, HEAD))

    def projected(name):
        of = getattr(module, name)
        heads = np.einsum("btd,dnh->btnh", inputs(), of.kernel.get_value()) + of.bias.get_value()
        if name == "value":
            return heads
        scale = getattr(module, f"{name}_ln").scale.get_value()
        heads = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-3) * scale
        return np.stack([rotated(one, range(LENGTH), FREQUENCIES, factor=1.25) for one in heads]).astype(np.float32)

    pattern = {name: PATTERN[name] for name in ("segment_lengths", "dilation_rates", "is_causal")}
    arrays = [jnp.asarray(projected(name)) for name in ("query", "key", "value")]
    attended = ringjax.dilated_attention_reference(*arrays, **pattern, scale=-0.6)
    expected = np.einsum("btnh,nhe->bte", attended, module.out.kernel.get_value())
    np.testing.assert_allclose(apply(inputs()), expected, rtol=0, atol=1e-5)
    with jax.set_mesh(make_mesh(seq=8)):
        np.testing.assert_allclose(jax.jit(apply)(inputs()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_positions_of_a_call(library):
    """They change the embedding alone: of each sequence its own, on one device and on a mesh."""
    apply = make(library, **PATTERN, rope_theta=100.0)
    np.testing.assert_array_equal(apply(inputs(), positions=jnp.arange(LENGTH)), apply(inputs()))
    positions = np.stack([7 + np.arange(LENGTH), 3 * np.arange(LENGTH)]).astype(np.int32)
    both = apply(inputs(), positions=positions)
    for number in range(2):
        alone = apply(inputs()[number], positions=positions[number])
        np.testing.assert_allclose(both[number], alone, rtol=0, atol=2e-6)
    np.testing.assert_allclose(both[0], apply(inputs())[0], rtol=0, atol=1e-5)  # angles are relative
    assert not np.allclose(both[1], apply(inputs())[1], atol=1e-3)
    mesh = make_mesh(data=2, seq=4)
    laid_out = [jax.device_put(array, NamedSharding(mesh, P("data", "seq"))) for array in (inputs(), positions)]
    with jax.set_mesh(mesh):
        on_mesh = jax.jit(lambda x, at: apply(x, positions=at))(*laid_out)
    np.testing.assert_allclose(on_mesh, both, rtol=0, atol=2e-6)


def test_positions_of_keys_that_are_others():
    apply = make("nnx", **PATTERN, rope_theta=100.0)
    shifted = np.arange(LENGTH) + 40
    out = apply(inputs(), inputs(1), positions=shifted, key_positions=shifted)
    np.testing.assert_allclose(out, apply(inputs(), inputs(1)), rtol=0, atol=1e-5)
    assert not np.allclose(apply(inputs(), inputs(1), positions=shifted), out, atol=1e-3)


def test_positions_of_three_axes_go_through_ones_own_embedding():
    """As those of images and videos do, [3, B, T]."""
    seen = []

    def embed(heads, positions, is_key):
        seen.append(positions.shape)
        return rotary_embedding(heads, positions.sum(axis=0), theta=100.0)

    own = make("nnx", **PATTERN, position_embedding=embed)
    axes = np.stack([np.arange(LENGTH) + np.zeros((2, 1), int), *np.zeros((2, 2, LENGTH), int)])
    expected = make("nnx", **PATTERN, rope_theta=100.0)(inputs())
    np.testing.assert_allclose(own(inputs(), positions=axes), expected, rtol=0, atol=2e-6)
    assert set(seen) == {(3, 2, LENGTH)}


@pytest.mark.parametrize("prompt", [1, 9])
def test_positions_and_a_scale_while_decoding(prompt):
    attention = make("nnx", **PATTERN, rope=(FREQUENCIES[:2], 1.1), scale=-0.8)
    positions = np.array([[3], [11]]) + np.arange(LENGTH)
    expected = attention(inputs(), positions=positions)
    attention.init_cache(inputs().shape)
    begun = attention(inputs()[:, :prompt], decode=True, prefill=True, positions=positions[:, :prompt])
    steps = [
        attention(inputs()[:, t : t + 1], decode=True, positions=positions[:, t : t + 1]) for t in range(prompt, LENGTH)
    ]
    np.testing.assert_allclose(jnp.concatenate([begun, *steps], axis=1), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"head_dim": 8, "qkv_features": 24}, ValueError, "head_dim=8 of num_heads=4 disagrees with qkv_features=24"),
        ({"rope_theta": 10.0, "rope": (FREQUENCIES, 1.0)}, ValueError, "rope_theta is given beside rope: give either"),
        ({"rope": FREQUENCIES}, TypeError, "must be frequencies and a factor, such as ringjax.rope_frequencies"),
        ({"rope": (np.ones(4), 1.0), "head_dim": 6}, ValueError, r"rope has frequencies of the shape \(4,\)"),
        ({"normalize_qk": True, "qk_norm": nnx.RMSNorm}, ValueError, "qk_norm is given beside normalize_qk=True"),
        ({"use_out_bias": 1}, TypeError, "use_out_bias=1 must be True, False or None"),
        ({"scale": "a"}, TypeError, "scale='a'"),
    ],
)
def test_wrong_options_of_modules(library, arguments, error, words, unchecked):
    of_nnx = functools.partial(ringjax.RingDilatedAttention, in_features=WIDTH, rngs=nnx.Rngs(0))
    module = of_nnx if library == "nnx" else ringjax.linen.RingDilatedAttention
    with pytest.raises(error, match=words):
        module(num_heads=4, **PATTERN, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"positions": np.arange(3)}, ValueError, r"positions has the shape \(3,\)"),
        ({"positions": np.arange(LENGTH), "query_offset": 1}, ValueError, "query_offset=1 is given beside positions"),
        ({"key_positions": np.ones(LENGTH)}, TypeError, "key_positions must be an array of integers"),
    ],
)
def test_wrong_positions(arguments, error, words, unchecked):
    with pytest.raises(error, match=words):
        make("nnx", **PATTERN, rope_theta=100.0)(inputs(), **arguments)
