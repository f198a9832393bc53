"""Programs compiled for H100s and TPUs: what they communicate and when, and the memory that they take.

Needs the plugins of jax for CUDA and TPU beside it, of its own version, but no such device; run with `-m aot`.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_four_axes import compile_training_step, crossed_axes

from benchmarks.ahead_of_time import (
    HALOS,
    HEADS,
    LENGTH,
    LONGNET,
    MILLION,
    OVERLAP,
    PATTERN,
    TOKENS,
    TOPOLOGIES,
    WIDTH,
    compile_for,
    devices,
    fine_tuning,
    peak,
    sent,
)
from benchmarks.deviceless import CONTROL, DOCUMENTS, find_libraries, try_program
from benchmarks.gpu_kernels import count
from benchmarks.kernels import counted, longnet, rows_of
from benchmarks.programs import (
    array_sizes,
    crossing_permutes,
    entry_permutes,
    gathers,
    has_dimension,
    loop_lines,
    loop_permutes,
)
from ringjax import DilatedPattern, Segments, Window, make_mesh, plan, ring_dilated_attention
from ringjax._kernels.mosaic import FIRST_JAX
from ringjax._pattern.warning import warning_anew
from ringjax._schedule.make import make_schedule
from ringjax._schedule.strategy import schedules_with
from ringjax._schedule.work import Work, choose_travelling_side
from ringjax._tools.compiled import compile_forecast, find_devices
from ringjax._tools.hlo import bytes_sent
from ringjax._tools.messages import messages

pytestmark = pytest.mark.aot

needs_kernels = pytest.mark.skipif(jax.__version_info__ < FIRST_JAX, reason="the kernels for GPUs need a newer jax")

# Tokens for what does not depend on how many they are: the fewer, the sooner TPUs' compiler is done.
FEW = 8 * 512
FEW_OF_A_CHIP = 1024  # still two tiles of a kernel's rows
ENOUGH_TO_HIDE = 2048  # of a chip: what is sent of fewer its compiler hides behind nothing

# The flags under which not all permutes overlap: the tests have to see the difference.
NOT_OVERLAPPING = {
    "8 H100s": (("xla_gpu_enable_latency_hiding_scheduler", False),),
    "v5e:2x4": (("xla_enable_async_collective_permute", "false"),),
}


@pytest.mark.parametrize(("width", "precision"), [(128, None), (64, "highest")])
def test_kernels_for_tpus_are_compiled_under_x64(width, precision):
    """Where integers are of 64 bits by default, those of kernels, which know none of these, are of 32."""
    mesh = make_mesh((1,), ("seq",), (AxisType.Auto,), devices=devices("v5e", "2x4")[:1])
    array = jax.ShapeDtypeStruct((1, 1024, 2, width), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "seq")))
    more = {
        "precision": precision,
        "is_causal": True,
        "dropout_rate": 0.1,
        "dropout_seed": 3,
        "implementation": "mosaic",
        "mesh": mesh,
    }
    more |= {"block_size": 128}  # several tiles come by in a step, and are soon compiled
    attend = functools.partial(ring_dilated_attention, pattern=[Segments(512), Segments(1024, 2)], **more)
    results = jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0]))
    assert jax.config.jax_enable_x64
    text = results.lower(array, array, array).compile().as_text()
    assert len({*re.findall(r"%(ringjax_\w+)", text)}) >= 3  # forward, and the two of the gradient


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ({"data": 1, "seq": 8}, (AxisType.Auto, AxisType.Auto)),
        ({"data": 2, "seq": 4, "tensor": 1}, (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)),
    ],
)
def test_an_axis_of_one_device_stops_no_kernel(sizes, kinds):
    """It cuts nothing, though the compiler has it; kernels take no axis that the compiler may cut along."""
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices("v5e", "2x4"))
    array = jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "seq")))
    attend = functools.partial(ring_dilated_attention, pattern=[Segments(512)], mesh=mesh)
    lowered = lambda **options: jax.jit(functools.partial(attend, **options)).lower(array, array, array).as_text()
    with jax.enable_x64(False):
        assert "tpu_custom_call" in lowered(implementation="mosaic")
        words = "faster kernels, but no device has run them yet; check them with"
        with warning_anew(), pytest.warns(UserWarning, match=words):
            assert "tpu_custom_call" not in lowered()


@pytest.mark.parametrize(("device", "chips"), [("v5e", 1), ("v5p", 8)])
def test_plans_are_compiled_for_the_boxes_that_there_are(device, chips):
    """One chip has a host of its own, and a v5p's boxes have three dimensions."""
    pattern, sizes = [Segments(256), Segments(1024, 2)], {"num_tokens": 1024, "num_heads": 2}
    options = {"has_gradient": False, "implementation": "mosaic"}
    comparison = plan(pattern, **sizes, device=device, mesh=chips, **options)
    ring = comparison.forecasts[0]
    compiled = compile_forecast(comparison, ring, find_devices(comparison))
    assert compiled.sent == ring.num_bytes("forward")
    assert compiled.memory > 0


