"""The planner: its bytes are those of compiled programs, its order that of others' measurements."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from oracle import make_mesh, random_arguments

import ringjax
from benchmarks.plan_accuracy import Configuration, compiled_bytes, configurations, stated_bytes
from ringjax import DilatedPattern, MeshWarning, ReachWarning, Segments, Window, explain, plan
from ringjax._kernels.mosaic import MosaicGpu
from ringjax._kernels.tile_sizes import choose_gpu_block_size
from ringjax._mesh.placement import find_placement
from ringjax._pattern.warning import warning_anew
from ringjax._recording import recording
from ringjax._tools.command import main
from ringjax._tools.comparison import compare, mebibytes
from ringjax._tools.compiled import compile_forecast, find_devices, memory_of
from ringjax._tools.forecast import forecast
from ringjax._tools.machine import MACHINES, machine_of
from ringjax._tools.messages import Message
from ringjax._tools.plan import FEATURES

# Seconds of a training step of MaxText on as many chips as devices along the sequence, by tokens of the sequence;
# "all_to_all" is between 8 chips, with a ring between such groups.
MEASURED_ON_64_CHIPS = {
    2**16: {"all_gather": 1.09, "all_to_all": 1.20, "ring": 1.42},
    2**17: {"all_gather": 2.98, "all_to_all": 2.93, "ring": 3.71},
    2**18: {"all_gather": 9.71, "all_to_all": 9.34, "ring": 10.78},
}
SHAPE = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
LONGNET = [Segments(2048), Segments(8192, 2), Segments(32768, 4)]


@pytest.mark.slow
@given(configurations())
@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_are_those_of_compiled_programs(configuration):
    assert stated_bytes(configuration) == compiled_bytes(configuration)


def test_gradients_of_repeated_heads_travel_as_sums():
    """Of one key/value head for eight devices: what they hold of its gradient is yet to be added."""
    alone = Configuration(8, 256, (8, 1), (4, 4), 1, (Segments(256),), "lse", "all", "all_to_all", None, False, True)
    half = alone._replace(dtype="float16")
    assert stated_bytes(half) == compiled_bytes(half)


def bounds(**arguments):
    forecasts = plan(has_gradient=False, **arguments).forecasts
    return {forecast.strategy: forecast.seconds for forecast in forecasts}


def test_the_order_that_others_measured():
    """At 2,000 tokens a device on TPUs a ring is slowest; on H200s at 64k tokens, causal, an exchange costs least."""
    few = bounds(pattern=[Segments(16000)], num_tokens=16000, num_heads=16, mesh=8, device="v5p")
    assert few["ring"] > few["all_gather"]
    assert few["ring"] > 1.2 * few["all_to_all"]
    length = 4 * 65536
    many = bounds(pattern=[Segments(length)], num_tokens=length, num_heads=32, is_causal=True, mesh=4, device="H200")
    assert many["all_to_all"] < many["ring"]
    products = plan([Segments(length)], num_tokens=length, num_heads=32, is_causal=True, mesh=4, device="H200").best
    assert products.forward.total < 1.05 * products.forward.products


def on_chips(tokens, heads, mesh, **options):
    sizes = {"num_tokens": tokens, "num_heads": heads[0], "num_kv_heads": heads[1], "mesh": mesh, "is_causal": True}
    forecasts = plan([Segments(tokens)], **sizes, device="v5p", implementation="mosaic", **options).forecasts
    return {forecast.strategy: forecast.seconds for forecast in forecasts}


def test_the_order_of_training_steps_that_others_measured():
    """On 64 v5p chips, of Llama 3 8B (MaxText, pull request 4893), and on 16, of Llama 2 7B (4687)."""
    for tokens, measured in MEASURED_ON_64_CHIPS.items():
        stated = on_chips(tokens, (32, 8), 64, exchange_size=8)
        for fast, slow in itertools.combinations(sorted(measured, key=measured.get), 2):
            # At 256K tokens the bounds of ring and gather are equal to a percent: neither link is what they wait for.
            assert stated[fast] < 1.01 * stated[slow], (tokens, fast, slow)
    few = on_chips(32768, (32, 32), 16)
    assert max(few["all_to_all"], few["all_gather"]) < 0.6 * few["ring"]


def test_links_of_grids():
    """A cube of 64 chips has six links for each, and no way that is longer than half of each side."""
    v5p, ring = MACHINES["v5p"], dataclasses.replace(MACHINES["v5p"], dimensions=1)
    link, size = v5p.link_bandwidth, 90_000_000
    seconds = lambda machine, *message: machine.seconds(Message("forward", *message), 64) - machine.latency
    for machine, gathered, exchanged, far in ((v5p, 1 / 6, 64 / 63 / 2, 6), (ring, 1 / 2, 64 / 63 * 8, 32)):
        assert math.isclose(seconds(machine, "all_gather", size, 64), gathered * size / link)
        assert math.isclose(seconds(machine, "all_to_all", size, 64), exchanged * size / link)
        assert math.isclose(seconds(machine, "permute", size, 1), size / link)
        assert math.isclose(seconds(machine, "permute", size, 63), far * size / link)


def test_a_large_mesh_takes_no_time():
    begin = time.perf_counter()
    arguments = {"num_heads": 32, "num_kv_heads": 8, "is_causal": True, "mesh": {"seq": 1000, "data": 2}}
    comparison = plan([Window(4096), Segments(2**25, 8)], num_tokens=2**25, batch_size=2, **arguments)
    assert "33,554,432 tokens on 1000 devices" in str(comparison)
    plan([Segments(1)], num_tokens=2**31 - 1, num_heads=4)  # as many segments as there can be
    assert time.perf_counter() - begin < 2


def test_each_branch_its_own():
    """A window sends its halo, and the dilated branch its rows: less than either strategy for both."""
    pattern = [Window(4096), Segments(2**20, 8)]
    comparison = plan(pattern, num_tokens=2**20, num_heads=32, num_kv_heads=8, is_causal=True, mesh=16, device="v5p")
    window, segments = comparison.best.implemented
    assert (window.ulysses_size, segments.ulysses_size) == (1, 16)
    assert comparison.best.seconds < min(forecast.seconds for forecast in comparison.forecasts)
    assert comparison.best.strategy == ("ring", "all_to_all")
    assert "strategy=('ring', 'all_to_all')" in comparison.example
    saved = 1 - comparison.best.seconds / comparison.forecasts[0].seconds
    assert f'{saved:.0%} less than that of the default, "ring"' in comparison.recommendation


def test_figures_in_json():
    figures = json.loads(plan(LONGNET, num_tokens=32768, num_heads=8, is_causal=True, node_size=4).to_json())
    assert [row["strategy"] for row in figures["strategies"]][:3] == ["ring", "all_gather", "all_to_all"]
    assert all(row["bytes_between_nodes"] > 0 for row in figures["strategies"][:2])
    assert [one["implementation"] for one in figures["implementations"]] == ["cudnn"] * 3
    assert figures["share_that_sees_beyond"] > 0.5
    capped = plan(LONGNET, num_tokens=32768, num_heads=8, features=["logits_soft_cap"], device="A100")
    refused = capped.implementations[0]
    assert refused["implementation"] == "xla"
    assert "no fused kernel knows logits_soft_cap" in refused["why"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "Q100"}, "device='Q100' is unknown: use one of A100, H100, H200, B200, v5e, v5p, v6e, cpu"),
        ({"num_heads": 0}, "num_heads=0 must be a positive integer"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be a positive integer"),
        ({"value_dim": 0}, "value_dim=0 must be a positive integer"),
        ({"head_axes": 3}, "head_axes=3 must be a sequence of names, such as ('tensor',)"),
        ({"features": None}, "features=None must be a sequence of names, such as ('document_ids',)"),
        (
            {"return_max_logit": True},
            "'return_max_logit': name it in features=('return_max_logit',)",
        ),
        ({"mesh": {0: 8}}, "mesh={0: 8} has no axis 'seq' of axis_name='seq': name one of 0"),
        ({"node_size": -4}, "node_size=-4 must be a positive integer"),
        ({"num_tokens": 2**31}, "num_tokens=2147483648 is above 2147483647: give fewer"),
        ({"num_heads": 10**400}, f"num_heads={10**400} is above 4096: give fewer"),
        ({"mesh": {"seq": 2**30}}, "mesh['seq']=1073741824 is above 1048576: give fewer"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
        ({"mesh": {"data": 8}}, "mesh={'data': 8} has no axis 'seq' of axis_name='seq': name one of data"),
        ({"head_axes": ("seq",)}, "head_axes=('seq',) has 'seq', which cuts no heads: name axes of the mesh besides"),
        ({"head_axes": "tensr"}, "head_axes=('tensr',) has 'tensr', which cuts no heads"),
        ({"mesh": {"seq": 4, "tensor": 3}}, "do not divide over the 3 devices of ('tensor',)"),
        (
            {"mesh": {"seq": 4, "data": 2}},
            "batch_size=1 does not divide over the 2 devices of ('data',): make",
        ),
        (
            {"features": ["mask"]},
            "features has 'mask': use some of document_ids, logits_soft_cap, dropout_rate, return",
        ),
        ({"exchange_size": 5}, "exchange_size=5 does not serve 8 devices"),
        ({"dtype": "float31"}, "dtype='float31' is none that attention takes: use one of float32, bfloat16"),
        ({"dtype": None}, "dtype=None is none that attention takes"),
        (
            {"features": "document_ids"},
            "features='document_ids' must be a sequence of names, such as ('document_ids',)",
        ),
        ({"dtype": "int32"}, "dtype='int32' is none that attention takes"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' is none that attention takes"),
        ({"implementation": "triton"}, "implementation='triton' is unknown: use one of 'cudnn', 'mosaic', 'xla'"),
        ({"is_causal": "no"}, "is_causal='no' must be True or False"),
        ({"exchange_size": 2.0}, "exchange_size=2.0 must be a positive integer"),
        ({"mesh": "seq"}, "mesh='seq' must be a mesh, or the size of each axis by its name, or that of 'seq'"),
        ({"device": 100}, "device=100 must be the name of a device, such as 'H100', or a file of figures"),
        ({"implementation": "cudnn", "device": "v5e"}, "implementation='cudnn' cannot serve: it runs on NVIDIA GPUs"),
    ],
)
def test_wrong_arguments(arguments, words, unchecked):
    with pytest.raises((TypeError, ValueError), match=".") as caught:
        plan(LONGNET, **{"num_tokens": 32768, "num_heads": 8, **arguments})
    assert words in str(caught.value)


def test_sizes_of_numpy_and_float64_without_x64():
    """Integers of any kind are written to JSON, and sums are as wide as what is summed, whatever jax is set to."""
    sizes = {"num_tokens": 32768, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "batch_size": 2, "node_size": 4}
    figures = plan(LONGNET, **sizes, mesh={"seq": 4}, dtype="float64").to_json()
    own = {name: np.int64(size) for name, size in sizes.items()}
    with jax.enable_x64(False):
        assert plan(LONGNET, **own, mesh={"seq": np.int64(4)}, dtype="float64").to_json() == figures


def test_axes_in_any_form():
    """Heads are cut over an axis that is named by itself; a mesh says its own sizes, and integers may be NumPy's."""
    call = lambda **more: str(plan(LONGNET, **{"num_tokens": 32768, "num_heads": 8, **more}))
    sizes = call(mesh={"seq": 8, "tensor": 2})
    assert sizes == call(mesh={"seq": np.int64(8), "tensor": 2}, head_axes="tensor")
    assert sizes == call(mesh=AbstractMesh((8, 2), ("seq", "tensor")))
    assert call() == call(mesh=np.int64(8)) == call(mesh=make_mesh(seq=8))
    assert call(exchange_size=2) == call(exchange_size=np.int64(2))
    alone = plan(LONGNET, num_tokens=32768, num_heads=8, mesh={"tensor": 4}, axis_name="tensor")
    assert (alone.call.num_devices, alone.call.work.num_heads) == (4, 8)  # no axis cuts both


