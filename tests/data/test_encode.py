"""Encoding once: the same training, resumable shards, and refusals of what a cache cannot honour."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiff import audit, build, inputs
from maxdiff.config import Config, load_config
from maxdiff.data import encode as encoding
from maxdiff.data.encoded import EncodedSource, shard_name
from maxdiff.data.examples import BadExample
from maxdiff.metrics import read_metrics
from maxdiff.task import Task, make_task
from maxdiff.train import train
from tests.test_keys import write_tar
from tests.test_runs import TINY_TEXT, TINY_UNET, TINY_VAE

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = 40


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encode") / "one.tar"
    write_tar(path, np.random.default_rng(0), EXAMPLES)
    return path


@pytest.fixture(scope="module", autouse=True)
def _small_shards():
    """Sixteen examples a shard, so that there are several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maxdiff.data.encoded.ROWS", 16)
        patch.setattr("maxdiff.data.encode.ROWS", 16)
        yield


def configuration(tar: Path, output: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / "base.yml", [
        "run_name=r", f"output_dir={output}", f"train_data_dir={tar}", f"dataset_save_location={output}", "resolution=16",
        "activations_dtype=float32", "attention=dot_product", "data_workers=0", "max_train_steps=6", "log_period=1",
        "learning_rate=1e-3", "per_device_batch_size=1", "center_crop=true", "random_flip=true", "caption_dropout=0.3",
        "encoded_dtype=float32", f"vae={TINY_VAE}", f"unet={TINY_UNET}", f"text_encoder={TINY_TEXT}", *overrides,
    ])  # fmt: skip


def encode(config: Config, folder: Path) -> EncodedSource:
    task = make_task(config, build.layout_of(config), None)
    encoding.encode(config, task, inputs.open_examples(config, "train_data_dir"), folder)
    return EncodedSource(folder)


@pytest.fixture(scope="module")
def encoded(tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    encode(configuration(tar, folder), folder / "e")
    return folder / "e"


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "r") if "loss" in record]


def test_training_is_that_from_images(tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch):
    """The same examples, mirrored or not, noise, timesteps and dropped captions; also by a run that goes over to it."""
    train(configuration(tar, tmp_path / "images"))
    train(configuration(tar, tmp_path / "cached", "cache_latents_text_encoder_outputs=true", "max_train_steps=3"))
    capsys.readouterr()
    tasks, without = [], Task.without_frozen
    monkeypatch.setattr(Task, "without_frozen", lambda task, **kwargs: tasks.append(task) or without(task, **kwargs))
    train(configuration(tmp_path / "cached" / "r" / "encoded", tmp_path / "cached"))
    (task,) = tasks
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(task.constants["frozen"]))
    said = capsys.readouterr().out
    assert "going on from step 3" in said
    assert "the training data have changed" not in said
    from_images = losses(tmp_path / "images")
    assert len(from_images) == 6
    np.testing.assert_allclose(losses(tmp_path / "cached"), from_images, rtol=1e-5)
    audits = [list(audit.audit(load_config(tmp_path / name / "r" / "config.yml"), 6)) for name in ("images", "cached")]
    assert audits[0][1:] == audits[1][1:]


@pytest.mark.parametrize(
    "overrides",
    [
        ["train_text_encoder=true", "text_encoder_learning_rate=1e-3"],
        ["caption_column=text, label", "shuffle_tags=true", "tag_dropout=0.3", "eval_data_dir={tar}", "eval_examples=8"],
    ],
)
def test_where_texts_differ_images_alone_are_encoded(tar: Path, tmp_path: Path, overrides: list[str], capsys, monkeypatch):
    """The same training as from images, with a text encoder in training, or another caption each time."""
    overrides = [override.format(tar=tar) for override in overrides]
    removed, without = [], Task.without_frozen
    monkeypatch.setattr(Task, "without_frozen", lambda task, **kwargs: removed.append(task) or without(task, **kwargs))
    train(configuration(tar, tmp_path / "images", *overrides))
    train(configuration(tar, tmp_path / "cached", "cache_latents_text_encoder_outputs=true", "max_train_steps=3", *overrides))
    assert "images alone are encoded, and captions are not: " in capsys.readouterr().out
    source = EncodedSource(tmp_path / "cached" / "r" / "encoded")
    assert set(source.shapes()) == {"mean", "logvar", "flip_mean", "flip_logvar", "original_size", "crop"}
    train(configuration(source.folder, tmp_path / "cached", *overrides))
    from_images = losses(tmp_path / "images")
    assert len(from_images) == 6
    np.testing.assert_allclose(losses(tmp_path / "cached"), from_images, rtol=1e-5)
    audits = [list(audit.audit(load_config(tmp_path / name / "r" / "config.yml"), 6)) for name in ("images", "cached")]
    assert audits[0][1:] == audits[1][1:]
    if "train_text_encoder=true" in overrides:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(removed[0].constants["frozen"]["vae"]))
    # What changes nothing but captions needs no other encoding; nor do captions that stay the same.
    column = [one for one in overrides if one.startswith("caption_column")]
    train(configuration(source.folder, tmp_path / "other", "caption_prefix=a ", "max_train_steps=1", *column))
    capsys.readouterr()
    if not column:
        encode(configuration(tar, tmp_path), source.folder)
        assert f"captions are not: {source.folder} holds images alone" in capsys.readouterr().out


