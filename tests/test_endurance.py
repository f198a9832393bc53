"""Runs that are killed end as those that were not; `benchmarks.endurance` does so more often, and watches memory."""

import pytest

from benchmarks import endurance


@pytest.mark.slow
def test_kills_change_nothing(tmp_path):
    figures = endurance.kills(tmp_path, count=1, steps=30)
    assert figures["kills"] == 1
    endurance.check("ten kills", figures)
