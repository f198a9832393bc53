"""Implementations by fused kernels: the branches that they compute, the pairs that they get, and cuDNN's guard."""

import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import assert_close, loss, make_mesh, random_arguments, reference_results, ring_results, with_gradients

from ringjax import _cudnn, nn, ring_dilated_attention
from ringjax._block import Keys
from ringjax._fused import Fused, FusedQueries
from ringjax._implementation import IMPLEMENTATIONS


class DenseKernel:
    """A kernel as a GPU's, in plain products: all pairs or all up to the diagonal, any dtype and device."""

    def __init__(self):
        self.calls = []

    def obstacle(self, query, key, value, platform, widening=0):
        return None

    def _logits(self, query, key, is_causal, scale):
        groups = query.shape[2] // key.shape[2]
        logits = scale * jnp.einsum("btnh,bsnh->btns", query, jnp.repeat(key, groups, axis=2))
        is_seen = jnp.tri(query.shape[1], key.shape[1], dtype=bool)[:, None]
        return jnp.where(is_seen, logits, -jnp.inf) if is_causal else logits

    def attend(self, query, key, value, is_causal, scale):
        self.calls.append(("attend", query.shape[:2], key.shape[1], is_causal))
        logits = self._logits(query, key, is_causal, scale)
        lse = jax.nn.logsumexp(logits, axis=-1)
        value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
        return jnp.einsum("btns,bsnv->btnv", jnp.exp(logits - lse[..., None]), value), lse

    def differentiate(self, queries, keys, is_causal, scale):
        self.calls.append(("differentiate", queries.query.shape, keys.value.shape, is_causal))
        assert queries.lse_grad is None
        query, (key, value) = queries.query, keys
        batch, length, heads, _ = key.shape
        groups = query.shape[2] // heads
        weights = jnp.exp(self._logits(query, key, is_causal, scale) - queries.lse[..., None])
        weights_grad = jnp.einsum("btnv,bsnv->btns", queries.out_grad, jnp.repeat(value, groups, axis=2))
        logits_grad = weights * (weights_grad - (queries.out_grad * queries.out).sum(-1, keepdims=True))
        grouped = lambda array: array.reshape(batch, length, heads, groups, -1).sum(3)
        return (
            scale * jnp.einsum("btns,bsnh->btnh", logits_grad, jnp.repeat(key, groups, axis=2)),
            grouped(scale * jnp.einsum("btns,btnh->bsnh", logits_grad, query)),
            grouped(jnp.einsum("btns,btnv->bsnv", weights, queries.out_grad)),
        )


@pytest.fixture
def kernel(monkeypatch):
    """Puts a kernel that runs on CPUs in the place of cuDNN's."""
    kernel = DenseKernel()
    monkeypatch.setitem(IMPLEMENTATIONS, "cudnn", Fused(kernel))
    yield kernel
    jax.clear_caches()  # of traces with this kernel


# Lengths, segment lengths, rates and shards: local, dense, all together, sub-rings, a last ring that is shorter.
PATTERNS = {
    "local": (32, (4, 8), (1, 2), 1),
    "longnet": (64, (4, 32, 64), (1, 2, 4), 4),
    "dense": (32, (32,), (1,), 8),
    "two rings": (96, (48,), (2,), 8),
    "unequal rings": (72, (48,), (1,), 3),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_fused_equals_oracle(kernel, name, is_causal):
    length, segment_lengths, dilation_rates, shards = PATTERNS[name]
    row = list(PATTERNS).index(name)
    kind = (AxisType.Auto, AxisType.Explicit)[(row + is_causal) % 2]
    arguments = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "is_causal": is_causal}
    arrays = random_arguments(length, [(4, 2), (2, 2), (6, 1)][row % 3], batch=((2,), ())[row % 2])
    mesh = make_mesh(kind, seq=shards) if shards > 1 else None
    actual = ring_results(arrays, mesh=mesh, implementation="cudnn", **arguments)
    assert_close(actual, reference_results(arrays, **arguments))
    assert kernel.calls


def test_sinks_beside_a_kernel(kernel):
    """They ask for the gradient of the lse, and for nothing else."""
    arguments = {"segment_lengths": (4, 16, 32), "dilation_rates": (1, 2, 4), "sinks": np.array([1.0, -2.0, 0.0, 3.0])}
    arrays = random_arguments(32, (4, 2))
    actual = ring_results(arrays, mesh=make_mesh(seq=2), implementation="cudnn", uses="out", **arguments)
    assert_close(actual, reference_results(arrays, uses="out", **arguments))
    assert kernel.calls


def test_local_branches_are_one_call(kernel):
    arrays = random_arguments(64, (2, 2), batch=(3,))
    jax.eval_shape(lambda *arrays: ring_dilated_attention(*arrays, segment_lengths=(8,), dilation_rates=(2,)), *arrays)
    assert kernel.calls == [("attend", (3 * 8, 4), 4, False)]


