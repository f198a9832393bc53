"""One of r tokens for each head: kernels for TPUs do what XLA does, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax._kernels.strides import Strides, put
from ringjax._kernels.tpu import strides as tpu_strides
from ringjax._kernels.tpu.strides import TpuStrides

KERNELS, XLA = TpuStrides(interpret=True), Strides()
CASES = [
    pytest.param(512, 2, 8, "float32", id="rows of two blocks"),
    pytest.param(2560, 4, 16, "bfloat16", id="five blocks"),
    pytest.param(384, 3, 192, "float32", id="a width of three parts"),
    pytest.param(4096, 32, 8, "bfloat16", id="the highest rate"),
]


def draw(length, width, dtype, heads=3):
    return jax.random.normal(jax.random.key(length), (2, length, heads, width), dtype)


@pytest.fixture
def grids(monkeypatch):
    """Returns a list of the grids of the kernels that were called."""
    called = []
    blocks = tpu_strides._blocks

    def record(*given, **more):
        found = blocks(*given, **more)
        called.append(found and found.grid)
        return found

    monkeypatch.setattr(tpu_strides, "_blocks", record)
    return called


@pytest.mark.parametrize(("length", "rate", "width", "dtype"), CASES)
@pytest.mark.parametrize("offset", [[1], [0, 1, 1]], ids=["one offset", "an offset each"])
def test_one_of_each(length, rate, width, dtype, offset, grids):
    tokens, offset = draw(length, width, dtype), np.array(offset, np.uint32)
    rows = KERNELS.take(tokens, rate, offset, is_whole=True)
    np.testing.assert_array_equal(rows, XLA.take(tokens, rate, offset, is_whole=True))
    for combine in (put, jnp.add):
        found = KERNELS.put(tokens, 2 * rows, rate, offset, combine)
        np.testing.assert_array_equal(found, XLA.put(tokens, 2 * rows, rate, offset, combine))
    assert None not in grids


@pytest.mark.parametrize(("length", "rate", "width", "dtype"), CASES)
def test_all_sorted(length, rate, width, dtype, grids):
    tokens = draw(length, width, dtype)
    rows = KERNELS.sort(tokens, rate)
    np.testing.assert_array_equal(rows, XLA.sort(tokens, rate))
    for combine in (put, jnp.add):
        found = KERNELS.put_sorted(tokens, 2 * rows, rate, combine)
        np.testing.assert_array_equal(found, XLA.put_sorted(tokens, 2 * rows, rate, combine))
    assert None not in grids


def test_what_is_elsewhere_does_not_matter():
    """Rows that a head does not keep may be no numbers: products with zeros would spread them."""
    tokens = draw(512, 8, "float32").at[:, ::2].set(jnp.nan)
    assert jnp.isfinite(KERNELS.take(tokens, 2, np.ones(1, np.uint32), is_whole=True)).all()
    with_rows = KERNELS.put(tokens, draw(256, 8, "float32"), 2, np.zeros(1, np.uint32), put)
    assert jnp.isfinite(with_rows).all()


def test_offsets_that_only_the_program_knows():
    tokens = draw(512, 8, "float32")
    take = lambda ways, offset: ways.take(tokens, 2, offset, is_whole=True)
    for offset in np.array([[0, 1, 0], [1, 1, 0]], np.uint32):
        found = jax.jit(functools.partial(take, KERNELS))(offset)
        np.testing.assert_array_equal(found, take(XLA, offset))


@pytest.mark.parametrize(
    ("length", "rate", "width"), [(512, 4, 1), (500, 4, 8), (384, 2, 8), (8192, 64, 8), (512, 4, 200)]
)
def test_what_is_no_whole_number_of_blocks_is_left_to_xla(length, rate, width, grids):
    tokens, offset = draw(length, width, "float32"), np.zeros(1, np.uint32)
    rows = KERNELS.take(tokens, rate, offset, is_whole=True)
    np.testing.assert_array_equal(rows, XLA.take(tokens, rate, offset, is_whole=True))
    found = KERNELS.put(tokens, rows, rate, offset, jnp.add)
    np.testing.assert_array_equal(found, XLA.put(tokens, rows, rate, offset, jnp.add))
    everything = KERNELS.sort(tokens, rate)
    np.testing.assert_array_equal(everything, XLA.sort(tokens, rate))
    np.testing.assert_array_equal(KERNELS.put_sorted(tokens, everything, rate, put), tokens)
    assert set(grids) == {None}
