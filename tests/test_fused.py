"""Implementations by fused kernels: the branches that they compute, the pairs that they get, and cuDNN's guard."""

import functools
import inspect
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle import (
    assert_close,
    loss,
    make_mesh,
    random_arguments,
    reference_results,
    ring_results,
    tolerance,
    with_gradients,
)

from ringjax import Segments, Window, dilated_attention_reference, nn, ring_dilated_attention
from ringjax._kernels import cudnn, fused
from ringjax._kernels.fused import Fused, FusedQueries
from ringjax._kernels.implementation import IMPLEMENTATIONS
from ringjax._kernels.interface import Request
from ringjax._kernels.sequences import Sequences
from ringjax._kernels.softmax import Keys
from ringjax._kernels.sub_blocks import Pairs


class DenseKernel:
    """A kernel as a GPU's, in plain products, of any dtype and device."""

    def __init__(self):
        self.calls = []

    def obstacle(self, query, key, value, platform, widening=0, has_sequences=False):
        return None

    def _logits(self, query, key, pairs, scale):
        logits = scale * jnp.einsum("btnh,bsnh->btns", query, jnp.repeat(key, query.shape[2] // key.shape[2], axis=2))
        return jnp.where(are_pairs(pairs, query.shape[1], key.shape[1])[:, :, None], logits, -jnp.inf)

    def attend(self, query, key, value, pairs, scale):
        self.calls.append(("attend", query.shape[:2], key.shape[1], pairs.is_causal))
        logits = self._logits(query, key, pairs, scale)
        lse = jax.nn.logsumexp(logits, axis=-1)
        value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
        weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
        return jnp.einsum("btns,bsnv->btnv", weights, value), lse

    def differentiate(self, queries, keys, pairs, scale):
        self.calls.append(("differentiate", queries.query.shape, keys.value.shape, pairs.is_causal))
        assert queries.lse_grad is None
        query, (key, value) = queries.query, keys
        batch, length, heads, _ = key.shape
        groups = query.shape[2] // heads
        weights = jnp.exp(self._logits(query, key, pairs, scale) - queries.lse[..., None])
        weights_grad = jnp.einsum("btnv,bsnv->btns", queries.out_grad, jnp.repeat(value, groups, axis=2))
        logits_grad = weights * (weights_grad - (queries.out_grad * queries.out).sum(-1, keepdims=True))
        grouped = lambda array: array.reshape(batch, length, heads, groups, -1).sum(3)
        return (
            scale * jnp.einsum("btns,bsnh->btnh", logits_grad, jnp.repeat(key, groups, axis=2)),
            grouped(scale * jnp.einsum("btns,btnh->bsnh", logits_grad, query)),
            grouped(jnp.einsum("btns,btnv->bsnv", weights, queries.out_grad)),
        )


def are_pairs(pairs, rows, others):
    """Which rows attend to which, [B, Rq, Rk], said anew: by diagonal and window from the first rows of sequences."""
    query, key = jnp.arange(rows)[:, None], jnp.arange(others)[None]
    near = lambda distance: (
        (distance >= 0 if pairs.is_causal else True) & (True if pairs.window is None else distance < pairs.window)
    )
    if pairs.sequences is None:
        return jnp.broadcast_to(near(query - key), (1, rows, others))
    inside = lambda sequence, row: (
        (row >= sequence.start[..., None, None]) & (row < (sequence.start + sequence.length)[..., None, None])
    )
    of_queries, of_keys = pairs.sequences
    distance = (query - of_queries.start[..., None, None]) - (key - of_keys.start[..., None, None])
    return (inside(of_queries, query) & inside(of_keys, key) & near(distance)).any(axis=1)


@pytest.fixture
def kernel(monkeypatch):
    """Puts a kernel that runs on CPUs in the place of cuDNN's."""
    kernel = DenseKernel()
    monkeypatch.setitem(IMPLEMENTATIONS, "cudnn", Fused(kernel))
    yield kernel
    jax.clear_caches()  # of traces with this kernel


# Lengths, segment lengths, rates and shards: local, dense, all together, sub-rings, a last ring that is shorter; the
# heads and the batch.
PATTERNS = {
    "local": (32, (4, 8), (1, 2), 1, (4, 2), (2,)),
    "longnet": (64, (4, 32, 64), (1, 2, 4), 4, (2, 2), ()),
    "dense": (32, (32,), (1,), 8, (6, 1), (2,)),
    "two rings": (96, (48,), (2,), 8, (4, 2), ()),
    "unequal rings": (72, (48,), (1,), 3, (2, 2), (2,)),
}


@pytest.mark.quick("causal-local-AxisType.Explicit", "causal-longnet-AxisType.Auto")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("local", AxisType.Explicit),
        ("longnet", AxisType.Auto),
        ("dense", AxisType.Explicit),
        ("two rings", AxisType.Auto),
        ("unequal rings", AxisType.Explicit),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_fused_equals_oracle(kernel, name, kind, is_causal):
    length, segment_lengths, dilation_rates, shards, heads, batch = PATTERNS[name]
    arguments = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates, "is_causal": is_causal}
    arrays = random_arguments(length, heads, batch=batch)
    mesh = make_mesh(kind, seq=shards) if shards > 1 else None
    actual = ring_results(arrays, mesh=mesh, implementation="cudnn", **arguments)
    assert_close(actual, reference_results(arrays, **arguments))
    assert kernel.calls


def test_sums_are_wider_than_results(kernel):
    """A kernel computes the first branch alone, in 16 bits, and XLA adds to it."""
    arguments = {"pattern": [Window(4), Segments(16, 4)], "merge": "union", "is_causal": True}
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in random_arguments(32, (4, 2), (8, 8))]
    out = ring_dilated_attention(*arrays, **arguments)
    assert kernel.calls
    expected = dilated_attention_reference(*map(jnp.float32, arrays), **arguments)
    np.testing.assert_allclose(np.float32(out), expected, atol=0.03)


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
    """Per branch: a rate that does not divide the segment."""
    arguments = {"segment_lengths": (8, 32), "dilation_rates": (1, 3), "is_causal": True}
    arrays = list(map(jnp.asarray, random_arguments(32)))
    assert_close(ring_results(arrays, mesh=make_mesh(seq=4), **arguments), reference_results(arrays, **arguments))
    assert kernel.calls
    with pytest.raises(ValueError, match="'cudnn' cannot serve: the branch .* on 4 shards has rows of padding"):
        ring_dilated_attention(*arrays, mesh=make_mesh(seq=4), implementation="cudnn", **arguments)


