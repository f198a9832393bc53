"""The training program as its users run it: the same curve on any mesh, through a kill, and clear errors."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpus import bigram_bits, evaluation_batches, load_corpus, pack, training_batch

ROOT = Path(__file__).parent.parent
SMALL = "--sequence-length 256 --steps 40 --checkpoint-every 10 --width 32 --layers 2 --heads 2 --evaluation-batches 2"
SMALL += " --segment-lengths 32,256 --dilation-rates 1,4 --data "


def start(folder, text, *options):
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), *SMALL.split(), str(text)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*command, "--out", str(folder), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, text, *options):
    process = start(folder, text, *options)
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout, stderr


def losses(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return np.array([float(row["loss"]) for row in csv.DictReader(file)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some files of this repository, of which none is a tenth: the last is held out."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted((ROOT / "ringjax").glob("_*.py")):
        (folder / path.name).write_text(path.read_text())
    return folder


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, stdout, stderr = run(folder, text)
    assert code == 0, stderr
    return folder, stdout


def test_a_run_writes_all_that_it_promises(undisturbed):
    folder, stdout = undisturbed
    assert stdout.startswith("held-out bits per byte: bigram")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["30", "40"]
    curve = losses(folder)
    assert len(curve) == 40
    assert curve[-5:].mean() < 0.75 * curve[0]


@pytest.mark.parametrize("mesh", ["seq=1", "data=2,seq=4"])
def test_the_same_losses_on_every_mesh(mesh, text, undisturbed, tmp_path):
    batch = ["--batch-size", "2"] if "data" in mesh else []
    code, _, stderr = run(tmp_path / "run", text, "--mesh", mesh, *batch)
    assert code == 0, stderr
    expected = undisturbed[0]
    if batch:
        assert run(tmp_path / "one", text, "--mesh", "seq=1", *batch)[0] == 0
        expected = tmp_path / "one"
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(expected), rtol=2e-4)


def test_a_killed_run_continues_the_same_curve(text, undisturbed, tmp_path):
    process = start(tmp_path, text)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        finished = list(tmp_path.glob("checkpoints/[0-9]*0"))
        if finished and len(losses(tmp_path)) >= 12:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    code, _, stderr = run(tmp_path, text, "--resume")
    assert code == 0, stderr
    np.testing.assert_allclose(losses(tmp_path), losses(undisturbed[0]), rtol=1e-6)


def test_a_sample_continues_its_prompt(text, undisturbed):
    code, stdout, stderr = run(undisturbed[0], text, "--sample", "import jax", "--sample-bytes", "16")
    assert code == 0, stderr
    assert stdout.startswith("import jax")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "rows=2"], "'rows=2' is no mesh axis: write data=N or seq=N"),
        (["--mesh", "seq=0"], "'seq=0' is no mesh axis"),
        (["--data", "/nowhere"], "--data /nowhere is neither a file nor a folder"),
        (["--sequence-length", "10000000"], "give more text with --data, or a smaller --sequence-length"),
        (["--resume"], "there is no checkpoint in"),
    ],
)
def test_wrong_input_is_refused(options, words, text, tmp_path):
    code, _, stderr = run(tmp_path, text, *options)
    assert code == 2
    assert words in stderr
    assert "Traceback" not in stderr


def test_a_folder_with_a_run_is_not_overwritten(text, undisturbed):
    code, _, stderr = run(undisturbed[0], text)
    assert code == 2
    assert "holds a run: continue it with --resume" in stderr


def test_corpus(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([65 + i]) * 10)
    corpus = load_corpus(str(tmp_path), 8)
    assert [bytes(document) for document in corpus.held_out] == [b"J" * 7, b"J" * 3, b"T" * 7, b"T" * 3]
    assert len(corpus.train) == 2 * 18
    with pytest.raises(ValueError, match="held_out part of .* has 1 bytes, less than a sequence of 9"):
        load_corpus(str(tmp_path / "00.txt"), 8)


def test_documents_are_packed_whole():
    """Each between two separators, predicted from its first byte to the separator that ends it."""
    documents = [np.frombuffer(text, np.uint8) for text in (b"abc", b"d", b"efghij")]
    batch = pack([documents[:2], documents[2:]], length=8)
    assert bytes(batch.inputs[0].astype(np.uint8)) == b"\0abc\0d\0\0"
    assert bytes(batch.targets[0].astype(np.uint8)) == b"abc\0d\0\0\0"
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [0] * 7 + [-1]]


def test_batches_depend_on_the_step_alone():
    documents = [np.full(size, size, np.uint8) for size in (3, 5, 7, 15)]
    one, again, other = (training_batch(documents, step, 0, (3, 16)) for step in (5, 5, 6))
    assert all(array.shape == (3, 16) for array in one)
    for array, same in zip(one, again, strict=True):
        np.testing.assert_array_equal(array, same)
    assert not np.array_equal(one.inputs, other.inputs)
    held_out = list(evaluation_batches(documents, (1, 16), limit=9))
    # In order, as many as fit: each document is there once.
    assert [sorted(set(batch.inputs.ravel()) - {0}) for batch in held_out] == [[3, 5], [7], [15]]


def test_bigram_bits():
    documents = [np.tile(np.array([1, 2, 1, 3], np.uint8), 1000)]  # after 1 comes 2 or 3, after those 1: half a bit
    bits = bigram_bits(documents, [pack([documents], length=4096)])
    assert abs(bits - 0.5) < 0.02
