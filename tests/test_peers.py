"""The same numbers as others' definitions of windows and sinks, from code that is not ours."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from oracle import make_mesh, random_arguments

from ringjax import RingDilatedAttention, Segments, Window, ring_dilated_attention, rope_frequencies

# Made by `python -m benchmarks.peer_outputs layers`: what the layers of tiny models got and gave.
RECORDED = np.load(Path(__file__).parent / "data" / "transformers_layers.npz")
LAYERS = sorted({key.rpartition("/")[0] for key in RECORDED})
# Made by `python -m benchmarks.peer_outputs attention`: the parameters of layers too, and what the whole of each gives.
PRETRAINED = np.load(Path(__file__).parent / "data" / "transformers_attention.npz")


@pytest.mark.parametrize("layer", LAYERS)
def test_the_attention_layers_of_transformers(layer):
    """Mistral's and Gemma 3's windows, gpt-oss's windows and sinks, and the full layers between."""
    recorded = {kind: RECORDED[f"{layer}/{kind}"] for kind in ("query", "key", "value", "out", "scale", "window")}
    length, window = len(recorded["query"]), int(recorded["window"])
    sinks = RECORDED.get(f"{layer}/sinks")
    if sinks is not None:
        assert np.abs(sinks).max() > 1
    attend = jax.jit(
        lambda *arrays: ring_dilated_attention(
            *arrays,
            pattern=[Window(window) if window else Segments(length)],
            is_causal=True,
            scale=float(recorded["scale"]),
            sinks=sinks,
            mesh=make_mesh(seq=4),
        )
    )
    out = attend(*(recorded[kind][None] for kind in ("query", "key", "value")))
    np.testing.assert_allclose(out[0], recorded["out"], rtol=0, atol=1e-5)


def pretrained(model):
    """The module with the parameters of the first layer of a model."""
    found = {key.partition("/")[2]: PRETRAINED[key] for key in PRETRAINED if key.startswith(f"{model}/")}
    config = json.loads(str(found["config"]))
    features, width = found["inputs"].shape[1], config["head_dim"]
    norm = functools.partial(nnx.RMSNorm, epsilon=1e-6) if "q_norm.weight" in found else None
    module = RingDilatedAttention(
        len(found["q_proj.weight"]) // width,
        features,
        num_kv_heads=len(found["k_proj.weight"]) // width,
        head_dim=width,
        pattern=[Window(config["window"]) if config["window"] else Segments(2**30)],
        is_causal=True,
        scale=config["scale"],
        logits_soft_cap=config["soft_cap"],
        rope=rope_frequencies(config["rope"], width, max_position_embeddings=config["max_position_embeddings"]),
        qk_norm=norm,
        use_bias="q_proj.bias" in found,
        use_out_bias="o_proj.bias" in found,
        sinks="sinks" in found,
        rngs=nnx.Rngs(0),
    )
    for name in "qkv":
        of = {"q": module.query, "k": module.key, "v": module.value}[name]
        of.kernel.set_value(found[f"{name}_proj.weight"].T.reshape(of.kernel.shape))
        if of.bias is not None:
            of.bias.set_value(found[f"{name}_proj.bias"].reshape(of.bias.shape))
    module.out.kernel.set_value(found["o_proj.weight"].T.reshape(module.out.kernel.shape))
    if module.out.bias is not None:
        module.out.bias.set_value(found["o_proj.bias"])
    if norm is not None:  # Gemma's norms multiply with one more than their weight
        module.query_ln.scale.set_value(found["q_norm.weight"] + (model == "gemma3"))
        module.key_ln.scale.set_value(found["k_norm.weight"] + (model == "gemma3"))
    if module.sinks is not None:
        module.sinks.set_value(found["sinks"])
    return module, found["inputs"][None], found["outputs"]


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "gemma2", "gemma3", "gpt-oss"])
def test_the_module_is_the_first_layer_of_pretrained_models(model):
    module, inputs, expected = pretrained(model)
    np.testing.assert_allclose(module(jnp.asarray(inputs))[0], expected, rtol=0, atol=1e-5)
    with jax.set_mesh(make_mesh(seq=4)):
        np.testing.assert_allclose(nnx.jit(lambda module, x: module(x))(module, inputs)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(6, 0), (6, 6)])
def test_the_local_window_of_jax(before, after):
    arrays = [array.astype(np.float32) for array in random_arguments(37, (4, 2), (6, 6))]
    expected = jax.nn.dot_product_attention(*map(jnp.asarray, arrays), local_window_size=(before, after))
    attend = jax.jit(
        lambda *arrays: ring_dilated_attention(
            *arrays, pattern=[Window(before + 1)], is_causal=after == 0, mesh=make_mesh(seq=4)
        )
    )
    np.testing.assert_allclose(attend(*arrays), expected, rtol=0, atol=1e-5)


def test_the_reference_of_splash_attention():
    """With a window, a cap and sinks at once."""
    length, window, cap = 37, 9, 3.0
    query, key, value = (array[0].astype(np.float32) for array in random_arguments(length, (3, 3), (6, 6)))
    sinks = np.array([2.0, -1.0, 0.5], np.float32)
    mask = splash_attention_mask.LocalMask((length, length), (window - 1, 0), 0)[:, :]
    heads = lambda array: jnp.asarray(array).swapaxes(0, 1)
    reference = jax.vmap(
        lambda query, key, value, sink: splash_attention_kernel.attention_reference(
            jnp.asarray(mask), query, key, value, None, sink, attn_logits_soft_cap=cap
        )
    )
    expected = heads(reference(*map(heads, (query, key, value)), jnp.asarray(sinks)))
    attend = jax.jit(
        lambda *arrays: ring_dilated_attention(
            *arrays,
            pattern=[Window(window)],
            is_causal=True,
            scale=1.0,
            logits_soft_cap=cap,
            sinks=sinks,
            mesh=make_mesh(seq=4),
        )
    )
    np.testing.assert_allclose(attend(query, key, value), expected, rtol=0, atol=1e-5)
