"""Prov-GigaPath's slide encoder: the states of the original with the same weights, on any number of devices."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gigapath_formula import CASES, inputs, parameters
from jax.sharding import AxisType
from oracle import make_mesh
from parts.longnet_layers import phantoms
from parts.slide_encoder import SlideEncoder, segment_lengths_of

# Made by `python -m benchmarks.peer_outputs gigapath FOLDER`, of the original's own code in float64.
RECORDED = np.load(Path(__file__).parent / "data" / "gigapath_states.npz")
SIZES = {"depth": 3, "width": 64, "in_chans": 24}


@functools.cache
def load(name, dtype=jnp.float32, **options):
    case = CASES[name]
    arrays = parameters(case["depth"], case["width"], case["in_chans"])
    shared = {"segment_lengths": case["segment_lengths"], "global_pool": case["global_pool"], "param_dtype": dtype}
    return SlideEncoder.from_torch(arrays, **shared, **options)


def encode(encoder, name, dtype=jnp.float32):
    arrays = (jnp.asarray(array, dtype) for array in inputs(CASES[name]["length"], CASES[name]["in_chans"]))
    return jax.device_get(nnx.jit(lambda encoder, *arrays: encoder(*arrays))(encoder, *arrays))


@pytest.mark.quick("61 tiles-1-None-float64", "61 tiles-8-AxisType.Explicit-float32")
@pytest.mark.parametrize(
    ("name", "devices", "kind", "dtype"),
    [
        ("61 tiles", 1, None, "float64"),
        ("61 tiles", 8, AxisType.Explicit, "float32"),
        ("197 tiles", 5, AxisType.Auto, "float32"),
        ("1068 tiles", 8, AxisType.Auto, "float32"),
        ("10000 tiles", 8, AxisType.Auto, "float32"),
    ],
)
def test_states_and_output_of_the_original(name, devices, kind, dtype):
    mesh = make_mesh(kind, seq=devices) if devices > 1 else None
    states, output = encode(load(name, jnp.dtype(dtype), mesh=mesh), name, dtype)
    expected = RECORDED[f"{name}/states"]
    assert np.abs(expected).max() > 8
    tolerance = 1e-5 if dtype == "float64" else 2e-4
    states = np.stack(states)
    assert states.shape == (CASES[name]["depth"] + 1, 1, CASES[name]["length"] + 1, 64)
    np.testing.assert_allclose(states[:, 0, :: CASES[name]["every"]], expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(output[0], RECORDED[f"{name}/pooled"], rtol=0, atol=tolerance)


@pytest.mark.slow
def test_phantoms_count_where_segments_are_not_full():
    """They change what the weights were trained with; a slide that fills all its segments has none."""
    trained, without = (encode(load("61 tiles", padding=padding), "61 tiles") for padding in ("torchscale", "none"))
    assert np.abs(trained[0][-1] - without[0][-1]).max() > 0.01
    count = lambda length: np.exp(np.asarray(phantoms(jnp.arange(length), length, 4, (4, 64), (1, 4)), np.float64))
    np.testing.assert_array_equal(count(64), np.zeros((64, 4)))
    # Of 61 tokens in segments of 4 the last has one, and so has the head of tokens 3, 7, ... to 59 of the other branch,
    # whose next is 63, and those of 1 and 2.
    expected = np.zeros((61, 4))
    expected[60] = 3
    for head in (1, 2, 3):
        expected[head::4, head] = 1
    np.testing.assert_allclose(count(61), expected, rtol=1e-6)


def test_segment_lengths_of_slides():
    assert segment_lengths_of(262144, 256) == (1024, 5792, 32768, 185363, 1048576)


def test_wrong_checkpoints():
    arrays = parameters(**SIZES)
    for change, words in (
        ({"norm.bias": None}, "the checkpoint has no norm.bias"),
        ({"head.weight": np.ones(3)}, "arrays that the model has not: head.weight"),
        (
            {"encoder.layers.1.ffn.fc2.bias": np.ones(7)},
            "encoder.layers.1.ffn.fc2.bias of the checkpoint has the shape (7,)",
        ),
        ({"patch_embed.proj.weight": None}, "the checkpoint has no patch_embed.proj.weight: give the slide encoder's"),
    ):
        changed = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        with pytest.raises(ValueError, match=re.escape(words)):
            SlideEncoder.from_torch(changed)
    with pytest.raises(ValueError, match="padding='same' is unknown: use 'torchscale' or 'none'"):
        SlideEncoder.from_torch(arrays, padding="same")