def test_a_named_implementation_is_compared_where_it_serves():
    """And takes part in the choice of a strategy: cuDNN has no way of keys that are gathered from other devices."""
    comparison = plan([Segments(2**20)], num_tokens=2**20, num_heads=32, is_causal=True, implementation="cudnn")
    assert [one.strategy for one in comparison.forecasts] == ["ring", "all_to_all"]
    assert "implementation='cudnn'" in comparison.example
    assert [one["why"] for one in comparison.implementations] == [""]
    by_tiles = plan([Segments(64)], num_tokens=64, num_heads=4, implementation="xla").implementations
    assert [(one["implementation"], one["why"]) for one in by_tiles] == [("xla", "")]


def test_the_call_to_paste_says_what_was_compared():
    long = {"num_tokens": 2**23, "num_heads": 32, "num_kv_heads": 4, "axis_name": "context", "mesh": {"context": 8}}
    comparison = plan([Segments(2**23)], **long, exchange_size=4)
    assert comparison.best.num_bytes("forward") > 0
    assert comparison.recommendation.startswith('Take "all_to_all": its bound is')
    assert 'less than 1% less than that of the default, "ring".' in comparison.recommendation
    assert "num_heads=32, in_features=in_features, num_kv_heads=4, qkv_features=4096," in comparison.module_example
    assert "strategy='all_to_all', exchange_size=4, axis_name='context', dtype=jnp" in comparison.module_example
    assert "strategy='all_to_all', exchange_size=4, axis_name='context')" in comparison.example
    clipped = plan([Segments(2**23)], **long, features=["return_max_logit"])
    assert "return_max_logit=True" in clipped.example
    assert "sow_max_logit=True" in clipped.module_example
    options = {"documents_are_sorted": True, "block_size": 256, "precision": "highest", "logits_soft_cap": 30.0}
    many = plan([Segments(2**23)], **long, features=["document_ids", "dropout_rate"], **options)
    pasted = "block_size=256, precision='highest', documents_are_sorted=True"
    assert f"{pasted}, document_ids=document_ids, logits_soft_cap=logits_soft_cap" in many.example
    assert "dropout_rate=dropout_rate, dropout_seed=dropout_seed" in many.example
    assert f"{pasted}, logits_soft_cap=logits_soft_cap, dropout_rate=dropout_rate, axis" in many.module_example
    layout = "Make the mesh with ringjax.make_mesh(..., exchange_size=4): else no hop between groups is hidden."
    assert layout not in comparison.recommendation
    assert layout in plan([Segments(2**23)], **long, exchange_size=4, device="v5e").recommendation
    # Where segments lie inside of the groups that exchange, no ring goes between these.
    for length, size, of_rings in ((2**23, 4, 4), (2**21, 2, 1)):
        forecasts = plan([Segments(length)], **long, exchange_size=size).forecasts
        assert {one.strategy: one.ring_ulysses_size for one in forecasts}["all_to_all"] == of_rings
    beside = {"context": 8, "data": 2, "fsdp": 2, "tensor": 2}
    cut = plan([Segments(2**23)], **{**long, "mesh": beside}, batch_size=4)
    assert cut.example.endswith("axis_name='context', spec=jax.P(('data', 'fsdp'), 'context', 'tensor'))")
    local = plan([Segments(64)], num_tokens=4096, num_heads=8)
    assert local.recommendation.startswith("Nothing has to travel")


