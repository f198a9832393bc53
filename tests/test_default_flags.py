"""With the flags of XLA that users have, in processes of their own: the other tests compile with flags of theirs."""

import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.environment import ROOT
from benchmarks.random_search import draw, search

# On XLA:CPU, permutes of the backward met those of the forward's ring, and the process aborted or hung.
GRADIENT = """
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ringjax import dilated_attention_reference, ring_dilated_attention

N, K, H, V = 8, 2, 64, 32
swap = lambda array: jnp.swapaxes(array, 0, 1)

for devices in (8, 5):
    T = 32 * devices
    rng = np.random.default_rng(0)
    shapes = (N, T, H), (K, T, H), (K, T, V), (N, T, V)
    *arrays, out_grad = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    pattern = {"segment_lengths": (T, 64), "dilation_rates": (1, 1), "scale": 0.1}

    def gradient(attend, **arguments):
        loss = lambda *arrays: (swap(attend(*map(swap, arrays), **pattern, **arguments)) * out_grad).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2)))

    attend = gradient(ring_dilated_attention, mesh=Mesh(jax.devices()[:devices], ("seq",)))
    expected = gradient(dilated_attention_reference)(*arrays)
    for _ in range(10):
        for one, other in zip(attend(*arrays), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)
"""

# XLA:CPU aborted on sums of bfloat16 over devices beside an axis of the mesh that is the compiler's: where a prompt
# fills a cache, and in the gradient of keys that are the same along a typed axis.
NARROW_SUMS = """
import jax, jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ringjax import RingDilatedAttention, Window, dilated_attention_reference, ring_dilated_attention

draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)
with jax.set_mesh(jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])):
    attention = RingDilatedAttention(2, 8, pattern=[Window(4)], is_causal=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = draw(0, 2, 16, 8)
    expected = attention(x)
    attention.init_cache(x.shape, jnp.bfloat16)
    prompt = attention(x[:, :8], decode=True, prefill=True)
    steps = attention(x[:, 8:], decode=True)
actual = np.concatenate([prompt, steps], axis=1).astype(np.float32)
np.testing.assert_allclose(actual, expected.astype(np.float32), rtol=0, atol=0.03)

mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(*(AxisType.Auto,) * 2, AxisType.Explicit))
arrays = draw(1, 2, 16, 4, 8), draw(2, 2, 16, 1, 8), draw(3, 2, 16, 1, 8)
specs = P(None, None, "tensor"), P(), P()

def gradient(attend, *arrays):
    loss = lambda *arrays: (attend(*arrays, segment_lengths=(16,), dilation_rates=(1,)).astype(jnp.float32) ** 2).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

expected = gradient(dilated_attention_reference, *arrays)
with jax.set_mesh(mesh):
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs)]
    for one, other in zip(gradient(ring_dilated_attention, *placed), expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0.05, atol=0.1)
"""


@pytest.fixture(autouse=True)
def _without_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.quick("narrow sums")
@pytest.mark.parametrize("program", [GRADIENT, NARROW_SUMS], ids=["permutes", "narrow sums"])
def test_programs_on_which_the_cpus_compiler_aborted(program):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_random_cases():
    rng = np.random.default_rng(20)
    largest, failed = search([draw(rng, most_branches=2, data=3) for _ in range(2)])
    assert not failed
    assert largest < 1e-9
