"""Fine-tuning the slide encoder: the same losses on any devices, what is dropped, and runs that are continued."""

import gigapath
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import make_mesh
from parts import finetune
from parts.finetune import Classifier, Settings, pad, padded_length, rate_scales
from parts.longnet_layers import Noise, drop
from parts.slide_encoder import SlideEncoder
from parts.slides import Slide

LENGTHS = 61, 64, 62  # which are padded to one


def make_encoder(mesh=None, **options):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 4, "in_features": 8}
    shared = {"segment_lengths": (64,), "dilation_rates": (1,), "mesh": mesh}
    return SlideEncoder(**sizes, **shared, **options, rngs=nnx.Rngs(0))


def make_slides():
    rng = np.random.default_rng(0)
    arrays = ((rng.normal(size=(n, 8)), rng.integers(0, 99, (n, 2)) * 256) for n in LENGTHS)
    return [Slide(*(np.float32(array) for array in pair)) for pair in arrays]


def losses_of(mesh, epochs=7):
    encoder = make_encoder(mesh, dropout_rate=0.1, drop_path_rate=0.1, remat=mesh is not None)
    classifier = Classifier(encoder, 2, nnx.Rngs(1))
    settings = Settings(epochs, 2, 1e-2, 0)
    return list(finetune.finetune(classifier, list(map(pad, make_slides())), [0, 1, 1], settings))


@pytest.mark.slow
def test_losses_are_those_of_one_device(caplog):
    alone = losses_of(None)
    with jax.log_compiles():
        together = losses_of(make_mesh(seq=8))
    assert sum("Finished XLA compilation of jit(step)" in line for line in caplog.messages) == 1
    assert len(alone) == 21
    np.testing.assert_allclose(together, alone, rtol=2e-4)
    assert np.mean(alone[-6:]) < np.mean(alone[:6])


def test_padding_changes_nothing():
    encoder, (slide, *_) = make_encoder(), make_slides()
    encode = nnx.jit(lambda encoder, *arrays: encoder(*arrays))
    more = Slide(*(np.pad(array, [(0, 7), (0, 0)], constant_values=3) for array in slide))
    arrays = [[jnp.asarray(array)[None] for array in each] for each in (slide, more)]
    states, output = encode(encoder, *arrays[0])
    padded_states, padded_output = encode(encoder, *arrays[1], jnp.asarray([len(slide.embeddings)]))
    np.testing.assert_allclose(padded_output, output, atol=1e-5)
    length = states[0].shape[1]
    np.testing.assert_allclose([padded[:, :length] for padded in padded_states], states, atol=1e-5)


@pytest.mark.slow
def test_noise_is_dropped_in_proportion():
    """Numbers at one rate, all that is added to a sequence at another; and nothing at rates of zero."""
    array, keys = jnp.ones((2, 61, 16)), jax.random.split(jax.random.key(0), 400)
    dropped = np.asarray(jax.vmap(lambda key: drop(array, Noise(key, 0.3, 0.5), 1))(keys))
    share = 0.7 * 0.5
    assert set(np.unique(dropped.round(5))) == {0, round(1 / share, 5)}
    np.testing.assert_allclose(dropped.mean(axis=0), array, atol=6 * np.sqrt((1 - share) / share / 400))
    assert abs((dropped == 0).all(axis=(2, 3)).mean() - 0.5) < 6 * np.sqrt(0.25 / 800)
    encoder, arrays = make_encoder(), pad(make_slides()[0])
    np.testing.assert_array_equal(encoder(*arrays, key=keys[0])[0], encoder(*arrays)[0])


def test_layers_learn_at_their_rates():
    classifier = Classifier(make_encoder(), 2, nnx.Rngs(1))
    scales = rate_scales(nnx.state(classifier), 2)
    assert float(scales["encoder"]["cls_token"].get_value()) == pytest.approx(0.95**3)
    layers = scales["encoder"]["encoder"]["layers"]["up"]["kernel"].get_value()
    np.testing.assert_allclose(np.ravel(layers), [0.95**2, 0.95], rtol=1e-6)
    assert scales["head"]["kernel"].get_value() == scales["encoder"]["patch"]["kernel"].get_value() == 1


