"""The kernels for Hopper GPUs, run by Pallas' interpreter on one device: the cases of all implementations.

The interpreter has no matrix unit that takes registers: there the kernels multiply arrays. Nor has it several devices,
or the gradient of what is checkpointed: rings are compiled for GPUs, in the tests of other programs that are.
"""

import dataclasses
import faulthandler
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import random_arguments
from test_features import FEATURES, PATTERN, make_arrays
from test_mosaic import TILES, check, check_errors

from ringjax import DilatedPattern, Segments, Window, ring_dilated_attention
from ringjax._kernels.block_list import find_stretches, is_full_step, streamed_in
from ringjax._kernels.hopper import chains
from ringjax._kernels.hopper.chains import Chains, make_chains
from ringjax._kernels.implementation import IMPLEMENTATIONS, preference
from ringjax._kernels.interface import Request
from ringjax._kernels.mask import BlockMask, KeyMask, Mask, QueryMask
from ringjax._kernels.mosaic import FIRST_JAX, MosaicGpu
from ringjax._kernels.operands import Given, Stats
from ringjax._kernels.softmax import Weighting
from ringjax._pattern.warning import warning_anew
from ringjax._schedule.make import make_schedule

needs_kernels = pytest.mark.skipif(jax.__version_info__ < FIRST_JAX, reason="the kernels need a newer jax")


class Interpreted(MosaicGpu):
    """The implementation, also in float32: no hardware limits it."""

    dtypes = (*MosaicGpu.dtypes, "float32")


@pytest.fixture
def interpret(monkeypatch):
    """Kernels that run on CPUs; how they are interpreted."""
    from jax.experimental.pallas import mosaic_gpu  # noqa: PLC0415

    parameters = mosaic_gpu.InterpretGPUParams()
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", Interpreted(interpret=parameters))
    yield parameters
    jax.clear_caches()  # of traces with these


# Those that hold most of the masks; the others on demand, but for those of several devices.
USUAL = ("all",)


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.slow)
        for name in FEATURES
        if not name.startswith(("exchanged", "dealt", "few queries of"))
    ],
)
def test_feature_equals_oracle(name, interpret):
    arguments = {**PATTERN, **FEATURES[name]}
    arrays = make_arrays(**arguments)
    if "pattern" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in PATTERN or name == "is_causal"}
    check(arrays, **arguments)


@needs_kernels
@pytest.mark.parametrize("name", ["a band", pytest.param("all", marks=pytest.mark.slow)])
def test_tiles_equal_oracle(name, interpret):
    arguments = {"is_causal": True, "num_heads": (2, 1), **TILES[name], "length": 230}
    check(make_arrays(**arguments), **arguments)


ROWS_AXIS = MosaicGpu.rows_axis


def delta_of(out, out_grad):
    """What the gradients subtract, by heads."""
    return jnp.moveaxis(jnp.sum(out * out_grad, axis=-1), ROWS_AXIS, 2)


def part_of(mask, keys):
    """The mask of some tiles of keys."""
    blocks = BlockMask(*(array[:, :, keys] for array in mask.blocks))
    return Mask(mask.queries, KeyMask(mask.keys.position[keys]), blocks)


def make_call(count):
    """Arrays of so many tiles, and their causal mask."""
    rng, tiles = np.random.default_rng(0), jnp.arange(128 * count, dtype=jnp.int32).reshape(count, 1, 1, 1, 128)
    arrays = [jnp.asarray(rng.normal(size=(1, 128 * count, n, 8)), jnp.float32) for n in (2, 1, 1, 2)]
    blocks = BlockMask(*(jnp.tril(jnp.ones((1, count, count), bool), below) for below in (0, -1)))
    return arrays, Mask(QueryMask(None, tiles), KeyMask(tiles), blocks)


