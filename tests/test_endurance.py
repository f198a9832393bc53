"""Ten kills, 2000 steps and 200 steps in bfloat16: what the benchmark of endurance measures has to hold."""

import pytest

from benchmarks import endurance

pytestmark = pytest.mark.slow


def test_ten_kills_change_nothing(tmp_path):
    figures = endurance.kills(tmp_path)
    assert figures["kills"] == 10
    assert figures["kills after which the last whole checkpoint was not resumed"] == 0
    # Those since the last checkpoint, and those taken while another was being written.
    assert figures["most steps that a kill lost"] < 2 * endurance.CHECKPOINT_EVERY
    assert figures["parameters and optimizer's state bit-identical"] == 1
    assert figures["losses bit-identical"] == 1


def test_a_long_run_neither_grows_nor_compiles_again(tmp_path):
    figures = endurance.soak(tmp_path)
    assert figures["steps"] == 2000
    growth = "growth of resident memory after step 200, percent"
    assert figures[growth] < 2
    assert figures[f"{growth}, nothing to compile, without malloc's caches"] < 1
    assert figures["compilations of the training step"] == 1
    assert figures["compilations after the first evaluation"] == 0
    assert figures["most checkpoints in the folder"] <= 3  # the two that are kept, and one that takes a place


def test_a_ring_in_bfloat16_follows_one_device(tmp_path):
    figures = endurance.follow(tmp_path)
    between_seeds = figures["mean distance of losses, two seeds, nats"]
    assert figures["mean distance of losses, 8 devices and 1, nats"] < between_seeds
    assert figures["largest distance of losses, 8 devices and 1, nats"] < between_seeds