def test_the_best_strategy_is_compared_with_the_next_where_it_is_the_default():
    arguments = {"num_tokens": 2**20, "num_heads": 32, "num_kv_heads": 1, "is_causal": True, "mesh": 64}
    comparison = plan([Window(4096)], **arguments)
    _, *others = comparison.forecasts
    rival = min(others, key=lambda one: one.seconds)
    assert comparison.best.strategy == "ring"
    assert f'and that of the next, "{rival.strategy}", is ' in comparison.recommendation


def test_an_explained_call_is_not_what_its_own_strategy_is_compared_with():
    query, key = (jax.ShapeDtypeStruct((1, 2**20, heads, 128), jnp.bfloat16) for heads in (32, 1))
    explained = explain(query, key, key, pattern=[Window(4096)], is_causal=True, mesh=make_mesh(seq=8), device="H100")
    ((comparison, _),) = explained.calls
    assert (comparison.best.strategy, comparison.forecasts[0].strategy) == ("ring", "ring (this call)")
    assert "(this call)" not in comparison.recommendation


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_timed_is_what_is_stated(dtype):
    """Also forward, where a gradient is to follow: that asks for the lse."""
    comparison = plan([Segments(2**16)], num_tokens=2**16, num_heads=32, num_kv_heads=8, dtype=dtype)
    (exchange,) = (one for one in comparison.forecasts if one.strategy == "all_to_all")
    stated = [message for message in exchange.messages if message.direction == "forward"]
    seconds = sum(comparison.machine.seconds(message, 8) for message in stated)
    assert exchange.forward.exposed == pytest.approx(seconds, rel=1e-12)


def test_the_command_compiles_what_it_states(capsys):
    options = (
        "--causal --heads 4 --head-dim 8 --tokens 64 --dtype float32 --device cpu --mesh seq=4 --forward --compile"
    )
    assert main(["plan", "window:5", *options.split(), "--features", *FEATURES]) == 0
    *_, first = capsys.readouterr().out.strip().partition("stated to be sent")
    rows = [line.split("  ") for line in first.splitlines()[1:]]
    found = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[0] for row in found] == ["ring", "all_gather", "all_to_all"]
    for _, stated, compiled, *_ in found:
        assert stated == compiled != "0 MiB"


