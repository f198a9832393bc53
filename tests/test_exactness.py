"""Values and gradients of the ring against the dense oracle, in float64, over a table of patterns and meshes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from oracle import assert_close, make_mesh, random_arguments, random_documents, reference_results, ring_results

from ringjax import Segments, ring_dilated_attention
from ringjax._kernels.strides import put_selected, put_slices, take_selected, take_slices, take_vectors
from ringjax._kernels.xla import Xla

# Lengths, segment lengths and rates: local, rings, sub-rings of unequal size, straddling, short, longer than all.
PATTERNS = {
    "dense": (32, (32,), (1,)),
    "local": (32, (4, 2), (1, 2)),
    "longnet": (32, (4, 8, 32), (1, 2, 4)),
    "rates that do not divide": (32, (8, 32), (3, 5)),
    "unequal rings": (48, (18, 12), (1, 2)),
    "straddling": (40, (7, 15), (2, 1)),
    "short last segment": (37, (10, 1000), (1, 3)),
    "uncovered rows": (32, (8, 16), (2, 4)),
    "padding in the segment": (7, (7,), (2,)),
}
HEADS = {"one": (1, 1), "grouped": (4, 2), "multi-query": (3, 1), "many": (5, 5)}


class Case(NamedTuple):
    """A pattern on devices: the heads by name, and what the loss uses of the results."""

    pattern: str
    devices: int
    is_causal: bool
    heads: str
    uses: str
    batch: tuple[int, ...] = (2,)
    kind: AxisType = AxisType.Auto
    offsets: str = "interleaved"


# Programs that differ in code: all patterns on eight devices, the loops of each size of ring, which a ring of two does
# not have, and balanced rings beside those that are not. What all sizes compute, and with which masks, is held in
# integers, by the tests of the schedule. A loss of all results asks for more than one of the output alone, and the
# other way round.
CASES = {
    "causal dense": Case("dense", 8, True, "one", "lse"),
    "dense": Case("dense", 8, False, "many", "out", (2,), AxisType.Explicit, "blocked"),
    "local": Case("local", 8, False, "one", "lse", (), offsets="blocked"),
    "local on one device": Case("local", 1, True, "multi-query", "both", (), offsets="blocked"),
    "causal longnet": Case("longnet", 8, True, "multi-query", "out", (1, 2), offsets="blocked"),
    "longnet": Case("longnet", 8, False, "grouped", "both", (1, 2), AxisType.Explicit),
    "longnet on two devices": Case("longnet", 2, True, "grouped", "lse"),
    "rates that do not divide": Case("rates that do not divide", 8, False, "multi-query", "out"),
    "unequal rings": Case("unequal rings", 8, True, "one", "both", ()),
    "unequal rings of four": Case("unequal rings", 4, True, "multi-query", "lse", (2,), AxisType.Explicit),
    "straddling": Case("straddling", 8, False, "one", "both", (1, 2), offsets="blocked"),
    "straddling on one device": Case("straddling", 1, True, "multi-query", "out", (1, 2), offsets="blocked"),
    "short last segment": Case("short last segment", 8, True, "multi-query", "lse", (2,), offsets="blocked"),
    "uncovered rows": Case("uncovered rows", 8, False, "multi-query", "lse", ()),
    "padding in the segment": Case("padding in the segment", 8, True, "one", "out", (1, 2)),
}


@pytest.mark.quick("causal dense", "local", "causal longnet", "straddling", "straddling on one device")
@pytest.mark.parametrize("name", CASES)
def test_ring_equals_oracle(name):
    case = CASES[name]
    length, segment_lengths, dilation_rates = PATTERNS[case.pattern]
    arguments = {
        "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
        "is_causal": case.is_causal,
        "offsets": case.offsets,
        "uses": case.uses,
    }
    arrays = random_arguments(length, HEADS[case.heads], batch=case.batch)
    mesh = None if case.devices == 1 else make_mesh(case.kind, seq=case.devices)
    assert_close(ring_results(arrays, mesh=mesh, **arguments), reference_results(arrays, **arguments))


@pytest.mark.quick("1-True")
@pytest.mark.parametrize(("ring_size", "is_causal"), [(1, True), (4, False)])
def test_many_blocks_equal_the_oracle(ring_size, is_causal):
    """With several blocks to a chunk, and chunks side by side in a tile, some tiles whole, cut and left out."""
    arguments = {"segment_lengths": (4, 23, 92), "dilation_rates": (1, 1, 2), "is_causal": is_causal}
    arrays = random_arguments(92, (2, 1))
    actual = ring_results(arrays, mesh=make_mesh(seq=ring_size), block_size=12, **arguments)
    assert_close(actual, reference_results(arrays, **arguments))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(("all_to_all", "ring", "all_gather"), {"exchange_size": 2}), (("ring", "all_gather", "all_to_all"), {})],
    ids=["an exchange in groups first", "an exchange last"],
)
def test_a_strategy_for_each_branch_equals_the_oracle(strategy, options):
    """Branches that span devices, each on its own ways."""
    arguments = {"segment_lengths": (32, 16, 64), "dilation_rates": (2, 1, 4), "is_causal": True}
    arrays = random_arguments(64, (4, 2))
    actual = ring_results(arrays, mesh=make_mesh(seq=4), strategy=strategy, **options, **arguments)
    assert_close(actual, reference_results(arrays, **arguments))


@pytest.mark.quick("longnet")
@pytest.mark.parametrize(
    ("name", "is_causal", "kind"),
    [
        ("longnet", True, AxisType.Explicit),
        ("unequal rings", False, AxisType.Auto),
        ("straddling", True, AxisType.Auto),
        ("short last segment", False, AxisType.Auto),
    ],
    ids=["longnet", "unequal rings", "straddling", "short last segment"],
)
def test_gathering_equals_the_oracle(name, is_causal, kind):
    length, segment_lengths, dilation_rates = PATTERNS[name]
    arguments = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "is_causal": is_causal}
    arrays = random_arguments(length, (4, 2))
    actual = ring_results(arrays, mesh=make_mesh(kind, seq=4), strategy="all_gather", **arguments)
    assert_close(actual, reference_results(arrays, **arguments))


@pytest.mark.quick("5")
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_dealt_rings_equal_the_oracle(devices):
    """Of documents, on rings of every kind of size, with lengths that fill no stripes."""
    length = 8 * devices - 1
    arguments = {"pattern": [Segments(length)], "is_causal": devices != 3, "uses": "both"}
    arrays = *random_arguments(length, (4, 2), (3, 2), (2,)), random_documents(length, (2,))
    kind = AxisType.Explicit if devices == 8 else AxisType.Auto
    options = {"mesh": make_mesh(kind, seq=devices), "balance": "stripes", "block_size": 2}
    assert_close(ring_results(arrays, **options, **arguments), reference_results(arrays, **arguments))


def test_dealt_rings_under_vmap_and_remat():
    """The axis of a vmap is folded into the batch of what is dealt."""
    pattern = {"pattern": [Segments(32)], "is_causal": True}
    arrays = *random_arguments(32, (4, 2), (3, 2), (2,)), random_documents(32, (2,))
    options = {"mesh": make_mesh(seq=4), "balance": "stripes", "block_size": 2, **pattern}

    def attend(*arrays, return_residual, document_ids):
        one = lambda *some: ring_dilated_attention(*some[:3], document_ids=some[3], return_residual=True, **options)
        return jax.checkpoint(jax.vmap(one))(*arrays, document_ids)

    assert_close(ring_results(arrays, attend), reference_results(arrays, **pattern))


def test_sorted_halves_are_exact(monkeypatch):
    """As programs for GPUs have them; those for CPUs leave them as they come."""
    served = []
    monkeypatch.setattr(Xla, "serve", lambda self, request, branch: (served.append(branch), (branch, None))[1])
    arrays = random_arguments(47, HEADS["grouped"], batch=(2,))
    pattern = {"segment_lengths": (12, 48), "dilation_rates": (1, 2), "is_causal": True}
    assert_close(ring_results(arrays, mesh=make_mesh(seq=8), **pattern), reference_results(arrays, **pattern))
    assert served
    assert all(branch.is_zigzag and branch.sorts_halves for branch in served)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_any_scale_is_exact(scale):
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 2), "is_causal": True, "scale": scale}
    arrays = random_arguments(32, (2, 1))
    assert_close(ring_results(arrays, mesh=make_mesh(seq=2), **arguments), reference_results(arrays, **arguments))


def test_slices_vectors_and_selections_of_rows_are_the_same():
    """What CPUs run, what GPUs run, and what other devices run."""
    rng = np.random.default_rng(0)
    split, rows = jnp.asarray(rng.normal(size=(2, 5, 3, 4, 6))), jnp.asarray(rng.normal(size=(2, 5, 4, 6)))
    for offset in (jnp.array([1], jnp.uint32), jnp.array([0, 1, 2, 0], jnp.uint32)):
        taken = take_slices(split, offset)
        np.testing.assert_array_equal(taken, take_selected(split, offset))
        np.testing.assert_array_equal(taken, take_vectors(split, offset))
        np.testing.assert_array_equal(taken[:, :, 1], split[:, :, 1, 1])
        for combine in (jnp.add, lambda token, row: row):
            put = put_slices(split, rows, offset, combine=combine)
            np.testing.assert_array_equal(put, put_selected(split, rows, offset, combine=combine))
            np.testing.assert_array_equal(put[:, :, 1, 1], combine(taken, rows)[:, :, 1])


def test_both_ways_around_the_ring_are_exact():
    """The backward sends the queries around where they are lighter, and the keys and values where those are."""
    for heads in ((1, 1), (6, 1)):
        arguments = {"segment_lengths": (32,), "dilation_rates": (1,), "is_causal": True}
        arrays = random_arguments(32, heads, widths=(5, 5))
        actual = ring_results(arrays, mesh=make_mesh(seq=4), **arguments)
        assert_close(actual, reference_results(arrays, **arguments))


def test_value_under_vjp_equals_primal():
    arrays = [array.astype(np.float32) for array in random_arguments(32, (2, 2))]
    mesh = make_mesh(seq=4)
    call = lambda *arrays: ring_dilated_attention(
        *arrays, segment_lengths=(8, 32), dilation_rates=(1, 2), is_causal=True, mesh=mesh
    )
    primal = jax.jit(call)(*arrays)
    under_vjp = jax.jit(lambda *arrays: jax.vjp(call, *arrays)[0])(*arrays)
    np.testing.assert_allclose(under_vjp, primal, rtol=0, atol=1e-6)


def test_a_token_changes_no_causal_row_before_it():
    arrays = random_arguments(32, (2, 2))
    mesh = make_mesh(seq=4)
    call = jax.jit(
        lambda *arrays: ring_dilated_attention(
            *arrays,
            segment_lengths=(8, 12, 32),
            dilation_rates=(1, 2, 3),
            is_causal=True,
            mesh=mesh,
            return_residual=True,
        )
    )

    @jax.jit
    def gradient(token, *arrays):
        """Of a loss of the rows before a token."""
        is_before = (jnp.arange(32) < token)[:, None]

        def results(*arrays):
            out, lse = call(*arrays)
            return out * is_before[..., None], jnp.where(is_before, lse, 0)

        return jax.grad(lambda *arrays: sum(jnp.sin(result).sum() for result in results(*arrays)), (0, 1, 2))(*arrays)

    before = jax.device_get(call(*arrays))
    for token, value in ((1, 2.0), (7, 1e4), (8, -1e4), (17, 1e4), (31, 0.5)):
        changed = [array.copy() for array in arrays]
        for array in changed:
            array[:, token] = value
        after = jax.device_get(call(*changed))
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one[:, :token], other[:, :token])
            assert not np.array_equal(one[:, token:], other[:, token:])
        for one, other in zip(gradient(token, *arrays), gradient(token, *changed), strict=True):
            np.testing.assert_array_equal(one[:, :token], other[:, :token])
            assert not one[:, token:].any()
            assert not other[:, token:].any()
