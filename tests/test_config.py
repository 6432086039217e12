import os
import re
from pathlib import Path

import pytest
import yaml

from maxdiff.config import KEYS, Config, flat, load_config, write_config

CONFIGS = Path(__file__).parent.parent / "configs"


def test_base_documents_every_key_with_its_default():
    text = (CONFIGS / "base.yml").read_text()
    values = yaml.safe_load(text)
    assert values.keys() == KEYS.keys()
    config = load_config(CONFIGS / "base.yml")
    rules = "logical_axis_rules"
    assert {k: v for k, v in flat(config).items() if k != rules} == {k: v for k, v in flat(Config()).items() if k != rules}
    for key in KEYS:
        if not key.startswith(("ici_", "dcn_")):
            assert re.search(rf"^{key}:.*# .+", text, re.MULTILINE), key


@pytest.mark.parametrize("file", [f for f in os.listdir(CONFIGS) if f.endswith(".yml") and f != "base.yml"])
def test_small_files_name_base_and_load(file: str):
    config = load_config(CONFIGS / file)
    assert config.model.pretrained_model_name_or_path or config.model.new
    assert config.mesh.logical_axis_rules


def test_maxdiffusions_command_lines_mean_the_same():
    config = load_config(
        CONFIGS / "base14.yml",
        [
            "run_name=my_run",
            "jax_cache_dir=/c",
            "activations_dtype=float32",
            "weights_dtype=float32",
            "per_device_batch_size=2",
            "precision=DEFAULT",
            "dataset_save_location=/d",
            "output_dir=/o",
            "attention=flash",
            "pretrained_model_name_or_path=X",
            "from_pt=True",
            "revision=main",
        ],
    )
    assert config.run.folder == Path("/o/my_run")
    assert (config.model.from_pt, config.model.revision, config.model.activations_dtype) == (True, "main", "float32")
    assert config.batch.per_device_batch_size == 2
    assert config.data.dataset_save_location == "/d"


def test_overrides_are_yaml_and_strings_need_no_quotes():
    config = load_config(
        CONFIGS / "base.yml",
        ["run_name=007", "learning_rate=1e-4", "mesh_axes=[data, fsdp]", "timestep_bias={strategy: later, portion: 0.5}"],
    )
    assert config.run.run_name == "007"
    assert config.optimizer.learning_rate == 1e-4
    assert config.mesh.mesh_axes == ("data", "fsdp")
    assert config.objective.timestep_bias == {"strategy": "later", "portion": 0.5}


def test_files_and_keys_count_from_left_to_right(tmp_path: Path):
    chips = tmp_path / "chips.yml"
    chips.write_text("per_device_batch_size: 8\nshard_optimizer: true\n")
    batch = load_config(CONFIGS / "base15.yml", ["per_device_batch_size=2", str(chips)]).batch
    assert batch.per_device_batch_size == 8
    config = load_config(CONFIGS / "base15.yml", [str(chips), "per_device_batch_size=2"])
    assert (config.batch.per_device_batch_size, config.optimizer.shard_optimizer, config.data.resolution) == (2, True, 512)
    with pytest.raises(ValueError, match="has a base, whose keys would replace all"):
        load_config(CONFIGS / "base15.yml", [str(CONFIGS / "base14.yml")])
    with pytest.raises(FileNotFoundError, match="there is no configuration none.yml"):
        load_config(CONFIGS / "base15.yml", ["none.yml"])


@pytest.mark.parametrize("file", sorted((CONFIGS / "tpu").glob("*.yml")), ids=lambda file: file.stem)
def test_configurations_of_slices_load(file: Path):
    config = load_config(CONFIGS / "base15.yml", [str(file)])
    assert config.batch.per_device_batch_size > 1


def test_the_resolved_configuration_reads_back(tmp_path: Path):
    config = load_config(CONFIGS / "base21.yml", ["run_name=a: b", "snr_gamma=5", "vae_path=x"])
    (tmp_path / "c.yml").write_text(write_config(config))
    assert load_config(tmp_path / "c.yml") == config
    assert config.model.sources == {"vae": "x"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rat=1", "the command line: there is no key 'learning_rat'; did you mean 'learning_rate'"),
        ("max_train_steps=0.5", r"max_train_steps=0.5 has the wrong type \(allowed: int\)"),
        ("max_train_steps=0", r"max_train_steps=0 is out of range \(allowed: 1 or more\)"),
        ("use_ema=yes please", r"use_ema='yes please' has the wrong type \(allowed: bool\)"),
        ("attention=fast", r"attention='fast' is not supported \(allowed: 'dot_product', 'cudnn', 'flash'\)"),
        ("from_pt=perhaps", "from_pt='perhaps' is not supported"),
        ("mesh_axes=[data, context]", r"has 'context' \(allowed: data, fsdp, tensor\)"),
        ("timestep_bias={strateg: later}", "timestep_bias has no key 'strateg'"),
        ("max_bad_fraction=2", r"max_bad_fraction=2 is out of range \(allowed: 0 to 1\)"),
        ("mesh_axes=[data", "the command line, mesh_axes is no YAML"),
        ("seed", "'seed' is not of the form key=value"),
    ],
)
def test_mistakes_are_named(override: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / "base.yml", [override])


def test_files_with_mistakes_are_named(tmp_path: Path):
    file = tmp_path / "c.yml"
    file.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ValueError, match="c.yml is no YAML: .*the key 'seed' stands twice"):
        load_config(file)
    file.write_text("sed: 1\n")
    with pytest.raises(ValueError, match="c.yml: there is no key 'sed'; did you mean 'seed'"):
        load_config(file)
    file.write_text("base: nowhere.yml\n")
    with pytest.raises(FileNotFoundError, match=r"there is no configuration .*nowhere\.yml"):
        load_config(file)
    file.write_text("- a\n")
    with pytest.raises(ValueError, match="holds a list, not keys and values"):
        load_config(file)


def test_the_global_batch_fixes_accumulation():
    split = lambda *overrides: load_config(CONFIGS / "base.yml", overrides).batch.split(4)
    assert split("per_device_batch_size=2") == (8, 1)
    assert split("per_device_batch_size=2", "global_batch_size=32") == (32, 4)
    with pytest.raises(ValueError, match="global_batch_size=12 is no multiple of per_device_batch_size=2 x 4 devices"):
        split("per_device_batch_size=2", "global_batch_size=12")


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["output_dir=~/runs", "dataset_save_location=~", "data_mix=[['~/a.tar', 1], [/b.tar, 2]]", "prompt=~/a cat"]
    config = load_config(CONFIGS / "base.yml", given)
    assert config.run.folder == tmp_path / "runs"
    assert config.data.dataset_save_location == str(tmp_path)
    assert config.data.data_mix == ([f"{tmp_path}/a.tar", 1], ["/b.tar", 2])
    assert config.sampling.prompt == "~/a cat"
