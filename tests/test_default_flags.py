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


@pytest.fixture(autouse=True)
def _without_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_a_gradient_on_simulated_devices():
    """On all eight, and on five of them."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", GRADIENT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
def test_random_cases():
    rng = np.random.default_rng(20)
    largest, failed = search([draw(rng, most_branches=2, data=3) for _ in range(2)])
    assert not failed
    assert largest < 1e-9