def test_a_changed_text_is_noticed(tar: Path, tmp_path: Path):
    source = encode(configuration(tar, tmp_path, "train_text_encoder=true"), tmp_path / "e")
    path, (key, (text,)) = source.folder / shard_name(0), source.names(3)
    written = f'"{text}"]'.encode()
    data = path.read_bytes()
    assert data.count(written) >= 1
    at = data.index(written, data.index(f'["{key}", '.encode()))
    for byte in (b"Q", b'"'):
        path.write_bytes(data[: at + 1] + byte + data[at + 2 :])
        with pytest.raises(BadExample, match="its bytes are not those that were written"):
            EncodedSource(source.folder)[3]
    with pytest.raises(BadExample, match="its texts are not those that were written"):
        EncodedSource(source.folder).names(3)
    assert EncodedSource(source.folder)[4]["mean"].shape == (8, 8, 4)


def test_bfloat16_is_the_same_rounded(tar: Path, encoded: Path, tmp_path: Path):
    rounded = encode(configuration(tar, tmp_path, "encoded_dtype=bfloat16"), tmp_path / "e")
    for name, value in EncodedSource(encoded)[7].items():
        np.testing.assert_allclose(rounded[7][name].astype(np.float32), value, rtol=2**-8, atol=1e-30)


def test_an_interrupted_encoding_goes_on(tar: Path, encoded: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """On fewer devices' worth of examples at once, and only what is missing."""
    folder = tmp_path / "e"
    shutil.copytree(encoded, folder)
    (folder / "encoded.json").unlink()
    (folder / shard_name(1)).unlink()
    with pytest.raises(ValueError, match="holds an encoding that is not finished: run python -m maxdiff.data.encode again"):
        EncodedSource(folder)
    kept = (folder / shard_name(0)).stat().st_mtime_ns
    capsys.readouterr()
    source = encode(configuration(tar, tmp_path), folder)
    assert "16 examples encoded" in (said := capsys.readouterr().out)
    assert "24 examples there already" in said
    assert (folder / shard_name(0)).stat().st_mtime_ns == kept
    for i in range(EXAMPLES):
        for name, value in EncodedSource(encoded)[i].items():
            np.testing.assert_allclose(source[i][name], value, atol=1e-5)
    encode(configuration(tar, tmp_path), folder)
    assert "is encoded already" in capsys.readouterr().out


def test_a_changed_byte_is_noticed(encoded: Path, tmp_path: Path):
    folder = tmp_path / "e"
    shutil.copytree(encoded, folder)
    path = folder / shard_name(0)
    data = bytearray(path.read_bytes())
    row = EncodedSource(folder)[3]["mean"].tobytes()
    data[data.find(row) + 5] ^= 1
    path.write_bytes(data)
    source = EncodedSource(folder)
    with pytest.raises(BadExample, match="its bytes are not those that were written"):
        source[3]
    assert source[4]["mean"].shape == (8, 8, 4)
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="is missing or not as it was written"):
        EncodedSource(folder)