@pytest.mark.parametrize("gradient", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "xla") for name in ("8 H100s", "4 x 8 H100s", "v5e:2x4")),
        *((name, "cudnn") for name in ("8 H100s", "4 x 8 H100s")),
        ("v5e:4x8", "mosaic"),
        pytest.param("v5p:2x2x2", "mosaic", marks=pytest.mark.slow),
        *(pytest.param(name, "mosaic", marks=needs_kernels) for name in ("8 H100s", "4 x 8 H100s")),
    ],
)
def test_every_permute_in_a_loop_overlaps_with_computation(name, implementation, gradient):
    tokens = ENOUGH_TO_HIDE if name.startswith("v") else TOKENS
    length = tokens * len(devices(*TOPOLOGIES[name]))
    pattern = (length,), (1,)
    text = compile_for(name, gradient, length=length, pattern=pattern, implementation=implementation).as_text()
    assert ("__cudnn" in text, "ringjax_forward" in text) == (implementation == "cudnn", implementation == "mosaic")
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text


@pytest.mark.parametrize(
    ("name", "outer_size", "implementation"),
    [
        ("4 x 8 H100s", 4, "xla"),
        pytest.param("4 x 8 H100s", 4, "cudnn", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 2, "xla", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 2, "mosaic", marks=pytest.mark.slow),
    ],
)
def test_rings_over_two_axes_hide_what_crosses_the_outer_one(name, outer_size, implementation):
    """In the gradient, whose program has what the forward sends as well: all but the way back, after the last step."""
    tokens, count = ENOUGH_TO_HIDE if name.startswith("v") else TOKENS, len(devices(*TOPOLOGIES[name]))
    options = {"length": tokens * count, "pattern": ((tokens * count,), (1,)), "implementation": implementation}
    text = compile_for(name, True, outer_size=outer_size, **options).as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    across = crossing_permutes(text, count // outer_size)
    assert len(across) > 1
    assert len(across) - sum(across) <= 1
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text


@pytest.mark.parametrize("name", ["v5e:2x4", pytest.param("8 H100s", marks=needs_kernels)])
def test_kernels_of_a_ring_return_the_greatest_logit(name):
    ring = devices(*TOPOLOGIES[name])
    mesh, length = make_mesh((8,), ("seq",), devices=ring), 8 * ENOUGH_TO_HIDE
    array = jax.ShapeDtypeStruct((1, length, 2, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "seq")))
    options = {"pattern": [Segments(length)], "mesh": mesh, "implementation": "mosaic", "return_max_logit": True}
    with jax.enable_x64(False):
        compiled = jax.jit(functools.partial(ring_dilated_attention, **options)).lower(array, array, array).compile()
    text = compiled.as_text()
    assert "ringjax_forward" in text
    assert all(loop_permutes(text))
    assert [one.shape for one in compiled.out_info] == [array.shape, (2,)]


