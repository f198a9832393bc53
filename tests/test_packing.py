"""How packed documents are counted: the blocks are those of the library's own masks, and stripes keep rings in step."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import make_mesh

import ringjax
from benchmarks import balance as benchmark
from benchmarks.timing import RESULTS
from ringjax import DilatedPattern, Segments, Window
from ringjax._kernels.attention_step import PaddedRows, see_keys, see_queries
from ringjax._kernels.interface import Request
from ringjax._kernels.mask import find_active_blocks
from ringjax._kernels.mosaic import MosaicTpu
from ringjax._kernels.rows import BranchHeads, Rows
from ringjax._schedule.make import make_schedule
from ringjax._schedule.strategy import schedules_with
from ringjax._tools.command import main
from ringjax._tools.packing import Packing, active_blocks, draw_lengths, in_step, num_packed_pairs, pack

HEADS = BranchHeads(0, 1, np.zeros(1, np.uint32), (), np.zeros(1, np.int32))


def seen_blocks(schedule, packing, shard, sources, side):
    """The active blocks of a shard's queries and these keys, by the bounds of their masks."""
    numbers = np.searchsorted(packing.starts, np.arange(4 * packing.length), "right").astype(np.int32)

    def see(view, rows, shards, is_dealt):
        padded = PaddedRows(rows, jnp.asarray(shards, jnp.uint32), is_dealt)
        token = padded.tokens()[0]
        return view(padded._replace(documents=jnp.asarray(numbers)[token][:, None])).bounds

    rows = Rows(schedule, schedule.queries, jnp.int32(shard), HEADS)
    queries = see(see_queries, rows, [shard], schedule.is_dealt)
    of_keys = rows.of_keys()._replace(side=side)
    keys = see(see_keys, of_keys, sources, schedule.is_dealt and not schedule.is_gathered)
    return int(find_active_blocks(queries, keys).is_active.sum())