@needs_kernels
def test_results_of_other_keys_are_continued(interpret):
    """In two steps of a ring, the second of which has nothing for half of the queries, as in one."""
    from ringjax._kernels.hopper import kernels as gpu  # noqa: PLC0415

    ((query, key, value, out_grad), mask), weighting = make_call(2), Weighting(0.3)
    halves = [(slice(0, 1), slice(0, 128)), (slice(1, 2), slice(128, 256))]
    given = Given(query, key, value, mask, weighting, ROWS_AXIS, interpret)
    parts = [given._replace(key=key[:, rows], value=value[:, rows], mask=part_of(mask, tile)) for tile, rows in halves]
    (out, lse), partial = gpu.forward(given), None
    for part in parts:
        partial = gpu.forward(part, partial)
    np.testing.assert_allclose(partial[0], out, atol=1e-5)
    np.testing.assert_allclose(partial[1], lse, atol=1e-5)
    logits = 0.3 * np.einsum("btnh,bsh->bnts", query, key[:, :, 0])
    greatest = np.where(np.tril(np.ones(logits.shape[-2:], bool)), logits, -np.inf).max(axis=-1)
    alone, partial = gpu.forward(given._replace(has_maximum=True)), None
    for part in parts:
        partial = gpu.forward(part._replace(has_maximum=True), partial)
    for found in (alone, partial):
        np.testing.assert_allclose(found[0], out, atol=1e-5)
        np.testing.assert_allclose(found[2], greatest, rtol=1e-5)

    more = {"out_grad": out_grad, "stats": Stats(lse, delta_of(out, out_grad))}
    given, parts = given._replace(**more), [part._replace(**more) for part in parts]
    query_grad, keys_grad = gpu.backward_queries(given), gpu.backward_keys(given)
    found, doubled = None, []
    for part in parts:
        found = (gpu.backward_queries(part, found),)
        doubled.append(gpu.backward_keys(part, gpu.backward_keys(part)))
    np.testing.assert_allclose(found[0], query_grad, atol=1e-5)
    for halves, other in zip(zip(*doubled, strict=True), keys_grad, strict=True):
        np.testing.assert_allclose(np.concatenate(halves, axis=ROWS_AXIS), 2 * other, atol=1e-5)


@needs_kernels
def test_what_does_not_meet_counts_nothing(interpret):
    """Though the masks of rows would let it attend: a shard that comes round again."""
    from ringjax._kernels.hopper import kernels as gpu  # noqa: PLC0415

    (query, key, value, _), mask = make_call(2)
    blocks = BlockMask(*(array.at[:, 1].set(False) for array in mask.blocks))
    mask = dataclasses.replace(mask, blocks=blocks)
    out, lse = gpu.forward(Given(query, key, value, mask, Weighting(1.0), ROWS_AXIS, interpret))
    assert np.isfinite(lse[:, :, :128]).all()
    assert (lse[:, :, 128:] == -np.inf).all()
    assert not out[:, 128:].any()


def run_kernels(interpret):
    """The output, the lse, and the gradients of four tiles."""
    from ringjax._kernels.hopper import kernels as gpu  # noqa: PLC0415

    arrays, mask = make_call(4)
    given = Given(*arrays[:3], mask, Weighting(0.3), ROWS_AXIS, interpret)
    out, lse = gpu.forward(given)
    given = given._replace(out_grad=arrays[3], stats=Stats(lse, delta_of(out, arrays[3])))
    return out, lse, gpu.backward_queries(given), *gpu.backward_keys(given)


