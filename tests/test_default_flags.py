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

T, N, K, H, V = 256, 8, 2, 64, 32
rng = np.random.default_rng(0)
shapes = (N, T, H), (K, T, H), (K, T, V), (N, T, V)
*arrays, out_grad = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
swap = lambda array: jnp.swapaxes(array, 0, 1)

def gradient(attend, **arguments):
    pattern = {"segment_lengths": (T, 64), "dilation_rates": (1, 1), "scale": 0.1, **arguments}
    return jax.jit(jax.grad(lambda *arrays: (swap(attend(*map(swap, arrays), **pattern)) * out_grad).sum(), (0, 1, 2)))

attend = gradient(ring_dilated_attention, mesh=Mesh(jax.devices(), ("seq",)))
expected = gradient(dilated_attention_reference)(*arrays)
for _ in range(10):
    for one, other in zip(attend(*arrays), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)
"""


@pytest.fixture(autouse=True)
def _without_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.quick("8")
@pytest.mark.parametrize("devices", [5, 8])
def test_a_gradient_on_simulated_devices(devices):
    code = GRADIENT if devices == 8 else GRADIENT.replace("T, N, K, H, V = 256", "T, N, K, H, V = 320")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
def test_random_cases():
    rng = np.random.default_rng(20)
    largest, failed = search([draw(rng, most_branches=2, data=3) for _ in range(2)])
    assert not failed
    assert largest < 1e-9