def test_the_command_says_first_that_it_cannot_compile(capsys):
    assert main(["plan", "--heads", "4", "--device", "H100", "--compile"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ringjax plan: --device 'H100': 8 of them are not there to compile for" in printed.err


def test_the_command(capsys, tmp_path):
    arguments = "plan window:4k segments:1M:8 --causal --kv-heads 8 --device v5e --mesh seq=16 data=2 --batch-size 2"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert "1,048,576 tokens on 16 devices (v5e)" in printed
    branches = "pattern=[ringjax.Window(size=4096, rate=1), ringjax.Segments(length=1048576, rate=8)]"
    assert branches in " ".join(printed.split())
    figures = tmp_path / "figures.json"
    machine = {name: getattr(MACHINES["H100"], name) for name in MACHINES["H100"].__dataclass_fields__}
    figures.write_text(json.dumps({**machine, "name": "mine", "link_bandwidth": 1e9}))
    picture = tmp_path / "plan.svg"
    assert main(["plan", "--device", str(figures), "--json", "--plot", str(picture), "--tokens", "1024M"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "mine"
    assert all(name in picture.read_text() for name in ("all_gather", "tokens", "devices"))
    for change, words in (
        ({"link_bandwidth": 0}, "link_bandwidth is 0, which is no positive number"),
        ({"memory_bandwidth": math.nan}, "memory_bandwidth is nan"),
        ({"latency": -1}, "latency is -1"),
        ({"operations": {}}, "operations is empty"),
        ({"operations": {"2": 0}}, "operations[2] is 0.0"),
        ({"node_size": "8"}, "node_size is '8'"),
        ({"node_size": 1.5}, "node_size is 1.5, which is no positive integer"),
        ({"is_measured": "no"}, "is_measured is 'no', which is neither true nor false"),
        ({"platform": "quantum"}, "platforms are cuda, tpu, cpu"),
    ):
        figures.write_text(json.dumps({**machine, **change}))
        assert main(["plan", "--device", str(figures)]) == 2
        assert f"is no file of figures ({words}" in (error := capsys.readouterr().err) or words in error
    assert main(["plan", "--heads", "8", "--mesh", "seq=4", "model=2", "--head-axes", "model"]) == 0
    assert "with 4 query" in capsys.readouterr().out
    sizes = "segments:256 --tokens 4096 --heads 6 --mesh seq=6 --exchange-size 3"
    assert main(["plan", *sizes.split(), "--plot", str(tmp_path / "exchanged.svg")]) == 0
    capsys.readouterr()
    figures.write_text("{}")
    for wrong, words in (
        ("--device Q100", "--device 'Q100' is unknown"),
        (f"--device {figures}", "is no file of figures"),
        ("--exchange-size 3", "--exchange-size 3 does not serve 8 devices"),
        ("--heads 3 --kv-heads 2", "--kv-heads 2 must divide --heads 3"),
        ("--mesh seq=8 seq=4", "--mesh seq=8 seq=4 names an axis twice: give each once"),
        ("--axis-name node,seq", "--axis-name node,seq names several: give sizes, such as --mesh node=2 seq=2"),
        (
            "--mesh seq=4 node=2",
            "--batch-size 1 does not divide over the 2 devices of ('node',): make",
        ),
        ("--implementation cudnn --device v5e", "--implementation 'cudnn' cannot serve"),
        ("--tokens 4096M", "--tokens 4294967296 is above 2147483647"),
        ("--plot /nowhere/x.svg", "--plot /nowhere/x.svg cannot be written (No such file or directory)"),
        ("--plot x.weird", "--plot x.weird must end in one of .png, .svg, .pdf"),
        ("--measure /nowhere/x", "--measure /nowhere/x cannot be written (No such file or directory)"),
        ("--json --compile", "--json prints figures alone: leave out --json or --compile"),
        ("--target-config /nowhere", "--target-config says what --compile compiles for: give both or neither"),
        ("--device /proc/self/mem", "--device '/proc/self/mem' is no file of figures ("),
        ("--plot /proc/x.png", "--plot /proc/x.png cannot be written (No such file or directory)"),
        ("--measure /tmp", "--measure /tmp cannot be written (Is a directory): name another file"),
        ("--device v5e:4x4 --mesh seq=8", "--device v5e:4x4 has 16 devices, and --mesh 8: make these equal"),
        ("--compile --target-config /nowhere", "--target-config /nowhere is no file: give one in XLA's text format"),
    ):
        assert main(["plan", *wrong.split()]) == 2
        printed = capsys.readouterr()
        assert words in printed.err
        assert not printed.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("chunks:4", "'chunks:4' is no branch: write segments:LENGTH[:RATE] or window:SIZE[:RATE]"),
        ("window:0", "argument BRANCH: '0' is no positive whole number: write one such as 4096, 32k or 1M"),
        ("segments:4x", "argument BRANCH: '4x' is no positive whole number: write one such as 4096, 32k or 1M"),
        ("--mesh data=2,seq=4", "'data=2,seq=4' is no axis: write several apart, such as data=2 seq=4"),
        ("--tokens 0", "argument --tokens: '0' is no positive whole number"),
        ("--mesh seq=8 a-b=0", "argument --mesh: '0' is no positive whole number"),
        ("--mesh seq", "'seq' is no axis: write AXIS=SIZE, such as seq=8"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *arguments.split()])
    found = capsys.readouterr().err
    assert words in found
    assert len(found.splitlines()) == 2


def test_what_the_command_says_of_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ringjax {ringjax.__version__}\n")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "(default: seq)" in " ".join(text.split())
    assert "default: None" not in text
    for part in ("the attention:", "the devices:", "rows of the table:", "example:", "(default: 1048576)"):
        assert part in text
    assert main(["plan"]) == 0
    assert capsys.readouterr().out.startswith("Without options: one dense segment of all tokens, not causal, on seq=8")
    assert main(["plan", "--device", "v5e:4x4"]) == 0
    assert "1,048,576 tokens on 16 devices (v5e)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5e", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v5p", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("gpu", "NVIDIA H200", "H200"),
        ("gpu", "NVIDIA H100 80GB HBM3", "H100"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "A100"),
        ("tpu", "TPU v4", "unknown tpu device 'TPU v4', with the figures of v5e"),
        ("tpu", "TPU v7", "unknown tpu device 'TPU v7', with the figures of v5e"),
        ("gpu", "NVIDIA L4", "unknown cuda device 'NVIDIA L4', with the figures of H100"),
        ("gpu", "NVIDIA RTX A1000", "unknown cuda device 'NVIDIA RTX A1000', with the figures of H100"),
        ("rocm", "AMD Instinct MI300X", "unknown rocm device 'AMD Instinct MI300X', with the figures of H100"),
    ],
)
def test_devices_are_known_by_their_kinds(platform, kind, name):
    """As jax's devices say these; those of which no figures are known are said to be unknown."""
    device = collections.namedtuple("Device", ("platform", "device_kind"))(platform, kind)
    mesh = jax.make_mesh((1,), ("seq",)).abstract_mesh.update(abstract_device=device)
    placements = []
    jax.eval_shape(lambda *arrays: placements.append(find_placement(*arrays, mesh, "seq")), *random_arguments(4))
    assert [machine_of(placement.platform, placement.device_kind).name for placement in placements] == [name]


def test_auto_is_the_ring_on_unknown_devices():
    """Where an exchange would be best on the device whose figures stand in."""
    device = collections.namedtuple("Device", ("platform", "device_kind"))
    shapes = 3 * [jax.ShapeDtypeStruct((1, 4096, 8, 16), jnp.float32)]
    attend = functools.partial(ringjax.ring_dilated_attention, pattern=[Segments(4096)], strategy="auto")

    def strategies(kind):
        mesh = jax.make_mesh((8,), ("seq",)).abstract_mesh.update(abstract_device=device("gpu", kind))
        with recording() as records:
            jax.eval_shape(functools.partial(attend, mesh=mesh), *shapes)
        return [one.ulysses_size for one in records[0].call.schedules("auto")]

    assert strategies("NVIDIA H100") == [8]
    with pytest.warns(UserWarning, match="strategy='auto' takes \"ring\": the figures of 'NVIDIA L4' are not known"):
        assert strategies("NVIDIA L4") == [1]


def test_measured_figures_serve(tmp_path, monkeypatch):
    for name, few in (("_ROUNDS", 1), ("_STEPS", 1), ("_ROWS_ON_CPUS", 64)):
        monkeypatch.setattr(f"ringjax._tools.measure.{name}", few)
    path = tmp_path / "figures.json"
    assert main(["plan", "--measure", str(path)]) == 0
    comparison = plan(LONGNET, num_tokens=32768, num_heads=8, dtype="float32", device=str(path))
    assert comparison.machine.rate(4) > 1e8
    assert comparison.best.seconds > 0
    assert "Times are forecasts, of measured figures." in str(comparison)
    assert "Times are bounds" in str(plan(LONGNET, num_tokens=32768, num_heads=8, device="cpu"))


def test_what_pairs_take_beside_products():
    """Of whole tiles: a window of 64 takes tiles of 128 queries with its own keys and the 63 before, on a CPU."""
    sizes = {"num_tokens": 1024, "num_heads": 8, "is_causal": True, "mesh": 8, "device": "cpu"}
    comparison = plan([Window(64)], **sizes)
    (ring,) = (one for one in comparison.forecasts if one.strategy == "ring")
    assert ring.pairs == 8 * 128 * 64
    assert ring.computed == 8 * 128 * (128 + 63)
    costly = dataclasses.replace(comparison.machine, pair_seconds=1.0)
    taken = forecast(comparison.call, "ring", costly)
    assert taken.forward.products == pytest.approx(ring.forward.products + ring.computed)
    assert taken.backward.products == pytest.approx(ring.backward.products + 2 * ring.computed)


@pytest.mark.parametrize(("of_query", "of_keys", "rotates_queries"), [(4, 4, True), (4, 2, False), (2, 4, True)])
def test_the_lighter_side_travels_also_where_dtypes_differ(of_query, of_keys, rotates_queries):
    mesh, dtypes = make_mesh(seq=8), {2: jnp.bfloat16, 4: jnp.float32}
    shape = lambda size: jax.ShapeDtypeStruct((1, 1024, 8, 16), dtypes[size])
    attend = functools.partial(ringjax.ring_dilated_attention, pattern=[Segments(1024)], mesh=mesh)
    with recording() as records:
        jax.eval_shape(attend, *map(shape, (of_query, of_keys, of_keys)))
    (schedule,) = records[0].call.implement(records[0].call.schedules("ring"))
    assert schedule.rotates_queries == rotates_queries


def test_blocks_fit_the_batches_and_heads_of_a_shard():
    """Where the compiler cuts them, too, unseen: over Auto axes that nothing else says a word of."""

    def rows(spec, **sizes):
        shape = jax.ShapeDtypeStruct((64, 1024, 32, 16), jnp.float32)
        attend = functools.partial(ringjax.ring_dilated_attention, pattern=[Segments(1024)], spec=spec)
        with recording() as records:
            jax.eval_shape(functools.partial(attend, mesh=make_mesh(**sizes)), shape, shape, shape)
        return records[0].call.max_block_rows

    of_shards = rows(P("data", "seq", "tensor"), data=2, seq=2, tensor=2)
    assert rows(None, data=2, seq=2, tensor=2) == of_shards == 128
    assert rows(None, seq=2) == 64


@pytest.mark.parametrize(("device", "kernel"), [(None, "xla"), ("H100", "cudnn"), ("v5e", "xla")])
def test_explain_asks_for_the_kernels_of_devices_that_are_not_here(device, kernel):
    shape = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.bfloat16)
    explained = ringjax.explain(*3 * [shape], pattern=[Segments(8192)], mesh=make_mesh(seq=8), device=device)
    text = " ".join(str(explained).split())
    assert f"Segments(length=8192, rate=1): {kernel}" in text
    assert ("not mosaic: no device has run it yet; check it with `ringjax check`" in text) == (device == "v5e")


