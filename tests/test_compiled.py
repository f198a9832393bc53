"""What eight-device programs compile to: the hops of the schedule, the kept rows alone, memory that shrinks."""

import collections
import contextlib
import functools
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import make_mesh

import ringjax
from benchmarks.programs import has_dimension
from ringjax import DilatedPattern, Segments, Window, ring_dilated_attention
from ringjax._kernels.attention_step import AttentionStep, PaddedRows, make_mask, see_keys, see_queries
from ringjax._kernels.softmax import Weighting
from ringjax._mesh.placement import Placement
from ringjax._parallel import rule
from ringjax._parallel.device import device_forward
from ringjax._parallel.plan import Plan
from ringjax._schedule.make import make_schedule
from ringjax._schedule.work import RowBytes, Work, choose_travelling_side
from ringjax._tools.hlo import bytes_sent, permutes
from ringjax._tools.messages import messages

# How XLA names the collectives of the planner.
KINDS = {
    "permute": "collective-permute",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
HEADS, WIDTH = 2, 6
FLOAT = 4


def compile_attention(mesh, length, spec=("seq",), heads=(HEADS, HEADS), batch=1, gradient=False, **arguments):
    shape = lambda heads: jax.ShapeDtypeStruct(
        (batch, length, heads, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, *spec))
    )

    def call(query, key, value):
        out = ring_dilated_attention(query, key, value, mesh=mesh, **arguments)
        # The result is kept where its tokens are: what is read off the program is the attention's alone.
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P(None, *spec)))

    function = (lambda out_grad, *arrays: jax.vjp(call, *arrays)[1](out_grad)) if gradient else call
    counts = (heads[0], *heads, heads[1]) if gradient else (*heads, heads[1])
    return jax.jit(function).lower(*map(shape, counts)).compile()


def compile_backward(mesh, length, heads, **arguments):
    """The backward alone: from the residuals and the cotangent."""
    call = lambda *arrays: ring_dilated_attention(*arrays, mesh=mesh, **arguments)
    shapes = [jax.ShapeDtypeStruct((1, length, count, WIDTH), jnp.float32) for count in (*heads, heads[1])]
    shard = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(None, "seq")))
    function = jax.eval_shape(lambda *arrays: jax.vjp(call, *arrays)[1], *shapes)
    residuals = jax.tree.map(shard, function)
    return jax.jit(lambda function, out_grad: function(out_grad)).lower(residuals, shard(shapes[0])).compile()


def row_bytes(heads, kv_heads, batch=1):
    """The bytes of one padded row in float32: for the backward, and of its query."""
    row = lambda heads: batch * heads * WIDTH * FLOAT
    query, keys, lse = row(heads), 2 * row(kv_heads), batch * heads * FLOAT
    return RowBytes(2 * query + 2 * lse, keys, query_grad=query, keys_grad=keys), query


def sum_sent(messages, direction):
    return sum(message.times * message.num_bytes for message in messages if message.direction == direction)


def sent(compiled):
    return sum(permute.trips * permute.bytes for permute in permutes(compiled.as_text()))


@pytest.mark.quick("192-1-512-heads2-True", "96-3-384-heads3-True", "128-2-512-heads1-False")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("segment_length", "rate", "length", "heads"),
    [
        (512, 1, 512, (HEADS, HEADS)),
        (128, 2, 512, (8, 1)),
        (192, 1, 512, (HEADS, HEADS)),
        (96, 3, 384, (HEADS, HEADS)),
    ],
)
def test_what_is_sent_is_what_the_tokens_ask_for(segment_length, rate, length, is_causal, heads):
    """A row goes once to each other shard that is linked to its own by segments, and to none else."""
    arguments = {"segment_lengths": (segment_length,), "dilation_rates": (rate,), "is_causal": is_causal}
    (schedule,) = make_schedule(DilatedPattern.of_lengths((segment_length,), (rate,)), length, 8, heads[1], is_causal)
    row, query = row_bytes(*heads)
    parts, padded, fills_shards = linked_shards(segment_length, rate, length, 8, heads[1])
    hops = max(map(len, parts)) - 1
    assert hops > 0
    work = Work(DilatedPattern([schedule.branch]), heads[1], 1, heads[0], WIDTH, WIDTH, FLOAT)
    (schedule,) = choose_travelling_side(work, (schedule,))
    assert schedule.rotates_queries == (heads[0] == heads[1])

    mesh = make_mesh(seq=8)
    forward = compile_attention(mesh, length, heads=heads, **arguments)
    # Where causal shards swap halves to have the same work, these go there and the results back.
    swapped = padded // 2 if is_causal and fills_shards else 0
    # Of one branch, nobody asks for the lse.
    expected = hops * padded * row.keys + swapped * (query + row.keys + query)
    stated = lambda direction, has_gradient: sum_sent(messages(work, (schedule,), has_gradient), direction)
    assert sent(forward) == expected == stated("forward", False)
    backward = compile_backward(mesh, length, heads, **arguments)
    travels = min(row.queries + row.query_grad, row.keys + row.keys_grad)
    assert sent(backward) == hops * padded * travels + swapped * sum(row) == stated("backward", True)
    part_of = {shard: number for number, part in enumerate(parts) for shard in part}
    for permute in (*permutes(forward.as_text()), *permutes(backward.as_text())):
        assert all(part_of[source] == part_of[destination] for source, destination in permute.pairs)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(("strategy", "balance"), [("ring", "stripes"), ("all_gather", "stripes"), ("ring", "zigzag")])
