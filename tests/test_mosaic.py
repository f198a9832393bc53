"""The kernels for TPUs, run by Pallas' interpreter: the cases of all implementations, and what is of tiles alone."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.pallas import pallas_call
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import (
    greatest_logits,
    make_mesh,
    random_arguments,
    random_documents,
    reference_results,
    ring_results,
)
from test_features import FEATURES, OF_OURS, PATTERN, make_arrays, of_reference

from ringjax import DilatedPattern, Segments, Window, ring_dilated_attention
from ringjax._kernels import mosaic
from ringjax._kernels.attention_step import AttentionStep, PaddedRows, make_mask
from ringjax._kernels.block_list import FULL, NOTHING, PARTIAL, SOME, Step, list_blocks, stationary_of, streamed_of
from ringjax._kernels.implementation import IMPLEMENTATIONS
from ringjax._kernels.interface import Request
from ringjax._kernels.mask import BlockMask
from ringjax._kernels.mosaic import MosaicTpu, NarrowMosaicTpu, _tiles
from ringjax._kernels.softmax import Weighting
from ringjax._kernels.tpu import call as tpu_call
from ringjax._kernels.tpu import kernels as tpu
from ringjax._mesh.placement import Placement
from ringjax._parallel.plan import Plan
from ringjax._schedule.make import make_schedule


class Unchecked:
    """jax's lowering, in which a kernel that is interpreted does not check what varies along axes of a mesh."""

    def __getattr__(self, name):
        return getattr(mlir, name)

    def lower_fun(self, function, **options):
        def lower(context, *arrays):
            shapes = [ShapedArray(array.shape, array.dtype) for array in context.avals_in]
            with jax._src.config._check_vma(False):
                return mlir.lower_fun(function, **options)(context.replace(avals_in=shapes), *arrays)

        return lower


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels that run on CPUs. The interpreter alone does not check along which axes of a mesh its steps vary.

    Heads are narrow in most cases, so that the implementation for such serves them.
    """
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_tpu", MosaicTpu(interpret=True))
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_tpu_narrow", NarrowMosaicTpu(interpret=True))
    monkeypatch.setattr(pallas_call, "mlir", Unchecked())
    yield
    jax.clear_caches()  # of traces with these


def with_rows_first(monkeypatch):
    """Lets the implementation for wide heads serve narrow ones too: the other one knows no CPU."""
    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_tpu_narrow", NarrowMosaicTpu())


def check(arrays, mesh=None, **arguments):
    """Compares all results in float32 with the oracle's."""
    narrow = lambda array: np.asarray(array, np.float32 if array.dtype == np.float64 else array.dtype)
    arrays = list(map(narrow, arrays))
    names = arguments.keys() & OF_OURS
    own = {name: arguments[name] for name in names}
    own |= {"sinks": np.float32(own["sinks"])} if "sinks" in own else {}
    actual = ring_results(arrays, mesh=mesh, implementation="mosaic", **own)
    expected = reference_results(arrays, **of_reference(arguments))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))
        found, wanted = (np.where(np.isfinite(array), array, 0) for array in (one, other))
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * max(1, np.abs(wanted).max()))


# What kernels do themselves: every mask and weight, rings either way round, and rows of all kinds. How rows come to a
# device is the same for all implementations.
OF_KERNELS = [
    *((name, "first") for name in ("dealt segments", "phases", "few queries of a union", "gathered windows", "all")),
    ("exchanged groups of heads", "first"),
    *((name, "last") for name in ("queries that go around", "mixed phases", "few queries", "dealt phases")),
    *((name, "last") for name in ("documents in any order and sinks", "exchanged windows")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), OF_KERNELS)
def test_feature_equals_oracle(name, rows, monkeypatch):
    """With rows first, before their width, or last."""
    if rows == "first":
        with_rows_first(monkeypatch)
    arguments = {**PATTERN, **FEATURES[name]}
    arrays = make_arrays(**arguments)
    if "pattern" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in PATTERN or name == "is_causal"}
    check(arrays, make_mesh(AxisType.Explicit, seq=4), **arguments)