@pytest.mark.parametrize(("device", "name"), [("H100", "cudnn"), ("v5e", "mosaic")])
def test_explain_takes_kernels_that_are_not_here_by_name(device, name):
    shape = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.bfloat16)
    given = {"pattern": [Segments(8192)], "mesh": make_mesh(seq=8), "implementation": name}
    assert f"Segments(length=8192, rate=1): {name}" in str(ringjax.explain(*3 * [shape], **given, device=device))
    with pytest.raises(ValueError, match=f"implementation='{name}' cannot serve: "):
        ringjax.explain(*3 * [shape], **given)


def test_tables_need_no_scrolling():
    pattern = [Segments(2**17), Segments(2**20, 8), Window(4096), Window(1000, 4)]
    size = {"num_tokens": 2**25, "num_heads": 32, "dtype": "float32", "mesh": {"seq": 1024}, "device": "H100"}
    lines = str(plan(pattern, **size)).splitlines()
    assert max(map(len, lines)) <= 88
    table = next(line for line in lines if line.startswith("strategy"))
    assert table.split() == ["strategy", "ring", "all_gather", "all_to_all"]
    start, module = (
        next(number for number, line in enumerate(lines) if line.startswith(f"ringjax.{name}("))
        for name in ("ring_dilated_attention", "RingDilatedAttention")
    )
    compile("\n".join(lines[start:module]), "the call to paste", "eval")
    compile("\n".join(lines[module:]), "the module to paste", "eval")


