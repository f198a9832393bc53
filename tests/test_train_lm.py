"""The training program as its users run it: the same curve on any mesh, and clear errors for wrong input."""

import contextlib
import csv
import io
import re
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from flax import nnx
from parts.byte_model import NGRAM_BITS, NGRAMS, NUM_FEATURES, NUM_OF_NGRAM, ByteModel, features
from parts.corpus import PADDING, Document, bigram_bits, evaluation_rows, load_corpus, pack, training_rows, zlib_bits
from parts.distribution import parse_mesh
from parts.metrics import plot, read_positions
from parts.options import positive
from parts.training import Tensors, by_position, first_not_finite
from tqdm import tqdm

from benchmarks.environment import ROOT
from benchmarks.training_runs import SMALL, losses


def test_a_run_writes_all_that_it_promises(undisturbed):
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == ["10", "20"]
    (events,) = (undisturbed / "tensorboard").iterdir()
    assert events.read_bytes().count(b"held_out_bits_per_byte") == 2
    curve = losses(undisturbed)
    assert len(curve) == 20
    assert curve[-5:].mean() < 0.75 * curve[0]
    with (undisturbed / "metrics.csv").open(newline="") as file:
        (*_, last) = csv.DictReader(file)
    rows = read_positions(undisturbed)
    bits, count = (np.array([row[name] for row in rows]) for name in ("held_out_bits_per_byte", "bytes"))
    np.testing.assert_allclose(np.average(bits, weights=count), float(last["held_out_bits_per_byte"]), rtol=1e-6)


def test_losses_by_position():
    """The first token of a document is at position 1; padding is none."""
    document_ids = np.array([[0, 0, 0, 0, 0, 1, 2, 2, 2, -1], [3, -1, 4, 4, -1, -1, -1, -1, -1, -1]])
    losses = np.random.default_rng(0).normal(size=document_ids.shape)
    expected = np.zeros((2, 4))
    for row, ids in enumerate(document_ids):
        for token, document in enumerate(ids):
            if document != PADDING:
                column = int(np.sum(ids[: token + 1] == document)).bit_length() - 1
                expected[:, column] += losses[row, token], 1
    np.testing.assert_allclose(jax.jit(by_position)(losses, document_ids), expected, rtol=1e-12)
    with jax.enable_x64(False):
        np.testing.assert_allclose(jax.jit(by_position)(losses, document_ids), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["seq=1", "seq=2,tensor=2,data=2,fsdp=2"])
def test_the_same_losses_on_every_mesh(mesh, runs, undisturbed, tmp_path):
    """On one device, and on sixteen of which each axis has two; profiled and drawn beside another, or not."""
    options = ["--profile", "--compare", str(undisturbed)] if mesh == "seq=1" else []
    ended = runs.run(tmp_path, "--mesh", mesh, *options)
    assert ended.code == 0, ended.stderr
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == (mesh == "seq=1")
    np.testing.assert_allclose(losses(tmp_path), losses(undisturbed), rtol=2e-4)
    for found, expected in zip(read_positions(tmp_path), read_positions(undisturbed), strict=True):
        assert found == pytest.approx(expected, rel=2e-3)
        assert found["bytes"] == expected["bytes"]
    assert "cannot be compared" not in ended.stdout


@pytest.mark.slow
def test_a_sample_continues_its_prompt(runs, undisturbed, tmp_path):
    """And changes nothing: neither later checkpoints nor one that another process is writing."""
    shutil.copytree(undisturbed, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "25.orbax-checkpoint-tmp").mkdir()
    before = sorted((tmp_path / "run").rglob("*"))
    ended = runs.run(tmp_path / "run", "--sample", "import jax", "--sample-bytes", "16", "--resume", "10")
    assert ended.code == 0, ended.stderr
    assert ended.stdout.startswith("import jax")
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_bytes(bytes([65 + i]) * 1000)
    return folder