# Patterns on several tiles of 128 rows, or one of very many, with what is asked for beside them.
TILES = {
    "a band": {"pattern": [Window(200), Segments(400, 2)], "length": 700, "documents": "sorted"},
    "two shards": {"pattern": [Segments(1500)], "length": 1500, "shards": 2, "uses": "lse"},
    "two dealt shards": {
        "pattern": [Segments(1500)],
        "length": 1500,
        "shards": 2,
        "balance": "stripes",
        "documents": "sorted",
        "uses": "lse",
    },
    "many rows": {"pattern": [Segments(1024)], "length": 1024, "is_causal": False, "block_size": 1024},
    "all": {
        "pattern": [Segments(300, 2), Window(90, 3)],
        "length": 600,
        "merge": "union",
        "dropout_rate": 0.3,
        "dropout_seed": 1,
        "logits_soft_cap": 2.0,
        "documents": "mixed",
    },
}


@pytest.mark.quick("all-None-last", "many rows-None-first")
@pytest.mark.parametrize(
    ("name", "most_entries", "rows"),
    [
        ("a band", 3, "first"),
        ("two shards", None, "last"),
        ("two dealt shards", None, "first"),
        ("many rows", None, "first"),
        ("all", None, "last"),
        ("all", None, "first"),
    ],
)
def test_tiles_equal_oracle(name, most_entries, rows, monkeypatch):
    """Also where scalar memory holds the lists of few tiles only."""
    if rows == "first":
        with_rows_first(monkeypatch)
    if most_entries:
        monkeypatch.setattr(tpu_call, "MAX_ENTRIES", most_entries)
    arguments = {"is_causal": True, "block_size": 128, "num_heads": (2, 1), "shards": 1, **TILES[name]}
    mesh = make_mesh(seq=arguments["shards"]) if arguments["shards"] > 1 else None
    check(make_arrays(**arguments), mesh, **arguments)


GROUPS = {
    "union": {
        "pattern": [Segments(8), Segments(16, 2), Window(5)],
        "merge": "union",
        "documents": "mixed",
        "dropout_rate": 0.3,
        "dropout_seed": 1,
    },
    "grouped heads": {
        "pattern": [Segments(16, 2), Segments(8)],
        "heads": "grouped",
        "offsets": "branch",
        "num_heads": (4, 4),
        "is_causal": False,
        "sinks": np.array([2.0, -1.0, 0.0, 5.0]),
    },
    "one branch": {"pattern": [Segments(16, 2)], "uses": "lse"},
}


@pytest.mark.quick("union")
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_segments_equal_oracle(name, monkeypatch):
    """Rows are laid out for some segments of a shard at a time."""
    monkeypatch.setattr(mosaic, "GROUP_TOKENS", 16)
    arguments = {"length": 128, "is_causal": True, **GROUPS[name]}
    made = make_schedule(DilatedPattern(arguments["pattern"]), 128, 2, 2)
    request = Request(*make_arrays(**arguments)[:3], "tpu")
    groups = [MosaicTpu().serve(request, schedule)[0].queries.num_groups for schedule in made if schedule.is_local]
    assert min(groups) >= 2
    check(make_arrays(**arguments), make_mesh(AxisType.Explicit, seq=2), **arguments)


# On four shards of 16 tokens: segments in a shard, neighbors, a ring of all shards, and segments of a whole shard.
ADDING = [Segments(8), Window(5), Segments(64), Segments(16)]


@pytest.mark.quick("ring-last")
@pytest.mark.parametrize(("strategy", "rows"), [("ring", "last"), ("all_gather", "last"), ("all_to_all", "first")])
def test_branches_that_add_to_sums_equal_oracle(strategy, rows, monkeypatch):
    """Each goes on where the one before ended, with what rows attended to and with nothing."""
    if rows == "first":
        with_rows_first(monkeypatch)
    arguments = {"pattern": ADDING, "length": 61, "num_heads": (4, 2), "documents": "mixed", "uses": "both"}
    arguments |= {"is_causal": False, "strategy": strategy}
    check(make_arrays(**arguments), make_mesh(AxisType.Explicit, seq=4), **arguments)