def test_rings_of_tpus_copy_nothing_in_their_loops():
    """What a trip receives the next one sends, from where it is."""
    length = 8 * ENOUGH_TO_HIDE
    text = compile_for("v5e:2x4", True, length=length, pattern=((length,), (1,)), implementation="mosaic").as_text()
    copies = [line for line in loop_lines(text) if re.search(r" copy(-start)?\(", line)]
    assert max((array_sizes(line)[0] for line in copies), default=0) < ENOUGH_TO_HIDE


def test_documents_travel_with_their_keys():
    """In a ring of cuDNN's kernel: what arrives with keys is hidden as these are, and nothing is gathered."""
    arguments = {"length": TOKENS * 32, "pattern": ((TOKENS * 32,), (1,)), "has_documents": True}
    text = compile_for("4 x 8 H100s", True, implementation="cudnn", **arguments).as_text()
    assert "__cudnn" in text
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    assert "all-gather" not in text


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *(("8 H100s", "xla"), ("v5e:2x4", "xla"), ("v5e:2x4", "mosaic")),
        pytest.param("8 H100s", "mosaic", marks=needs_kernels),
    ],
)
def test_dealt_rings_overlap_and_take_no_more_memory(name, implementation):
    """Documents, and the gradient: stripes beside zigzag."""
    length = 8 * (TOKENS if name == "8 H100s" else ENOUGH_TO_HIDE)
    arguments = {"length": length, "pattern": ((length,), (1,)), "has_documents": True, "has_cotangent": True}
    arguments |= {"implementation": implementation}
    programs = [compile_for(name, True, balance=balance, **arguments) for balance in (None, "zigzag")]
    dealt, swapped = (program.memory_analysis().peak_memory_in_bytes for program in programs)
    assert dealt <= 1.15 * swapped
    text = programs[0].as_text()
    assert gathers(text, "all-to-all")
    assert "all-gather" not in text
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_heads", "has_engine"), [(f"a ring {DOCUMENTS}", 2, "yes"), (CONTROL, 4, "no")])
def test_cudnn_has_an_engine(name, kv_heads, has_engine):
    assert try_program(name, True, kv_heads, find_libraries())["has an engine"] == has_engine


@pytest.mark.parametrize(
    ("name", "tokens", "branch"),
    [
        *(("8 H100s", TOKENS, *branches) for branches in HALOS.values()),
        # The same on shards that are shorter; but the least of several halos would be too small to be hidden.
        ("v5e:2x4", FEW_OF_A_CHIP, Window(512)),
        ("v5e:2x4", TOKENS, Window(20000)),
        ("v5e:2x4", FEW_OF_A_CHIP, Segments(375)),
    ],
    ids=str,
)
def test_every_halo_overlaps_with_computation(name, tokens, branch):
    """Forward it comes while a shard computes with its own keys; backward it also returns so."""
    text = compile_for(name, True, length=8 * tokens, pattern=(branch,), kv_heads=1).as_text()
    hops = entry_permutes(text)
    assert hops
    assert all(hops)
    assert all(loop_permutes(text))
    assert "all-gather" not in text


