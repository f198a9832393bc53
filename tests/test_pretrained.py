"""The example that loads pretrained models: the logits and the tokens of transformers, on one device and on a mesh."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pretrained
import pytest
import tiny_checkpoints
from flax import nnx
from oracle import make_mesh
from parts.pretrained.config import make_config, read_config
from parts.pretrained.lora import adapt
from parts.pretrained.weights import read_tensors
from safetensors.numpy import save_file

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
    return reload(folder, mesh, **options)


def reload(folder, mesh=None, dtype=jnp.float32, **options):
    mesh = make_mesh(seq=1) if mesh is None else mesh
    return pretrained.load(folder, dtype=dtype, mesh=mesh, **options)


def check_logits(model, name, kind="logits"):
    tokens, expected, loss = (RECORDED[f"{name}/{one}"] for one in ("tokens", kind, "loss"))
    logits = logits_of(model, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    if kind == "logits":
        np.testing.assert_allclose(mean_loss(logits, tokens), loss, rtol=1e-5)


def mean_loss(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(tmp_path, name):
    """On a mesh, and four prompts of several lengths in one batch."""
    tokens, expected, loss, added = (RECORDED[f"{name}/{kind}"] for kind in ("tokens", "logits", "loss", "added"))
    mesh = make_mesh(fsdp=2, seq=4)
    model = load(tmp_path, name, mesh, num_shards=2)
    kernel = model.stacked[0].attention.query.kernel.get_value()
    count, width = len(model.config.layers) // model.config.period, model.config.width
    assert kernel.shape[:2] == (count, width)
    assert kernel.sharding.shard_shape(kernel.shape)[:2] == (count, width // 2)
    padded = np.pad(tokens, ((0, 0), (0, 1)))  # to a length that the mesh divides
    with jax.set_mesh(mesh):
        logits = logits_of(model, padded)[:, :-1]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(mean_loss(logits, tokens), loss, rtol=1e-5)
        prompts = [tokens[0, :size].tolist() for size in PROMPTS]
        found = np.stack(list(pretrained.generate(model, prompts, added.shape[1])), axis=1)
    np.testing.assert_array_equal(found, added)


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("name", MODELS)
def test_configurations_of_transformers_4(tmp_path, name):
    model = load(tmp_path, name, is_old=True)
    assert model.config == load(tmp_path / "new", name).config
    check_logits(model, name)


def read(folder):
    return {name: array() for name, array in read_tensors(folder).items()}


@pytest.mark.quick("gemma2", "gpt_oss")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_was_loaded(tmp_path, name):
    """To the bit, so that transformers computes the same of it; experts in four bits are written in full."""
    model = load(tmp_path / "from", name)
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    pretrained.save(model, tmp_path / "to")
    found, expected = read(tmp_path / "to"), read(tmp_path / "from")
    assert sorted(found) == sorted(expected)
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key].astype(np.float32), err_msg=key)
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "{}"
    config = tiny_checkpoints.config_of(name)
    config.pop("quantization_config", None)
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == {**config, "torch_dtype": "float32"}
    with pytest.raises(ValueError, match="holds a checkpoint"):
        pretrained.save(model, tmp_path / "to")


@pytest.mark.parametrize("name", tiny_checkpoints.WRITTEN)
def test_another_rotary_embedding_is_written_with_the_model(tmp_path, name):
    model = load(tmp_path / "from", name, rope=tiny_checkpoints.EXTENDED)
    check_logits(model, name, "extended")
    pretrained.save(model, tmp_path / "to")
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written == {**tiny_checkpoints.config_of(name), **tiny_checkpoints.WRITTEN[name], "torch_dtype": "float32"}
    assert reload(tmp_path / "to").config == model.config


def test_what_transformers_cannot_express_is_warned_of(tmp_path):
    """A pattern; and apart from layers with windows a rotary embedding, but for Gemma 3."""
    model = load(tmp_path / "from", "gemma2", rope=tiny_checkpoints.EXTENDED, pattern=[ringjax.Segments(8)])
    with pytest.warns(UserWarning, match="cannot express") as caught:
        pretrained.save(model, tmp_path / "to")
    of_pattern, of_rope = (str(warning.message) for warning in caught)
    assert "the pattern of layers that attend to all tokens" in of_pattern
    assert "the rotary embedding of layers with windows" in of_rope


def test_adapters(tmp_path):
    """They add nothing at first; merged into the kernels of a saved model they add what they did; their base stays."""
    model = load(tmp_path / "from", "gemma2")
    adapt(model, 2)
    check_logits(model, "gemma2")
    draw = np.random.default_rng(0)
    adapters = nnx.state(model, nnx.LoRAParam)
    assert len(jax.tree.leaves(adapters)) == 3 * 7 * 2
    drawn = lambda array: jnp.asarray(0.1 * draw.normal(size=array.shape), array.dtype)
    nnx.update(model, jax.tree.map(drawn, adapters))
    tokens = RECORDED["gemma2/tokens"]
    logits = logits_of(model, tokens)
    assert not np.allclose(logits, RECORDED["gemma2/logits"], atol=1e-2)
    pretrained.save(model, tmp_path / "to")
    np.testing.assert_allclose(logits_of(reload(tmp_path / "to"), tokens), logits, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits_of(model, tokens), logits)


@pytest.mark.slow
def test_gradients_that_compute_blocks_again(tmp_path):
    """Through layers in a scan, with experts and with blocks computed again: the same."""
    tokens = RECORDED["gpt_oss/tokens"]

    @nnx.jit
    @nnx.grad
    def gradient(model, tokens):
        return mean_loss(model(tokens), tokens)

    mesh = make_mesh(fsdp=2, seq=4)
    with jax.enable_x64(True):
        expected = gradient(load(tmp_path, "gpt_oss", dtype=jnp.float64), tokens[:, :16])
        with jax.set_mesh(mesh):
            found = gradient(reload(tmp_path, mesh, dtype=jnp.float64, remat=True), tokens[:, :16])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-9), found, expected)


def test_the_same_kind_of_rotary_embedding_keeps_its_other_settings(tmp_path):
    tiny_checkpoints.write(tmp_path, "gpt_oss")
    expected = read_config(tmp_path).layers
    assert read_config(tmp_path, rope={"rope_type": "yarn", "factor": 4.0}).layers == expected
    assert read_config(tmp_path, rope={"type": "yarn", "factor": 8.0}).max_length == 512


@pytest.mark.parametrize(
    ("name", "changes", "rope", "words"),
    [
        ("llama", {}, {"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' has no frequencies"),
        ("mistral", {}, {"rope_type": "yarn", "factor": 2.0}, "this model has none, leave them out"),
        ("llama", {"hidden_act": "gelu"}, None, "hidden_act='gelu' in config.json is not supported: it must be 'silu'"),
        ("gemma2", {"layer_types": ["chunked_attention"]}, None, "layer_types in config.json have 'chunked_attention'"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, name, changes, rope, words):
    tiny_checkpoints.write(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=words):
        read_config(tmp_path, rope=rope)


@pytest.mark.parametrize("prompt", [[], [3, 64], [-1]])
def test_prompts_that_are_no_tokens(tmp_path, prompt):
    with pytest.raises(ValueError, match="not in the vocabulary of 64"):
        next(pretrained.generate(load(tmp_path, "qwen2"), [prompt], 2))


def test_the_text_of_a_model_of_texts_and_images(tmp_path):
    """Whose configuration leaves out what transformers has by default, and whose other tensors are not read."""
    config = tiny_checkpoints.config_of("gemma3", is_old=True)
    for name in ("rms_norm_eps", "vocab_size", "rope_theta", "rope_local_base_freq"):
        config.pop(name)
    full = {**config, "rms_norm_eps": 1e-6, "vocab_size": 262_208, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    expected = make_config(full, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert read_config(tmp_path) == expected

    tensors = tiny_checkpoints.tensors_of(tiny_checkpoints.config_of("gemma3"))
    named = {f"language_model.{name}": array for name, array in tensors.items()}
    others = {"vision_tower.patch": np.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3)}
    save_file(named | others, tmp_path / "model.safetensors")
    assert sorted(read_tensors(tmp_path)) == sorted(tensors)


def test_a_saved_dtype_is_that_of_the_parameters(tmp_path):
    tiny_checkpoints.write(tmp_path / "from", "qwen3", dtype="float16", torch_dtype="float16")
    pretrained.save(reload(tmp_path / "from", param_dtype=jnp.bfloat16), tmp_path / "to")
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert (config["torch_dtype"], config.get("dtype")) == ("bfloat16", None)
    assert {array.dtype.name for array in read(tmp_path / "to").values()} == {"bfloat16"}


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
    rope = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
    pattern = [ringjax.Window(4), ringjax.Segments(16, rate=2)]
    model = load(tmp_path, "gemma2", pattern=pattern, rope=rope)
    first, second = (block.attention.settings for block in model.stacked)
    assert first.pattern.branches == (ringjax.Window(5),)
    assert second.pattern == ringjax.DilatedPattern(pattern, merge="union")
    frequencies, _ = ringjax.rope_frequencies(rope, 8)
    assert second.rope[0] == tuple(frequencies.tolist()) != first.rope[0]
    logits = logits_of(model, RECORDED["gemma2/tokens"])
    assert not np.allclose(logits, RECORDED["gemma2/logits"], atol=1e-2)


def test_a_checkpoint_that_is_not_right(tmp_path):
    tiny_checkpoints.write(tmp_path, "llama")
    config = (tmp_path / "config.json").read_text()
    read = lambda: pretrained.load(tmp_path, dtype=jnp.float32, mesh=make_mesh(seq=1))
    for old, new, words in (
        ('"llama"', '"mamba"', "model_type='mamba' in config.json is unknown: use one of llama, mistral"),
        ('"rms_norm_eps"', '"epsilon"', "has no 'rms_norm_eps': the configuration is not complete"),
        ('"num_hidden_layers": 3', '"num_hidden_layers": 4', r"has no tensor 'model.layers.3"),
        (
            '"num_hidden_layers": 3',
            '"num_hidden_layers": 2',
            r"has an unknown tensor 'model.layers.2.*: check the layers in config.json",
        ),
        (
            '"intermediate_size": 24',
            '"intermediate_size": 20',
            r"down_proj.weight' makes \(24, 16\), but config.json asks for \(20, 16\)",
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