@pytest.mark.parametrize("rows", ["last", pytest.param("first", marks=pytest.mark.slow)])
def test_the_greatest_logit_of_kernels_equals_the_oracle(rows, monkeypatch):
    """Of branches that begin with the sums of others, in rings; also where a head sees nothing."""
    if rows == "first":
        with_rows_first(monkeypatch)
    arguments = {"pattern": ADDING, "is_causal": True, "logits_soft_cap": 3.0, "scale": -0.7}
    arrays = [np.float32(array) for array in random_arguments(61, (4, 2))]
    arrays = [*arrays, random_documents(61, is_sorted=False)]
    attend = jax.jit(
        lambda *arrays: ring_dilated_attention(
            *arrays[:3],
            document_ids=arrays[3],
            implementation="mosaic",
            mesh=make_mesh(seq=4),
            return_max_logit=True,
            **arguments,
        )[-1]
    )
    np.testing.assert_allclose(attend(*arrays), greatest_logits(arrays, **arguments), rtol=1e-5)
    arrays[3] = np.full((1, 61), -1, np.int32)
    assert (np.asarray(attend(*arrays)) == -np.inf).all()


def test_branches_add_to_sums():
    """The kernel of the second reads the output of the first, and writes where that was: no pass adds the two."""
    arrays = [jnp.zeros((1, 256, 1, 64), jnp.float32)] * 3
    attend = functools.partial(
        ring_dilated_attention, pattern=[Segments(128), Segments(64)], implementation="mosaic", mesh=make_mesh(seq=2)
    )
    jaxpr = str(jax.make_jaxpr(attend)(*arrays))
    aliases = re.findall(r"input_output_aliases=\((.*)\)$", jaxpr, re.MULTILINE)
    assert [len(re.findall(r"\(", one)) for one in aliases] == [0, 2]


def test_key_heads_that_are_the_same_along_an_axis_equal_oracle():
    """Their gradients are summed over the axis that cuts the query heads."""
    arrays = [array.astype(np.float32) for array in random_arguments(256, (4, 1), (8, 8), (1,))]
    mesh = make_mesh(AxisType.Explicit, seq=2, tensor=2)
    specs = P(None, "seq", "tensor"), P(None, "seq"), P(None, "seq")
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
    pattern = {"pattern": [Segments(128), Window(100, 2)], "is_causal": True}
    actual = ring_results(placed, implementation="mosaic", **pattern)
    for one, other in zip(actual, reference_results(arrays, **pattern), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("shards", [7, 8])
def test_rings_whose_steps_go_in_pairs_equal_oracle(shards):
    """An odd number of them, and an even one."""
    arrays = random_arguments(16 * shards, (2, 1), (8, 8), (1,))
    check(arrays, make_mesh(seq=shards), pattern=[Segments(16 * shards)], is_causal=True)


compiled_list = jax.jit(list_blocks, static_argnums=1)


def test_rows_that_kernels_take_equal_oracle():
    """Tokens of whole blocks, of branches that keep one of two in segments and that sort them for a window."""
    arrays = random_arguments(1024, (2, 1), (8, 8), (1,))
    check(arrays, make_mesh(seq=2), pattern=[Segments(512, 2), Window(100, 2)], is_causal=True)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9])
