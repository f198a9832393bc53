"""The greatest logit of each head, against the oracle's: wherever it is computed, and with no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import greatest_logits, make_mesh, random_arguments
from test_features import FEATURES, OF_OURS, PATTERN, make_arrays, of_reference

import ringjax
from ringjax import Segments, Window, dilated_attention_reference, ring_dilated_attention
from ringjax._kernels.implementation import preference
from ringjax._kernels.interface import Request
from ringjax._tools.hlo import bytes_sent

MANY = {"pattern": [Segments(8), Window(7), Segments(64, 2)], "is_causal": True, "logits_soft_cap": 2.0}
greatest = functools.partial(ring_dilated_attention, return_max_logit=True)
both = pytest.mark.parametrize(
    "greatest",
    [greatest, functools.partial(dilated_attention_reference, return_max_logit=True)],
    ids=["function", "reference"],
)


def given(arrays, documents):
    return {"document_ids": documents if len(documents) == 2 else documents[0]} if documents else {}


OF_LOGITS = (
    "grouped by branch",
    "few queries of a union",
    "queries that go around",
    "more queries",
    "phases",
    "gathered windows",
    "exchanged groups of heads",
    "dealt segments",
    "all",
)


@pytest.mark.quick("dealt segments", "exchanged groups of heads", "all")
@pytest.mark.parametrize("name", OF_LOGITS)
def test_feature_equals_oracle(name):
    arguments = {**PATTERN, **FEATURES[name]}
    arrays = make_arrays(**arguments)
    if "pattern" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in PATTERN or name == "is_causal"}
    arguments.pop("uses", None)
    own = {name: value for name, value in arguments.items() if name in OF_OURS}
    attend = lambda *arrays: greatest(*arrays[:3], mesh=make_mesh(seq=4), **given(arrays, arrays[3:]), **own)
    found = jax.jit(attend)(*arrays)[-1]
    expected = greatest_logits(arrays, **of_reference(arguments))
    assert found.shape == (arrays[0].shape[-2],)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.quick("AxisType.Explicit")
def test_over_batches_sequences_and_two_axes(kind):
    """And the other results, and the gradients, are what they are without it."""
    mesh, arrays = make_mesh(kind, data=2, dcn=2, ici=2), random_arguments(64, (4, 2), batch=(2,))
    arrays = [jax.device_put(array, NamedSharding(mesh, P("data", ("dcn", "ici")))) for array in arrays]
    options = {"mesh": mesh, "axis_name": ("dcn", "ici"), "return_residual": True, **MANY}

    def loss(*arrays, **more):
        out, lse, *rest = ring_dilated_attention(*arrays, **options, **more)
        return jnp.sin(out).sum() + jnp.cos(lse).sum() + sum(jnp.sum(one) for one in rest), rest

    gradient = lambda **more: jax.jit(jax.grad(functools.partial(loss, **more), (0, 1, 2), has_aux=True))(*arrays)
    (with_it, (found,)), (without, _) = gradient(return_max_logit=True), gradient()
    np.testing.assert_allclose(found, greatest_logits(arrays, **MANY), rtol=1e-12)
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.quick("True")
def test_inside_the_callers_shard_map(check_vma):
    """Over the axis of the sequence, which the call knows: the same on all of its devices."""
    mesh, arrays = make_mesh(seq=4), random_arguments(64, (4, 2))
    mapped = jax.shard_map(
        lambda *shards: greatest(*shards, **MANY)[-1],
        mesh=mesh,
        in_specs=P(None, "seq"),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_allclose(jax.jit(mapped)(*arrays), greatest_logits(arrays, **MANY), rtol=1e-12)


def test_each_instance_of_a_vmap_has_its_own():
    arrays = random_arguments(32, (4, 2), batch=(3, 2))
    attend = jax.jit(jax.vmap(lambda *arrays: greatest(*arrays, mesh=make_mesh(seq=2), **MANY)[-1]))
    expected = [greatest_logits([array[number] for array in arrays], **MANY) for number in range(3)]
    np.testing.assert_allclose(attend(*arrays), np.stack(expected), rtol=1e-12)


@both
def test_nothing_that_is_seen_is_minus_infinity(greatest):
    query, key, value = map(jnp.asarray, random_arguments(16, (4, 2)))
    documents = np.full((1, 16), -1, np.int32)
    _, found = greatest(query, key, value, document_ids=documents, **MANY)
    assert found.tolist() == [-np.inf] * 4
    assert len(greatest(query, key, value, return_residual=np.True_, **MANY)) == 3
    out, lse, found = greatest(query[:0], key[:0], value[:0], return_residual=True, **MANY)
    assert (out.shape, lse.shape, found.tolist()) == ((0, 16, 4, 3), (0, 16, 4), [-np.inf] * 4)


@both
def test_dropout_and_sinks_do_not_count(greatest):
    arrays = list(map(jnp.asarray, random_arguments(32, (4, 2))))
    more = {"dropout_rate": 0.9, "dropout_seed": 3, "sinks": np.full(4, 50.0)}
    np.testing.assert_allclose(greatest(*arrays, **MANY, **more)[-1], greatest_logits(arrays, **MANY), rtol=1e-12)


def test_cudnn_says_why_not():
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    attend = functools.partial(greatest, segment_lengths=(256,), dilation_rates=(1,))
    explained = str(ringjax.explain(attend, shape, shape, shape, device="H100"))
    assert "not cudnn: no fused kernel knows return_max_logit" in " ".join(explained.split())


def test_kernels_that_no_device_has_run_with_it_are_no_default():
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    request = Request(shape, shape, shape, "cuda", needs=("document_ids",), device_kind="NVIDIA H100")
    assert preference(request) == ("mosaic_gpu", "cudnn", "xla")
    assert preference(request._replace(needs=("document_ids", "return_max_logit"))) == ("cudnn", "xla")


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_what_is_sent_more_is_what_the_planner_counts(strategy):
    """A number for each row that is dealt back or exchanged."""
    mesh, length = make_mesh(seq=4), 256
    sharding = NamedSharding(mesh, P(None, "seq"))
    arrays = [jax.ShapeDtypeStruct((1, length, n, 6), jnp.float32, sharding=sharding) for n in (4, 4, 4)]
    options = {"pattern": [Segments(length)], "is_causal": True, "strategy": strategy, "mesh": mesh}
    attend = functools.partial(ring_dilated_attention, return_residual=True, **options)
    function = functools.partial(attend, return_max_logit=True)
    sent = sum(bytes_sent(jax.jit(function).lower(*arrays).compile().as_text()).values())
    stated = ringjax.explain(function, *arrays).calls[0][0].forecasts[0].num_bytes("forward")
    assert sent == stated


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_sow_it(kind):
    options = {"pattern": [Segments(8), Segments(32, 2)], "is_causal": True, "sow_max_logit": True}
    x = jax.random.normal(jax.random.key(0), (2, 32, 16), jnp.float32)
    if kind == "nnx":
        module = ringjax.RingDilatedAttention(4, 16, **options, rngs=nnx.Rngs(0))
        plain = ringjax.RingDilatedAttention(4, 16, **{**options, "sow_max_logit": False}, rngs=nnx.Rngs(0))
        out, state = nnx.capture(module, nnx.Intermediate)(x)
        np.testing.assert_array_equal(out, plain(x))
        (found,) = state["max_logit"].get_value()
        heads = [project(x) for project in (module.query, module.key, module.value)]
    else:
        module = ringjax.linen.RingDilatedAttention(4, **options)
        variables = module.init(jax.random.key(0), x)
        _, state = module.apply({"params": variables["params"]}, x, mutable=["intermediates"])
        (found,) = state["intermediates"]["max_logit"]
        of = lambda name: jnp.einsum("btd,dnh->btnh", x, variables["params"][name]["kernel"])
        heads = [of(name) + variables["params"][name]["bias"] for name in ("query", "key", "value")]
    expected = greatest_logits(jax.device_get(heads), pattern=options["pattern"], is_causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(TypeError, match="sow_max_logit=1"):
        ringjax.RingDilatedAttention(4, 16, **{**options, "sow_max_logit": 1}, rngs=nnx.Rngs(0))
