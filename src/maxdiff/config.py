"""Configuration: small YAML files over base.yml, then `key=value` from the command line; typed and strict.

Keys are flat; in code each lives in one section: `config.optimizer.learning_rate`. configs/base.yml documents
every key in one line.
"""

import dataclasses
import difflib
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxdiff import bucket
from maxdiff.models.config import is_a, spelled


@dataclasses.dataclass(frozen=True)
class Run:
    """Which run this is."""

    run_name: str = ""
    output_dir: str = ""
    seed: int = 0
    jax_cache_dir: str = ""
    deterministic: bool = False
    libtpu_init_args: str = ""
    resume_from: str = ""
    skip_jax_distributed_system: bool = False
    coordinator_address: str = ""
    num_processes: int = -1
    process_id: int = -1

    def __post_init__(self):
        bucket.check_path("output_dir", self.output_dir)
        if {*self.run_name} & {"/", "\\"} or self.run_name in (".", ".."):
            raise ValueError(f"run_name={self.run_name} names no folder in output_dir (allowed: a name without slashes)")

    @property
    def place(self) -> Path:
        """Where the run lies: a folder, or a place in a bucket (see `bucket.place`)."""
        return bucket.place(self.output_dir) / self.run_name

    @property
    def folder(self) -> Path:
        """Where the run writes all but checkpoints: the same folder or, for a bucket, this process's copy."""
        return bucket.local_copy(str(self.place)) if bucket.is_bucket(self.output_dir) else self.place

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.place / "checkpoints"

    def shown(self, path: Path) -> Path:
        """What users know a path within `folder` by."""
        return self.place / path.relative_to(self.folder)


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, from what, and how it computes."""

    pretrained_model_name_or_path: str = ""
    revision: str = ""
    variant: str = ""
    from_pt: bool | str = "auto"
    unet_path: str = ""
    vae_path: str = ""
    text_encoder_path: str = ""
    text_encoder_2_path: str = ""
    tokenizer_path: str = ""
    tokenizer_2_path: str = ""
    scheduler_path: str = ""
    train_new_unet: bool = False
    train_text_encoder: bool = False
    train_vae: bool = False
    unet: dict = dataclasses.field(default_factory=dict)
    vae: dict = dataclasses.field(default_factory=dict)
    text_encoder: dict = dataclasses.field(default_factory=dict)
    text_encoder_2: dict = dataclasses.field(default_factory=dict)
    weights_dtype: str = "float32"
    activations_dtype: str = "bfloat16"
    precision: str = "DEFAULT"
    attention: str = "flash"
    norms: str = "auto"
    remat: str = "none"

    def __post_init__(self):
        _one_of(self, "from_pt", "auto", True, False)
        for key in ("weights_dtype", "activations_dtype"):
            _one_of(self, key, "float32", "bfloat16")
        _one_of(self, "precision", "DEFAULT", "HIGH", "HIGHEST")
        _one_of(self, "attention", "dot_product", "cudnn", "flash")
        _one_of(self, "norms", "auto", "fused", "plain")
        _one_of(self, "remat", "none", "full", "selective", "dots")
        if self.train_vae and (self.train_text_encoder or self.train_new_unet):
            raise ValueError("train_vae=True trains the autoencoder alone: not with train_text_encoder or train_new_unet")

    @property
    def sources(self) -> dict[str, str]:
        """Part -> where it comes from, for those that have a source of their own."""
        paths = {
            f.name.removesuffix("_path"): getattr(self, f.name) for f in dataclasses.fields(self) if f.name.endswith("_path")
        }
        return {part: path for part, path in paths.items() if path and part != "pretrained_model_name_or"}

    @property
    def new(self) -> dict[str, dict[str, Any]]:
        """Part -> its architecture, for those that begin with random weights."""
        parts = {part: getattr(self, part) for part in ("unet", "vae", "text_encoder", "text_encoder_2")}
        return {part: given for part, given in parts.items() if given or (part == "unet" and self.train_new_unet)}


@dataclasses.dataclass(frozen=True)
class Data:
    """Captioned images."""

    train_data_dir: str = ""
    data_mix: tuple = ()
    dataset_type: str = ""
    train_split: str = "train"
    image_column: str = "image"
    caption_column: str = "text"
    caption_mode: str = "choose"
    caption_separator: str = ", "
    caption_prefix: str = ""
    shuffle_tags: bool = False
    keep_tags: int = 0
    tag_dropout: float = 0.0
    idx_to_prompt: str = ""
    filters: dict = dataclasses.field(default_factory=dict)
    dataset_save_location: str = ""
    resolution: int = 512
    center_crop: bool = False
    random_flip: bool = False
    image_resizer: str = "simd"
    aspect_ratio_buckets: bool = False
    bucket_step: int = 64
    bucket_max_ratio: float = 2.0
    minimum_size: int = 0
    data_workers: int = 4
    encoded_dir: str = ""
    encoded_dtype: str = "bfloat16"
    cache_latents_text_encoder_outputs: bool = False
    eval_data_dir: str = ""
    eval_examples: int = 256
    max_bad_fraction: float = 0.01
    shuffle_block: int = 0

    def __post_init__(self):
        for part in self.data_mix:
            path, weight = part if isinstance(part, list | tuple) and len(part) == 2 else ("", 0)
            if not path or not is_a(path, str) or not is_a(weight, int) or weight < 1:
                raise ValueError(f"data_mix has {part!r} (allowed: [path, weight], the weight a whole number of 1 or more)")
        if self.data_mix and self.train_data_dir:
            raise ValueError(f"data_mix is instead of train_data_dir={self.train_data_dir!r} (allowed: one of them)")
        _between(self, "shuffle_block", 0, math.inf)
        _between(self, "minimum_size", 0, math.inf)
        _between(self, "bucket_step", 1, math.inf)
        _between(self, "bucket_max_ratio", 1, math.inf)
        if self.aspect_ratio_buckets and self.resolution % self.bucket_step:
            raise ValueError(f"bucket_step={self.bucket_step} does not divide resolution={self.resolution}")
        if self.aspect_ratio_buckets and (self.data_mix or self.shuffle_block):
            raise ValueError("aspect_ratio_buckets=True is not supported with data_mix or shuffle_block (allowed: false)")
        _one_of(self, "dataset_type", "", "webdataset", "folder", "table", "parquet", "hf", "arrayrecord")
        for key in ("train_split", "image_column"):
            if not getattr(self, key):
                raise ValueError(f"{key}='' is not supported (allowed: a name)")
        _between(self, "resolution", 8, math.inf)
        _between(self, "data_workers", 0, math.inf)
        _one_of(self, "encoded_dtype", "bfloat16", "float32")
        _one_of(self, "image_resizer", "simd", "pillow")
        _one_of(self, "caption_mode", "choose", "join")
        _between(self, "keep_tags", 0, math.inf)
        _between(self, "tag_dropout", 0, 1)
        _between(self, "max_bad_fraction", 0, 1)
        _between(self, "eval_examples", 1, math.inf)


@dataclasses.dataclass(frozen=True)
class Batch:
    """How long, and how much at once."""

    max_train_steps: int = 1000
    num_examples_to_see: int = 0
    per_device_batch_size: int = 1
    global_batch_size: int = 0

    def __post_init__(self):
        _between(self, "max_train_steps", 1, math.inf)
        _between(self, "per_device_batch_size", 1, math.inf)
        _between(self, "global_batch_size", 0, math.inf)
        _between(self, "num_examples_to_see", 0, math.inf)

    def steps(self, global_batch: int) -> int:
        """Optimizer steps of the whole run, with batches of this size."""
        return math.ceil(self.num_examples_to_see / global_batch) or self.max_train_steps

    def split(self, devices: int) -> tuple[int, int]:
        """(global batch, accumulation steps) on this many devices that each have examples of their own.

        Raises:
            ValueError: if global_batch_size is no multiple of what the devices take at once.
        """
        at_once = self.per_device_batch_size * devices
        batch = self.global_batch_size or at_once
        if batch % at_once:
            taken = f"per_device_batch_size={self.per_device_batch_size} x {devices} devices"
            raise ValueError(f"global_batch_size={batch} is no multiple of {taken}")
        return batch, batch // at_once


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How parameters move."""

    optimizer: str = "adamw"
    learning_rate: float = 1e-5
    text_encoder_learning_rate: float = 4.25e-6
    scale_lr: bool = False
    learning_rate_schedule: str = "constant"
    warmup_steps_fraction: float = 0.0
    learning_rate_schedule_steps: int = -1
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_eps: float = 1e-8
    adam_weight_decay: float = 1e-2
    decay_norms_and_biases: bool = True
    moment_dtype: str = "float32"
    max_grad_norm: float = 1.0
    shard_optimizer: bool = False
    use_ema: bool = True
    ema_decay: float = 0.9999
    ema_start_step: int = 0

    def __post_init__(self):
        _one_of(self, "optimizer", "adamw", "adafactor", "lion")
        _one_of(self, "learning_rate_schedule", "constant", "linear", "cosine", "polynomial")
        _one_of(self, "moment_dtype", "float32", "bfloat16")
        _between(self, "learning_rate", 0, math.inf)
        _between(self, "text_encoder_learning_rate", 0, math.inf)
        _between(self, "warmup_steps_fraction", 0, 1)
        _minus_one_or_more(self, "learning_rate_schedule_steps")
        for key in ("adam_eps", "adam_weight_decay", "ema_start_step", "max_grad_norm"):
            _between(self, key, 0, math.inf)
        for key in ("adam_b1", "adam_b2", "ema_decay"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)!r} is out of range (allowed: 0 or more, and below 1)")


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is learnt; the ranges are checked by diffusion.objective."""

    prediction_type: str = ""
    rescale_zero_terminal_snr: bool = False
    snr_gamma: float = -1.0
    timestep_bias: dict = dataclasses.field(default_factory=lambda: {"strategy": "none"})
    noise_offset: float = 0.0
    input_perturbation: float = 0.0
    caption_dropout: float = 0.0
    reconstruction_loss: str = "l1"
    kl_weight: float = 1e-6

    def __post_init__(self):
        _one_of(self, "prediction_type", "", "epsilon", "v_prediction", "sample")
        _one_of(self, "reconstruction_loss", "l1", "l2")
        _between(self, "kl_weight", 0, math.inf)
        allowed = ("strategy", "multiplier", "begin", "end", "portion")
        for key in self.timestep_bias:
            if key not in allowed:
                raise ValueError(f"timestep_bias has no key {key!r} (allowed: {', '.join(allowed)})")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How images are drawn, while training and by generate.py; the sampler's own ranges are checked by diffusion.sampler."""

    prompt: str = ""
    prompts: tuple[str, ...] = ()
    prompts_file: str = ""
    validation_prompts: tuple[str, ...] = ()
    negative_prompt: str = ""
    num_images_per_prompt: int = 1
    seeds: tuple[int, ...] = ()
    height: int = 0
    width: int = 0
    sampler: str = ""
    num_inference_steps: int = 30
    guidance_scale: float = 7.5
    guidance_rescale: float = 0.0
    eta: float = 0.0
    timestep_spacing: str = ""
    use_karras_sigmas: bool | str = "auto"
    clip_skip: int = 0
    image: str = ""
    mask: str = ""
    strength: float = -1.0
    vae_slicing: bool = False
    overwrite: bool = False

    def __post_init__(self):
        _between(self, "num_inference_steps", 1, math.inf)
        _between(self, "guidance_scale", 0, math.inf)
        _between(self, "guidance_rescale", 0, 1)
        _between(self, "eta", 0, 1)
        _between(self, "num_images_per_prompt", 1, math.inf)
        _between(self, "clip_skip", 0, math.inf)
        if self.strength != -1:
            _between(self, "strength", 0, 1)
        for key in ("height", "width"):
            _between(self, key, 0, math.inf)
        _one_of(self, "timestep_spacing", "", "leading", "trailing", "linspace")
        _one_of(self, "use_karras_sigmas", "auto", True, False)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `python -m maxdiff.evaluate` measures."""

    inception_path: str = ""
    clip_path: str = ""
    eval_images: int = 0
    eval_guidance_scales: tuple[float, ...] = ()
    eval_timesteps: int = 10

    def __post_init__(self):
        _between(self, "eval_images", 0, math.inf)
        _between(self, "eval_timesteps", 1, math.inf)
        if any(not 0 <= scale < math.inf for scale in self.eval_guidance_scales):
            raise ValueError(f"eval_guidance_scales={list(self.eval_guidance_scales)} (allowed: numbers of 0 or more)")
        if len(set(self.eval_guidance_scales)) < len(self.eval_guidance_scales):
            raise ValueError(f"eval_guidance_scales={list(self.eval_guidance_scales)} names one twice (allowed: each once)")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices, and what lies where; the sizes are checked by sharding.make_mesh."""

    mesh_axes: tuple[str, ...] = ("data", "fsdp", "tensor")
    logical_axis_rules: tuple = ()
    ici_data_parallelism: int = -1
    ici_fsdp_parallelism: int = 1
    ici_tensor_parallelism: int = 1
    dcn_data_parallelism: int = -1
    dcn_fsdp_parallelism: int = 1
    dcn_tensor_parallelism: int = 1
    allow_split_physical_axes: bool = False
    max_replicated_mib: float = 64.0

    def __post_init__(self):
        for axis in self.mesh_axes:
            if axis not in ("data", "fsdp", "tensor"):
                raise ValueError(f"mesh_axes={list(self.mesh_axes)!r} has {axis!r} (allowed: data, fsdp, tensor)")

    def sizes(self, kind: str) -> dict[str, int]:
        """Mesh axis -> its `ici` or `dcn` size."""
        return {axis: getattr(self, f"{kind}_{axis}_parallelism") for axis in self.mesh_axes}


