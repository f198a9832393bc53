"""The example that fine-tunes pretrained language models: rows, losses, runs, and what it leaves behind."""

import json

import finetune_lm
import jax.numpy as jnp
import numpy as np
import optax
import pretrained
import pytest
import tiny_checkpoints
from oracle import make_mesh
from parts.pretrained import report, training
from parts.pretrained.text import (
    PADDING,
    evaluation_rows,
    hide_needles,
    make_rows,
    read_tokenizer,
    rows_of_step,
    split,
)
from parts.pretrained.tiny import write_tiny
from parts.pretrained.weights import read_tensors

SMALL = ("--sequence-length", "64", "--dtype", "float32", "--held-out-rows", "2", "--learning-rate", "1e-2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of texts, and a checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    words = np.array(["a", "ring", "of", "devices", "takes", "each", "key", "to", "every", "query"])
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(words, 60 + 7 * number)))
    write_tiny(folder.with_name("tiny"), sorted(folder.glob("*.txt")), seed=0)
    return folder, folder.with_name("tiny")


@pytest.fixture
def run(data, tmp_path, capsys):
    """Runs the command line in a folder of its own, and returns the losses that it prints, and the rest."""

    def run(*options, out="run", weights=False):
        texts, checkpoint = data
        given = ("--weights", str(checkpoint)) if weights else ()
        finetune_lm.main(["--data", str(texts), "--out", str(tmp_path / out), *SMALL, *given, *map(str, options)])
        lines = capsys.readouterr().out.splitlines()
        losses = [float(line.split()[3].rstrip(",")) for line in lines if line.startswith("step ")]
        return losses, [line for line in lines if not line.startswith("step ")]

    return run


def test_rows_of_documents():
    documents = [np.arange(1, 6), np.arange(11, 14), np.arange(21, 27)]
    packed, joined = (make_rows(documents, 4, is_packed) for is_packed in (True, False))
    assert packed.tokens.tolist() == [[1, 2, 3, 4], [5, 11, 12, 13], [21, 22, 23, 24], [25, 26, 0, 0]]
    none = PADDING
    assert packed.targets.tolist() == [[2, 3, 4, 5], [none, 12, 13, none], [22, 23, 24, 25], [26, none, none, none]]
    assert packed.document_ids.tolist() == [[0] * 4, [0, 1, 1, 1], [2] * 4, [2, 2, none, none]]
    assert packed.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert joined.targets.tolist() == [[2, 3, 4, 5], [11, 12, 13, 21], [22, 23, 24, 25], [26, none, none, none]]
    assert joined.document_ids is None


@pytest.mark.parametrize("count", [1, 2, 9, 10, 25])
def test_what_is_held_out_is_not_trained_on(count):
    documents = [np.arange(10) + 10 * number for number in range(count)]
    train, held_out = map(np.concatenate, split(documents))
    assert sorted([*train, *held_out]) == list(range(10 * count))


def test_rows_to_evaluate_are_spread_and_padded():
    rows = make_rows([np.arange(40)], 4, is_packed=True)
    found = evaluation_rows(rows, 3, 2)
    assert found.tokens[:, 0].tolist() == [0, 16, 36, 0]
    assert (found.targets[-1] == PADDING).all()


def test_each_epoch_has_every_row_once():
    numbers = np.concatenate([rows_of_step(6, 4, step, seed=0) for step in range(3)])
    assert sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6))
    assert numbers[:6].tolist() != numbers[6:].tolist()


def test_losses_in_chunks_are_those_of_all_logits(data, monkeypatch):
    monkeypatch.setattr(training, "MAX_TOKENS", 3)
    model = pretrained.load(data[1], dtype=jnp.float32, mesh=make_mesh(seq=1))
    draw = np.random.default_rng(0)
    states = jnp.asarray(draw.normal(size=(2, 20, 64)), jnp.float32)
    targets = draw.integers(-1, 250, (2, 20))
    logits = model.logits(states)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(targets, 0))
    found = training.token_losses(model, states, jnp.asarray(targets))
    np.testing.assert_allclose(found, np.where(targets == PADDING, 0, expected), rtol=1e-5)