@pytest.fixture
def refused(text, tmp_path, monkeypatch, capsys):
    """Runs the program in this process; returns what it prints as it ends with exit code 2 before it compiles."""
    assert len(jax.devices()) == 8  # made by the tests' own settings, before the program could ask for others
    monkeypatch.setattr("parts.training.Trainer", lambda *_: pytest.fail("it went on to compile"))

    def run(*options):
        out = tmp_path / "out"
        before = sorted(out.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            train_lm.main([*SMALL.split(), "--data", str(text), "--out", str(out), *options])
        assert ended.value.code == 2
        assert sorted(out.rglob("*")) == before
        assert before or not out.exists()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mesh rows=2", "'rows=2' is no mesh axis: write NAME=SIZE with a name of ('data', 'fsdp', 'seq', 'tensor')"),
        ("--mesh seq=0", "'seq=0' is no mesh axis"),
        ("--mesh seq=2,seq=4", "'seq=4' is no mesh axis: write NAME=SIZE"),
        ("--mesh seq=16", "--mesh data=1,fsdp=1,tensor=1,seq=16 asks for 16 devices, but there are 8: ask for fewer"),
        ("--sequence-length 100", "--sequence-length 100 does not divide over seq, 8 devices: make it a multiple of 8"),
        ("--batch-size 3 --mesh data=2,fsdp=2", "--batch-size 3 does not divide over data x fsdp, 4 devices"),
        ("--heads 3 --width 33 --mesh tensor=2", "--heads 3 does not divide over tensor, 2 devices"),
        ("--heads 3", "--width 32 does not divide over --heads 3"),
        ("--segment-lengths 32,256", "--segment-lengths (32, 256) and --dilation-rates"),
        ("--steps 2 --profile", "--profile is of steps from the third on, and this run has 2: give more --steps"),
        ("--ngram-bits 15", "'15' is more than the 14 bits that tokens have"),
        ("--steps 0", "'0' is no positive whole number"),
        ("--seed -1", "'-1' is no whole number from 0 to 2^31 - 1"),
        ("--seed 99999999999999999999", "'99999999999999999999' is no whole number"),
        ("--learning-rate -1", "'-1' is no positive number"),
        ("--learning-rate nan", "'nan' is no positive number"),
        ("--data /nowhere", "--data /nowhere is no file, and no folder with files: give one of these"),
        ("--sequence-length 10000000", "give more text with --data, or a smaller --sequence-length"),
        ("--resume", "there is no checkpoint in"),
        ("--compare nowhere", "nowhere has no positions.csv of a run: give the --out of one that has"),
        ("--sample x --distributed", "--sample runs in one process: leave --distributed out"),
        ("--distributed --num-processes 3 --process-index 0", "could not join the other processes"),
    ],
)
def test_wrong_input_is_refused(options, words, refused):
    assert words in refused(*options.split())


def test_a_run_that_goes_on_reads_its_flags(undisturbed, tmp_path, monkeypatch):
    """From its checkpoint, of the model and of the data, where the command line does not say otherwise."""
    seen = []
    monkeypatch.setattr("train_lm.train", lambda arguments, *_: seen.append(arguments))
    monkeypatch.setattr("train_lm.sample", lambda arguments, *_: seen.append(arguments) or b"")
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    for options in (["--resume"], ["--sample", "x"], ["--resume", "10", "--heads", "4"]):
        train_lm.main(["--out", str(folder), *options])
    small = train_lm.parse_arguments(SMALL.split())
    for arguments in seen:
        for name in {*train_lm.MODEL, *train_lm.DATA} - {"heads"}:
            assert getattr(arguments, name) == getattr(small, name)
    assert [arguments.heads for arguments in seen] == [2, 2, 4]


PAGES = ROOT / "README.md", *ROOT.glob("docs/*.md"), Path(train_lm.__file__)
MESH_FLAG = re.compile(r"(?<!ringjax plan )--mesh[\s,\"]+((?:\w+=\d+,?)+)")
MESHES = {mesh for page in PAGES for mesh in MESH_FLAG.findall(page.read_text())}