def test_kernels_for_gpus_are_taken_where_they_serve(monkeypatch):
    """Where they do not, their own reason is given."""
    size = {"num_tokens": 8192, "num_heads": 8, "head_dim": 64, "mesh": 8, "dtype": "float32"}
    planned = lambda device: " ".join(str(plan([Segments(1000)], **size, device=device)).split())
    assert "not mosaic: of GPUs it runs on H100, H200, H800, H20, GH200, and the devices are 'A100'" in planned("A100")
    monkeypatch.setattr(MosaicGpu, "_obstacle", lambda *_: None)
    assert "Segments(length=1000, rate=1): mosaic (not cudnn: it computes in bfloat16" in planned("H100")


def test_tiles_are_large_on_gpus():
    """On one device the logits of a tile are as large as its rows; in a ring they are small beside the queries."""
    sizes = lambda tokens, devices: choose_gpu_block_size(tokens * 128 * 2, devices, extent=tokens)
    assert [sizes(tokens, 1) for tokens in (256, 2048, 8192, 2**20)] == [128, 512, 1024, 2048]
    assert [sizes(tokens, 8) for tokens in (256, 8192, 32768, 2**17, 2**20)] == [128, 256, 512, 1024, 2048]
    assert [choose_gpu_block_size(2**30, 1, extent) for extent in (100, 512, 2**20)] == [128, 512, 2048]


def test_messages_that_devices_copy_themselves_are_not_hidden():
    comparison = plan([Segments(4096)], num_tokens=4096, num_heads=8, mesh=8, device="cpu", has_gradient=False)
    (ring,) = (one for one in comparison.forecasts if one.strategy == "ring")
    taken = ring.forward
    assert taken.hidden == 0 < taken.exposed
    assert taken.total == pytest.approx(taken.products + taken.memory + taken.exposed)


def test_why_nothing_preferred_serves():
    """Also where heads that run other branches are on other devices, which is so with some strategies alone."""
    grouped = DilatedPattern([Segments(4096), Segments(32768)], heads="grouped")
    comparison = plan(grouped, num_tokens=32768, num_heads=8, mesh={"seq": 4, "tensor": 2}, device="A100")
    for one in comparison.implementations:
        assert one["implementation"] == "xla"
        assert "not cudnn: no fused kernel knows heads='grouped' over several devices" in one["why"]


def test_what_does_not_fit_is_said_and_not_taken():
    sizes = {"num_heads": 16, "device": "v5e"}
    gathered = plan([Segments(2**22)], num_tokens=2**22, mesh=64, **sizes)
    assert gathered.recommendation.endswith('More than the 16,384 MiB of a device would be held by "all_gather".')
    slow = dataclasses.replace(gathered.machine, latency=10.0)  # with which the fewest messages are the fastest
    assert min(compare(gathered.call, slow).forecasts, key=lambda one: one.seconds).strategy == "all_gather"
    assert compare(gathered.call, slow).best.strategy != "all_gather"
    none = plan([Segments(2**25)], num_tokens=2**25, mesh=16, **sizes)
    alone = plan([Segments(2**22)], num_tokens=2**22, mesh=1, **sizes)
    for one in (none, alone):
        assert "None fits the 16,384 MiB of a device: take more devices" in one.recommendation
    assert "MiB" not in plan([Segments(2**18)], num_tokens=2**18, mesh=64, **sizes).recommendation


def test_large_numbers_are_written_out():
    assert [mebibytes(size * 2**20) for size in (0.5, 999.96, 12345.6, 7)] == [
        "0.5 MiB",
        "1000 MiB",
        "12,346 MiB",
        "7 MiB",
    ]