def test_what_is_dealt_is_what_the_planner_counts(strategy, balance, gradient):
    """With documents, in shards whose padding fills stripes."""
    length, heads, mesh = 8 * 132, (4, 2), make_mesh(seq=8)
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = lambda heads: jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32, sharding=sharding)
    documents = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)
    arrays = shape(heads[0]), shape(heads[1]), shape(heads[1])
    options = {"pattern": [Segments(length)], "is_causal": True, "strategy": strategy, "balance": balance}

    def attend(query, key, value, documents):
        return ring_dilated_attention(query, key, value, document_ids=documents, mesh=mesh, **options)

    def gradients(*arrays):
        out, back = jax.vjp(lambda *some: attend(*some, arrays[-1]), *arrays[:-1])
        return out, back(out)

    text = jax.jit(gradients if gradient else attend).lower(*arrays, documents).compile().as_text()
    (explained,) = ringjax.explain(attend, *arrays, documents).calls
    call, schedules = explained[0].call, explained[0].forecasts[0].implemented
    assert [schedule.balance for schedule in schedules] == [balance]
    stated = collections.Counter()
    for one in messages(call.work, schedules, gradient):
        stated[KINDS[one.collective]] += one.num_bytes * one.times
    assert bytes_sent(text) == stated


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("length", "key_length", "what"), [(64, 65536, "gathered"), (1536, 8192, "around"), (8192, 8192 + 8, "keys")]
)
def test_few_queries_travel_in_place_of_keys(length, key_length, what, gradient):
    """Fewer than a device's keys: each device sends little more than what all queries and their outputs take."""
    is_gathered = what == "gathered"
    mesh, (heads, kv_heads), width = make_mesh(seq=8), (8, 2), 64
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = lambda *sizes: jax.ShapeDtypeStruct((1, *sizes, width), jnp.float32, sharding=sharding)
    arrays = shape(length, heads), shape(key_length, kv_heads), shape(key_length, kv_heads)
    options = {"pattern": [Segments(key_length)], "is_causal": True, "query_offset": key_length - length}
    attend = functools.partial(ring_dilated_attention, mesh=mesh, **options)

    def gradients(*arrays):
        out, back = jax.vjp(attend, *arrays)
        return out, back(out)

    text = jax.jit(gradients if gradient else attend).lower(*arrays).compile().as_text()
    (explained,) = ringjax.explain(attend, *arrays).calls
    call, (schedule,) = explained[0].call, explained[0].forecasts[0].implemented
    assert (schedule.gathers_queries, schedule.rotates_outputs) == (is_gathered, what == "around")
    stated = collections.Counter()
    for one in messages(call.work, (schedule,), gradient):
        stated[KINDS[one.collective]] += one.num_bytes * one.times
    sent = bytes_sent(text)
    assert sent == stated
    assert ("collective-permute" in sent) != is_gathered
    if is_gathered and not gradient:
        # Sums of outputs are in float32: twice the bytes of these in bfloat16, where queries would take half.
        of_both = 2 * (2 * length * heads * width)
        assert sent["all-to-all"] + sent["all-gather"] / 2 <= 1.5 * of_both


