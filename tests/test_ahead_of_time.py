"""Programs compiled for H100s and a TPU v5e: what they communicate and when, and the memory that they take.

Needs the plugins of jax for CUDA and TPU beside it, of its own version, but no such device; run with `-m aot`.
"""

import pytest

from benchmarks.ahead_of_time import PATTERN, TOKENS, TOPOLOGIES, compile_for, peak, sent
from benchmarks.programs import loop_permutes

pytestmark = pytest.mark.aot

# The flags under which not all permutes overlap: the tests have to see the difference.
NOT_OVERLAPPING = {
    "8 H100s": (("xla_gpu_enable_latency_hiding_scheduler", False),),
    "v5e:2x4": (("xla_enable_async_collective_permute", "false"),),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_permute_in_a_loop_overlaps_with_computation(name, gradient):
    length = TOKENS * (32 if name.startswith("4 x") else 8)
    text = compile_for(name, gradient, length=length, pattern=((length,), (1,))).as_text()
    permutes = loop_permutes(text)
    assert permutes
    assert all(permutes)
    for collective in ("all-gather", "all-to-all"):
        assert collective not in text


@pytest.mark.parametrize("name", NOT_OVERLAPPING)
def test_permutes_that_do_not_overlap_are_seen(name):
    permutes = loop_permutes(compile_for(name, True, options=NOT_OVERLAPPING[name]).as_text())
    assert permutes
    assert not all(permutes)


def test_memory_of_the_gradient():
    assert peak() <= 24
    assert peak(pattern=PATTERN) <= 18


def test_memory_shrinks_with_the_devices():
    # In bytes: a quarter of the tokens, and the gradient that is on its way while another is computed.
    assert peak() / 4 <= 0.28 * peak(count=2)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_sent_is_what_the_schedule_says(is_causal, gradient):
    found, stated = sent(is_causal, gradient)
    assert found == stated
