"""Several processes on this machine: the same numbers as one, each reading its own part, and none left hanging."""

import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from parts.distribution import bounding_box, local_region, make_mesh

from benchmarks.training_runs import ROOT, end_all, free_port, losses, wait_for_step

pytestmark = pytest.mark.slow


def test_attention_across_processes(runs):
    """Outputs, lse and gradients of a pattern with rings through all processes, and documents, in float64."""
    environment, count = runs.environment(), 2
    environment["PYTHONPATH"] += f":{ROOT}/tests"
    command = [sys.executable, str(ROOT / "tests" / "attention_process.py"), f"127.0.0.1:{free_port()}", str(count)]
    processes = [
        subprocess.Popen(
            [*command, str(index)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for index in range(count)
    ]
    for ended in end_all(processes):
        assert ended.code == 0, ended.stderr
        assert "exact" in ended.stdout


def test_training_across_processes(runs, undisturbed, tmp_path):
    ended = end_all(runs.start_processes(4, tmp_path / "run", "--mesh", "fsdp=2,seq=4"))
    assert all(process.code == 0 for process in ended), ended[0].stderr
    assert "held-out bits per byte" in ended[0].stdout
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(undisturbed), rtol=2e-4)


def test_a_checkpoint_of_one_process_resumes_on_two(runs, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    ended = end_all(runs.start_processes(2, tmp_path / "run", "--resume", "10", "--mesh", "data=2,seq=4"))
    assert all(process.code == 0 for process in ended), ended[0].stderr
    assert "held-out bits per byte" in ended[0].stdout
    np.testing.assert_array_equal(losses(tmp_path / "run")[:10], losses(undisturbed)[:10])
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(undisturbed), rtol=1e-5)


@pytest.mark.parametrize("victim", [0, 1])
def test_processes_end_when_one_dies(victim, runs, tmp_path):
    processes = runs.start_processes(2, tmp_path / "run", "--mesh", "data=2,seq=4", "--peer-timeout", "10")
    try:
        wait_for_step(tmp_path / "run", 2, *processes)
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        code = processes[1 - victim].wait(60)
        assert code != 0
        assert time.monotonic() - begin < 60
    finally:
        ended = end_all([process for process in processes if process.kill() is None])
    assert ended[victim].code == -signal.SIGKILL
    words = ended[1 - victim].stderr
    assert "another process died" in words or "another task died" in words


def test_wrong_input_ends_all_processes(runs, tmp_path):
    for ended in end_all(runs.start_processes(2, tmp_path / "run", "--batch-size", "3", "--mesh", "data=2,seq=4")):
        assert ended.code == 2
        assert "--batch-size 3 does not divide over data x fsdp, 2 devices" in ended.stderr


def test_the_part_of_a_process():
    """All that its devices hold; where that is no box, an error that says so."""
    mesh = make_mesh({"data": 2, "fsdp": 1, "seq": 4, "tensor": 1})
    assert local_region(mesh, (4, 32)) == (slice(0, 4), slice(0, 32))
    assert bounding_box([((2, 4), (8, 16)), ((2, 4), (16, 24))]) == (slice(2, 4), slice(8, 24))
    with pytest.raises(ValueError, match="which is no box: name the axes of --mesh in another order"):
        bounding_box([((0, 2), (0, 8)), ((2, 4), (8, 16))])
