"""Sequences padded once: the numbers of those that are not, and results that stay sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

import ringjax
from ringjax._pattern.warning import warning_anew

LENGTH, WIDTH = 13, 16


def make_module(**more):
    arguments = {"segment_lengths": (4, 16), "dilation_rates": (1, 2), "is_causal": True}
    return ringjax.RingDilatedAttention(2, WIDTH, **arguments, **more, rngs=nnx.Rngs(0))


@pytest.mark.quick("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_padding_changes_no_number_and_keeps_results_sharded(kind):
    module, mesh = make_module(), make_mesh(kind, data=2, seq=4)
    inputs = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH), jnp.float32)
    documents = jnp.arange(LENGTH, dtype=jnp.int32)[None] // jnp.array([[5], [20]], jnp.int32)

    def total(module, inputs, documents):
        out = module(inputs, document_ids=documents)
        return jnp.sin(out).sum(where=documents[..., None] >= 0), out

    both = nnx.jit(nnx.value_and_grad(total, has_aux=True))
    (_, expected), expected_grads = both(module, inputs, documents)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, jax.NamedSharding(mesh, P("data"))) for array in (inputs, documents)]
        (_, out), grads = both(module, *ringjax.pad_to_mesh(*placed))
        assert out.shape == (2, 16, WIDTH)
        assert tuple(out.sharding.spec)[:2] == ("data", "seq")
        cut = ringjax.unpad(out, LENGTH)
    np.testing.assert_allclose(cut, expected, rtol=0, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), grads, expected_grads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_gradient_of_padding_on_a_mesh_that_tokens_carry(kind):
    tokens = jax.device_put(jnp.ones((2, LENGTH, 3)), jax.NamedSharding(make_mesh(kind, seq=2), P()))
    (padded, documents), pull_back = jax.vjp(ringjax.pad_to_mesh, tokens)
    assert padded.shape == (2, LENGTH + 1, 3)
    assert documents.shape == (2, LENGTH + 1)
    grads = pull_back((jnp.full_like(padded, 2), np.zeros(documents.shape, jax.dtypes.float0)))[0]
    np.testing.assert_array_equal(grads, np.full((2, LENGTH, 3), 2))


def test_what_is_padded():
    mesh = make_mesh(seq=8)
    tokens, documents = ringjax.pad_to_mesh(jnp.ones((3, LENGTH), jnp.int32), axis=-1, mesh=mesh)
    assert tokens.shape == documents.shape == (3, 16)
    assert tokens.sharding.spec[1] == documents.sharding.spec[1] == "seq"
    np.testing.assert_array_equal(documents, np.broadcast_to(np.where(np.arange(16) < LENGTH, 0, -1), (3, 16)))
    np.testing.assert_array_equal(tokens, documents + 1)
    traced = jax.jit(lambda x: ringjax.pad_to_mesh(x, mesh=mesh)[0])(jnp.ones((LENGTH, 2)))
    assert traced.sharding.shard_shape(traced.shape) == (2, 2)
    # Without a mesh, or a length that it divides, nothing is added.
    for length, more in ((LENGTH, {}), (16, {"mesh": mesh}), (LENGTH, {"mesh": make_mesh(seq=1)})):
        assert ringjax.pad_to_mesh(jnp.ones((length, 2)), **more)[0].shape == (length, 2)


def test_arrays_of_numpy():
    """As tokens are where they come from."""
    tokens, ids = np.ones((1, LENGTH, 2), np.float32), np.zeros((1, LENGTH), np.int32)
    for mesh in (None, make_mesh(seq=8)):
        padded, documents = ringjax.pad_to_mesh(tokens, ids, mesh=mesh)
        assert documents.shape == padded.shape[:2] == (1, 16 if mesh else LENGTH)
    np.testing.assert_array_equal(ringjax.unpad(np.asarray(padded), LENGTH), tokens)


def test_who_does_not_pad_is_told():
    module = make_module(mesh=make_mesh(seq=8))
    words = "8 devices of 'seq' do not divide .* pad tokens once, .*pad_to_mesh"
    with warning_anew(), pytest.warns(ringjax.MeshWarning, match=words) as caught:
        out = module(jnp.ones((1, LENGTH, WIDTH), jnp.float32))
    assert [warning.filename for warning in caught] == [__file__]
    assert out.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"axis": 1}, ValueError, "axis=1 must be between -3 and -1"),
        ({"axis": -4}, ValueError, "axis=-4 must be between -3 and -1"),
        ({"document_ids": jnp.zeros((1, 12), jnp.int32)}, ValueError, "document_ids has the shape (1, 12)"),
        ({"document_ids": jnp.zeros((1, LENGTH))}, TypeError, "pass an array of integers"),
        ({"document_ids": [[0] * LENGTH]}, TypeError, "document_ids is of list: pass an array"),
        ({"document_ids": np.full((1, LENGTH), 2**40)}, ValueError, "document_ids has numbers from 1099511627776"),
        ({"axis_name": "ring", "mesh": make_mesh(seq=2)}, ValueError, "has no axis axis_name='ring'"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, error, words, unchecked):
    with pytest.raises(error, match=re.escape(words)):
        ringjax.pad_to_mesh(jnp.ones((1, LENGTH, 2)), **arguments)


def test_wrong_lengths_and_places(unchecked):
    with pytest.raises(ValueError, match="length=14 is not between 0 and the 13 tokens"):
        ringjax.unpad(jnp.ones((1, LENGTH, 2)), 14)
    with pytest.raises(TypeError, match="length='a' must be an integer: how many tokens to keep"):
        ringjax.unpad(jnp.ones((1, LENGTH, 2)), "a")
    inside = jax.shard_map(
        lambda x: ringjax.pad_to_mesh(x)[0], mesh=make_mesh(seq=2), in_specs=P("seq"), out_specs=P("seq")
    )
    with pytest.raises(ValueError, match="inside a shard_map over 'seq' sees one shard: call it before"):
        inside(jnp.ones((4, 2)))