def test_a_finished_encoding_is_repaired(tar: Path, encoded: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = tmp_path / "e"
    shutil.copytree(encoded, folder)
    path = folder / shard_name(1)
    path.write_bytes(path.read_bytes()[:5000])
    (folder / shard_name(2)).unlink()
    (folder / "empty.safetensors").unlink()
    repaired = encode(configuration(tar, tmp_path), folder)
    assert "16 examples there already" in capsys.readouterr().out
    assert len(repaired) == EXAMPLES
    np.testing.assert_allclose(repaired[20]["mean"], EncodedSource(encoded)[20]["mean"], atol=1e-5)
    np.testing.assert_array_equal(repaired.empty["states"], EncodedSource(encoded).empty["states"])


def test_bad_examples_of_a_small_source_count(tmp_path: Path):
    write_tar(tmp_path / "bad.tar", np.random.default_rng(0), 20, bad=3)
    with pytest.raises(ValueError, match=r"3 of 20 examples are bad, more than max_bad_fraction=0.1; the last: .*bad.tar:0: "):
        encode(configuration(tmp_path / "bad.tar", tmp_path, "max_bad_fraction=0.1"), tmp_path / "e")
    assert not list((tmp_path / "e").glob("*.json.*"))
    assert len(encode(configuration(tmp_path / "bad.tar", tmp_path, "max_bad_fraction=0.15"), tmp_path / "e")) == 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["center_crop=false"], "center_crop=False cannot be encoded: every time another crop"),
        (
            ["shuffle_tags=true"],
            "e holds captions, encoded, and shuffle_tags=True wants images alone; allowed: another encoded_dir",
        ),
        (["caption_column=label"], "holds another encoding (caption_column: 'text' is encoded, 'label' is asked for)"),
    ],
)
def test_what_cannot_be_encoded_once_is_refused(tar: Path, encoded: Path, tmp_path: Path, overrides: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        encode(configuration(tar, tmp_path, *overrides), encoded)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resolution=24"], "resolution: 16 is encoded, 24 is asked for"),
        (["caption_prefix=a photo of "], "caption_prefix: '' is encoded, 'a photo of ' is asked for"),
        (["seed=1"], "text_encoder, its weights: another is encoded"),
        (["shuffle_tags=true"], "shuffle_tags=True cannot be trained from "),
        (["tag_dropout=0.1"], "tag_dropout=0.1 cannot be trained from "),
        (["caption_column=text, label"], "caption_mode='choose' of caption_column='text, label' cannot be trained from "),
        (["train_text_encoder=true"], "train_text_encoder=True cannot be trained from "),
        (["center_crop=false"], "center_crop: True is encoded, False is asked for"),
        (["activations_dtype=bfloat16"], "activations_dtype: 'float32' is encoded, 'bfloat16' is asked for"),
    ],
)
def test_an_encoding_of_something_else_is_refused(encoded: Path, tmp_path: Path, overrides: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(configuration(encoded, tmp_path, *overrides))


@pytest.mark.parametrize("pattern", ["mine.tar", "m*.tar"])
def test_a_source_that_has_changed_is_noticed(tar: Path, tmp_path: Path, pattern: str):
    mine = tmp_path / "mine.tar"
    shutil.copy(tar, mine)
    encode(configuration(tmp_path / pattern, tmp_path, "random_flip=false"), tmp_path / "e")
    with pytest.raises(ValueError, match="mirrored images: False is encoded, True is asked for"):
        train(configuration(tmp_path / "e", tmp_path))
    write_tar(mine, np.random.default_rng(1), 12)
    with pytest.raises(ValueError, match=r"e is not what the configuration asks for: source: another is encoded"):
        train(configuration(tmp_path / "e", tmp_path, "random_flip=false"))
    with pytest.raises(ValueError, match="holds other files; allowed: a new folder"):
        encode(configuration(tar, tmp_path), tmp_path)


def test_the_command_line(tar: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    base = str(ROOT / "configs" / "base.yml")
    given = [f"{key}={value}" for key, value in (("vae", TINY_VAE), ("unet", TINY_UNET), ("text_encoder", TINY_TEXT))]
    common = ["resolution=16", "activations_dtype=float32", f"train_data_dir={tar}", "skip_jax_distributed_system=true", *given]
    assert encoding.main([base, *common]) == 2
    assert "encoded_dir is required" in capsys.readouterr().err
    assert encoding.main([base, *common, "center_crop=true", f"encoded_dir={tmp_path / 'e'}"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"the first 8 examples after [\d.]+ s\n40 examples encoded, [\d.]+ examples/s after the first\nwrote ", said
    )


def test_no_more_shards_are_open_than_may_be(encoded: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("maxdiff.data.encoded.MAX_OPEN", 2)
    source = EncodedSource(encoded)
    for i in (0, 20, 39, 1):
        assert source[i]["mean"].shape == (8, 8, 4)
        assert len(source._open) <= 2