def test_no_pair_beyond_the_diagonal_is_computed(kernel):
    """In a causal ring, a shard's own rows up to the diagonal, and half of the pairs with each other shard."""
    arrays = random_arguments(64)
    call = lambda *arrays: ring_dilated_attention(
        *arrays, segment_lengths=(64,), dilation_rates=(1,), is_causal=True, mesh=make_mesh(seq=4)
    )
    jax.eval_shape(call, *arrays)
    cases = {("attend", (1, 16), 16, True), ("attend", (1, 16), 8, False), ("attend", (1, 8), 16, False)}
    assert set(kernel.calls) == cases


def test_widths_grow_only_for_a_cotangent_of_the_lse(kernel):
    arguments = {"segment_lengths": (8,), "dilation_rates": (1,)}
    arrays = random_arguments(8, widths=(8, 8))
    for residual, width in ((False, 8), (True, 16)):
        total = lambda *arrays, residual=residual: sum(
            result.sum()
            for result in jax.tree.leaves(ring_dilated_attention(*arrays, return_residual=residual, **arguments))
        )
        kernel.calls.clear()
        jax.eval_shape(jax.grad(total), *arrays)
        assert [call[1][-1] for call in kernel.calls if call[0] == "differentiate"] == [width]


def test_branches_that_it_cannot_compute_are_left_to_xla(kernel):
    """Per branch: rows that straddle, a rate that does not divide, a padded length."""
    for length, segment_lengths, dilation_rates, served in (
        (32, (8, 12), (1, 1), True),
        (32, (8, 32), (1, 3), True),
        (31, (31,), (1,), False),
    ):
        arguments = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "is_causal": True}
        arrays = list(map(jnp.asarray, random_arguments(length)))
        kernel.calls.clear()
        assert_close(ring_results(arrays, mesh=make_mesh(seq=4), **arguments), reference_results(arrays, **arguments))
        assert bool(kernel.calls) == served
        with pytest.raises(ValueError, match="'cudnn' cannot serve: the branch .* on 4 shards has slots without rows"):
            ring_dilated_attention(*arrays, mesh=make_mesh(seq=4), implementation="cudnn", **arguments)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_groups_of_heads(kernel, kind):
    """A kernel computes the heads of each branch alone."""
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 2), "is_causal": True, "heads": "grouped"}
    arrays = random_arguments(32, (6, 3))
    actual = ring_results(arrays, mesh=make_mesh(kind, seq=2), implementation="cudnn", **arguments)
    assert_close(actual, reference_results(arrays, **arguments))
    assert {call[1][2] for call in kernel.calls if call[0] == "differentiate"} == {2, 4}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"document_ids": jnp.zeros((1, 32), jnp.int32)}, "no fused kernel knows document_ids"),
        ({"logits_soft_cap": 1.0, "dropout_rate": 0.1, "dropout_seed": 1}, "knows logits_soft_cap, dropout_rate"),
        (
            {"merge": "union"},
            "the branch Segments\\(length=32, rate=2\\) of a union leaves out pairs of earlier branches",
        ),
        ({"query_offset": 1}, "queries and keys lie at different positions"),
    ],
    ids=lambda argument: next(iter(argument)) if isinstance(argument, dict) else "",
)
def test_pairs_that_are_masked_or_weighted_one_by_one(kernel, arguments, words):
    arrays = list(map(jnp.asarray, random_arguments(32)))
    call = functools.partial(
        ring_dilated_attention, segment_lengths=(8, 32), dilation_rates=(1, 2), is_causal=True, **arguments
    )
    with pytest.raises(ValueError, match=f"implementation='cudnn' cannot serve: .*{words}"):
        call(*arrays, implementation="cudnn")
    np.testing.assert_allclose(call(*arrays), call(*arrays, implementation="xla"), rtol=0, atol=1e-9)
    assert bool(kernel.calls) == ("merge" in arguments)  # the first branch of a union