def linked_shards(segment_length, rate, length, shards, num_heads):
    """By brute force over tokens: the parts of the shards that segments link, directly or by way of others; the most
    rows that a head keeps on a shard; and whether each segment of more than one shard is made of whole ones."""
    tokens = np.arange(length).reshape(shards, -1)
    segments = [set(own // segment_length) for own in tokens]
    parts = []
    for shard in range(shards):
        linked = [part for part in parts if any(segments[shard] & segments[other] for other in part)]
        parts = [part for part in parts if part not in linked] + [{shard}.union(*linked)]
    kept = [(own % segment_length % rate == head % rate).sum() for own in tokens for head in range(num_heads)]
    return parts, max(kept), all(len(numbers) == 1 for numbers in segments)


def seen_tokens(branch, length, shards, is_causal):
    """By brute force over tokens: which keys the queries of each shard see, [shards, T], and which queries see its."""
    t = np.arange(length)
    if isinstance(branch, Segments):
        first, last = t // branch.length * branch.length, (t // branch.length + 1) * branch.length - 1
    else:
        first, last = t - (branch.size - 1) * branch.rate, t + (branch.size - 1) * branch.rate
    first, last = np.maximum(first, 0), np.minimum(t if is_causal else last, length - 1)
    keys, queries = np.zeros((2, shards, length), bool)
    for shard, own in enumerate(t.reshape(shards, -1)):
        for token in own:
            keys[shard, first[token] : last[token] + 1] = True
        queries[shard] = (last >= own[0]) & (first <= own[-1])
    return keys, queries


def hops_of(seen, branch, length, num_heads):
    """The rows that go to the shard so far on, {hops: rows}: the most that any head has on any shard."""
    t, shards = np.arange(length), len(seen)
    rate = branch.rate if isinstance(branch, Segments) else 1
    segment = branch.length if isinstance(branch, Segments) else length
    rows = {}
    for head in range(num_heads):
        kept = (seen & (t % segment % rate == head % rate)).reshape(shards, shards, -1).sum(axis=2)
        for here, there in itertools.permutations(range(shards), 2):
            if kept[there, here]:
                rows[there - here] = max(rows.get(there - here, 0), int(kept[there, here]))
    return rows


@pytest.mark.quick(
    "Segments(length=1000, rate=1)-1024-False-{1: 168, -1: 976}-queries travel back",
    "Segments(length=40, rate=2)-32-True-{1: 16}-keys travel back",
    "Window(size=5, rate=3)-36-False-{1: 12, -1: 12}-keys travel back",
)
@pytest.mark.parametrize("kv_heads", [1, HEADS], ids=["keys travel back", "queries travel back"])
@pytest.mark.parametrize(
    ("branch", "shard_length", "is_causal", "expected"),
    [
        (Segments(1000), 1024, True, {1: 168}),
        (Segments(1000), 1024, False, {1: 168, -1: 976}),
        (Segments(40, 2), 32, True, {1: 16}),
        (Segments(2500, 3), 1000, False, {1: 334, 2: 334, -1: 334, -2: 334}),
        (Window(4096), 8192, True, {1: 4095}),
        (Window(20000), 8192, True, {1: 8192, 2: 8192, 3: 3615}),
        (Window(5, 3), 36, False, {1: 12, -1: 12}),
    ],
    ids=str,
)
def test_rows_hop_to_those_that_see_them_alone(branch, shard_length, is_causal, expected, kv_heads):
    """As many rows as the tokens ask for, each way; backward those of the lighter side, whose gradient returns."""
    length, heads, mesh = 8 * shard_length, (8, kv_heads) if kv_heads == 1 else (HEADS, HEADS), make_mesh(seq=8)
    keys, queries = seen_tokens(branch, length, 8, is_causal)
    hops = hops_of(keys, branch, length, heads[1])
    if heads[1] > 1:
        assert hops == expected
    row, _ = row_bytes(*heads)
    # In blocks that hold the rows of a shard, so that no row is padding.
    arguments = {"pattern": [branch], "is_causal": is_causal, "heads": heads, "block_size": 512}
    forward = compile_attention(mesh, length, **arguments)
    assert sent(forward) == sum(hops.values()) * row.keys
    for permute in permutes(forward.as_text()):
        assert {there - here for here, there in permute.pairs} <= set(hops)
    of_queries = sum(hops_of(queries, branch, length, heads[1]).values()) * (row.queries + row.query_grad)
    of_keys = sum(hops.values()) * (row.keys + row.keys_grad)
    assert sent(compile_backward(mesh, length, **arguments)) == min(of_queries, of_keys)


@pytest.mark.parametrize(
    "operation",
    [
        'bf16[16,4]{1,0} collective-permute(%array)$, metadata={scheduling_name="collective-permute-start.1"}',
        "((bf16[16,4]{1,0}), bf16[16,4]{1,0}) collective-permute-start(%array)$",
        "(bf16[16,4]{1,0}, bf16[16,4]{1,0}, u32[], u32[]) collective-permute-start(%array)$",
    ],
)
def test_bytes_of_a_permute_that_is_written_in_any_way(operation):
    line = operation.replace("$", ", channel_id=1, source_target_pairs={{0,1},{1,0}}")
    (permute,) = permutes(f"ENTRY %main (array: bf16[16,4]) -> bf16[16,4] {{\n  %permute = {line}\n}}")
    assert permute.pairs == ((0, 1), (1, 0))
    assert permute.bytes == 16 * 4 * 2


def test_a_program_for_512_devices_is_that_for_8():
    """Segments that straddle make the same hops on any number of devices, and take as long to lower."""

    def lower(devices):
        mesh = AbstractMesh((devices,), ("seq",), (AxisType.Auto,))
        array = jax.ShapeDtypeStruct(
            (1, 8192 * devices, HEADS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "seq"))
        )
        attend = lambda *arrays: ring_dilated_attention(*arrays, pattern=[Segments(3000)], is_causal=True, mesh=mesh)
        gradient = jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum(), (0, 1, 2)))
        jax.clear_caches()
        begin = time.process_time()
        text = gradient.trace(array, array, array).lower(lowering_platforms=("cpu",)).as_text()
        return time.process_time() - begin, text.count("collective_permute")

    lower(8)
    # In turns, so that both see the same machine.
    few, many = zip(*((lower(8), lower(512)) for _ in range(4)), strict=True)
    (of_few, permutes_of_few), (of_many, permutes_of_many) = min(few), min(many)
    assert permutes_of_few == permutes_of_many
    assert of_many < 1.5 * of_few