def test_explaining_a_call():
    explained = explain(SHAPE, SHAPE, SHAPE, pattern=[Segments(8), Segments(64, 2)], mesh=make_mesh(seq=8))
    assert max(map(len, str(explained).splitlines())) <= 88
    text = " ".join(str(explained).split())
    assert "Called once: 64 tokens on the 8 devices of the mesh axis 'seq', which is from the argument mesh=" in text
    assert "ring (this call)" in text
    assert "not cudnn: it runs on NVIDIA GPUs" in text
    with pytest.raises(ValueError, match="does not call ringjax.ring_dilated_attention"):
        explain(jnp.sin, SHAPE)
    model = ringjax.RingDilatedAttention(2, 4, pattern=[Segments(8)], is_causal=True, decode=True, rngs=nnx.Rngs(0))
    model.init_cache((1, 8, 4))
    with pytest.raises(ValueError, match="^RingDilatedAttention does not call .* decode=True are not explained"):
        explain(model, jnp.ones((1, 1, 4)))


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_queries_of_unknown_positions_count_as_the_last_ones(strategy):
    """As the last chunk of a prompt does; no call to paste is printed, which could not say all of it."""
    shape = lambda length, heads: jax.ShapeDtypeStruct((1, length, heads, 64), jnp.bfloat16)
    arrays, options = (shape(512, 8), shape(8192, 2), shape(8192, 2)), {"strategy": strategy, "mesh": make_mesh(seq=8)}
    options |= {"pattern": [Segments(8192), Window(300)], "is_causal": True, "device": "H100"}
    own = lambda offset: explain(*arrays, query_offset=offset, **options).calls[0][0].rows[0]
    unknown = explain(*arrays, query_offset=jnp.int32(3), **options)
    (comparison, _), figures = unknown.calls[0], ("pairs", "pairs_computed", "bytes_forward")
    assert [comparison.rows[0][name] for name in figures] == [own(8192 - 512)[name] for name in figures]
    assert comparison.rows[0]["pairs"] > 1.5 * own(0)["pairs"]
    text = " ".join(str(unknown).split())
    assert "512 queries and 8,192 keys on 8 devices (H100)" in text
    assert "they are counted as the last ones" in text
    assert "query, key, value" not in text
    assert "512 queries, the first at 7, and 8,192 keys on" in str(explain(*arrays, query_offset=7, **options))


def test_few_queries_on_gpus_have_the_tiles_of_their_keys():
    """All of them are gathered: tiles of as many rows as a device keeps would be steps without number."""
    shape = lambda length, heads: jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
    options = {"pattern": [Segments(2**20)], "is_causal": True, "query_offset": 2**20 - 4096, "mesh": make_mesh(seq=8)}
    explained = explain(shape(4096, 32), shape(2**20, 8), shape(2**20, 8), device="A100", **options)
    (comparison, _), *_ = explained.calls
    (schedule,) = comparison.forecasts[0].implemented
    assert schedule.gathers_queries
    assert schedule.keys.block_rows == 1024
    assert "not cudnn: queries and keys lie at different positions" in " ".join(str(explained).split())


def test_heads_that_are_cut_fill_the_nodes():
    """A node of eight H100s has one device of a sequence whose heads are cut in eight: all that it sends crosses."""
    sizes = {"num_tokens": 2**17, "num_heads": 64, "num_kv_heads": 8, "is_causal": True, "device": "H100"}
    across = lambda **options: [row["bytes_between_nodes"] for row in plan([Segments(2**17)], **sizes, **options).rows]
    cut = across(mesh={"seq": 8, "tensor": 8})
    assert cut == across(mesh={"seq": 8, "tensor": 8}, node_size=1)
    assert min(cut) > 0 == max(across(mesh={"seq": 8}))


def test_calls_of_other_heads_are_explained_apart():
    """Heads of other widths, or fewer key/value heads, are other calls; the same ones are one, counted."""
    shape = lambda heads, width: jax.ShapeDtypeStruct((1, 64, heads, width), jnp.float32)

    def attend(*pairs):
        return [ringjax.ring_dilated_attention(query, key, key, pattern=[Segments(64)]) for query, key in pairs]

    pairs = [(shape(4, 8), shape(4, 8)), (shape(4, 16), shape(4, 16)), (shape(4, 8), shape(1, 8))]
    found = ringjax.explain(attend, *pairs, pairs[0])
    assert [count for _, count in found.calls] == [2, 1, 1]


def test_explaining_a_module_that_was_traced_before():
    pattern = {"pattern": [Segments(64)], "strategy": "all_to_all"}
    attention = ringjax.RingDilatedAttention(4, 32, **pattern, rngs=nnx.Rngs(0))
    function = nnx.jit(lambda attention, inputs: attention(attention(inputs)))
    with jax.set_mesh(make_mesh(seq=4)):
        function(attention, jnp.ones((1, 64, 32)))
        explanation = explain(function, attention, jax.ShapeDtypeStruct((1, 64, 32), jnp.float32))
    assert [count for _, count in explanation.calls] == [2]
    assert explanation.places[0].startswith("64 tokens on the 4 devices of the mesh axis 'seq'")


@pytest.mark.parametrize("order", ["call first", "explanation first"])
def test_explaining_leaves_warnings_as_they_were(order):
    """What a call warns of once an explanation says in any case, and a later call if none has warned before."""
    pattern = {"pattern": [Segments(4), Segments(64, 16)]}
    array = jnp.zeros((1, 64, 2, 8))
    call = lambda: ringjax.ring_dilated_attention(array, array, array, **pattern)
    with warning_anew(), warnings.catch_warnings():
        if order == "call first":
            with pytest.warns(ReachWarning):
                call()
        (text,) = explain(SHAPE, SHAPE, SHAPE, **pattern).warnings
        assert "of the queries see beyond their smallest branch" in text
        if order == "call first":
            call()
        else:
            with pytest.warns(ReachWarning):
                call()