@pytest.mark.parametrize(
    ("name", "implementation", "kv_heads", "tokens"),
    [
        *((name, "cudnn", 2, TOKENS) for name in ("8 H100s", "4 x 8 H100s")),
        *((name, "xla", 8, 256) for name in ("v5e:2x4", "v5e:4x8")),
    ],
)
def test_exchanges_stay_inside_a_node(name, implementation, kv_heads, tokens):
    """Eight heads for eight neighbors; beyond these a ring, whose hops go on while tiles are computed."""
    count = len(devices(*TOPOLOGIES[name]))
    length, heads = tokens * count, 8
    arguments = {"implementation": implementation, "strategy": "all_to_all", "heads": heads, "kv_heads": kv_heads}
    arguments |= {"exchange_size": heads}
    text = compile_for(name, True, length=length, pattern=((length,), (1,)), **arguments).as_text()
    assert "all-gather" not in text
    exchanges = gathers(text, "all-to-all")
    assert exchanges
    for exchange in exchanges:
        np.testing.assert_array_equal(exchange.groups, np.arange(count).reshape(-1, 8))
    permutes = loop_permutes(text)
    assert len(permutes) > 0 if count > 8 else not permutes
    assert all(permutes)

    pattern = DilatedPattern([Segments(length)])
    schedule = functools.partial(make_schedule, pattern, length, count, kv_heads, is_causal=True)
    branches = schedules_with(lambda size: schedule(ulysses_size=size), ("all_to_all",), (1, 2, 4, 8), "all")
    # The backward of cuDNN reads the output and its cotangent, and the lse; others read delta in place of the output.
    size = 2 * 2 * WIDTH + 4 if implementation == "cudnn" else None
    branches = tuple(dataclasses.replace(one, implementation=implementation, residual_bytes=size) for one in branches)
    work = Work(pattern, kv_heads, 1, heads, WIDTH, WIDTH, itemsize=2)
    branches = choose_travelling_side(work, branches)
    stated = sum(message.num_bytes * message.times for message in messages(work, branches, True))
    sent = sum(bytes_sent(text).values())
    # The first hop of a gradient that a kernel returns in bfloat16 is made one of bfloat16, where no loop is around it.
    is_narrowed = implementation == "cudnn" and count > 8
    assert 0.96 * stated <= sent < stated if is_narrowed else sent == stated


@pytest.mark.parametrize("name", NOT_OVERLAPPING)
def test_permutes_that_do_not_overlap_are_seen(name):
    length = FEW if name.startswith("v") else LENGTH
    arguments = {"length": length, "pattern": ((length,), (1,)), "options": NOT_OVERLAPPING[name]}
    permutes = loop_permutes(compile_for(name, True, **arguments).as_text())
    assert permutes
    assert not all(permutes)


def test_permutes_of_a_ring_in_natural_order_do_not_overlap():
    """Where its hops are not to neighbors in the grid: what `make_mesh` is for."""
    text = compile_for("v5e:4x8", True, length=FEW, pattern=((FEW,), (1,)), in_natural_order=True).as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert not any(permutes)


def test_rings_beside_other_axes_overlap():
    """Each ring walks round a box of the grid, whatever other axes there are."""
    names = ("data", "tensor", "seq")
    mesh = make_mesh((2, 2, 8), names, (AxisType.Auto,) * 3, devices=devices("v5e", "4x8"))
    sharding = NamedSharding(mesh, P("data", "seq", "tensor"))
    length = 8 * ENOUGH_TO_HIDE
    array = jax.ShapeDtypeStruct((2, length, 2 * HEADS, WIDTH), jnp.bfloat16, sharding=sharding)
    options = {"is_causal": True, "implementation": "mosaic", "mesh": mesh, "spec": P(*names[::2], names[1])}
    attend = lambda *arrays: ring_dilated_attention(*arrays, pattern=[Segments(length)], **options)
    results = lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0])
    with jax.enable_x64(False):
        text = jax.jit(results).lower(array, array, array).compile().as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    assert "all-gather" not in text


@pytest.mark.slow
def test_a_training_step_gathers_parameters_alone():
    """On four nodes of eight, with rings of two nodes."""
    sizes = {"data": 1, "fsdp": 2, "seq": 8, "tensor": 2}
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 4, devices=devices("h100", "1x4x8"))
    length = 8 * 8191  # a prime number on each device, so that a dimension of all tokens is nothing else
    options = f"--sequence-length {length} --batch-size 12 --segment-lengths {length} --dilation-rates 1 --layers 1"
    text = compile_training_step(mesh, options + " --width 256 --dtype bfloat16", OVERLAP).as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    for size in (length, 12 * length):
        assert not has_dimension(text, size)
    found = [gather for gather in gathers(text) if "optimizer" not in gather.name]
    assert found
    for gather in found:
        assert crossed_axes(mesh, gather.groups) <= {"fsdp", "tensor"}


