"""`ringjax check`: what it takes, that it finds what is wrong, and that nothing is."""

import itertools
import os
import subprocess
import sys
import types

import jax
import pytest

from ringjax._kernels.xla import Xla
from ringjax._tools import check
from ringjax._tools.check import Program, cover
from ringjax._tools.command import main


@pytest.mark.parametrize(("num_devices", "most"), [(1, 8), (8, 12)])
def test_few_programs_have_each_pair(num_devices, most):
    candidates = [Program(*choices) for choices in itertools.product(*check._levels(num_devices))]
    pairs = lambda programs: {pair for one in programs for pair in itertools.combinations(enumerate(one), 2)}
    chosen = cover(candidates)
    assert pairs(chosen) == pairs(candidates)
    assert len(chosen) <= most
    # Also where an implementation serves but some.
    served = [one for one in candidates if not (one.has_cap or one.has_dropout) and one.dtype == "bfloat16"]
    assert pairs(cover(served)) == pairs(served)
    assert len(cover(served)) <= 12


PROGRAM = Program(
    strategy="ring",
    pattern="windows",
    has_documents=False,
    has_sinks=True,
    has_cap=True,
    has_dropout=False,
    has_groups=True,
    has_max_logit=True,
    has_two_axes=True,
    dtype="float32",
)
TEXT = "ring, windows, sinks, cap, grouped heads, greatest logit, two axes, float32"


@pytest.fixture
def one_program(monkeypatch):
    """Of all programs one, on four devices."""
    monkeypatch.setattr(check, "_levels", lambda _: [(choice,) for choice in PROGRAM])
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:4])


def test_what_is_right(one_program, capsys):
    with jax.enable_x64(False):
        assert check.print_check()
    printed = capsys.readouterr()
    assert printed.err.startswith(f"1 of 1: {TEXT}")
    assert f"right  {TEXT}" in printed.out
    assert "1 results on 4 x cpu, 0 wrong" in printed.out


def test_what_is_wrong(one_program, monkeypatch, capsys):
    """An output that is off by a thousandth."""
    finish = Xla.finish
    monkeypatch.setattr(
        Xla, "finish", lambda self, partial: (finish(self, partial)[0] * 1.001, *finish(self, partial)[1:])
    )
    jax.clear_caches()
    with jax.enable_x64(False):
        assert main(["check"]) == 1
    assert "WRONG  ring, windows" in capsys.readouterr().out
    jax.clear_caches()


def test_what_fails(one_program, monkeypatch, capsys):
    """The others are checked all the same."""
    monkeypatch.setattr(Xla, "finish", lambda *_: 1 / 0)
    jax.clear_caches()
    with jax.enable_x64(False):
        assert not check.print_check()
    printed = capsys.readouterr().out
    assert "FAILED  ring, windows" in printed
    assert f"xla, {TEXT}: ZeroDivisionError: division by zero" in printed
    jax.clear_caches()


@pytest.mark.parametrize("count", [1, 3, 5, 8, 16])
def test_devices_divide_the_tokens(count):
    device = types.SimpleNamespace(platform="cpu")
    for platform in ("cpu", "cuda"):
        device.platform = platform
        length, *_ = check._sizes(PROGRAM, [device] * count)
        assert length % (32 * count) == 0


@pytest.mark.slow
def test_eight_devices():
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "ringjax", "check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "12 results on 8 x cpu, 0 wrong" in done.stdout
    assert done.stderr.count(" of 12: ") == 12