def test_a_list_has_the_tiles_that_meet(parts, density):
    """Each in one step of its row, in order, and one step of each row without any."""
    rng = np.random.default_rng(0)
    is_active, is_whole = rng.random((2, 2, 5, 8)) < np.array([density, 0.5])[:, None, None, None]
    found = jax.device_get(compiled_list(BlockMask(is_active, is_whole), parts))
    expected = []
    for number, row in np.ndindex(2, 5):
        columns = [c for c in range(8 // parts) if is_active[number, row, c * parts : (c + 1) * parts].any()]
        for column in columns or [0]:
            at = slice(column * parts, (column + 1) * parts)
            some, whole = is_active[number, row, at], (is_active & is_whole)[number, row, at]
            case = FULL if whole.all() else PARTIAL if some.all() else SOME if some.any() else NOTHING
            edges = column == (columns or [0])[0], column == (columns or [0])[-1]
            expected.append((number, row, column, case, *edges, some.tolist()))
    assert int(found.length) == len(expected)
    for entry, (number, row, column, case, is_first, is_last, some) in enumerate(expected):
        tile, step = int(found.tiles[entry]), Step(int(found.notes[entry]))
        assert (step.list, stationary_of(tile), streamed_of(tile), step.case) == (number, row, column, case)
        assert (step.is_first, step.is_last) == (is_first, is_last)
        assert [bool(step.is_active(part)) for part in range(parts)] == some


@pytest.mark.parametrize(
    ("pattern", "documents"),
    [
        ([Segments(8192)], None),
        ([Segments(2048)], None),
        ([Segments(4096, 2)], None),
        ([Window(1000)], None),
        ([Window(300, 2)], None),
        ([Segments(8192)], np.arange(8192) // 3000),
    ],
    ids=str,
)
def test_no_step_is_in_vain(pattern, documents):
    """A step is taken where some pair attends, and there alone."""
    length = 8192
    pattern = DilatedPattern(pattern)
    (schedule,) = make_schedule(pattern, length, 1, 1, True)
    mosaic = MosaicTpu()
    shape = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16)
    schedule, _ = mosaic.serve(Request(shape, shape, shape, "tpu"), schedule)

    def list_steps():
        rows = Plan(pattern, (schedule,), 1, Weighting(1.0), Placement()).rows(schedule)._replace(is_whole=True)
        padded = PaddedRows(
            rows, rows.shard[None], False, None if documents is None else jnp.asarray(documents)[None, None]
        )
        of_keys = padded._replace(rows=padded.rows.of_keys())
        mask = make_mask(AttentionStep(schedule, mosaic.see(padded), mosaic.see(of_keys)))
        parts = 4 if mask.blocks.is_active.shape[2] % 4 == 0 else 2
        return mask.queries, mask.keys, mask.blocks.is_active, list_blocks(mask.blocks, parts).length

    queries, keys, is_active, num_steps = jax.device_get(jax.jit(list_steps)())
    _, tiles, others = is_active.shape
    parts = 4 if others % 4 == 0 else 2
    flat = lambda array: array.reshape(-1)
    first, last, position = map(flat, (queries.first, queries.last, keys.position))
    allowed = (first[:, None] <= position) & (position <= last[:, None])
    if documents is not None:
        allowed &= flat(queries.document)[:, None] == flat(keys.document)
    if queries.phase is not None:
        allowed &= flat(queries.phase)[:, None] == flat(keys.phase)
    of_steps = allowed.reshape(tiles, len(first) // tiles, others // parts, -1).any(axis=(1, 3))
    assert num_steps == of_steps.sum() + (~of_steps.any(axis=1)).sum()


def test_documents_of_any_integers():
    """Also of fewer bits than a kernel's numbers have."""
    *arrays, documents = make_arrays(documents="mixed", length=20)
    arrays = [jnp.asarray(array, jnp.float32) for array in arrays[:3]]
    attend = functools.partial(ring_dilated_attention, *arrays, pattern=[Segments(20)], is_causal=True)
    found = attend(document_ids=documents.astype(np.int8), implementation="mosaic")
    np.testing.assert_allclose(found, attend(document_ids=documents, implementation="xla"), atol=1e-5)


def check_errors(arrays, **arguments):
    """Against float64, of an output, an lse and gradients: at most a tenth more than those of "xla"."""
    expected = reference_results([np.asarray(array, np.float64) for array in arrays], **arguments)
    errors = {}
    for name in ("xla", "mosaic"):
        found = ring_results(arrays, implementation=name, **arguments)
        errors[name] = [np.sqrt(np.mean((np.float64(a) - b) ** 2)) for a, b in zip(found, expected, strict=True)]
    assert all(np.array(errors["mosaic"]) <= 1.1 * np.array(errors["xla"]))


@pytest.mark.quick("[Segments(length=384, rate=1)]")
@pytest.mark.parametrize("pattern", [[Segments(128), Segments(384, 3)], [Segments(384)]], ids=str)
def test_errors_in_bfloat16_are_those_of_xla(pattern):
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in random_arguments(384, (2, 1), (64, 64), (2,))]
    check_errors(arrays, pattern=pattern, is_causal=True)


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [([Segments(128)], "bf16"), ([Segments(256)], "f32"), ([Segments(128), Segments(64)], "f32")],
    ids=["alone", "ring", "two branches"],
)
def test_kernels_write_sums_where_something_is_added(pattern, dtype):
    """And else what the caller gets, of half the bytes."""
    arrays = [jnp.zeros((1, 256, 1, 64), jnp.bfloat16)] * 3
    attend = functools.partial(ring_dilated_attention, pattern=pattern, implementation="mosaic", mesh=make_mesh(seq=2))
    gradient = jax.make_jaxpr(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0]))(*arrays)
    results = re.findall(r"^ *(.*) = pallas_call\[", str(gradient), re.MULTILINE)
    written = re.findall(r":(\w+)\[\d+,64,\d+\]", " ".join(results))  # rows are last
    assert written
    assert set(written) == {dtype}


