"""Every key of the configuration does something: two values of each, and what comes of them."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import pytest
import yaml
from PIL import Image

from maxdiff import build
from maxdiff.config import KEYS, Config, make_config
from maxdiff.task import make_task
from maxdiff.train import train
from maxdiff.weights.tokenizer import published_tokenizer
from tests import observe as see
from tests.test_runs import TINY_TEXT, TINY_UNET, TINY_VAE

ROOT = Path(__file__).parent.parent
NEW = {"vae": yaml.safe_load(TINY_VAE), "unet": yaml.safe_load(TINY_UNET), "text_encoder": yaml.safe_load(TINY_TEXT)}
RULES = yaml.safe_load((ROOT / "configs" / "base.yml").read_text())["logical_axis_rules"]
DEFAULTS = {
    "run_name": "r", "output_dir": "@/runs", "train_data_dir": "@/one.tar", "resolution": 16, "data_workers": 0, "max_train_steps": 4,
    "activations_dtype": "float32", "attention": "dot_product", "learning_rate": 1e-2, "global_batch_size": 8, "logical_axis_rules": RULES,
}  # fmt: skip
# An autoencoder of a block is the quickest to train.
BLOCK = {"block_out_channels": [8], "down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"],
         "norm_num_groups": 4, "scaling_factor": 0.2}  # fmt: skip
TRAINED = {"vae": BLOCK, "train_vae": True, "resolution": 8, "max_train_steps": 3, "use_ema": False, "optimizer": "lion"}
PRETRAINED = {"pretrained_model_name_or_path": "@/a"}
DRAWN = {**PRETRAINED, "run_name": "", "prompt": "a cat", "overwrite": True}
ENCODED = {**PRETRAINED, "cache_latents_text_encoder_outputs": True, "center_crop": True}
TWO_TEXTS = {"caption_column": "text, label"}
# As SDXL's, with two text encoders.
DOUBLE = {**PRETRAINED, "unet": {**NEW["unet"], "cross_attention_dim": 64}, "tokenizer_2_path": "@/a/tokenizer"}
# Values of keys that only a whole run tells apart, and which run has them.
RUNS = {
    "plain": {"eval_data_dir": "", "checkpoint_every": -1, "log_period": 10, "export_dtype": ""},
    "watched": {"eval_data_dir": "@/two.tar", "checkpoint_every": 8, "log_period": 1, "export_dtype": "float16",
                "eval_every": -1, "checkpoints_to_keep": 2},
    "often": {"eval_data_dir": "@/two.tar", "checkpoint_every": 8, "log_period": 1, "export_dtype": "float16",
              "eval_every": 2, "checkpoints_to_keep": 3},
}  # fmt: skip


def at(folder: Path, value: Any) -> Any:
    """A value with `@` for the folder of the tests' files."""
    if isinstance(value, list):
        return [at(folder, item) for item in value]
    return value.replace("@", str(folder)) if isinstance(value, str) else value


def configuration(folder: Path, **keys: Any) -> Config:
    return make_config({key: at(folder, value) for key, value in {**DEFAULTS, **keys}.items()})