@pytest.mark.parametrize("mesh", sorted(MESHES))
def test_the_batch_fills_the_mesh(mesh, text, tmp_path, monkeypatch):
    """Every mesh of the documentation runs as it is written."""
    assert len(MESHES) >= 4
    taken, axes = [], parse_mesh(mesh)
    sequences = axes.get("data", 1) * axes.get("fsdp", 1)
    monkeypatch.setattr("train_lm.make_mesh", lambda *_: types.SimpleNamespace(shape=parse_mesh(mesh)))
    monkeypatch.setattr("train_lm.check_fits", lambda _, sizes: taken.append(sizes["--batch-size"][0]))
    monkeypatch.setattr("jax.set_mesh", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("train_lm.train", lambda *_: None)
    train_lm.main(["--mesh", mesh, "--data", str(text), "--out", str(tmp_path / "out"), "--sequence-length", "64"])
    assert taken == [sequences]


def test_wrong_text_is_refused(refused, text, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"--data {empty} is no file, and no folder with files" in refused("--data", str(empty))
    (empty / "nothing.txt").touch()
    assert "has 0 bytes, less than a sequence of 257: give more text" in refused("--data", str(empty))
    (text / "image.png").write_bytes(b"\x89PNG\0\0")
    assert "image.png is binary, with bytes of zero, which separate documents: leave it out" in refused()
    (text / "image.png").unlink()

    def unreadable(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", unreadable)
    assert "00.txt cannot be read (Permission denied): give --data that you may read" in refused()


def test_a_checkpoint_that_is_not_the_run_s_own_is_refused(refused, undisturbed, tmp_path):
    """Of another configuration, or not made by this program at all: then the one before it is offered."""
    assert "out/checkpoints holds a run: continue it with --resume" in _copy(undisturbed, tmp_path, refused)
    words = refused("--resume", "--width", "64", "--seed", "3")
    assert "is of another configuration" in words
    assert "seed 0 there and 3 here" in words
    assert "width 32 there and 64 here" in words
    assert "text" in words  # that of the test
    assert "the checkpoints in" in refused("--resume", "11")
    shutil.rmtree(tmp_path / "out/checkpoints/20")
    (tmp_path / "out/checkpoints/20").mkdir()
    words = refused("--resume")
    assert "out/checkpoints is damaged, or not this program's" in words
    assert words.strip().endswith("go on from the one before it with --resume 10")


def _copy(undisturbed, folder, refused):
    shutil.copytree(undisturbed, folder / "out")
    return refused()


def test_corpus(text):
    corpus = load_corpus(str(text), 800)
    read = lambda documents: [bytes(document.read(0, document.size)) for document in documents]
    assert read(corpus.held_out) == [b"J" * 799, b"J" * 201, b"T" * 799, b"T" * 201]
    assert len(corpus.train) == 2 * 18
    with pytest.raises(ValueError, match="held_out part of .* has 100 bytes, less than a sequence of 801"):
        load_corpus(str(text / "00.txt"), 800)


def documents_of(folder, *texts):
    found = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.txt"
        path.write_bytes(b"--" + text)
        found.append(Document(path, 2, 2 + len(text)))
    return found


def test_documents_are_packed_whole(tmp_path):
    """Each between two separators, predicted from its first byte to the separator that ends it."""
    documents = documents_of(tmp_path, b"abc", b"d", b"efghij")
    batch = pack([documents[:2], documents[2:]], length=8)
    assert bytes(batch.inputs[0, :, 0].astype(np.uint8)) == b"\0abc\0d\0\0"
    assert bytes(batch.targets[0].astype(np.uint8)) == b"abc\0d\0\0\0"
    # The numbers of the last bytes know nothing of other documents: at "d" they are those of a text of one byte.
    np.testing.assert_array_equal(batch.inputs[0, 5], features(np.frombuffer(b"\0\0\0\0\0d", np.uint8))[0])
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [0] * 7 + [-1]]


def test_a_region_is_packed_without_the_rest(tmp_path, monkeypatch):
    documents = documents_of(tmp_path, b"abcde", b"f", b"ghijklm", b"nop")
    rows = [documents[:2], documents[2:3], documents[3:], documents[1:3]]
    whole = pack(rows, 11)
    asked = []
    read = Document.read
    monkeypatch.setattr(
        Document, "read", lambda self, begin, stop: asked.append(stop - begin) or read(self, begin, stop)
    )
    for rows_part in (slice(0, 4), slice(1, 3), slice(3, 4)):
        for begin in range(11):
            for stop in range(begin + 1, 12):
                asked.clear()
                part = pack(rows, 11, (rows_part, slice(begin, stop)))
                for array, expected in zip(part, whole, strict=True):
                    np.testing.assert_array_equal(array, expected[rows_part, begin:stop])
                # Of each of at most two documents the bytes before a token, and the next one.
                assert sum(asked) <= (rows_part.stop - rows_part.start) * (stop - begin + 2 * max(NGRAMS))


def test_batches_depend_on_the_step_alone(tmp_path):
    documents = documents_of(tmp_path, *(bytes([size]) * size for size in (3, 5, 7, 15)))
    draw = lambda step: pack(training_rows(documents, step, 0, (3, 16)), 16)
    one, again, other = map(draw, (5, 5, 6))
    assert [array.shape for array in one] == [(3, 16, NUM_FEATURES), (3, 16), (3, 16)]
    for array, same in zip(one, again, strict=True):
        np.testing.assert_array_equal(array, same)
    assert not np.array_equal(one.inputs, other.inputs)
    held_out = evaluation_rows(documents, (1, 16), limit=9)
    # In order, as many as fit: each document is there once.
    assert [[document.size for document in row] for (row,) in held_out] == [[3, 5], [7], [15]]


def test_bigram_bits(tmp_path):
    documents = documents_of(tmp_path, bytes([1, 2, 1, 3] * 1000))  # after 1 comes 2 or 3, after those 1: half a bit
    bits = bigram_bits(documents, [pack([documents], length=4096)])
    assert abs(bits - 0.5) < 0.02


def test_zlib_bits(tmp_path):
    """Each document by itself: what both say is said twice."""
    text = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))
    assert 8 < zlib_bits([[documents_of(tmp_path, text, text)]]) < 8.2