def test_explaining_says_a_warning_once_and_gives_none():
    """Of a short reach, which the table has too, and of "auto" on devices of which no figures are known."""
    shape = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    mine = dataclasses.replace(MACHINES["H100"], name="my box")
    options = {"pattern": [Segments(4), Segments(64, 16)], "strategy": "auto", "mesh": make_mesh(seq=8)}
    with warning_anew(), warnings.catch_warnings(action="error"):
        explained = explain(shape, shape, shape, **options, device=mine)
    assert len(explained.warnings) == 2
    text = " ".join(str(explained).split())
    assert text.count("of the queries see beyond their smallest branch, of 4 tokens") == 1
    assert text.count("the figures of 'my box' are not known") == 1
    ((comparison, _),) = explained.calls
    own, ring, *_ = comparison.forecasts
    assert (own.strategy, own.num_bytes("forward")) == ("auto (this call)", ring.num_bytes("forward"))


def test_what_cannot_be_pasted_is_not_offered():
    """A module whose values have another width."""
    size = {"num_tokens": 2**20, "num_heads": 32, "num_kv_heads": 8, "is_causal": True, "mesh": 16}
    pattern = [Window(4096), Segments(2**20, 8)]
    assert "RingDilatedAttention" in str(plan(pattern, **size))
    assert "RingDilatedAttention" not in str(plan(pattern, **size, value_dim=64))


def test_explaining_changes_no_call():
    """Also for another device: a call that names what serves there is traced so, and asks for nothing else."""
    shape = jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16)
    programs = []

    def call(query):
        attend = functools.partial(ringjax.ring_dilated_attention, pattern=[Segments(256)], implementation="cudnn")
        programs.append(str(jax.make_jaxpr(attend)(query, query, query)))
        return query

    explain(call, shape, device="H100")
    assert "dot_product_attention_fwd" in programs[0]
    with pytest.raises(ValueError, match="implementation='cudnn' cannot serve: it runs on NVIDIA GPUs"):
        explain(call, shape)


def test_memory_that_is_compiled_has_temporaries():
    """The peak that XLA states for CPUs is without them."""
    size = 10_000
    compiled = jax.jit(lambda x: (jnp.sort(x) * jnp.sort(-x)).sum()).lower(jnp.zeros(size, jnp.float32)).compile()
    assert memory_of(compiled) >= 4 * size * 2


BOUNDED = {
    "dense ring": ([Segments(4096)], "ring", True),
    "causal ring forward": ([Segments(4096)], "ring", False),
    "gathered": ([Segments(4096)], "all_gather", True),
    "exchanged": ([Segments(4096)], "all_to_all", True),
    "halo of a window": ([Window(300)], "ring", True),
    "local": ([Segments(512)], "ring", True),
    "dilated and local": ([Segments(4096, 4), Segments(500)], "ring", True),
}


@pytest.mark.parametrize(("pattern", "strategy", "has_gradient"), BOUNDED.values(), ids=BOUNDED)
def test_compiled_programs_hold_what_the_bounds_allow(pattern, strategy, has_gradient):
    size = {"num_tokens": 4096, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "dtype": "float32", "device": "cpu"}
    comparison = plan(pattern, **size, mesh=4, is_causal=True, has_gradient=has_gradient)
    one = next(one for one in comparison.forecasts if one.strategy == strategy)
    compiled = compile_forecast(comparison, one, find_devices(comparison)).memory
    assert one.memory.at_least <= compiled <= one.memory.at_most


def test_arguments_and_results_are_the_least():
    """Also the keys and values that are gathered, where these are more than the results."""
    comparison = plan([Segments(2**19)], num_tokens=2**19, num_heads=8, num_kv_heads=4, mesh=8, has_gradient=False)
    least = {one.strategy: one.memory.at_least for one in comparison.forecasts}
    queries, keys = (2**16 * heads * 128 * 2 for heads in (8, 4))
    assert least["ring"] == least["all_to_all"] == queries + 2 * keys + queries
    assert least["all_gather"] == queries + 2 * keys + 8 * 2 * keys


def test_the_same_call_is_served_the_same_way():
    mesh, arguments = make_mesh(seq=8), {"pattern": LONGNET, "is_causal": True}
    shape = jax.ShapeDtypeStruct((1, 4096, 8, 16), jnp.float32)
    texts = {str(explain(shape, shape, shape, **arguments, mesh=mesh, strategy="auto")) for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_is_not_used_is_said(kind):
    arrays = list(map(jnp.asarray, random_arguments(16, (2, 1), (4, 4), (4,))))
    call = lambda: ringjax.ring_dilated_attention(*arrays, segment_lengths=(4,), dilation_rates=(1,))
    name = "context" if kind == AxisType.Auto else "cp"
    with jax.set_mesh(make_mesh(kind, **{name: 4})), pytest.warns(MeshWarning, match=f"axis_name='{name}'"):
        call()
    with jax.set_mesh(make_mesh(kind, **{name: 4})):
        call()  # once is enough
    other = "ring" if kind == AxisType.Auto else "sp"
    with jax.set_mesh(make_mesh(kind, **{other: 2, "model": 4})), pytest.warns(MeshWarning, match=f"name='{other}'"):
        call()
    with jax.set_mesh(make_mesh(AxisType.Auto, data=4, tensor=2)):
        call()  # may cut batches and heads
    with jax.set_mesh(make_mesh(kind, seq=4, data=2)):
        call()


def test_pictures():
    pattern = DilatedPattern([Segments(16), Segments(64, 4), Window(9)])
    figure = pattern.plot(64, num_kv_heads=4, head=1, is_causal=True, num_devices=4)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "Segments(length=16, rate=1)\nnothing travels"
    assert titles[1].endswith("3 hops of 4 rows")
    assert titles[2].endswith("8 rows 1 device on")
    drawn = np.ma.filled(figure.axes[3].get_images()[0].get_array(), 0)
    np.testing.assert_array_equal(drawn, pattern.multiplicity(64, 4, is_causal=True)[1])
    assert figure.axes[4].get_ylabel() == "keys seen"