def test_memory_of_the_gradient():
    assert peak() <= 24
    assert peak(pattern=PATTERN) <= 18
    # The output travels with the queries where a kernel wants it; and no tile of logits is kept.
    assert peak(implementation="cudnn") <= 25
    assert peak(pattern=PATTERN, implementation="cudnn") <= 12
    assert peak(has_documents=True) <= 24
    # Sums begin as zeros of their own, when they are needed: no copies of an array of zeros.
    assert peak(count=4, pattern=(Window(512),), strategy="all_to_all") <= 16.5


@needs_kernels
def test_memory_of_the_gradient_by_kernels_for_gpus():
    """They read no sums that begin with them."""
    assert peak(implementation="mosaic", has_documents=True) <= 24
    assert peak(pattern=((TOKENS,), (1,)), implementation="mosaic") <= 16


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [((2048,), (1,)), LONGNET])
def test_memory_by_kernels_for_tpus(pattern):
    """They copy all that they read: some segments at a time, of one branch after the other."""
    by_kernels, by_tiles = (
        peak(name="v5e:2x4", length=2**19, pattern=pattern, implementation=name, has_cotangent=True)
        for name in ("mosaic", "xla")
    )
    assert by_kernels <= by_tiles <= 25


@pytest.mark.slow
def test_a_million_tokens_fit_sixteen_chips():
    """In five branches of sixteen heads, on TPUs of 16 GB."""
    compiled = compile_for("v5e:4x4", True, length=2**20, pattern=MILLION, heads=16, implementation="mosaic")
    assert compiled.memory_analysis().peak_memory_in_bytes <= 0.6 * 16 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "whole", "cut"), [("plain", 0.55, 0.95), ("documents", 0.55, 0.95), ("soft cap", 0.85, 1.15)]
)
def test_instructions_of_the_kernels_for_gpus(program, whole, cut):
    """They may hide behind the products, forward and backward, and nothing is spilled."""
    kernels = count(program)
    assert kernels.keys() == {"forward", "query_gradient", "key_gradient"}
    assert kernels["forward"].whole <= whole
    assert kernels["forward"].cut <= cut
    assert all(kernel.whole <= 0.9 for kernel in kernels.values())
    assert not any(kernel.spilled for kernel in kernels.values())


# What the kernels cost on one chip, counted: the most bundles over the bound, and the least use of the matrix units.
FORWARD = {("forward", "whole"): (1.05, 0.90), ("forward", "cut"): (1.12, 0.85), ("forward", "one part"): (1.12, 0.80)}
GRADIENTS = {("query_gradient", "whole"): (1, 0.80), ("query_gradient", "one part"): (1, 0.80)}
GRADIENTS |= {("key_gradient", "whole"): (1, 0.85), ("key_gradient", "one part"): (1, 0.85)}
BARS = {
    ("v5e", "plain"): {**FORWARD, **GRADIENTS},
    ("v6e", "plain"): {("forward", "whole"): (1.30, 0.75), ("key_gradient", "whole"): (1.10, 0.85)},
    ("v5e", "dropout"): {("forward", "whole"): (1.60, 0)},
    ("v5e", "soft cap"): {("forward", "whole"): (1.30, 0)},
}
SLOW_BARS = (("v5e", "dropout"), ("v5e", "soft cap"), ("v6e", "plain"))