@pytest.mark.slow
def test_under_vmap_and_checkpoint():
    """Instances that draw for themselves, which are not made one batch; and the same results when computed again."""
    arrays = [np.float32(array) for array in random_arguments(64, (2, 1), (4, 4), (3, 1))]
    arguments = {"pattern": [Segments(64), Window(9)], "is_causal": True, "dropout_rate": 0.3}
    seeds = jnp.arange(3, dtype=jnp.uint32)

    def attend(implementation, seed, *arrays):
        function = functools.partial(
            ring_dilated_attention, implementation=implementation, dropout_seed=seed, **arguments
        )
        return jax.vjp(jax.checkpoint(function), *arrays)[1](arrays[0])

    found, expected = (jax.jit(jax.vmap(functools.partial(attend, name)))(seeds, *arrays) for name in ("mosaic", "xla"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "more", "words"),
    [
        ("float16", {}, "in bfloat16 and float32, and query is of float16"),
        ("float32", {"platform": "cpu"}, "it runs on TPUs and on Hopper GPUs, and the devices are of platform 'cpu'"),
        (
            "float32",
            {"device_kind": "TPU v3"},
            "of TPUs it runs on the v4 and later ones, and the devices are 'TPU v3'",
        ),
        ("float32", {"device_kind": "TPU v4", "width": 192}, "has room for heads of 512 bytes, and these are 192 wide"),
        ("float32", {"unmapped": ("data",)}, r"say with spec=P\(...\) what they cut"),
        ("float32", {"precision": "high"}, "at the default precision or the highest"),
    ],
)
def test_what_it_cannot_serve(dtype, more, words):
    arguments = {"platform": "tpu", "width": 64, **more}
    array = jax.ShapeDtypeStruct((1, 256, 2, arguments.pop("width")), dtype)
    request = Request(array, array, array, **arguments)
    (schedule,) = make_schedule(DilatedPattern([Segments(256)]), 256, 1, 2)
    assert re.search(words, MosaicTpu().serve(request, schedule)[1])


@pytest.mark.parametrize(
    ("widths", "name"), [((64, 64), "narrow"), ((192, 128), "narrow"), ((128, 256), "wide"), ((128, 128), "wide")]
)
def test_heads_that_fill_no_whole_registers_have_rows_last(widths, name):
    query, value = (jax.ShapeDtypeStruct((1, 256, 2, width), jnp.bfloat16) for width in widths)
    (schedule,) = make_schedule(DilatedPattern([Segments(256)]), 256, 1, 2)
    reason = NarrowMosaicTpu().serve(Request(query, query, value, "tpu"), schedule)[1]
    assert (reason is None) == (name == "narrow")
    assert MosaicTpu().serve(Request(query, query, value, "tpu"), schedule)[1] is None


def test_a_named_implementation_that_cannot_serve_is_an_error():
    arrays = [jnp.asarray(array, jnp.float16) for array in random_arguments(16)]
    with pytest.raises(ValueError, match="implementation='mosaic' cannot serve: it runs on TPUs and on Hopper GPUs"):
        ring_dilated_attention(*arrays, segment_lengths=(8,), dilation_rates=(1,), implementation="mosaic")


@pytest.mark.parametrize(("kind", "most"), [("TPU v4", 512), ("TPU v5 lite", 1024), ("TPU v6 lite", 1024)])
def test_tiles_have_room_in_the_memory_of_a_chip(kind, most):
    array = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
    rows = lambda size: MosaicTpu().tile_rows(Request(array, array, array, "tpu", device_kind=kind, block_size=size))
    assert rows(128) == (128, 128)
    assert rows(4096) == (most, most)


@pytest.mark.parametrize(("rows", "count", "padded"), [(512, 13, 16), (1024, 13, 14), (1024, 17, 18), (2048, 3, 3)])
def test_tiles_are_padded_to_the_steps_that_are_taken(rows, count, padded):
    assert _tiles(count * rows, rows, tpu.parts_of) == (padded, rows)