# Segments and documents as sequences. By length, pattern and shards: segments inside shards, across them, in a ring
# around which each goes a part, of a length that shards do not divide, and in halves of a balanced ring.
SEQUENCES = {
    "local": (48, (12,), 1),
    "uneven": (43, (13, 5), 1),
    "inside": (48, (6, 48), 4),
    "halo": (48, (16,), 4),
    "around": (48, (32,), 4),
    "padded": (46, (13, 46), 4),
    "balanced": (64, (64,), 8),
}


@pytest.mark.quick("local-True", "balanced-True")
@pytest.mark.parametrize(
    ("name", "is_causal"),
    [*((name, True) for name in SEQUENCES), ("halo", False), ("around", False), ("padded", False)],
)
def test_sequences_equal_oracle(kernel, monkeypatch, name, is_causal):
    monkeypatch.setattr(fused, "MOST_SEQUENCES", (2, 3))
    has_documents = is_causal or name != "padded"
    length, segment_lengths, shards = SEQUENCES[name]
    arguments = {"segment_lengths": segment_lengths, "dilation_rates": (1,) * len(segment_lengths)}
    arrays = random_arguments(length, (4, 2), batch=(2,))
    documents = [packed_documents(length, 2)] if has_documents else []
    mesh = make_mesh(seq=shards) if shards > 1 else None
    arguments |= {"is_causal": is_causal, "uses": "both" if is_causal else "out"}
    more = {"documents_are_sorted": True} if has_documents else {}
    actual = ring_results([*arrays, *documents], mesh=mesh, implementation="cudnn", **arguments, **more)
    assert_close(actual, reference_results([*arrays, *documents], **arguments))
    assert kernel.calls