@pytest.mark.parametrize(
    ("chip", "program"),
    [pytest.param(*one, marks=[pytest.mark.slow] if one in SLOW_BARS else []) for one in BARS],
)
def test_bundles_of_the_kernels_for_tpus(chip, program):
    found = counted(chip, program)
    rows = {(row["kernel"], row["case"]): row for row in rows_of(chip, program, found)}
    for (kernel, case), (most_bundles, least_busy) in BARS[chip, program].items():
        row = rows[kernel, case]
        assert row["MXU busy"] >= least_busy
        assert row.get("bundles over bound", 0) <= most_bundles
    if program == "plain":
        # A pair of LongNet's branches costs what one of dense segments of the same rows does.
        assert all(ratio <= 1.05 for ratio in longnet(found).values())


def test_memory_shrinks_with_the_devices():
    # In units of a device's queries: a ring of two has no gradient on its way while another is computed. Both together
    # are 0.28 in bytes, with a quarter of the tokens; each is held by itself, so that either may shrink.
    assert peak(count=2) <= 19.6
    assert peak() <= 4 * 0.28 * 19.6


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_sent_is_what_the_schedule_says(is_causal, gradient):
    found, stated = sent(is_causal, gradient)
    assert found == stated


def test_the_kernel_is_chosen_where_it_can_serve():
    """For local branches, in one call, and for rings, on GPUs with one call for each case; forward and backward."""
    compiled = compile_for("8 H100s", True, pattern=PATTERN, implementation=None)
    of_meetings = 4  # a local one, and the three cases of a ring
    assert compiled.as_text().count('="__cudnn') >= of_meetings * 2
    length = 8 * FEW_OF_A_CHIP
    two = ((256, length), (1, 4))
    text = compile_for("v5e:2x4", True, length=length, pattern=two, implementation="mosaic").as_text()
    for name in ("forward", "query_gradient", "key_gradient"):
        assert len(re.findall(rf"%ringjax_{name}\S* = .*custom-call\(", text)) >= 2
    assert " dot(" not in text
    assert " convolution(" not in text


def test_an_exchange_for_tpus_takes_little_code():
    """What goes with each token and head, of a number or two, is nowhere a row of 128 for each token."""
    arguments = {"length": 8 * 8192, "pattern": (Window(1024),), "heads": 16, "kv_heads": 8, "implementation": "mosaic"}
    compiled = compile_for("v5e:2x4", True, strategy="all_to_all", **arguments)
    assert compiled.memory_analysis().generated_code_size_in_bytes <= 10e6


def test_queries_that_share_keys_are_not_laid_out_anew_for_tpus():
    """Query heads are not put side by side with those that share a key, where a TPU has heads one after the other."""
    arguments = {"length": 8 * 8192, "heads": 8, "kv_heads": 2, "implementation": "mosaic"}
    compiled = compile_for("v5e:2x4", True, pattern=(Segments(2048, 2),), **arguments)
    moved = [line for line in compiled.as_text().splitlines() if " reshape(" in line]
    assert max((size for line in moved for size in array_sizes(line)), default=0) < 8192 * WIDTH


# Fewer tokens of a branch with a rate have rows that lie in the vector memory, which the peak counts as well.
@pytest.mark.parametrize(("branch", "tokens"), [(Window(20000), 8192), (Segments(2**16, 4), 32768)], ids=str)
def test_narrow_heads_are_not_padded_for_tpus(branch, tokens):
    """To the width of registers: heads of 64 take little more than half of the memory that heads of 128 take."""
    arguments = {"length": 8 * tokens, "pattern": (branch,), "implementation": "mosaic"}
    peaks = [
        compile_for("v5e:2x4", True, width=width, **arguments).memory_analysis().peak_memory_in_bytes
        for width in (64, 128)
    ]
    assert peaks[0] <= 0.6 * peaks[1]


