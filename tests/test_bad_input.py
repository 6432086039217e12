"""What a user gets wrong: one line that names it, exit status 2, and no training."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxdiff import train

ROOT = Path(__file__).parent.parent
EMOJI = ROOT / "data" / "emoji" / "heldout-000000.tar"


@pytest.fixture(autouse=True)
def _compiled_by_none(monkeypatch: pytest.MonkeyPatch):
    """Nothing here may get as far as compiling a step."""
    monkeypatch.setattr(train.build, "make_step", lambda *_: pytest.fail("it went on to the step"))


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, Path]:
    """Tars by what is wrong with them."""
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(buffer, "png")
    good, words = buffer.getvalue(), b"a caption"
    contents = {
        "good": {"a.png": good, "a.txt": words},
        "empty": {},
        "imageless": {"a.txt": words},
        "unreadable": {f"{i}.{kind}": data for i in range(8) for kind, data in (("png", b"no image"), ("txt", words))},
        "uncaptioned": {"a.png": good, "a.txt": words, "b.png": good},
        "other_column": {"a.png": good, "a.json": json.dumps({"label": "x"}).encode()},
    }
    for name, members in contents.items():
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    (tmp_path / "truncated.tar").write_bytes((tmp_path / "good.tar").read_bytes()[:700])
    return {name: tmp_path / f"{name}.tar" for name in [*contents, "truncated"]}


def arguments(tmp_path: Path, pipeline: Path, *overrides: str) -> list[str]:
    return [
        str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={tmp_path}", f"train_data_dir={EMOJI}",
        f"dataset_save_location={tmp_path / 'index'}", f"pretrained_model_name_or_path={pipeline}", "resolution=16", "data_workers=0",
        "max_train_steps=1", "activations_dtype=float32", "skip_jax_distributed_system=true", *overrides,
    ]  # fmt: skip


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The line on stderr of a command that does nothing else."""
    assert train.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("train.py: ")
    assert said.count("\n") == 1
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert not [path for path in tmp_path.rglob("checkpoints/*") if path.name.isdigit()]
    return said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run_name=", "run_name is required"),
        ("output_dir=", "output_dir is required"),
        ("run_name=../a", "run_name=../a names no folder in output_dir (allowed: a name without slashes)"),
        ("train_data_dir=", "train_data_dir is required"),
        ("learning_rat=1", "the command line: there is no key 'learning_rat'; did you mean 'learning_rate'?"),
        ("learning_rate=fast", "learning_rate='fast' has the wrong type (allowed: float)"),
        ("output_dir=s3://bucket/runs", "output_dir='s3://bucket/runs' is no place for a run (allowed: a folder, or gs://BUCKET/PATH)"),
        ("logical_axis_rules=[[embed, 5]]", "logical_axis_rules: ['embed', 5] is not a pair [name, mesh axis or axes]"),
        ("logical_axis_rules=[5]", "logical_axis_rules: 5 is not a pair [name, mesh axis or axes]"),
        ("checkpoint_every=-5", "checkpoint_every=-5 is out of range (allowed: 1 or more, or -1)"),
        ("guidance_scale=.inf", "guidance_scale=inf is out of range (allowed: 0 or more)"),
        ("validation_prompts=cat", "validation_prompts='cat' has the wrong type (allowed: list of str)"),
        ("learning_rate", "'learning_rate' is not of the form key=value"),
        ("adam_b1=1", "adam_b1=1 is out of range (allowed: 0 or more, and below 1)"),
        ("ema_decay=1", "ema_decay=1 is out of range (allowed: 0 or more, and below 1)"),
        ("ema_start_step=-1", "ema_start_step=-1 is out of range (allowed: 0 or more)"),
        ("warmup_steps_fraction=2", "warmup_steps_fraction=2 is out of range (allowed: 0 to 1)"),
        ("caption_dropout=2", "caption_dropout=2 must lie in [0, 1]"),
        ("ici_fsdp_parallelism=3", "ici_fsdp_parallelism=3, ici_tensor_parallelism=1: the product must be the number of 8 devices"),
        ("dcn_fsdp_parallelism=2", "dcn_fsdp_parallelism=2, dcn_tensor_parallelism=1: the product must be the number of 1 slices"),
        ("logical_axis_rules=[[embd, fsdp]]", "logical_axis_rules: 'embd' is no logical axis; did you mean 'embed'?"),
        ("global_batch_size=6", "global_batch_size=6 is no multiple of per_device_batch_size=1 x 8 devices"),
        ("data_mix=[[a.tar, 0]]", "data_mix has ['a.tar', 0] (allowed: [path, weight], the weight a whole number of 1 or more)"),
        ("data_mix=[a.tar]", "data_mix has 'a.tar' (allowed: [path, weight]"),
        ("data_mix=[[a.tar, true]]", "data_mix has ['a.tar', True] (allowed"),
        ("data_mix=[[a.tar, 1]]", "data_mix is instead of train_data_dir="),
        ("shuffle_block=-1", "shuffle_block=-1 is out of range (allowed: 0 or more)"),
        ("dataset_type=tfds", "dataset_type='tfds' is not supported (allowed: '', 'webdataset', 'folder', 'table', 'parquet', 'hf', 'arrayrecord')"),
        ("image_column=", "image_column='' is not supported (allowed: a name)"),
        ("train_data_dir=/nowhere/*.tar", "train_data_dir: nothing matches /nowhere/*.tar"),
        ("eval_data_dir=/nowhere", "eval_data_dir: nothing matches /nowhere"),
        ("pretrained_model_name_or_path=/nowhere", "there is no folder /nowhere"),
        ("pretrained_model_name_or_path=", "nothing says where the unet comes from (allowed: pretrained_model_name_or_path"),
        ("vae_path=/nowhere", "vae_path: there is no folder /nowhere"),
        ("resume_from=/nowhere", "resume_from=/nowhere has no checkpoint (allowed: a run's folder, or one of its checkpoints)"),
        ("resolution=17", "resolution=17 is no multiple of the autoencoder's 2 pixels a latent"),
        ("unet={block_out_channels: [32]}", "down_block_types"),
        ("text_encoder={vocab_size: 100}", "the tokenizer has ids up to 49407, but the text_encoder a vocab_size=100"),
        ("text_encoder={hidden_size: 32}", "the unet's cross_attention_dim=64 is not the text encoders' width 32"),
        ("validation_prompts=[cat]", "num_inference_steps=5000"),
        ("snr_gamma=.inf", "snr_gamma=inf must be finite"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_before_any_training(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
):
    argv = arguments(tmp_path, folders["sd1"], "num_inference_steps=5000", override)
    assert message in refused(tmp_path, capsys, argv)


@pytest.mark.parametrize(
    ("mix", "message"),
    [("[[@, 1], [/nowhere/*.tar, 2]]", "data_mix: nothing matches /nowhere/*.tar"),
     ("[[@, 1000001], [@, 1000000]]", "data_mix: weights [1000001, 1000000] add up to 2000001 (allowed: at most 1048576)")],
)  # fmt: skip
def test_a_wrong_part_of_a_mix_is_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], mix: str, message: str
):
    argv = arguments(tmp_path, folders["sd1"], "train_data_dir=", f"data_mix={mix.replace('@', str(EMOJI))}")
    assert message in refused(tmp_path, capsys, argv)