def test_lengths_are_few():
    lengths = np.arange(1, 10_000)
    padded = np.array([padded_length(int(length)) for length in lengths])
    assert (padded >= lengths).all()
    assert (padded <= 1.125 * lengths + 1).all()
    assert len(set(padded.tolist())) <= 90


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A table of slides, and a program whose encoder is small."""
    for number, slide in enumerate(make_slides()):
        np.savez(tmp_path / f"{number}.npz", features=slide.embeddings, coords=slide.coordinates)
    (tmp_path / "labels.csv").write_text("slide,label\n0.npz,tumour\n1.npz,normal\n2.npz,normal\n")
    small = lambda arguments, width: make_encoder(dropout_rate=arguments.dropout, drop_path_rate=arguments.drop_path)
    monkeypatch.setattr(gigapath, "make_encoder", small)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, monkeypatch, *options, last=None):
    """Fine-tunes by the program; returns the losses, of which the last may end the run."""
    losses, train = [], finetune.finetune

    def record(*arguments):
        for value in train(*arguments):
            losses.append(value)
            yield value
            if len(losses) == last:
                raise OSError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "finetune", record)
        table = ["--finetune", "labels.csv", "--accumulate", "2", "--epochs", "2"]
        gigapath.main([*table, "--checkpoints", folder, *options])
    return losses


@pytest.mark.slow
def test_a_run_that_is_continued_ends_as_one_that_was_not(files, monkeypatch, capsys):
    whole = run("whole", monkeypatch)
    with pytest.raises(SystemExit):
        run("parts", monkeypatch, last=4)
    rest = run("parts", monkeypatch, "--resume")
    assert len(whole) == 6
    np.testing.assert_array_equal(rest, whole[3:])
    assert "3 slides of 2 classes; checkpoints are in parts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (None, "", "--finetune none.csv is no file: give a table of slides and labels"),
        ("a,b\n1,2\n", "", "has not the columns slide and label: name them in its first line"),
        ("slide,label\n0.npz,one\n", "", "has less than two classes: give slides of two at least"),
        ("slide,label\n0.npz,one\n1.npz\n", "", "has no slide or no label in row 3: give both"),
        (
            "slide,label\n0.npz,one\n1.npz,two\n",
            "",
            "--accumulate 32 makes less than two steps of 2 slides",
        ),
        ("slide,label\n0.npz,one\n1.npz,two\n", "--accumulate 1 --seed -1", "--seed -1 must be at least 0"),
        ("slide,label\n0.npz,one\n1.npz,two\n", "--accumulate 1 --learning-rate 0", "must be a number above 0"),
        ("slide,label\n0.npz,one\nwide.npz,two\n", "--accumulate 1", "wide.npz has embeddings of width 7, and the"),
        (
            "slide,label\n0.npz,one\n1.npz,two\n",
            "--accumulate 1 --resume",
            "there is no checkpoint in run: train",
        ),
        ("slide,label\n", "--out out.npz", "--out is not for --finetune: leave it out"),
        ("slide,label\n0.npz,one\n7.npz,two\n", "", "7.npz, which is no file: correct it"),
        ("slide,label\n", "--epochs 0", "--epochs 0 must be 1 at least"),
        ("slide,label\n", "--drop-path 1", "--drop-path 1.0 must be at least 0 and less than 1"),
    ],
)
def test_wrong_input(files, capsys, table, options, words):
    np.savez(files / "wide.npz", features=np.ones((4, 7)), coords=np.ones((4, 2)))
    name = "none.csv" if table is None else "table.csv"
    if table is not None:
        (files / name).write_text(table)
    with pytest.raises(SystemExit) as ended:
        gigapath.main(["--finetune", name, "--checkpoints", "run", *options.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (files / "run").exists()


def test_both_are_needed(capsys):
    with pytest.raises(SystemExit):
        gigapath.main(["--checkpoints", "run"])
    assert "--finetune and --checkpoints go together" in capsys.readouterr().err