def test_segments_within_a_device_need_no_permute():
    arguments = {"segment_lengths": (64, 32), "dilation_rates": (1, 4), "is_causal": True}
    assert permutes(compile_attention(make_mesh(seq=8), 512, gradient=True, **arguments).as_text()) == []


@pytest.mark.quick("False")
@pytest.mark.parametrize("gradient", [False, True])
def test_nothing_of_the_whole_length_is_on_a_device(gradient):
    length = 8 * 101
    arguments = {"segment_lengths": (101, 202, 1000), "dilation_rates": (1, 2, 4), "is_causal": True}
    text = compile_attention(make_mesh(seq=8), length, gradient=gradient, **arguments).as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce"):
        assert collective not in text
    assert has_dimension(text, 101)
    assert not has_dimension(text, length)


@pytest.mark.quick("AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_tensor_axis_adds_no_collective(kind):
    mesh = make_mesh(kind, seq=2, tensor=2)
    arguments = {"segment_lengths": (32, 64), "dilation_rates": (4, 8), "is_causal": True}
    shape = jax.ShapeDtypeStruct(
        (1, 128, 4, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "seq", "tensor"))
    )
    call = lambda *arrays: ring_dilated_attention(*arrays, mesh=mesh, **arguments)
    gradient = jax.jit(lambda *arrays: jax.vjp(call, *arrays)[1](arrays[0]))
    text = gradient.lower(shape, shape, shape).compile().as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert f"{collective}(" not in text