@dataclasses.dataclass(frozen=True)
class Output:
    """What is kept and said."""

    checkpoint_every: int = -1
    checkpoints_to_keep: int = 3
    keep_checkpoint_every: int = 0
    keep_best_checkpoint: bool = False
    log_period: int = 10
    eval_every: int = -1
    export_dtype: str = ""
    enable_profiler: bool = False
    skip_first_n_steps_for_profiler: int = 5
    profiler_steps: int = 5

    def __post_init__(self):
        _between(self, "log_period", 1, math.inf)
        _between(self, "checkpoints_to_keep", 1, math.inf)
        _between(self, "keep_checkpoint_every", 0, math.inf)
        _between(self, "skip_first_n_steps_for_profiler", 1, math.inf)
        _between(self, "profiler_steps", 1, math.inf)
        for key in ("checkpoint_every", "eval_every"):
            _minus_one_or_more(self, key)
        _one_of(self, "export_dtype", "", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Safety:
    """What happens when something goes wrong."""

    max_skipped_steps: int = 10
    max_loss_spike: float = 0.0
    max_rollbacks: int = 3
    hang_timeout_seconds: float = 0.0
    lost_process_seconds: float = 60.0
    allow_config_change: bool = False

    def __post_init__(self):
        for key in ("max_skipped_steps", "max_rollbacks", "hang_timeout_seconds"):
            _between(self, key, 0, math.inf)
        _between(self, "lost_process_seconds", 5, 90)  # JAX itself waits for 100
        if self.max_loss_spike and not 1 < self.max_loss_spike < math.inf:
            raise ValueError(f"max_loss_spike={self.max_loss_spike!r} is out of range (allowed: above 1, or 0 for none)")


@dataclasses.dataclass(frozen=True)
class Config:
    """Every section."""

    run: Run = dataclasses.field(default_factory=Run)
    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    batch: Batch = dataclasses.field(default_factory=Batch)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    objective: Objective = dataclasses.field(default_factory=Objective)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    output: Output = dataclasses.field(default_factory=Output)
    safety: Safety = dataclasses.field(default_factory=Safety)


SECTIONS: dict[str, Any] = typing.get_type_hints(Config)
# key -> (its section, its type)
KEYS: dict[str, tuple[str, Any]] = {
    key: (name, kind) for name, section in SECTIONS.items() for key, kind in typing.get_type_hints(section).items()
}


# Keys whose values are paths, or may be.
PATHS = ("output_dir", "jax_cache_dir", "train_data_dir", "data_mix", "eval_data_dir", "dataset_save_location", "encoded_dir",
         "idx_to_prompt", "prompts_file", "inception_path", "clip_path")  # fmt: skip


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, the file that its `base` names before it, and overrides after it: key=value, or other YAML files.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: naming key, value and what is allowed, for anything wrong.
    """
    values = _read(Path(path))
    for override in overrides:
        if is_file_name(override):
            values |= _read(Path(override), may_have_base=False)
            continue
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} is not of the form key=value")
        _check_key(key, "the command line")
        # A string needs no quotes: run_name=007 is no number.
        text_key, where = KEYS[key][1] is str, f"the command line, {key}"
        try:
            values[key] = text if text_key and not text.startswith(("'", '"')) else _parse(text, where)
        except ValueError:
            if not text_key:
                raise
            values[key] = text  # a prompt that begins with a quotation
    return make_config(values)


def is_file_name(override: str) -> bool:
    """Whether an argument is a further YAML file, and no key=value."""
    return override.endswith((".yml", ".yaml")) and "=" not in override


def make_config(values: Mapping[str, Any]) -> Config:
    """The configuration with these values, by flat keys; ValueError for a wrong one."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, kind = KEYS[key]
        value = tuple(value) if isinstance(value, list) else value
        if not is_a(value, kind):
            raise ValueError(f"{key}={value!r} has the wrong type (allowed: {spelled(kind)})")
        value = _from_home(value) if key in PATHS else value
        sections[section][key] = value
    return Config(**{name: kind(**sections[name]) for name, kind in SECTIONS.items()})


def flat(config: Config) -> dict[str, Any]:
    """Every key and its value, as YAML can hold them."""
    values = {key: getattr(getattr(config, section), key) for key, (section, _) in KEYS.items()}
    return {key: _lists(value) for key, value in values.items()}


def write_config(config: Config) -> str:
    """YAML with every key, which `load_config` reads back."""
    return yaml.safe_dump(flat(config), sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path, *, may_have_base: bool = True) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {path}")
    values = _parse(path.read_text(encoding="utf-8"), str(path)) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not keys and values")
    base = values.pop("base", None)
    if base and not may_have_base:
        raise ValueError(f"{path} has a base, whose keys would replace all before it (allowed: in the first file alone)")
    for key in values:
        _check_key(key, str(path))
    return {**(_read(path.parent / base) if base else {}), **values}


def _check_key(key: str, where: str) -> None:
    if key not in KEYS:
        close = closest(str(key), KEYS)
        raise ValueError(f"{where}: there is no key {key!r}" + (f"; did you mean {close!r}?" if close else ""))


def closest(key: str, known: Iterable[str]) -> str:
    """The key that was probably meant; "" if none is near."""
    return next(iter(difflib.get_close_matches(key, [*known], 1)), "")


class _Loader(yaml.SafeLoader):
    """YAML with two repairs: a key that stands twice is an error, and 1e-5 is a number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no YAML: {' '.join(str(error).split())}") from None


def _from_home(value: Any) -> Any:
    """With ~ as the shell has it, which leaves it alone behind `key=`."""
    if isinstance(value, tuple | list):
        return type(value)(_from_home(item) for item in value)
    return os.path.expanduser(value) if isinstance(value, str) else value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _one_of(section: Any, key: str, *allowed: Any) -> None:
    value = getattr(section, key)
    if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
        raise ValueError(f"{key}={value!r} is not supported (allowed: {', '.join(map(repr, allowed))})")


def _between(section: Any, key: str, low: float, high: float) -> None:
    if not low <= getattr(section, key) <= high or getattr(section, key) == math.inf:
        allowed = f"{low} or more" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{key}={getattr(section, key)!r} is out of range (allowed: {allowed})")


def _minus_one_or_more(section: Any, key: str) -> None:
    if (value := getattr(section, key)) != -1 and value < 1:
        raise ValueError(f"{key}={value!r} is out of range (allowed: 1 or more, or -1)")