@needs_kernels
def test_a_chain_computes_what_single_tiles_do(interpret, monkeypatch):
    """Exactly: each tile that stays adds up the same numbers in the same order."""
    alone = run_kernels(interpret)
    monkeypatch.setattr(chains, "PROCESSORS", 1)
    for one, other in zip(run_kernels(interpret), alone, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def no_hang():
    """Ends the process of the tests, and says where it stood, if this one does not end."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@needs_kernels
@pytest.mark.usefixtures("no_hang")
@pytest.mark.quick("1", "2-0")
@pytest.mark.parametrize(
    "empty",
    [[1], [2], [3], [1, 0], [2, 0], [2, 1], [3, 2], [3, 1, 0], [3, 2, 1, 0]],
    ids=lambda of: "-".join(map(str, of)),
)
def test_a_chain_goes_on_after_tiles_that_meet_nothing(empty, interpret, monkeypatch):
    """The warpgroups take turns, which such a tile must not leave to one of them: four tiles, from the last on."""
    from ringjax._kernels.hopper import kernels as gpu  # noqa: PLC0415

    monkeypatch.setattr(chains, "PROCESSORS", 1)
    (query, key, value, _), mask = make_call(4)
    assert make_chains(4, 2, True, True).links == 4
    given = Given(query, key, value, mask, Weighting(1.0), ROWS_AXIS, interpret)
    blocks = BlockMask(*(array.at[:, np.array(empty)].set(False) for array in mask.blocks))
    (out, lse), (found, found_lse) = (
        gpu.forward(given),
        gpu.forward(given._replace(mask=dataclasses.replace(mask, blocks=blocks))),
    )
    is_empty = np.isin(np.arange(512) // 128, empty)
    np.testing.assert_array_equal(found, np.where(is_empty[:, None, None], 0, out))
    np.testing.assert_array_equal(found_lse, np.where(is_empty, -np.inf, lse))


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("processors", [1, chains.PROCESSORS])
def test_nothing_is_replaced_before_it_is_read(processors, monkeypatch):
    """The stages of shared memory are used again from the third step on, in any order of the threads.

    With one processor tiles are in chains of two and four, whose own stages are used again as well.
    """
    from jax.experimental.pallas import mosaic_gpu  # noqa: PLC0415

    from ringjax._kernels.hopper import call as gpu_call  # noqa: PLC0415

    release = gpu_call.GpuStep.release

    def release_after_reading(step, number):
        # What the interpreter reads for products is not read by the matrix unit, and needs a fence.
        mosaic_gpu.commit_smem()
        release(step, number)

    monkeypatch.setattr(gpu_call.GpuStep, "release", release_after_reading)
    monkeypatch.setattr(chains, "PROCESSORS", processors)
    results = run_kernels(mosaic_gpu.InterpretGPUParams(detect_races=True))
    assert all(np.isfinite(result).all() for result in results)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        ("bfloat16", (64, 64)),
        pytest.param("float16", (64, 64), marks=pytest.mark.slow),
        ("bfloat16", (40, 72)),  # which are made 64 and 128 wide
    ],
)
def test_errors_in_16_bits_are_those_of_xla(dtype, widths, interpret):
    arrays = [jnp.asarray(array, dtype) for array in random_arguments(200, (2, 1), widths, (1,))]
    check_errors(arrays, pattern=[Segments(200)], is_causal=True)


@needs_kernels
def test_under_vmap(interpret):
    """Instances that draw for themselves, which are not made one batch."""
    arrays = [np.float32(array) for array in random_arguments(64, (2, 1), (4, 4), (2, 1))]
    arguments = {"pattern": [Window(9)], "is_causal": True, "dropout_rate": 0.3}
    seeds = jnp.arange(2, dtype=jnp.uint32)

    def attend(implementation, seed, *arrays):
        function = functools.partial(
            ring_dilated_attention, implementation=implementation, dropout_seed=seed, **arguments
        )
        return jax.vjp(function, *arrays)[1](arrays[0])

    found, expected = (jax.jit(jax.vmap(functools.partial(attend, name)))(seeds, *arrays) for name in ("mosaic", "xla"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.9])
def test_stretches_have_the_tiles_that_meet(density):
    """Of each tile that stays the tiles that meet it, and no others."""
    rng = np.random.default_rng(0)
    is_active, is_whole = rng.random((2, 2, 5, 8)) < np.array([density, 0.5])[:, None, None, None]
    stretches = find_stretches(BlockMask(jnp.asarray(is_active), jnp.asarray(is_whole)))
    assert stretches.steps.shape == is_active.shape
    for place in np.ndindex(2, 5):
        steps = stretches.steps[place][: int(stretches.length[place])]
        columns = np.flatnonzero(is_active[place])
        assert streamed_in(steps).tolist() == columns.tolist()
        assert is_full_step(steps).tolist() == is_whole[place][columns].tolist()


@needs_kernels
@pytest.mark.parametrize("wrong", [1 - 2**-22, 1 + 2**-22])
def test_capped_logits_are_right(wrong, monkeypatch):
    """With exponentials and inverse roots as wrong as those of a GPU, to 2e-6 of the cap."""
    from ringjax._kernels.hopper.kernels import _scores  # noqa: PLC0415

    exp2, rsqrt = jnp.exp2, jax.lax.rsqrt
    monkeypatch.setattr(jnp, "exp2", lambda array: exp2(array) * wrong)
    monkeypatch.setattr(jax.lax, "rsqrt", lambda array: rsqrt(array) * wrong)
    weighting = Weighting(scale=0.125, logits_soft_cap=50.0)
    products = np.concatenate([np.linspace(-20_000, 20_000, 1001), np.geomspace(1e-6, 1e9, 100)]).astype(np.float32)
    found = np.asarray(_scores(weighting, jnp.asarray(products)), np.float64)
    np.testing.assert_allclose(found, np.tanh(products.astype(np.float64) * 0.125 / 50), rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_from_last", [False, True])
@pytest.mark.parametrize("links", [1, 2, 3, 4])
def test_chains_have_each_tile_once_and_are_as_long_as_each_other(links, is_from_last):
    found = Chains(12 * links, links, is_from_last).tiles
    assert sorted(np.ravel(found)) == list(range(12 * links))
    assert found[0, 0] == (12 * links - 1 if is_from_last else 0)
    lengths = np.sum(found, axis=1)
    assert np.ptp(lengths) == (11 if links % 2 else 0)  # of causal attention


@pytest.mark.parametrize(
    ("num_tiles", "num_heads", "can_link", "links"),
    [
        (64, 16, True, 4),  # 256 blocks, of which 132 run at once: 1.94 rounds
        (64, 16, False, 1),
        (75, 16, True, 1),  # 400 blocks of three would be 3.03 rounds, of which the last one is nearly empty
        (61, 80, True, 1),  # no number of links divides the tiles
        (66, 8, True, 2),  # 264 blocks
        (64, 8, True, 2),  # 128 blocks of four would not fill one round; 256 are 1.94
        (8, 1, True, 1),
    ],
)
def test_chains_keep_all_processors_busy(num_tiles, num_heads, can_link, links):
    assert make_chains(num_tiles, num_heads, True, can_link).links == links


def test_what_is_preferred():
    """cuDNN's kernel, but for documents, and XLA where nothing else serves; never what no device has run."""
    array = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")
    request = Request(array, array, array, "cuda", device_kind="NVIDIA H100 80GB HBM3")
    assert preference(request) == ("cudnn", "mosaic_gpu", "xla")
    assert preference(request._replace(needs=("document_ids",))) == ("mosaic_gpu", "cudnn", "xla")
    assert preference(request._replace(platform="tpu", device_kind="TPU v5e")) == ("cudnn", "mosaic_gpu", "xla")


def obstacle(width=64, dtype="bfloat16", **more):
    """Why the kernels cannot serve a request, of an H100 if nothing else is said."""
    array = jax.ShapeDtypeStruct((1, 256, 2, width), dtype)
    more = {"platform": "cuda", "device_kind": "NVIDIA H100 80GB HBM3", **more}
    (schedule,) = make_schedule(DilatedPattern([Segments(256)]), 256, 1, 2)
    return MosaicGpu().serve(Request(array, array, array, **more), schedule)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"platform": "cpu"}, "it runs on TPUs and on Hopper GPUs, and the devices are of platform 'cpu'"),
        ({"device_kind": "NVIDIA A100-SXM4-80GB"}, "of GPUs it runs on H100, .*, and the devices are 'NVIDIA A100"),
        ({"width": 136}, "on GPUs heads may be at most 128 wide in query and in value: they are 136 and 136"),
        ({"dtype": "float32"}, "it computes in bfloat16 and float16, and query is of float32"),
        ({"unmapped": ("data",)}, r"say with spec=P\(...\) what they cut"),
    ],
)
def test_what_it_cannot_serve(arguments, words, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", FIRST_JAX)
    assert re.search(words, obstacle(**arguments))


@pytest.mark.parametrize(
    ("version", "is_refused"), [("V12.8.61", True), ("V12.9.41", True), ("V12.9.86", False), ("V13.0.48", False)]
)
def test_an_assembler_that_miscompiles_is_an_obstacle(version, is_refused, monkeypatch, tmp_path):
    """Whatever package it is from: the one that jax names to XLA is asked."""
    path = write_ptxas(tmp_path, f"Cuda compilation tools, release 12, {version}")
    monkeypatch.setattr(jax._src.lib, "cuda_path", str(tmp_path))
    monkeypatch.setattr(jax, "__version_info__", FIRST_JAX)
    words = f"{path} of version {version[1:]} miscompiles masked kernels: install CUDA 12.9.1 (ptxas 12.9.86) or later"
    assert obstacle() == (words if is_refused else None)


def test_an_assembler_of_an_unknown_version_is_said(monkeypatch, tmp_path):
    """Where there is a GPU to compile for."""
    write_ptxas(tmp_path, "release 12.9rc1")
    monkeypatch.setattr(jax._src.lib, "cuda_path", str(tmp_path))
    monkeypatch.setattr(jax, "__version_info__", FIRST_JAX)
    assert obstacle() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with warning_anew(), pytest.warns(UserWarning, match="the version of ptxas, .*, is not known"):
        assert obstacle() is None


def write_ptxas(folder, words):
    path = folder / "bin" / "ptxas"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho '{words}'\n")
    path.chmod(0o755)
    return path


def test_an_older_jax_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 9))
    words = "on GPUs it needs jax 0.12, which needs Python 3.12, and this is jax"
    assert words in obstacle(platform="cuda", device_kind="NVIDIA H200")