def test_gathering_is_left_to_xla(kernel):
    arrays = list(map(jnp.asarray, random_arguments(32)))
    arguments = {"segment_lengths": (32,), "dilation_rates": (1,), "mesh": make_mesh(seq=4), "strategy": "all_gather"}
    with pytest.raises(
        ValueError, match="'cudnn' cannot serve: the branch .* spans devices, and strategy='all_gather'"
    ):
        ring_dilated_attention(*arrays, implementation="cudnn", **arguments)
    jax.eval_shape(lambda *arrays: ring_dilated_attention(*arrays, **arguments), *arrays)
    assert not kernel.calls


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_of_a_mesh(kernel, kind):
    """Explicit axes are known from the types; for Auto ones the call says what they cut, or no kernel runs."""
    mesh = make_mesh(kind, data=2, seq=2, tensor=2)
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "is_causal": True}
    arrays = random_arguments(32, (8, 4), batch=(2,))
    placed = [jax.device_put(array, jax.NamedSharding(mesh, P("data", "seq", "tensor"))) for array in arrays]
    more = {"spec": P("data", "seq", "tensor"), "mesh": mesh} if kind == AxisType.Auto else {}
    actual = ring_results(placed, implementation="cudnn", **more, **arguments)
    assert_close(actual, reference_results(arrays, **arguments))
    assert {call[1][0] for call in kernel.calls if call[0] == "attend"} == {
        1,
        2,
    }  # batches, and segments, of one device
    if kind == AxisType.Auto:
        with pytest.raises(ValueError, match=r"'cudnn' cannot serve: the mesh axes \('data', 'tensor'\) are Auto: say"):
            ring_dilated_attention(*placed, implementation="cudnn", mesh=mesh, **arguments)
        kernel.calls.clear()
        with pytest.warns(UserWarning, match="without a fused kernel: the mesh axes"):
            assert_close(ring_results(placed, mesh=mesh, **arguments), reference_results(arrays, **arguments))
        assert not kernel.calls


def test_under_vmap_and_in_a_module(kernel):
    arguments = {"segment_lengths": (4, 16), "dilation_rates": (1, 2), "is_causal": True}
    arrays = list(map(jnp.asarray, random_arguments(16, (2, 1), batch=(3,))))
    one = with_gradients(loss(ring_dilated_attention, implementation="cudnn", **arguments))
    together = jax.vmap(one, axis_size=3)(*arrays)
    for index in range(3):
        expected = reference_results([array[index] for array in arrays], **arguments)
        assert_close([result[index] for result in together], expected)
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 8)))
    modules = {
        name: nn.RingDilatedAttention(
            2, 8, implementation=name, param_dtype=jnp.float64, rngs=nn.nnx.Rngs(0), **arguments
        )
        for name in ("cudnn", "xla")
    }
    np.testing.assert_allclose(modules["cudnn"](inputs), modules["xla"](inputs), rtol=0, atol=1e-12)


# cuDNN's kernel itself: what can be known of it without a GPU.


@pytest.mark.parametrize(
    ("dtype", "width", "platform", "words"),
    [
        ("bfloat16", 64, "cpu", "runs on NVIDIA GPUs, and the devices are of platform 'cpu'"),
        ("float32", 64, "gpu", "computes in bfloat16 and float16, and query is of float32"),
        ("bfloat16", 60, "gpu", "heads must be as wide in value as in query, a multiple of 8 up to 128: 60, 60"),
        ("float16", 136, "gpu", "a multiple of 8 up to 128: 136, 136"),
    ],
)
def test_what_cudnn_cannot_compute(dtype, width, platform, words):
    array = jax.ShapeDtypeStruct((1, 8, 2, width), dtype)
    assert words in _cudnn.obstacle(array, array, array, platform)


def test_what_cudnn_can_compute():
    array = jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.bfloat16)
    assert _cudnn.obstacle(array, array, array, "gpu") is None
    other = jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.float16)
    for arrays in ((array, other, array), (array, array, other)):
        assert "takes one dtype, and query, key and value are of bfloat16" in _cudnn.obstacle(*arrays, "gpu")


@pytest.mark.parametrize(("most", "fits"), [(128, (128, None)), (256, (256, 136))])
def test_widths_by_capability(most, fits, monkeypatch):
    """Up to 128, from Hopper on up to 256; with the cotangent of an lse by eight columns less."""
    monkeypatch.setattr(_cudnn, "_most_width", lambda: most)
    obstacle = lambda width, *widening: _cudnn.obstacle(
        *[jax.ShapeDtypeStruct((1, 8, 2, width), jnp.bfloat16)] * 3, "gpu", *widening
    )
    assert all(obstacle(width) is None for width in fits if width)
    assert f"a multiple of 8 up to {most}" in obstacle(most + 8)
    assert obstacle(most - 8, 8) is None
    assert f"with the gradient of the lse, heads of {most} are {most + 8} wide" in obstacle(most, 8)


def test_a_call_is_lowered_for_its_platform(kernel, monkeypatch):
    """Where a machine has a GPU, and the call is compiled for its CPU: the kernel is not in that program."""
    attend = kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *arguments: jax.tree.map(jnp.cbrt, attend(*arguments)))
    arguments = {"segment_lengths": (4, 16), "dilation_rates": (1, 2)}
    arrays = random_arguments(32)
    traced = jax.jit(with_gradients(loss(ring_dilated_attention, **arguments))).trace(*arrays)
    assert "cbrt" in traced.lower(lowering_platforms=("cuda",)).as_text()
    lowered = traced.lower(lowering_platforms=("cpu",))
    assert "cbrt" not in lowered.as_text()
    assert_close(jax.device_get(lowered.compile()(*arrays)), reference_results(arrays, **arguments))


