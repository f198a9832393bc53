"""Training through what happens to it: kills, damaged checkpoints, a full disk, other meshes, numbers that are none."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import train_lm

from benchmarks.training_runs import checkpoint_steps, kill_at_random, losses, state

pytestmark = pytest.mark.slow


def test_a_run_that_is_killed_ends_as_if_it_were_not(runs, undisturbed, tmp_path):
    """Bit for bit, and with no more lost than the steps since its last checkpoint."""
    kills = kill_at_random(runs, tmp_path / "run", 20, 2, 0)
    assert [kill["resumed"] for kill in kills[1:]] == [kill["whole"] for kill in kills[:-1]]
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(undisturbed))
    killed, whole = state(tmp_path / "run"), state(undisturbed)
    assert killed.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(killed[name], array, err_msg=name)


@pytest.mark.parametrize("mesh", ["seq=4", pytest.param("seq=1", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_fewer_devices(mesh, runs, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    ended = runs.run(tmp_path / "run", "--resume", "10", "--mesh", mesh)
    assert ended.code == 0, ended.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run")[:10], losses(undisturbed)[:10])
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(undisturbed), rtol=1e-5)


def test_a_damaged_checkpoint_is_refused(runs, undisturbed, tmp_path, capsys):
    """Truncated or with a file missing: in one line, which offers the one before it, from which the run goes on."""
    shutil.copytree(undisturbed, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "20" / "default"
    piece = max(folder.glob("*embedding.value/0.0"), key=lambda path: path.stat().st_size)
    halved = lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    go_on = [*runs.options, "--data", str(runs.text), "--out", str(tmp_path / "run"), "--resume"]
    with jax.enable_x64(False):
        train_lm.main(go_on)  # it is at its end: nothing is left to train
    capsys.readouterr()
    for path, damage in ((piece, halved), (piece, Path.unlink), (folder / "_METADATA", halved)):
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(SystemExit) as ended, jax.enable_x64(False):
            train_lm.main(go_on)
        path.write_bytes(whole)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert re.search(r"checkpoint 20 in .* is damaged, or not this program's \(.*\): go on .* --resume 10", line)
    piece.unlink()
    ended = runs.run(tmp_path / "run", "--resume", "10")
    assert ended.code == 0, ended.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(undisturbed))
    assert checkpoint_steps(tmp_path / "run") == [10, 20]


def test_a_checkpoint_that_was_cut_off_is_not_taken(runs, undisturbed, tmp_path):
    """Where it was being written it has another name; the run begins from the one before, and removes it."""
    shutil.copytree(undisturbed, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    cut = folder / "20.orbax-checkpoint-tmp"
    (folder / "20").rename(cut)
    (cut / "default" / "_METADATA").unlink()
    ended = runs.run(tmp_path / "run", "--resume")
    assert ended.code == 0, ended.stderr
    np.testing.assert_array_equal(losses(tmp_path / "run"), losses(undisturbed))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20"]


def test_a_full_disk_leaves_the_last_checkpoint_whole(runs, undisturbed, tmp_path):
    """On a file system of its own, which holds two checkpoints and not a third."""
    files = [path for path in (undisturbed / "checkpoints").rglob("*") if path.is_file()]
    pages = 1.3 * sum(-(-path.stat().st_size // 4096) for path in files)
    small, rest = tmp_path / "small", tmp_path / "rest"
    small.mkdir()
    command = [sys.executable, "-c", "import train_lm; train_lm.main()", *runs.options, "--data", str(runs.text)]
    command += ["--out", str(small / "run"), "--checkpoint-every", "5"]
    script = 'small=$1 rest=$2; shift 2; mount -t tmpfs -o size=$0k tmpfs "$small" || exit 77; "$@"; code=$?; '
    script += 'cp -r "$small/run" "$rest"; exit $code'
    environment = runs.environment()
    environment["PYTHONPATH"] += f":{environment['PYTHONPATH']}/examples"
    ended = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, str(round(4 * pages)), str(small), str(rest), *command],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("this machine allows no file system of one's own")
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    whole = checkpoint_steps(rest)
    assert whole
    assert "Traceback" not in ended.stderr
    assert "No space left on device" in last
    assert f"the last whole checkpoint is of step {max(whole)} in" in last
    assert last.endswith("make room, and go on with --resume")
    ended = runs.run(rest, "--resume")
    assert ended.code == 0, ended.stderr
    assert losses(rest).shape == (20,)


def test_a_number_that_is_none_stops_the_run(runs, tmp_path):
    """With the step and the tensor: the first update is zero, the second beyond all bounds."""
    options = "--mesh seq=1 --layers 1 --learning-rate 1e38 --debug-nans"
    ended = runs.run(tmp_path, *options.split())
    assert ended.code == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert re.search(
        r"error: step [23]: (logits|loss|(gradient|update) of \S+) is not finite; there is no checkpoint yet", last
    )
    assert last.endswith("take a smaller --learning-rate, and start again")