@pytest.mark.quick("packed")
@pytest.mark.parametrize(
    "options",
    [("--packed",), ("--lora", 2, "--rope", "yarn:2"), ("--pattern", "window:9,segments:64:4")],
    ids=("packed", "adapters", "pattern"),
)
def test_eight_devices_train_as_one(run, options):
    options = (*options, "--steps", 20, "--batch-size", 2, "--accumulate", 2)
    losses, _ = run(*options, "--mesh", "seq=1", out="one")
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.05
    found, lines = run(*options, "--mesh", "fsdp=2,seq=4", out="eight")
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert lines[-1].startswith("held-out loss")


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(run, tmp_path, monkeypatch):
    options = ("--packed", "--steps", 6, "--checkpoint-every", 2, "--mesh", "seq=4")
    losses, _ = run(*options, out="whole")
    step = finetune_lm.train_step

    def kill(*arguments):
        if arguments[-1] == 5:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_lm, "train_step", kill)
        with pytest.raises(KeyboardInterrupt):
            run(*options, out="killed")
    printed, _ = run(*options, "--resume", out="killed")
    assert printed == losses[:5] + losses[4:]
    one, other = (json.loads((tmp_path / out / report.LOSSES).read_text()) for out in ("whole", "killed"))
    assert one == other
    assert list(one) == ["0", "6"]


@pytest.mark.slow
def test_adapters_leave_the_rest_alone(run, data, tmp_path):
    """They are all that is trained and written; a saved model has them in its projections."""
    options = "--lora", 2, "--steps", 3, "--sequence-length", 128, "--mesh", "seq=4"
    _, lines = run(*options, "--save", tmp_path / "to", weights=True)
    assert lines[-3] == f"{tmp_path / 'to'} holds the model for transformers"
    assert lines[-1].split()[0] == "128"
    before, after = ({name: array() for name, array in read_tensors(one).items()} for one in (data[1], tmp_path / "to"))
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert (tmp_path / "to" / "tokenizer.json").read_text() == (data[1] / "tokenizer.json").read_text()
    text = run("--lora", 2, "--generate", "a ring of", "--tokens", 5, "--mesh", "fsdp=2,seq=2", weights=True)[1]
    assert "\n".join(text).startswith("a ring of")


def test_needles(data):
    tokenizer, _ = read_tokenizer(data[1])
    hay = np.full(7, 5)
    for needle in hide_needles(tokenizer, hay, 200, (0.0, 0.25, 0.5, 1.0)):
        assert len(needle.prompt) + len(needle.answer) == 200
        answer = tokenizer.decode(needle.answer)
        assert tokenizer.decode(needle.prompt).count(answer) == 1
        is_hay = np.array(needle.prompt) == 5
        begin = np.argmin(is_hay)  # of the hidden sentence
        assert begin == round(needle.depth * is_hay.sum())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mesh", "seq=3"), "--sequence-length 64 does not divide over seq, 3 devices"),
        (("--batch-size", 3, "--mesh", "fsdp=2,seq=4"), "--batch-size 3 does not divide over data x fsdp"),
        (("--sequence-length", "64k"), "tokens to train on, less than --sequence-length 65536: give more text"),
        (("--rope", "spiral:4"), "--rope spiral is unknown: use one of linear, yarn, llama3"),
        (("--mesh", "tensor=3,seq=2"), "num_attention_heads of config.json 4 does not divide over tensor, 3 devices"),
        (("--save", "to", "--generate", "a"), "leave --generate out"),
        (("--weights", "nothing"), "nothing"),
        (("--data", "nothing"), "--data nothing is no file"),
        (("--resume",), "there is no checkpoint in"),
        (("--generate", "a"), "there is no checkpoint in"),
    ],
)
def test_wrong_input_ends_it_and_writes_nothing(run, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(*options)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_tokenizer(run, tmp_path, capsys):
    tiny_checkpoints.write(tmp_path / "qwen3", "qwen3")
    with pytest.raises(SystemExit) as ended:
        run("--weights", tmp_path / "qwen3")
    assert ended.value.code == 2
    assert "has no tokenizer.json: save the tokenizer there with transformers" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3"]