def test_narrow_heads_are_not_padded_between_branches_for_tpus():
    """Where a branch waits for another, what it reads is not copied to registers that heads of 64 half fill."""
    arguments = {"length": 8 * FEW_OF_A_CHIP, "implementation": "mosaic", "width": 64}
    compiled = compile_for("v5e:2x4", False, pattern=(Segments(8 * FEW_OF_A_CHIP), Window(20)), **arguments)
    padded = rf"bf16\[1,{FEW_OF_A_CHIP},\d+,64\]\{{3,2,1,0[^ ]* copy\("
    assert not re.findall(padded, compiled.as_text())


@pytest.mark.parametrize(("gradient", "count"), [(False, 1), (True, 5)])
def test_branches_are_merged_in_one_pass(gradient, count):
    """Around the kernels only the output, its cotangent and the three gradients are written for all tokens."""
    length, pattern = 8 * TOKENS, ((2048, 8192, 32768), (1, 4, 16))
    compiled = compile_for("8 H100s", gradient, count=1, length=length, pattern=pattern, implementation="cudnn")
    entry = compiled.as_text().split("ENTRY")[1]
    fusions = [line.split(" fusion(")[0] for line in entry.splitlines() if " fusion(" in line]
    sizes = [size for line in fusions for size in array_sizes(line)]
    assert sum(size >= length * HEADS * WIDTH for size in sizes) == count


@pytest.mark.parametrize("name", ["cudnn", pytest.param("mosaic", marks=needs_kernels)])
@pytest.mark.parametrize("branch", [Segments(TOKENS), Window(512)])
def test_one_local_branch_on_gpus_is_its_kernel_alone(name, branch):
    """It reads queries, keys and values where they are, and writes the output: no pass over tokens is around it."""
    compiled = compile_for("8 H100s", False, count=1, length=TOKENS, pattern=(branch,), implementation=name)
    entry = compiled.as_text().split("ENTRY")[1]
    streamed = re.findall(r"= (\S+|\(.*?\)) (?:fusion|copy|transpose)\(", entry)
    assert max((size for shapes in streamed for size in array_sizes(shapes)), default=0) < TOKENS * HEADS * WIDTH


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_gather_nothing(kind):
    """Batches over one axis, heads over another: known from the types, or from `spec`."""
    names = ("data", "seq", "tensor")
    mesh = Mesh(np.array(devices("h100", "1x1x8")).reshape(2, 2, 2), names, axis_types=(kind,) * 3)
    array = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(*names)))
    arguments = {"segment_lengths": (256, 1024), "dilation_rates": (1, 4), "is_causal": True, "mesh": mesh}
    spec = P(*names) if kind == AxisType.Auto else None

    def results(*arrays):
        attend = functools.partial(ring_dilated_attention, implementation="cudnn", spec=spec, **arguments)
        return jax.vjp(attend, *arrays)[1](arrays[0])

    with jax.enable_x64(False):
        text = jax.jit(results).lower(array, array, array).compile().as_text()
    assert "__cudnn" in text
    for collective in ("all-gather", "all-to-all", "all-reduce"):
        assert collective not in text


def test_a_mesh_that_jit_hides_gathers_nothing():
    """Where only `in_shardings` name the mesh, batches and heads stay where they are all the same."""
    mesh = Mesh(np.array(devices("h100", "1x1x8")).reshape(2, 4), ("data", "tensor"))
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    array = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
    arguments = {"segment_lengths": (256, 1024), "dilation_rates": (1, 4), "is_causal": True}

    def results(*arrays):
        return jax.vjp(functools.partial(ring_dilated_attention, **arguments), *arrays)[1](arrays[0])

    with jax.enable_x64(False):
        jitted = jax.jit(results, in_shardings=(sharding,) * 3, out_shardings=(sharding,) * 3)
        text = jitted.lower(array, array, array).compile().as_text()
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text


def test_a_pretrained_model_is_fine_tuned_at_131072_tokens():
    """In a seventh of an H100's memory: a step of 0.6 billion parameters with AdamW, in bfloat16."""
    assert fine_tuning() < 12.5