def write_tar(path: Path, rng: np.random.Generator, examples: int, bad: int = 0) -> None:
    """Images of 24 x 40 pixels, the first of which are none, with two captions each."""
    with tarfile.open(path, "w") as tar:
        for number in range(examples):
            image = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (24, 40, 3), np.uint8)).save(image, "png")
            captions = json.dumps({"text": f"a {number}", "label": f"the {number}", "number": str(number % 3)}).encode()
            for suffix, data in (("png", b"" if number < bad else image.getvalue()), ("json", captions)):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, two pipelines `a` and `b` of one architecture, and what makes `a` choose."""
    folder = tmp_path_factory.mktemp("keys")
    rng = np.random.default_rng(0)
    for name, examples, bad in (("one", 12, 0), ("two", 8, 0), ("bad", 20, 1)):
        write_tar(folder / f"{name}.tar", rng, examples, bad)
    for name, seed, prediction in (("a", 1, ""), ("b", 2, "v_prediction")):
        config = configuration(folder, seed=seed, prediction_type=prediction, **NEW)
        task = make_task(config, build.layout_of(config), None)
        task.save_frozen(folder / name)
        task.save_trained(folder / name, task.initial())
    published_tokenizer("!").save(folder / "b" / "tokenizer")
    for name in ("one", "two"):
        (folder / f"{name}.txt").write_text(f"a {name}")
    (folder / "labels.json").write_text(json.dumps({"0": "zero", "1": "one", "2": "two"}))
    for name, color in (("a", "black"), ("b", "white")):
        Image.new("RGB", (16, 16), color).save(folder / f"{name}.png")
    (folder / "table.csv").write_text("image,other,text\na.png,b.png,a picture\n")
    rows = [{"image": (folder / "a.png").read_bytes(), "text": f"a {name}"} for name in ("cat", "dog")]
    splits = {name: datasets.Dataset.from_list([row]) for name, row in zip(("train", "test"), rows, strict=True)}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    weights = "unet/diffusion_pytorch_model{}.safetensors"
    shutil.copy(folder / "b" / weights.format(""), folder / "a" / weights.format(".fp16"))
    return folder


@pytest.fixture(scope="module")
def runs(files: Path) -> dict[str, Path]:
    """The folder of each of RUNS."""
    for name, keys in RUNS.items():
        train(configuration(files, run_name=name, **TRAINED, **keys))
    return {name: files / "runs" / name for name in RUNS}


# key -> two values, what comes of one, and the values of other keys that this needs.
TABLE: dict[str, tuple[Any, Any, Callable[[Config], Any], dict[str, Any]]] = {
    "run_name": ("r", "q", see.made_folder, {}),
    "output_dir": ("@/runs", "@/others", see.made_folder, {}),
    "seed": (0, 1, see.batch, {}),
    "deterministic": (False, True, see.flags("XLA_FLAGS"), {}),
    "libtpu_init_args": ("", "--xla_tpu_x=1", see.flags("LIBTPU_INIT_ARGS"), {}),
    "jax_cache_dir": ("", "@/programs", see.compiled_programs, {"train_data_dir": "@/none.tar"}),
    "resume_from": ("", "@/resume/another", see.begun, {"output_dir": "@/resume"}),
    "skip_jax_distributed_system": (False, True, see.joined, {}),
    "coordinator_address": ("", "a:1", see.joined, {"num_processes": 2, "process_id": 0}),
    "num_processes": (2, 3, see.joined, {"coordinator_address": "a:1", "process_id": 0}),
    "process_id": (0, 1, see.joined, {"coordinator_address": "a:1", "num_processes": 2}),
    "pretrained_model_name_or_path": ("@/a", "@/b", see.weights("vae"), {}),
    "revision": ("v1", "v2", see.task_refused, {"pretrained_model_name_or_path": "nobody/nothing"}),
    "variant": ("", "fp16", see.weights("unet"), PRETRAINED),
    "from_pt": ("auto", False, see.task_refused, PRETRAINED),
    "unet_path": ("", "@/b", see.weights("unet"), PRETRAINED),
    "vae_path": ("", "@/b/vae", see.weights("vae"), PRETRAINED),
    "text_encoder_path": ("", "@/b", see.weights("text_encoder"), PRETRAINED),
    "text_encoder_2_path": ("@/a/text_encoder", "@/b/text_encoder", see.weights("text_encoder_2"), DOUBLE),
    "tokenizer_path": ("", "@/b", see.empty_ids, PRETRAINED),
    "tokenizer_2_path": ("@/a/tokenizer", "@/b/tokenizer", see.empty_ids,
                         {**DOUBLE, "text_encoder_2": NEW["text_encoder"]}),
    "scheduler_path": ("", "@/b", see.noised, PRETRAINED),
    "train_new_unet": (False, True, see.weights("unet"), PRETRAINED),
    "train_text_encoder": (False, True, see.trained, PRETRAINED),
    "train_vae": (False, True, see.trained, PRETRAINED),
    "unet": ({}, {"layers_per_block": 2}, see.shapes("unet"), PRETRAINED),
    "vae": ({}, {"layers_per_block": 3}, see.shapes("vae"), PRETRAINED),
    "text_encoder": ({}, {"num_hidden_layers": 2}, see.shapes("text_encoder"), PRETRAINED),
    "text_encoder_2": (NEW["text_encoder"], {**NEW["text_encoder"], "num_hidden_layers": 2}, see.shapes("text_encoder_2"), DOUBLE),
    "weights_dtype": ("float32", "bfloat16", see.weights_dtypes, PRETRAINED),
    "activations_dtype": ("float32", "bfloat16", see.computed, PRETRAINED),
    "precision": ("DEFAULT", "HIGHEST", see.computed, PRETRAINED),
    "attention": ("dot_product", "cudnn", see.computed, PRETRAINED),
    "norms": ("auto", "fused", see.task_refused, PRETRAINED),
    "remat": ("none", "full", see.computed, PRETRAINED),
    "train_data_dir": ("@/one.tar", "@/two.tar", see.examples, {}),
    "data_mix": ([["@/one.tar", 1], ["@/two.tar", 1]], [["@/one.tar", 1], ["@/two.tar", 2]], see.indexes, {"train_data_dir": ""}),
    "shuffle_block": (0, 4, see.indexes, {}),
    "dataset_type": ("", "webdataset", see.opened, {"train_data_dir": "@/table.csv"}),
    "train_split": ("train", "test", see.examples, {"train_data_dir": "@/saved"}),
    "image_column": ("image", "other", see.batch, {"train_data_dir": "@/table.csv"}),
    "caption_column": ("text", "label", see.examples, {}),
    "caption_mode": ("choose", "join", see.captions, TWO_TEXTS),
    "caption_separator": (", ", "; ", see.captions, {**TWO_TEXTS, "caption_mode": "join"}),
    "caption_prefix": ("", "a photo of ", see.captions, {}),
    "shuffle_tags": (False, True, see.captions, {**TWO_TEXTS, "caption_mode": "join"}),
    "keep_tags": (0, 1, see.captions, {**TWO_TEXTS, "caption_mode": "join", "shuffle_tags": True}),
    "tag_dropout": (0.0, 0.5, see.captions, {**TWO_TEXTS, "caption_mode": "join"}),
    "idx_to_prompt": ("", "@/labels.json", see.captions, {"caption_column": "number"}),
    "filters": ({}, {"number": "==1"}, see.examples, {}),
    "encoded_dir": ("@/enc-one", "@/enc-two", see.encoded, ENCODED),
    "encoded_dtype": ("float32", "bfloat16", see.encoded_new, ENCODED),
    "cache_latents_text_encoder_outputs": (False, True, see.encoded, {**ENCODED, "encoded_dir": "@/enc-three"}),
    "dataset_save_location": ("", "@/indexes", see.index_files, {}),
    "resolution": (16, 24, see.batch, {}),
    "center_crop": (False, True, see.batch, {}),
    "random_flip": (False, True, see.batch, {}),
    "image_resizer": ("simd", "pillow", see.batch, {}),
    "aspect_ratio_buckets": (False, True, see.batch, {"bucket_step": 8, "resolution": 32}),
    "bucket_step": (8, 16, see.batch, {"aspect_ratio_buckets": True, "resolution": 32}),
    "bucket_max_ratio": (2.0, 1.0, see.batch, {"aspect_ratio_buckets": True, "bucket_step": 8, "resolution": 32}),
    "minimum_size": (0, 25, see.opened, {}),
    "data_workers": (0, 1, see.workers, {}),
    "eval_data_dir": ("", "@/two.tar", see.measured, RUNS),
    "eval_examples": (256, 5, see.held_out, {}),
    "max_bad_fraction": (0.01, 0.5, see.many_batches, {"train_data_dir": "@/bad.tar"}),
    "max_train_steps": (4, 8, see.updates, {"learning_rate_schedule": "linear"}),
    "num_examples_to_see": (0, 64, see.updates, {"learning_rate_schedule": "linear"}),
    "per_device_batch_size": (1, 2, see.settled, {"global_batch_size": 32}),
    "global_batch_size": (0, 32, see.settled, {}),
    "optimizer": ("adamw", "lion", see.updates, {}),
    "learning_rate": (1e-3, 1e-2, see.updates, {}),
    "text_encoder_learning_rate": (1e-3, 1e-2, see.updates, {}),
    "scale_lr": (False, True, see.updates, {}),
    "learning_rate_schedule": ("constant", "cosine", see.updates, {}),
    "warmup_steps_fraction": (0.0, 0.5, see.updates, {}),
    "learning_rate_schedule_steps": (-1, 8, see.updates, {"learning_rate_schedule": "linear"}),
    "adam_b1": (0.9, 0.5, see.updates, {}),
    "adam_b2": (0.999, 0.9, see.updates, {}),
    "adam_eps": (1e-8, 0.1, see.updates, {}),
    "adam_weight_decay": (1e-2, 1.0, see.updates, {"learning_rate": 1e-2}),
    "decay_norms_and_biases": (True, False, see.updates, {"learning_rate": 1e-2, "adam_weight_decay": 1.0}),
    "moment_dtype": ("float32", "bfloat16", see.updates, {}),
    "max_grad_norm": (1.0, 0.0, see.updates, {}),
    "shard_optimizer": (False, True, see.state_of, {}),
    "use_ema": (True, False, see.state_of, {}),
    "ema_decay": (0.9999, 0.0, see.average, {}),
    "ema_start_step": (0, 5, see.average, {}),
    "prediction_type": ("epsilon", "sample", see.noised, PRETRAINED),
    "rescale_zero_terminal_snr": (False, True, see.noised, PRETRAINED),
    "snr_gamma": (-1.0, 5.0, see.noised, PRETRAINED),
    "timestep_bias": ({"strategy": "none"}, {"strategy": "later", "multiplier": 100.0}, see.noised, PRETRAINED),
    "noise_offset": (0.0, 0.1, see.noised, PRETRAINED),
    "input_perturbation": (0.0, 0.1, see.noised, PRETRAINED),
    "caption_dropout": (0.0, 0.5, see.noised, PRETRAINED),
    "reconstruction_loss": ("l1", "l2", see.reconstruction_loss, TRAINED),
    "kl_weight": (1e-6, 1.0, see.reconstruction_loss, TRAINED),
    "prompt": ("a cat", "a dog", see.drawn, DRAWN),
    "prompts": (["a cat"], ["a cat", "a dog"], see.drawn, {**DRAWN, "prompt": ""}),
    "prompts_file": ("@/one.txt", "@/two.txt", see.drawn, {**DRAWN, "prompt": ""}),
    "num_images_per_prompt": (1, 2, see.drawn, DRAWN),
    "seeds": ([], [7], see.drawn, DRAWN),
    "height": (0, 8, see.drawn, DRAWN),
    "width": (0, 8, see.drawn, DRAWN),
    "sampler": ("ddim", "euler", see.drawn, DRAWN),
    "guidance_rescale": (0.0, 0.7, see.drawn, DRAWN),
    "eta": (0.0, 1.0, see.drawn, DRAWN),
    "use_karras_sigmas": ("auto", True, see.drawn, {**DRAWN, "sampler": "euler"}),
    "clip_skip": (0, 1, see.drawn, DRAWN),
    "image": ("@/a.png", "@/b.png", see.drawn, DRAWN),
    "mask": ("@/a.png", "@/b.png", see.drawn, {**DRAWN, "unet": {"in_channels": 9}, "image": "@/a.png"}),
    "strength": (-1.0, 0.5, see.drawn, {**DRAWN, "image": "@/a.png"}),
    "vae_slicing": (False, True, see.drawn, DRAWN),
    "overwrite": (False, True, see.overdrawn, DRAWN),
    "validation_prompts": ([], ["a cat", "a dog"], see.validated, PRETRAINED),
    "negative_prompt": ("", "a dog", see.drawn, DRAWN),
    "num_inference_steps": (30, 20, see.drawn, DRAWN),
    "guidance_scale": (7.5, 1.0, see.drawn, DRAWN),
    "timestep_spacing": ("", "trailing", see.drawn, DRAWN),
    "inception_path": ("", "@/a.pth", see.judged_by, {}),
    "clip_path": ("", "@/a", see.judged_by, {}),
    "eval_images": (0, 3, see.judged, {}),
    "eval_guidance_scales": ([], [1.0, 3.0], see.judged, {}),
    "eval_timesteps": (10, 5, see.judged, {}),
    "mesh_axes": (["data", "fsdp", "tensor"], ["tensor", "fsdp", "data"], see.mesh, {}),
    "logical_axis_rules": (RULES, [], see.split, {"ici_fsdp_parallelism": 2}),
    "ici_data_parallelism": (-1, 4, see.mesh, {}),
    "ici_fsdp_parallelism": (1, 2, see.mesh, {}),
    "ici_tensor_parallelism": (1, 2, see.mesh, {}),
    "dcn_data_parallelism": (-1, 2, see.mesh, {}),
    "dcn_fsdp_parallelism": (1, 2, see.mesh, {}),
    "dcn_tensor_parallelism": (1, 2, see.mesh, {}),
    "allow_split_physical_axes": (False, True, see.mesh_of_chips, {"ici_fsdp_parallelism": 2}),
    "max_replicated_mib": (64.0, 1e-4, see.unsplit, {"ici_fsdp_parallelism": 2, "logical_axis_rules": []}),
    "checkpoint_every": (-1, 8, see.saved, RUNS),
    "checkpoints_to_keep": (2, 3, see.saved, RUNS),
    "keep_checkpoint_every": (0, 2, see.kept, {}),
    "keep_best_checkpoint": (False, True, see.kept, {}),
    "max_skipped_steps": (10, 2, see.bad_batch, {}),
    "max_loss_spike": (0.0, 3.0, see.bad_batch, {}),
    "max_rollbacks": (3, 1, see.rollback_limit, {}),
    "lost_process_seconds": (60.0, 20.0, see.lost_after, {}),
    "hang_timeout_seconds": (0.0, 60.0, see.watched, {}),
    "allow_config_change": (False, True, see.changed, {}),
    "log_period": (10, 1, see.logged, RUNS),
    "eval_every": (-1, 2, see.measured, RUNS),
    "export_dtype": ("", "float16", see.exported, RUNS),
    "enable_profiler": (False, True, see.traced, {}),
    "skip_first_n_steps_for_profiler": (5, 2, see.traced, {"enable_profiler": True}),
    "profiler_steps": (5, 2, see.traced, {"enable_profiler": True}),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    leaves, structure = jax.tree.flatten(a)
    others, other = jax.tree.flatten(b)
    return structure == other and all(np.array_equal(x, y) for x, y in zip(leaves, others, strict=True))


def test_the_table_has_every_key():
    assert TABLE.keys() == KEYS.keys()


@pytest.mark.parametrize("key", [key for key, row in TABLE.items() if row[3] is not RUNS])
def test_two_values_of_a_key_do_different_things(files: Path, key: str):
    first, second, observe, others = TABLE[key]
    one, two = (observe(configuration(files, **{**others, key: value})) for value in (first, second))
    assert not same(one, two)


@pytest.mark.parametrize("key", [key for key, row in TABLE.items() if row[3] is RUNS])
def test_two_runs_differ_by_a_key(runs: dict[str, Path], key: str):
    first, second, observe, _ = TABLE[key]
    found = {name: observe(runs[name]) for name, keys in RUNS.items() if key in keys}
    one, two = (next(found[name] for name, keys in RUNS.items() if keys.get(key) == value) for value in (first, second))
    assert not same(one, two)
