"""The example of a LongNet: the paper's base configuration at its length, and a small one against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from longnet import LENGTH, LongNet, loss_of, random_bytes, train_step
from oracle import make_mesh
from train_lm import make_mesh as make_mesh_of_example

from ringjax import DilatedPattern

SMALL = {"width": 16, "num_layers": 2, "num_heads": 2, "segment_lengths": (16, 64), "dilation_rates": (1, 4)}


@pytest.mark.slow
def test_a_small_one_is_the_same_on_every_mesh():
    """With blocks that are rematerialised."""
    results = {}
    for size in (1, 8):
        with jax.set_mesh(make_mesh(seq=size)):
            loss, grads = nnx.jit(nnx.value_and_grad(loss_of))(LongNet(**SMALL, rngs=nnx.Rngs(0)), *random_bytes(64))
            results[size] = [loss, *jax.tree.leaves(grads)]
    for one, other in zip(results[1], results[8], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_the_base_configuration():
    model = nnx.eval_shape(lambda: LongNet(rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["blocks"]["attention"]["query"]["kernel"].get_value() == (12, 768, 12, 64)
    assert 84e6 < sum(array.size for array in jax.tree.leaves(params)) < 86e6
    lengths, rates = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12)
    assert model.blocks.attention.settings.pattern == DilatedPattern.of_lengths(lengths, rates)


def test_the_base_configuration_has_a_training_step_at_its_length():
    """In shapes: `examples/longnet.py --base` runs it."""
    with jax.set_mesh(make_mesh_of_example(None)):
        model = nnx.eval_shape(lambda: LongNet(rngs=nnx.Rngs(0)))
        tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        loss, norm = nnx.eval_shape(train_step, model, tokens, tokens)
    assert loss.shape == norm.shape == ()