def test_names_of_implementations(unchecked):
    arrays = random_arguments(8)
    with pytest.raises(ValueError, match="implementation='triton' is unknown: use one of 'cudnn', 'mosaic', 'xla'"):
        ring_dilated_attention(*arrays, segment_lengths=(8,), dilation_rates=(1,), implementation="triton")
    with pytest.raises(ValueError, match="implementation='cudnn' cannot serve: it runs on NVIDIA GPUs"):
        ring_dilated_attention(*arrays, segment_lengths=(8,), dilation_rates=(1,), implementation="cudnn")


def test_a_spec_on_a_mesh_without_a_sequence_axis(kernel):
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "is_causal": True}
    arrays = random_arguments(32, (4, 2), batch=(2,))
    mesh = make_mesh(data=2, tensor=2)
    placed = [jax.device_put(array, jax.NamedSharding(mesh, P("data", None, "tensor"))) for array in arrays]
    actual = ring_results(placed, implementation="cudnn", spec=P("data", None, "tensor"), **arguments)
    assert_close(actual, reference_results(arrays, **arguments))


def test_specs_that_do_not_fit_the_mesh():
    call = lambda spec: ring_dilated_attention(
        *map(jnp.asarray, random_arguments(8)),
        segment_lengths=(8,),
        dilation_rates=(1,),
        mesh=make_mesh(seq=2),
        spec=spec,
    )
    with pytest.raises(ValueError, match=r"spec=.* names the axis 'tensor', but the mesh has \['seq'\]"):
        call(P(None, "seq", "tensor"))
    with pytest.raises(ValueError, match="has more entries than query has dimensions"):
        call(P(None, "seq", None, None, None))
    with pytest.raises(ValueError, match=r"cuts dimension 0 of query, .*, over the 2 devices of \('seq',\)"):
        call(P("seq"))


def test_jax_binds_the_primitives_as_they_are_used_here():
    """Traced alone: shapes and dtypes of both directions, with grouped heads."""
    of = lambda heads, length: jax.ShapeDtypeStruct((3, length, heads, 64), jnp.bfloat16)
    query, key, lse = of(4, 16), of(2, 8), jax.ShapeDtypeStruct((3, 16, 4), jnp.float32)
    out, row = jax.eval_shape(lambda *arrays: _cudnn.attend(*arrays, True, 0.5), query, key, key)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (row.shape, row.dtype) == (lse.shape, lse.dtype)
    grads = jax.eval_shape(
        lambda query, key, lse: _cudnn.differentiate(
            FusedQueries(query, query, query, lse), Keys(key, key), False, 0.5
        ),
        query,
        key,
        lse,
    )
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]

    # And under vmap, of some of the arrays too.
    several = jax.ShapeDtypeStruct((5, *query.shape), query.dtype)
    attend = jax.vmap(lambda *arrays: _cudnn.attend(*arrays, True, 0.5), (0, None, None))
    out, row = jax.eval_shape(attend, several, key, key)
    assert (out.shape, row.shape) == ((5, *query.shape), (5, *lse.shape))


def test_the_guard_against_other_versions_of_jax(monkeypatch):
    whole = _cudnn._jax
    assert _cudnn._find_missing(whole) is None
    without = types.SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != "MaskType"})
    assert _cudnn._find_missing(without) == "this version of jax has no MaskType"
    other = types.SimpleNamespace(**vars(whole))
    other._dot_product_attention_bwd_impl = lambda query, key, value, scale: None
    assert "other parameters" in _cudnn._find_missing(other)
    other._dot_product_attention_bwd_impl = lambda query, key: None
    assert "other parameters" in _cudnn._find_missing(other)

    # Then everything else is computed all the same, with one warning in all.
    monkeypatch.setattr(_cudnn, "_jax", None)
    _cudnn._missing.cache_clear()
    array = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    with pytest.warns(UserWarning, match="cuDNN's attention is not used: this version of jax has no MaskType"):
        assert _cudnn.obstacle(array, array, array, "gpu") == "this version of jax has no MaskType"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _cudnn.obstacle(array, array, array, "gpu") == "this version of jax has no MaskType"
    _cudnn._missing.cache_clear()


@pytest.mark.parametrize(
    ("capability", "library", "lacking"),
    [(True, None, None), (False, None, "compute capability 8.0"), (True, RuntimeError("no cuDNN"), "no cuDNN")],
)
def test_machines_that_lack_something(capability, library, lacking):
    def check_cudnn_version():
        if library:
            raise library

    module = types.SimpleNamespace(
        check_compute_capability=lambda needed: capability, check_cudnn_version=check_cudnn_version
    )
    found = _cudnn._find_lacking(module)
    assert found == lacking if lacking is None else lacking in found