@pytest.mark.parametrize("balance", ["none", "zigzag", "stripes"])
@pytest.mark.parametrize(
    ("branch", "strategy", "is_causal"),
    [
        (Segments(960), "ring", True),
        (Segments(960), "ring", False),
        (Segments(960), "all_gather", True),
        (Segments(240), "ring", True),
        (Segments(48), "ring", True),
        (Window(100), "ring", True),
    ],
    ids=str,
)
def test_active_blocks_are_those_of_the_masks(branch, strategy, is_causal, balance):
    """Step by step and shard by shard, with short documents and long ones."""
    packing = Packing((0, 17, 300, 301, 641, 649), 960)
    make = lambda size: make_schedule(
        DilatedPattern([branch]), 960, 8, 1, is_causal, 8, ulysses_size=size, balance=balance
    )
    (schedule,) = schedules_with(make, (strategy,), (1,), "all")
    counted = active_blocks(schedule, packing)
    for shard in range(8):
        if schedule.is_gathered:
            size = schedule.gather_size
            sources = range(shard // size * size, shard // size * size + size)
            assert counted[0][shard] == seen_blocks(schedule, packing, shard, [*sources], schedule.keys)
            continue
        steps = [(shard, schedule.keys, True)]
        for rotation in schedule.key_rotations:
            for hops in range(1, rotation.hops + 1):
                side = schedule.keys if hops <= rotation.steps else rotation.of_halo(schedule.keys)
                where = shard, hops, rotation.direction
                steps.append((schedule.source(*where), side, schedule.is_new(*where)))
        expected = [seen_blocks(schedule, packing, shard, [one], side) * is_new for one, side, is_new in steps]
        assert [step[shard] for step in counted] == expected


def test_pairs_of_packed_documents():
    """All of a document's pairs, divided among the shards."""
    packing = pack([5, 40, 19], 64)[0]
    assert packing.starts == (0, 5, 45)
    (schedule,) = make_schedule(DilatedPattern([Segments(64)]), 64, 4, 1, True)
    assert num_packed_pairs(schedule, (0,), [packing]) == sum(n * (n + 1) // 2 for n in (5, 40, 19)) // 4
    assert in_step(schedule, [packing]) > 1


def test_documents_are_packed_in_order():
    assert pack([100], 64) == (Packing((0,), 64),)
    assert pack([10, 20], 64) == (Packing((0, 10, 30, 40, 60), 64), Packing((0, 20, 30, 50, 60), 64))
    assert [len(packing.starts) for packing in pack([1] * 64 + [63], 64)] == [64, 2]
    assert pack([10**30], 64) == pack(np.array([100]), 64)
    assert pack([40, 40, 40, 40], 64) == (Packing((0, 40), 64), Packing((0, 40), 64))
    assert len(pack([64] * 100, 64)) == 8
    lengths = draw_lengths(2000, 1.2, 2**20)
    assert lengths == draw_lengths(2000, 1.2, 2**20)
    assert 1900 < np.median(lengths) < 2100
    with pytest.raises(TypeError, match="document_lengths=5 must be a sequence: give the tokens of each document"):
        pack(5, 64)
    for wrong, words in (
        ([], r"=\[\] is empty"),
        ([3, 0], "document_lengths has 0"),
        ([2.5], "document_lengths has 2.5"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*: give the tokens of each document"):
            pack(wrong, 64)


def test_stripes_keep_rings_in_step():
    """Within the bounds, as the stored figures of more draws are; and no block is computed that need not be."""
    for number, median in enumerate(benchmark.MEDIANS):
        packings = [benchmark.draw(8 * benchmark.TOKENS, median, seed) for seed in range(benchmark.DRAWS)]
        schedules = [benchmark.schedule_of(8, balance) for balance in benchmark.BALANCES]
        stripes, zigzag, contiguous = (in_step(schedule, packings) for schedule in schedules)
        assert stripes <= benchmark.BOUNDS[8][number]
        assert min(zigzag, contiguous) > 1.5 * stripes
    rows = json.loads((RESULTS / "balance.json").read_text())["rows"]
    bounds = [bound for of_devices in benchmark.BOUNDS.values() for bound in (*of_devices, 1.05)]
    for row, bound in zip(rows, bounds, strict=True):
        assert row["stripes over the ideal"] <= bound
        assert row["blocks over those of contiguous"] == 1
        assert row["zigzag"] == 1 or "one document" not in row["case"]


def plan(**options):
    arguments = {"num_tokens": 2**17, "num_heads": 32, "num_kv_heads": 8, "is_causal": True, "mesh": 8}
    arguments |= {"implementation": "xla", **options}
    return ringjax.plan([Segments(arguments["num_tokens"])], **arguments)


def test_a_plan_of_packed_documents():
    """A ring takes as long as the busiest device of each step, an exchange is balanced by itself."""
    lengths = draw_lengths(8000, 1.2, 2**17)
    packed, whole = plan(document_lengths=lengths), plan()
    ring, gathered, exchanged = packed.forecasts
    assert exchanged.in_step == 1 < gathered.in_step < ring.in_step < 1.15
    assert plan(document_lengths=lengths, balance="zigzag").forecasts[0].in_step > 2
    assert all(forecast.in_step == 1 for forecast in whole.forecasts)
    assert ring.computed < 0.3 * whole.forecasts[0].computed
    assert re.search(r"balance +stripes +stripes +none", str(packed))
    assert re.search(r"busiest over the mean +1\.\d\d +1\.\d\d +1\.00", str(packed))
    assert "busiest" not in str(whole)
    assert "document_ids=document_ids" in packed.example
    assert "document_ids" not in packed.module_example + whole.example
    assert "balance='zigzag'" in plan(document_lengths=lengths, balance="zigzag").example


def test_the_blocks_of_kernels_are_not_their_rows():
    """Which they lay out as a whole: they wait as XLA does with blocks of the same size."""
    packings = pack(draw_lengths(8000, 1.2, 2**17), 2**17)
    for balance in ("none", "zigzag"):
        one = dataclasses.replace(benchmark.schedule_of(8, balance), implementation="mosaic_tpu", tile_rows=(512, 512))
        assert in_step(one.in_whole_chunks(), packings) == in_step(benchmark.schedule_of(8, balance), packings)


def test_batches_wait_less():
    """Of several sequences the busiest devices differ."""
    packings = [benchmark.draw(8 * benchmark.TOKENS, 8000, seed) for seed in range(8)]
    one = benchmark.schedule_of(8, "zigzag")
    assert in_step(one, packings, batch=8) < in_step(one, packings, batch=2) < in_step(one, packings)
    assert in_step(one, packings[:1], batch=3) == in_step(one, packings[:1])


def test_few_rows_are_not_dealt_to_kernels():
    """Whose stripes fill registers: padding would add more than dealing saves."""
    request = Request(*[np.zeros((1, 8, 1, 128), np.float32)] * 3, "tpu", needs=("document_ids",))
    for length, balance in ((2**17, "stripes"), (8 * 1032, "zigzag"), (8 * 2056, "zigzag")):
        (one,) = make_schedule(DilatedPattern([Segments(length)]), length, 8, 1, True, balance="stripes")
        served = MosaicTpu().serve(request, one)[0]
        assert served.balance == balance
        assert not served.pads_much
        assert MosaicTpu().serve(request._replace(balance="stripes"), one)[0].balance == "stripes"


def test_the_forecast_of_few_queries():
    """One device has all keys that they see."""
    few, many = (1, 512, 8, 64), (1, 2**16, 2, 64)
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (few, many, many)]
    options = {"pattern": [Window(512)], "is_causal": True, "query_offset": 2**16 - 512, "mesh": make_mesh(seq=8)}
    (explained,) = ringjax.explain(*arrays, **options).calls
    forecast = explained[0].forecasts[0]
    assert forecast.implemented[0].gathers_queries
    assert forecast.pairs == 8 * 512 * 512


def test_short_documents_need_a_window_alone():
    """Where heads do not suffice for an exchange among all devices, keys go to neighbors alone."""
    of_many = {"num_tokens": 2**20, "mesh": 64, "num_kv_heads": 1, "num_heads": 1}
    said = plan(document_lengths=[3000, 1000, 7000], **of_many).recommendation
    assert "If no document has more than 7,000 tokens, as here, pattern=[ringjax.Window(7000)] sees the same" in said
    long = plan(document_lengths=[3000] * 3000 + [50_000], **of_many).recommendation  # not in the counted sequences
    assert "If no document has more than 50,000 tokens" in long
    cut = ringjax.plan([Segments(2**16)], is_causal=True, document_lengths=[3000], **of_many)
    assert "Window" not in cut.recommendation
    assert "Window" not in plan(document_lengths=[2**20], **of_many).recommendation


def test_documents_of_the_command(tmp_path, capsys):
    lengths = tmp_path / "lengths"
    lengths.write_text("3000\n1k\n\n7000\n")
    sizes = ["plan", "--tokens", "64k", "--causal", "--implementation", "xla"]
    for documents, words in (
        (str(lengths), "with 18 packed documents in all"),
        ("lognormal:2k", "over 8 sequences with "),
    ):
        assert main([*sizes, "--documents", documents]) == 0
        assert words in (printed := capsys.readouterr().out)
        assert "stripes" in printed
        assert main([*sizes, "--documents", documents, "--balance", "zigzag"]) == 0
        assert "stripes" not in capsys.readouterr().out
    lengths.write_text("3000\nmany\n")
    for documents in ("/nowhere", "lognormal:", "lognormal:2k:wide", "lognormal:2k:nan", str(lengths)):
        assert main([*sizes, "--documents", documents]) == 2
        words = "give a file with one length a line, or lognormal:MEDIAN[:SIGMA] such as lognormal:8k:1.2"
        assert f"--documents {documents}: " in (error := capsys.readouterr().err)
        assert words in error
    lengths.write_text("")
    assert main([*sizes, "--documents", str(lengths)]) == 2
    assert "--documents [] is empty: give the tokens of each document" in capsys.readouterr().err


def test_cudnn_keeps_the_order_that_it_can_mask():
    """By default it swaps halves, where others deal stripes; it says that it cannot deal them."""
    options = {"implementation": "cudnn", "documents_are_sorted": True, "num_kv_heads": 32}
    cudnn = plan(features=("document_ids",), **options)
    assert [one.balance for one in cudnn.forecasts[0].implemented] == ["zigzag"]
    dealt = plan(features=("document_ids",), balance="stripes", **options)
    assert [one.strategy for one in dealt.forecasts] == ["all_to_all"]
    with pytest.raises(ValueError, match="'cudnn' cannot serve: .* is dealt in stripes, and fused kernels mask rows"):
        dealt.call.implement(dealt.call.schedules("ring"))
    assert [one.balance for one in plan().forecasts[0].implemented] == ["zigzag"]
    assert [one.balance for one in plan(features=("document_ids",)).forecasts[0].implemented] == ["stripes"]
