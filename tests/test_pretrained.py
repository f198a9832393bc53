"""The example that loads pretrained models: the logits and the tokens of transformers, on one device and on a mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
import tiny_checkpoints
from flax import nnx
from oracle import make_mesh

import ringjax

# Made by `python -m benchmarks.peer_outputs models`.
RECORDED = np.load(Path(__file__).parent / "data" / "transformers_models.npz")
MODELS = list(tiny_checkpoints.CONFIGS)
PROMPTS = 3, 8, 11, 17


@nnx.jit
def logits_of(model, tokens, **options):
    return model(tokens, **options)


def load(folder, name, mesh=None, num_shards=1, is_old=False, **options):
    tiny_checkpoints.write(folder, name, is_old, num_shards)
    mesh = make_mesh(seq=1) if mesh is None else mesh
    return pretrained.load(folder, dtype=jnp.float32, mesh=mesh, **options)


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(tmp_path, name):
    """On a mesh, and four prompts of several lengths in one batch."""
    tokens, expected, added = (RECORDED[f"{name}/{kind}"] for kind in ("tokens", "logits", "added"))
    mesh = make_mesh(fsdp=2, seq=4)
    model = load(tmp_path, name, mesh, num_shards=2)
    kernel = model.blocks[0].attention.query.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 4, kernel.shape[2])
    padded = np.pad(tokens, ((0, 0), (0, 1)))  # to a length that the mesh divides
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(logits_of(model, padded)[:, :-1], expected, rtol=0, atol=1e-4)
        prompts = [tokens[0, :size].tolist() for size in PROMPTS]
        found = np.stack(list(pretrained.generate(model, prompts, added.shape[1])), axis=1)
    np.testing.assert_array_equal(found, added)


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("name", MODELS)
def test_configurations_of_transformers_4(tmp_path, name):
    model = load(tmp_path, name, is_old=True)
    assert model.config == load(tmp_path / "new", name).config
    np.testing.assert_allclose(
        logits_of(model, RECORDED[f"{name}/tokens"]), RECORDED[f"{name}/logits"], rtol=0, atol=1e-4
    )


def test_packed_documents_are_those_apart(tmp_path):
    model = load(tmp_path, "gemma2")
    tokens = RECORDED["gemma2/tokens"]
    row = np.concatenate([tokens[0, :7], tokens[1, :12]])[None]
    ids = np.repeat(np.array([0, 1], np.int32), [7, 12])[None]
    positions = np.concatenate([np.arange(7), np.arange(12)])[None]
    packed = logits_of(model, row, document_ids=ids, positions=positions)
    np.testing.assert_allclose(packed[0, :7], RECORDED["gemma2/logits"][0, :7], rtol=0, atol=1e-4)
    np.testing.assert_allclose(packed[0, 7:], RECORDED["gemma2/logits"][1, :12], rtol=0, atol=1e-4)


def test_another_pattern_and_rope_in_full_layers(tmp_path):
    """Of layers that attend to all tokens; those with windows stay."""
    rope = ringjax.rope_frequencies({"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}, 8)
    pattern = [ringjax.Window(4), ringjax.Segments(16, rate=2)]
    model = load(tmp_path, "gemma2", pattern=pattern, rope=rope)
    first, second, _ = (block.attention.settings for block in model.blocks)
    assert first.pattern.branches == (ringjax.Window(5),)
    assert second.pattern == ringjax.DilatedPattern(pattern, merge="union")
    assert second.rope[0] == tuple(rope[0].tolist()) != first.rope[0]
    logits = logits_of(model, RECORDED["gemma2/tokens"])
    assert not np.allclose(logits, RECORDED["gemma2/logits"], atol=1e-2)


def test_a_checkpoint_that_is_not_right(tmp_path):
    tiny_checkpoints.write(tmp_path, "llama")
    config = (tmp_path / "config.json").read_text()
    read = lambda: pretrained.load(tmp_path, dtype=jnp.float32, mesh=make_mesh(seq=1))
    for old, new, words in (
        ('"llama"', '"mamba"', "model_type='mamba' in config.json is unknown: use one of llama, mistral"),
        ('"num_hidden_layers": 3', '"num_hidden_layers": 4', r"has no tensor 'model.layers.3"),
        ('"num_hidden_layers": 3', '"num_hidden_layers": 2', r"has a tensor 'model.layers.2.* that no parameter takes"),
        (
            '"intermediate_size": 24',
            '"intermediate_size": 20',
            r"down_proj.weight' makes \(24, 16\), and the configuration \(20, 16\)",
        ),
    ):
        (tmp_path / "config.json").write_text(config.replace(old, new))
        with pytest.raises(ValueError, match=words):
            read()


def test_the_command(tmp_path, monkeypatch, capsys):
    tiny_checkpoints.write(tmp_path, "qwen2")
    prompt = RECORDED["qwen2/tokens"][0, :8]
    run = lambda folder: (
        monkeypatch.setattr("sys.argv", ["pretrained.py", str(folder), "--tokens", ",".join(map(str, prompt))]),
        pretrained.main(),
    )[1]
    assert run(tmp_path) == 0
    expected = RECORDED["qwen2/added"][1, :16]
    assert capsys.readouterr().out.strip() == ",".join(map(str, expected))
    assert run(tmp_path / "none") == 2
    assert capsys.readouterr().err.count("\n") == 1