def packed_documents(length, batch):
    """Documents of all lengths, one of them over several shards, with padding between two and at the end."""
    rng = np.random.default_rng(1)
    documents = np.sort(np.minimum(rng.integers(0, 12, (batch, length)), rng.integers(3, 12, (batch, length))), axis=1)
    documents[:, length // 3 : 2 * length // 3] = documents[:, length // 3 : length // 3 + 1]
    documents = np.maximum.accumulate(documents, axis=1)
    documents[documents == documents[:, -1:]] = -1
    documents[0, documents[0] == documents[0, length // 5]] = -1
    return documents.astype(np.int32)


@pytest.mark.quick("Window(size=3, rate=2)-4", "Window(size=5, rate=1)-1")
@pytest.mark.parametrize(
    ("window", "shards"), [(Window(5), 1), (Window(1), 4), (Window(7), 4), (Window(3, rate=2), 4)], ids=str
)
def test_windows_equal_oracle(kernel, window, shards):
    """Inside a device, and from the tokens before in one hop."""
    arguments = {"pattern": [window, Segments(32)], "is_causal": True}
    arrays = random_arguments(64, (4, 2), batch=(2,))
    mesh = make_mesh(seq=shards) if shards > 1 else None
    assert_close(
        ring_results(arrays, mesh=mesh, implementation="cudnn", **arguments), reference_results(arrays, **arguments)
    )
    assert kernel.calls


SORTED = {"document_ids": np.zeros((1, 64), np.int32), "documents_are_sorted": True}


@pytest.mark.parametrize(
    ("window", "arguments", "words"),
    [
        (Window(10), {"is_causal": True}, "sees more than half of the tokens of a device before"),
        (Window(4), {}, "sees later tokens as well"),
        (Window(4), {**SORTED, "is_causal": True}, "is cut by documents"),
        (Window(4, rate=3), {"is_causal": True}, "has rows of padding, or rows that meet and do not all attend"),
    ],
    ids=lambda argument: str(argument) if isinstance(argument, Window) else "",
)
def test_windows_that_are_left_to_xla(kernel, window, arguments, words):
    arrays = list(map(jnp.asarray, random_arguments(64)))
    call = functools.partial(ring_dilated_attention, pattern=[window], mesh=make_mesh(seq=4), **arguments)
    with pytest.raises(ValueError, match=f"'cudnn' cannot serve: the branch Window.* {words}"):
        call(*arrays, implementation="cudnn")
    jax.eval_shape(call, *arrays)
    assert not kernel.calls


def test_kinds_of_branches_that_are_not_known_are_left_to_xla(kernel, monkeypatch):
    monkeypatch.setattr(fused, "window_of", lambda schedule: None)
    arrays = list(map(jnp.asarray, random_arguments(64)))
    call = functools.partial(ring_dilated_attention, pattern=[Window(4)], is_causal=True, mesh=make_mesh(seq=4))
    with pytest.raises(ValueError, match="the branch Window.* is neither of segments nor a window"):
        call(*arrays, implementation="cudnn")
    jax.eval_shape(call, *arrays)
    assert not kernel.calls


@pytest.mark.quick("decrease-1")
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", ["decrease", "interrupted"])
def test_a_promise_that_is_broken_gives_nan(kernel, name, shards):
    """Of the batch where it is, in the results and in the gradients."""
    documents = np.sort(np.arange(64).reshape(2, 32) % 5, axis=1).astype(np.int32)
    documents[1, 21:23] = 0 if name == "decrease" else -1
    documents[1, 23:] = documents[1, 20]
    arguments = {"segment_lengths": (32,), "dilation_rates": (1,), "is_causal": True, "implementation": "cudnn"}
    arrays = random_arguments(32, batch=(2,))
    mesh = make_mesh(seq=shards) if shards > 1 else None
    results = ring_results([*arrays, documents], mesh=mesh, documents_are_sorted=True, **arguments)
    for result in results:
        assert np.isfinite(result[0]).all()
        assert np.isnan(result[1]).any()


def test_documents_are_served_alike_whether_they_are_known_or_not(kernel):
    """An eager call takes the kernel that it takes under jax.jit: what the numbers are makes no difference."""
    arrays = list(map(jnp.asarray, random_arguments(32)))
    documents = packed_documents(32, 1)
    call = functools.partial(ring_dilated_attention, segment_lengths=(32,), dilation_rates=(1,))
    for is_promised in (True, None, False):
        attend = functools.partial(call, documents_are_sorted=is_promised)
        for known in (True, False):
            kernel.calls.clear()
            jax.clear_caches()  # of what was traced for the other one
            if known:
                jax.eval_shape(lambda *arrays: attend(*arrays, document_ids=documents), *arrays)  # noqa: B023
            else:
                jax.eval_shape(lambda ids, *arrays: attend(*arrays, document_ids=ids), documents, *arrays)  # noqa: B023
            assert bool(kernel.calls) == bool(is_promised)


@pytest.mark.quick("AxisType.Auto")
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
        (
            {"document_ids": jnp.zeros((1, 32), jnp.int32), "documents_are_sorted": True},
            "the branch Segments\\(length=32, rate=2\\) has other rows of a document on each head",
        ),
        (
            {"document_ids": jnp.arange(32, 0, -1)[None]},
            "documents may lie in any order: say documents_are_sorted=True",
        ),
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
    np.testing.assert_allclose(call(*arrays), call(*arrays, implementation="xla"), rtol=0, atol=tolerance())
    # The first branch of a union, or of sorted documents, is served.
    assert bool(kernel.calls) == ("merge" in arguments or words.startswith("the branch"))


def test_gathering_is_left_to_xla(kernel):
    arrays = list(map(jnp.asarray, random_arguments(32)))
    arguments = {"segment_lengths": (32,), "dilation_rates": (1,), "mesh": make_mesh(seq=4), "strategy": "all_gather"}
    with pytest.raises(
        ValueError, match="'cudnn' cannot serve: the branch .* spans devices, and strategy='all_gather'"
    ):
        ring_dilated_attention(*arrays, implementation="cudnn", **arguments)
    jax.eval_shape(lambda *arrays: ring_dilated_attention(*arrays, **arguments), *arrays)
    assert not kernel.calls


@pytest.mark.quick("AxisType.Explicit")
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


@pytest.mark.slow
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
    np.testing.assert_allclose(modules["cudnn"](inputs), modules["xla"](inputs), rtol=0, atol=tolerance(1e-12))


# cuDNN's kernel itself: what can be known of it without a GPU.


@pytest.mark.parametrize(
    ("dtype", "width", "platform", "words"),
    [
        ("bfloat16", 64, "cpu", "runs on NVIDIA GPUs, and the devices are of platform 'cpu'"),
        ("float32", 64, "cuda", "computes in bfloat16 and float16, and query is of float32"),
        ("bfloat16", 60, "cuda", "heads must be as wide in value as in query, a multiple of 8 up to 128: 60, 60"),
        ("float16", 136, "cuda", "a multiple of 8 up to 128: 136, 136"),
    ],
)
def test_what_cudnn_cannot_compute(dtype, width, platform, words):
    array = jax.ShapeDtypeStruct((1, 8, 2, width), dtype)
    assert words in cudnn.obstacle(array, array, array, platform)


def test_what_cudnn_can_compute():
    array = jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.bfloat16)
    assert cudnn.obstacle(array, array, array, "cuda") is None
    other = jax.ShapeDtypeStruct((1, 8, 2, 128), jnp.float16)
    for arrays in ((array, other, array), (array, array, other)):
        reason = Request(*arrays, "cuda").obstacle_to_kernels()
        assert "takes one dtype, and query, key and value are of bfloat16" in reason


@pytest.mark.parametrize(("most", "fits"), [(128, (128, None)), (256, (256, 136))])
def test_widths_by_capability(most, fits, monkeypatch):
    """Up to 128, from Hopper on up to 256; with the cotangent of an lse by eight columns less."""
    monkeypatch.setattr(cudnn, "_most_width", lambda: most)
    obstacle = lambda width, *widening: cudnn.obstacle(
        *[jax.ShapeDtypeStruct((1, 8, 2, width), jnp.bfloat16)] * 3, "cuda", *widening
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
    out, row = jax.eval_shape(lambda *arrays: cudnn.attend(*arrays, Pairs(is_causal=True), 0.5), query, key, key)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
    assert (row.shape, row.dtype) == (lse.shape, lse.dtype)
    grads = jax.eval_shape(
        lambda query, key, lse: cudnn.differentiate(
            FusedQueries(query, query, query, lse), Keys(key, key), Pairs(), 0.5
        ),
        query,
        key,
        lse,
    )
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]

    # And under vmap, of some of the arrays too.
    several = jax.ShapeDtypeStruct((5, *query.shape), query.dtype)
    attend = jax.vmap(lambda *arrays: cudnn.attend(*arrays, Pairs(is_causal=True), 0.5), (0, None, None))
    out, row = jax.eval_shape(attend, several, key, key)
    assert (out.shape, row.shape) == ((5, *query.shape), (5, *lse.shape))


class Emulated:
    """The primitive of cuDNN in plain products, with sequences where it has them in memory, junk elsewhere."""

    def __init__(self, direction):
        self.direction = direction

    def bind(self, query, key, value, bias, lengths, key_lengths, offsets, key_offsets, tables, others, *given, **how):
        of_queries, of_keys = (
            (offset[:, :-1], length) for offset, length in ((offsets, lengths), (key_offsets, key_lengths))
        )
        pairs = Pairs(
            "CAUSAL" in how["mask_type"].name,
            how["sliding_window_length"],
            (Sequences(*of_queries), Sequences(*of_keys)),
        )
        assert how["mask_type"].name.startswith("PADDING")
        inside = [
            sequence.contains(array.shape[1])[..., None, None]
            for sequence, array in zip(pairs.sequences, (query, key), strict=True)
        ]
        junk = lambda array, is_inside: jnp.where(is_inside, array, jnp.nan)
        row = of_queries[0][..., None] + jnp.arange(query.shape[1])  # [B, M, R]
        is_own = row < (of_queries[0] + of_queries[1])[..., None]
        if self.direction == "fwd":
            out, lse = DenseKernel().attend(query, key, value, pairs, how["scale"])
            stats = jax.vmap(lambda lse, row: lse[jnp.minimum(row, query.shape[1] - 1)])(lse, row)  # [B, M, R, N]
            stats = jnp.where(is_own[..., None], stats, jnp.nan).swapaxes(2, 3)
            return junk(out, inside[0]), stats.reshape(-1, *stats.shape[2:])
        stats, out, out_grad = given
        stats = stats.reshape(*row.shape[:2], *stats.shape[1:]).swapaxes(2, 3)  # [B, M, R, N]
        put = lambda stats, row, is_own: (
            jnp.full(query.shape[1:3], jnp.inf).at[jnp.where(is_own, row, query.shape[1])].set(stats, mode="drop")
        )
        lse = jax.vmap(put)(stats, row, is_own)
        queries = FusedQueries(query, out_grad, out, lse)
        grads = DenseKernel().differentiate(queries, Keys(key, value), pairs, how["scale"])
        return tuple(map(junk, grads, (inside[0], inside[1], inside[1])))


@pytest.mark.parametrize(("is_causal", "most_numbers"), [(False, 2**31), (True, 2**31), (True, 200)])
def test_sequences_are_where_cudnn_has_them(monkeypatch, is_causal, most_numbers):
    """The numbers of a row are in a batch of its sequence, counted from the first row; batches that are too large
    are cut."""
    monkeypatch.setattr(cudnn, "_MOST_NUMBERS", most_numbers)
    for direction in ("fwd", "bwd"):
        monkeypatch.setattr(cudnn._jax, f"_dot_product_attention_{direction}_p_wrapper", Emulated(direction))
    rng = np.random.default_rng(0)
    query, key, value, out_grad = (jnp.asarray(rng.normal(size=(2, rows, 3, 4))) for rows in (11, 9, 9, 11))
    of = lambda start, length: Sequences(jnp.array(start, jnp.int32), jnp.array(length, jnp.int32))
    sequences = of([[0, 5, 10], [2, 8, 0]], [[4, 3, 1], [6, 3, 0]]), of([[1, 3, 8], [0, 4, 0]], [[2, 4, 1], [3, 5, 0]])
    for some in (sequences, jax.tree.map(lambda array: array[:, :1], sequences)):

        @jax.jit
        def results(some):
            pairs, kernels = Pairs(is_causal, None, some), (cudnn, DenseKernel())
            out, lse = cudnn.attend(query, key, value, pairs, 0.5)
            queries = FusedQueries(query, out_grad, out, jnp.where(lse == -jnp.inf, jnp.inf, lse))
            outs = [kernel.attend(query, key, value, pairs, 0.5) for kernel in kernels]
            grads = [kernel.differentiate(queries, Keys(key, value), pairs, 0.5) for kernel in kernels]
            return outs, grads

        for (found, expected), atol in zip(results(some), (1e-6, 1e-5), strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_one_sequence_that_is_too_large(monkeypatch):
    monkeypatch.setattr(cudnn, "_MOST_NUMBERS", 100)
    array, sequence = jnp.zeros((1, 16, 1, 8)), Sequences(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="takes 100 numbers at most of one sequence with documents .*: shard it over"):
        cudnn.attend(array, array, array, Pairs(sequences=(sequence, sequence)), 1.0)


def test_what_rows_of_several_documents_need(monkeypatch):
    """As many heads of keys, where jax counts the offsets of keys by the heads of queries."""
    arrays = [jax.ShapeDtypeStruct((1, 8, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    assert cudnn.obstacle(*arrays, "cuda") is None
    is_newer = "score_mod" in inspect.signature(cudnn._jax._dot_product_attention_fwd_impl).parameters
    words = (
        None if is_newer else "before jax 0.12, rows of several documents need as many key/value heads as query heads"
    )
    assert cudnn.obstacle(*arrays, "cuda", has_sequences=True) == words
    assert cudnn.obstacle(arrays[0], arrays[0], arrays[0], "cuda", has_sequences=True) is None


def test_the_guard_against_other_versions_of_jax(monkeypatch):
    whole = cudnn._jax
    assert cudnn._find_missing(whole) is None
    without = types.SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != "MaskType"})
    assert cudnn._find_missing(without) == "this version of jax has no MaskType"
    other = types.SimpleNamespace(**vars(whole))
    other._dot_product_attention_bwd_impl = lambda query, key, value, scale: None
    assert "other parameters" in cudnn._find_missing(other)
    other._dot_product_attention_bwd_impl = lambda query, key: None
    assert "other parameters" in cudnn._find_missing(other)
    signature = inspect.signature(cudnn._jax._dot_product_attention_bwd_impl)
    names = list(signature.parameters)
    place = names.index("fwd_output")
    names[place : place + 2] = names[place : place + 2][::-1]  # as many arrays, in another order
    swapped = [signature.parameters[name] for name in names]
    other._dot_product_attention_bwd_impl.__signature__ = signature.replace(parameters=swapped)
    assert "other parameters" in cudnn._find_missing(other)

    # Then everything else is computed all the same, with one warning in all.
    monkeypatch.setattr(cudnn, "_jax", None)
    cudnn._missing.cache_clear()
    array = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    with pytest.warns(UserWarning, match="cuDNN's attention is not used: this version of jax has no MaskType"):
        assert cudnn.obstacle(array, array, array, "cuda") == "this version of jax has no MaskType"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cudnn.obstacle(array, array, array, "cuda") == "this version of jax has no MaskType"
    cudnn._missing.cache_clear()


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
    found = cudnn._find_lacking(module)
    assert found == lacking if lacking is None else lacking in found