@pytest.mark.quick("False")
@pytest.mark.parametrize("gradient", [False, True])
def test_bytes_on_a_device_halve_when_the_devices_double(gradient):
    # Blocks and segments small beside a shard: what is read is the rows, not the logits of one block.
    length = 65536
    arguments = {"segment_lengths": (512, length), "dilation_rates": (1, 4), "is_causal": True, "block_size": 64}
    used = {}
    for count in (2, 4, 8):
        memory = compile_attention(make_mesh(seq=count), length, gradient=gradient, **arguments).memory_analysis()
        used[count] = memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes
        # In units of one device's queries, whatever the number of devices.
        assert used[count] <= (15 if gradient else 7) * (length // count * HEADS * WIDTH * FLOAT)
    assert used[8] <= 0.55 * used[4]
    assert used[8] <= 0.55**2 * used[2]
    # In a ring of two no gradient travels while another is computed: from there the gradient does not quite halve.
    if not gradient:
        assert used[4] <= 0.55 * used[2]


def test_memory_of_one_device_is_linear_in_the_tokens():
    """But for the table of which tiles meet, which is small: with the least tiles it shows."""
    used = []
    for length in (4096, 8192, 16384):
        arguments = {"segment_lengths": (length,), "dilation_rates": (1,), "block_size": 128}
        memory = compile_attention(make_mesh(seq=1), length, gradient=True, **arguments).memory_analysis()
        used.append(memory.temp_size_in_bytes)
    assert used[-1] <= 4.2 * used[0]


def test_no_array_of_logits_exceeds_a_block():
    length = 2048
    arguments = {"segment_lengths": (length,), "dilation_rates": (1,)}
    memory = compile_attention(make_mesh(seq=1), length, gradient=True, **arguments).memory_analysis()
    assert memory.temp_size_in_bytes < HEADS * length * length * FLOAT


def test_segments_that_do_not_divide_the_tokens_are_not_gathered():
    """Their rows are the tokens, with padding behind them."""
    text = compile_attention(make_mesh(seq=1), 37, gradient=True, pattern=[Segments(10)]).as_text()
    assert not re.findall(r" (gather|scatter)\(", text)


def test_masked_blocks_are_skipped():
    pattern = DilatedPattern.of_lengths((4096,), (1,))
    counts = {}
    for is_causal in (False, True):
        branches = make_schedule(pattern, 4096, 1, 1, is_causal)
        rows = Plan(pattern, branches, 1, Weighting(1.0), Placement()).rows(branches[0])
        padded = PaddedRows(rows, rows.shard[None], False)
        blocks = make_mask(AttentionStep(padded.schedule, see_queries(padded), see_keys(padded))).blocks
        counts[is_causal] = int(blocks.is_active.sum()), int(blocks.is_full.sum())
    assert counts[False] == (64, 64)
    assert counts[True] == (36, 28)


def test_rematerialisation_keeps_the_named_results():
    """With the policy the backward goes around its own ring alone; without it the forward's ring runs again.

    In a loop over layers, as models have it: of one layer the compiler may find that both forwards are the same.
    """
    mesh = make_mesh(seq=4)
    arguments = {"segment_lengths": (64,), "dilation_rates": (1,), "is_causal": True, "mesh": mesh}
    shape = jax.ShapeDtypeStruct((1, 64, HEADS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "seq")))
    attend = lambda array: jnp.sin(ring_dilated_attention(array, array, array, **arguments))

    def hops(layer):
        model = lambda array: jax.lax.scan(lambda array, _: (layer(array), None), array, length=2)[0].sum()
        text = jax.jit(jax.grad(model)).lower(shape).compile().as_text()
        return sum(permute.trips for permute in permutes(text))

    keep = jax.checkpoint_policies.save_only_these_names("ringjax_out", "ringjax_lse")
    assert hops(jax.checkpoint(attend, policy=keep)) == hops(attend)
    assert hops(jax.checkpoint(attend)) > hops(attend)


@pytest.mark.parametrize("is_set", [False, True])
def test_a_gradient_traces_the_forward_once(monkeypatch, is_set):
    traced, mesh, array = [], make_mesh(seq=4), jnp.ones((1, 52, HEADS, WIDTH))
    counted = lambda *arrays, plan: (traced.append(plan), device_forward(*arrays, plan=plan))[1]
    monkeypatch.setattr(rule, "device_forward", counted)
    loss = lambda array: ring_dilated_attention(array, array, array, pattern=[Segments(52)], mesh=mesh).sum()
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        jax.jit(jax.grad(loss)).trace(array)
    assert len(traced) == 1


def test_attention_of_jax_computes_all_pairs_of_its_queries():
    """As the comparison with other libraries says: masked ones too, with all keys on each device."""
    length, mesh = 8 * 37, make_mesh(seq=8)
    shape = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "seq")))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    text = jax.jit(attend).lower(shape, shape, shape).compile().as_text()
    assert "all-gather" in text
    assert f"f32[{HEADS},37,{length}]" in text