@pytest.mark.parametrize("key", ["train_data_dir", "eval_data_dir"])
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("empty", "empty.tar is an empty shard: none of its 0 keys has an image (.jpg, .jpeg, .png, .webp, .gif, .bmp)"),
        ("imageless", "imageless.tar is an empty shard: none of its 1 keys has an image"),
        ("unreadable", "8 examples in a row are bad, the last"),
        ("uncaptioned", "uncaptioned.tar: b has no caption: it has no .txt and no .json (caption_column='text')"),
        ("other_column", "no caption_column='text' (allowed: ['label'])"),
        ("truncated", "truncated.tar of 700 bytes is truncated or no uncompressed tar"),
    ],
)
def test_wrong_data_are_named(folders: dict[str, Path], shards: dict[str, Path], tmp_path: Path,
                              capsys: pytest.CaptureFixture[str], key: str, shard: str, message: str):  # fmt: skip
    said = refused(tmp_path, capsys, arguments(tmp_path, folders["sd1"], f"{key}={shards[shard]}"))
    assert f"{key}: " in said
    assert message in said


def test_an_output_folder_that_cannot_be_made_is_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    said = refused(tmp_path, capsys, arguments(tmp_path, folders["sd1"], f"output_dir={tmp_path / 'file' / 'runs'}"))
    assert f"output_dir='{tmp_path}/file/runs' cannot be written to: [Errno 20] Not a directory" in said
    said = refused(
        tmp_path, capsys, arguments(tmp_path, folders["sd1"], f"dataset_save_location={tmp_path / 'file' / 'index'}")
    )
    assert f"dataset_save_location='{tmp_path}/file/index' cannot be written to" in said


def test_an_inpainting_model_is_refused(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = arguments(tmp_path, folders["inpaint"], "validation_prompts=[a cat]")
    said = refused(tmp_path, capsys, argv)
    assert "the unet's in_channels=9 are those of a model that draws into an image (inpainting, editing)" in said


def test_a_coordinator_needs_its_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = arguments(
        tmp_path, tmp_path, "skip_jax_distributed_system=false", "coordinator_address=localhost:1", "num_processes=2"
    )
    assert "num_processes=2, process_id=-1: with coordinator_address, 0 <= process_id" in refused(tmp_path, capsys, argv)
    said = refused(tmp_path, capsys, arguments(tmp_path, tmp_path, "skip_jax_distributed_system=false", "process_id=1"))
    assert "process_id=1 needs coordinator_address" in said
