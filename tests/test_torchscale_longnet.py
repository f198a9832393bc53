"""torchscale's LongNet: the original's states and outputs with the same weights, decoding, and wrong checkpoints."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from longnet_formula import (
    CASES,
    DILATION_RATES,
    EVERY,
    HEADS,
    LENGTH,
    SEGMENT_LENGTHS,
    VOCABULARY,
    WIDTH,
    normalizes_before,
    parameters,
    tokens,
)
from oracle import make_mesh
from parts.longnet_layers import Arrangement, XPos
from parts.torchscale_longnet import LongNetDecoder, LongNetEncoder

# Made by `python -m benchmarks.peer_outputs longnet FOLDER`, of the original's own code in float64.
RECORDED = np.load(Path(__file__).parent / "data" / "longnet_states.npz")
MODELS = {"encoder": LongNetEncoder, "decoder": LongNetDecoder}


def load(kind, name, **options):
    case = CASES[name]
    arrangement = Arrangement(
        normalizes_before(kind, case),
        case.get("subln", True),
        case.get("deepnorm", False),
        case.get("activation_fn", "gelu"),
    )
    options = {
        "num_heads": HEADS,
        "segment_lengths": case.get("segment_length", SEGMENT_LENGTHS),
        "dilation_rates": case.get("dilated_ratio", DILATION_RATES),
        "scale_embedding": not case.get("no_scale_embedding", True),
        "arrangement": arrangement,
        **options,
    }
    if "xpos_scale_base" in case:
        options["xpos_scale_base"] = case["xpos_scale_base"]
    return MODELS[kind].from_torch(parameters(kind, case), **options)


@nnx.jit(static_argnames=("decode", "prefill"))
def call(model, *inputs, **options):
    return model(*inputs, **options)


@pytest.mark.quick(
    "encoder-as it is", "encoder-norms after", "decoder-deepnorm", "decoder-xpos", "decoder-learned positions"
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", MODELS)
def test_states_and_output_of_the_original(kind, name):
    # One case on a mesh that does not divide the length, the others on one device.
    mesh = make_mesh(seq=8) if name == "xpos" else None
    states, output = call(load(kind, name, mesh=mesh), jnp.asarray(tokens()))
    for found, what in ((jnp.stack(states)[:, :, ::EVERY], "states"), (output[:, ::EVERY], "output")):
        expected = RECORDED[f"{kind}/{name}/{what}"]
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("no norms inside", 1), ("xpos", 8)])
def test_prefill_and_decoding_equal_the_full_forward(name, devices):
    inputs, prompt = jnp.asarray(tokens()), 40
    with jax.set_mesh(make_mesh(seq=devices)):
        model = load("decoder", name)
        _, expected = call(model, inputs)
        model.init_cache(2, LENGTH)
        outputs = [call(model, inputs[:, :prompt], decode=True, prefill=True)[1]]
        for begin, end in ((40, 41), (41, 51), (51, LENGTH)):
            outputs.append(call(model, inputs[:, begin:end], decode=True)[1])
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_tokens_that_are_not_there_change_nothing():
    """Those beyond `num_tokens` of a padded batch."""
    inputs = jnp.asarray(tokens())
    expected = call(load("encoder", "scaled"), inputs[1:, :47])[1][0]
    for kind, devices in ((AxisType.Auto, 1), (AxisType.Explicit, 8)):
        with jax.set_mesh(make_mesh(kind, seq=devices)):
            whole = jax.device_get(call(load("encoder", "scaled"), inputs, jnp.array([LENGTH, 47]))[1])
        np.testing.assert_allclose(whole[1, :47], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_what_is_dropped_does_not_depend_on_the_mesh():
    """Whose padding makes sequences longer."""
    inputs, key = jnp.asarray(tokens()), jax.random.key(3)
    model = load("encoder", "as it is", dropout_rate=0.2, drop_path_rate=0.3)
    alone = call(model, inputs, key=key)[1]
    assert np.abs(alone - call(model, inputs)[1]).max() > 0.1
    with jax.set_mesh(make_mesh(seq=8)):
        np.testing.assert_allclose(call(model, inputs, key=key)[1], alone, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_dtypes():
    sizes = {"segment_lengths": (8, 64), "dilation_rates": (1, 2), "rngs": nnx.Rngs(0)}
    for given, own in ((jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)):
        model = LongNetEncoder(2, WIDTH, HEADS, arrangement=Arrangement(False, False), dtype=own, **sizes)
        states, output = call(model, jnp.ones((1, LENGTH, WIDTH), given))
        assert states[-1].dtype == output.dtype == (own or jnp.float32)


@pytest.mark.slow
def test_new_models():
    """Weights of random numbers: of the size that the arrangement asks for, and with losses that fall."""
    sizes = {"segment_lengths": (8, 64), "dilation_rates": (1, 2), "vocab_size": VOCABULARY}
    kernels = {}
    for deepnorm in (True, False):
        arrangement = Arrangement(subln=False, deepnorm=deepnorm)
        model = LongNetDecoder(3, WIDTH, HEADS, **sizes, arrangement=arrangement, rngs=nnx.Rngs(0))
        kernels[deepnorm] = model.layers.up.kernel.get_value()
    np.testing.assert_allclose(kernels[True], kernels[False] * 24**-0.25, rtol=1e-6)
    model = LongNetDecoder(3, WIDTH, HEADS, **sizes, dropout_rate=0.1, drop_path_rate=0.1, remat=True, rngs=nnx.Rngs(0))
    inputs = jnp.asarray(tokens())

    @nnx.jit
    def step(model, key):
        def loss_of(model):
            logits = jax.nn.log_softmax(model(inputs[:, :-1], key=key)[1])
            return -jnp.take_along_axis(logits, inputs[:, 1:, None], axis=-1).mean()

        loss, gradient = nnx.value_and_grad(loss_of)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda param, grad: param - 0.5 * grad, params, gradient))
        return loss

    losses = [step(model, jax.random.key(number)) for number in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_an_output_without_an_array_of_its_own():
    """As files that keep an array that is shared once have it: the logits are products with the embeddings."""
    arrays = parameters("decoder", CASES["xpos"])
    options = {"num_heads": HEADS, "segment_lengths": (8,), "dilation_rates": (1,)}
    both = {**arrays, "output_projection.weight": arrays["embed_tokens.weight"]}
    once = {name: array for name, array in both.items() if name != "output_projection.weight"}
    tokens = jnp.arange(6).reshape(1, 6)
    _, expected = LongNetDecoder.from_torch(both, **options)(tokens)
    _, actual = LongNetDecoder.from_torch(once, **options, tie=True)(tokens)
    np.testing.assert_array_equal(actual, expected)
    _, none = LongNetDecoder.from_torch(once, **options, project=False)(tokens)
    assert (expected.shape[-1], none.shape[-1]) == (len(arrays["embed_tokens.weight"]), 32)


def test_wrong_checkpoints_and_inputs():
    arrays = parameters("decoder", CASES["xpos"])
    options = {"num_heads": HEADS, "segment_lengths": (8,), "dilation_rates": (1,)}
    for change, words in (
        ({"layers.1.ffn.fc2.bias": None}, "the checkpoint has no layers.1.ffn.fc2.bias"),
        ({"layers.0.encoder_attn.q_proj.bias": np.ones(3)}, "arrays that the model has not: layers.0.encoder_attn"),
        ({"layers.0.ffn.fc2.weight": np.ones((48, 32))}, "has the shape (48, 32), which cannot be made (48, 32)"),
        ({"layers.0.ffn.fc1.weight": None}, "give the state_dict of a LongNet"),
    ):
        changed = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        with pytest.raises(ValueError, match=re.escape(words)):
            LongNetDecoder.from_torch(changed, **options)
    model = LongNetDecoder.from_torch(arrays, **options, xpos_scale_base=1)
    most = XPos.MOST
    with pytest.raises(ValueError, match=f"{most + 1} tokens are too many for xpos_scale_base=1"):
        model.embed(jnp.zeros((1, most + 1), jnp.int32))
    with pytest.raises(ValueError, match="tokens of int32 are given, but vocab_size=None: give embeddings"):
        LongNetEncoder(1, 32, 4, segment_lengths=(8,), dilation_rates=(1,), rngs=nnx.Rngs(0)).embed(
            jnp.zeros((1, 3), jnp.int32)
        )
    learned = load("decoder", "learned positions")
    with pytest.raises(ValueError, match="63 tokens are too many for num_positions=62"):
        learned.init_cache(1, 63)
    with pytest.raises(ValueError, match="prefill=True, but decode=False leaves the cache as it is"):
        learned(jnp.zeros((1, 3), jnp.int32), prefill=True)
    with pytest.raises(ValueError, match="num_heads=2, but xPos of the checkpoint is for 4"):
        LongNetDecoder.from_torch(arrays, **{**options, "num_heads": 2})
    without_output = {name: array for name, array in arrays.items() if name != "output_projection.weight"}
    with pytest.raises(ValueError, match=r"no output_projection.weight: say tie=True .*, project=False if there is no"):
        LongNetDecoder.from_torch(without_output, **options, tie=False)
    for token in (-1, len(arrays["embed_tokens.weight"])):
        with pytest.raises(ValueError, match=f"tokens has {token}, but is to be from 0 to"):
            model.embed(jnp.full((1, 3), token, jnp.int32))
    with pytest.raises(ValueError, match="num_tokens has 4, but is to be from 0 to 3"):
        model.run(jnp.zeros((2, 3, 32)), np.array([4, 1]))
    with pytest.raises(ValueError, match="the checkpoint has no layer_norm.weight: say in arrangement"):
        LongNetDecoder.from_torch(parameters("decoder", CASES["norms after"]), **options)
    with pytest.raises(ValueError, match="drop_path_rate=1.0 must be at least 0 and less than 1"):
        LongNetDecoder(1, 32, 4, segment_lengths=(8,), dilation_rates=(1,), drop_path_rate=1.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="deepnorm=True has no norms inside: make subln False"):
        Arrangement(deepnorm=True)
    with pytest.raises(ValueError, match="activation='tanh' is unknown: use one of 'gelu', 'relu', 'swish'"):
        Arrangement(activation="tanh")