def test_the_numbers_of_the_last_bytes():
    """The same after the same bytes, wherever they stand; in tables of their own; and rarely the same after others."""
    text = np.frombuffer(b"\0\0\0\0\0say hello, say hello", np.uint8)
    tokens = features(text)
    assert tokens.shape == (len(text) - 5, 5)
    np.testing.assert_array_equal(tokens[:, 0], text[5:])
    np.testing.assert_array_equal(tokens[7:9], tokens[-2:])  # at the ends of "say hell" and "say hello"
    assert (tokens[3:5, -1] != tokens[-6:-4, -1]).all()  # before "say he" is another byte
    assert (tokens[:, 1:] // NUM_OF_NGRAM == np.arange(len(NGRAMS))).all()
    pairs = np.stack(np.meshgrid(np.arange(64), np.arange(64)), axis=-1).reshape(-1, 2)
    numbers = {int(features(np.array([0, 0, 0, 0, *pair], np.uint8))[0, 1]) for pair in pairs}
    assert len(numbers) > 2000


def test_a_smaller_model_tells_fewer_numbers_apart():
    """Of each number its upper bits, in tables of their own."""
    sizes = {"width": 16, "num_layers": 1, "num_heads": 2, "segment_lengths": (16,), "dilation_rates": (1,)}
    model = ByteModel(**sizes, ngram_bits=NGRAM_BITS - 3, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert model.ngrams.num_embeddings == len(NGRAMS) * NUM_OF_NGRAM // 8
    tokens = jnp.asarray(features(np.random.default_rng(0).integers(0, 256, 21, np.uint8)))[None]  # [1, T, 5]
    logits = lambda ngrams: model(tokens.at[..., 1:].set(ngrams))
    same, other = tokens[..., 1:] // 8 * 8, tokens[..., 1:] ^ 8
    np.testing.assert_array_equal(logits(tokens[..., 1:]), logits(same))
    assert (jnp.abs(logits(same) - logits(other)).max(axis=-1) > 0).all()


def test_the_first_tensor_that_is_not_finite_is_named():
    """In the order in which they are computed."""
    yes, no = np.array(True), np.array(False)
    gradient = {"down": {"kernel": yes}, "up": {"kernel": no}}
    assert first_not_finite(Tensors(yes, yes, yes, gradient, no)) == "gradient of up.kernel"
    assert first_not_finite(Tensors(yes, yes, no, gradient, no)) == "loss"
    assert first_not_finite(Tensors(yes, yes, yes, yes, yes)) is None
    assert first_not_finite(None) is None


def test_few_bytes_are_not_drawn(tmp_path, monkeypatch):
    """A place with a few bytes would flatten the picture of all others."""
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, *args, **kwargs: drawn.append(args))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
    row = {"step": 1, "bits_per_byte": 3.0, "held_out_bits_per_byte": 3.0}
    places = [
        {"position": 2**number, "bytes": count, "held_out_bits_per_byte": 2.0, "step": 1}
        for number, count in enumerate((100_000, 50_000, 12))
    ]
    plot(tmp_path / "loss.png", [row], {"bigram table": 4.0, "zlib": 3.5}, {"own": places})
    assert drawn[-1][0] == [1, 2]


@pytest.mark.parametrize("program", ["train_lm", "gigapath", "draw_pattern", "longnet"])
def test_wrong_options_take_two_lines(program, capsys):
    parse = __import__(program).parse_arguments
    with pytest.raises(SystemExit) as ended:
        parse(["x.svg", "--nothing"] if program == "draw_pattern" else ["--nothing"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_pace_of_a_run_is_that_without_its_compilation():
    """Bars that are not shown, those of all processes but the first, have none."""
    with tqdm(total=3, file=io.StringIO()) as bar:
        bar.start_t -= 100  # of compiling
        bar.update()
        for done in (1, 2):
            train_lm.leave_out_compiling(bar, done)
            bar.update()
        assert (bar.n - bar.initial, bar.format_dict["elapsed"] < 50) == (2, True)
    train_lm.leave_out_compiling(tqdm(total=3, disable=True), 1)


def test_numbers_may_have_a_unit():
    assert [positive(text) for text in ("7", "1k", "2M")] == [7, 1024, 2**21]
