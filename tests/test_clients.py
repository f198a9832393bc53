"""The adapter for a model of one's own; those for other libraries run by `python -m benchmarks.clients`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

from ringjax import Segments, Window, dilated_attention_reference, rotary_embedding

sys.path.append(str(Path(__file__).parent / "clients"))

from own_ring import Attention

PATTERN = [Window(9), Segments(64, rate=2)]


def test_an_attention_of_ones_own():
    """Over a ring as the definition has it, and the same token by token, for sequences of several lengths."""
    mesh, spec = make_mesh(data=2, seq=4), P("data", "seq")
    model = Attention(32, 4, 2, PATTERN, spec, nnx.Rngs(0))
    states = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 32)), jnp.float32)
    positions = jnp.arange(64)
    call = nnx.jit(lambda model, *arguments: model(*arguments))
    with jax.set_mesh(mesh):
        found, _ = call(model, jax.device_put(states, NamedSharding(mesh, spec)), positions)
    heads = [rotary_embedding(linear(states), positions, theta=10_000.0) for linear in (model.query, model.key)]
    attended = dilated_attention_reference(*heads, model.value(states), pattern=PATTERN, is_causal=True)
    np.testing.assert_allclose(found, model.out(attended.astype(jnp.float32)), rtol=0, atol=1e-5)

    # The first sequence has 20 tokens and the second 33 when the next ones come, five at a time.
    lengths, sharding = np.array([20, 33]), NamedSharding(mesh, spec)
    cache = {"keys": heads[1], "values": model.value(states)}
    is_there = np.arange(64) < lengths[:, None]
    put = lambda array: jax.device_put(jnp.where(is_there[..., None, None], array, 0), sharding)
    cache = {name: put(array) for name, array in cache.items()}
    cache["lengths"] = jnp.asarray(lengths)
    with jax.set_mesh(mesh):
        for _ in range(2):
            places = lengths[:, None] + np.arange(5)
            new = states[np.arange(2)[:, None], places]
            out, cache = call(model, new, jnp.asarray(places), cache)
            np.testing.assert_allclose(out, found[np.arange(2)[:, None], places], rtol=0, atol=1e-5)
            lengths = lengths + 5
