"""Several processes, as a user starts them, train as one does; and how a process finds the others."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from benchmarks.together import free_port, run_together
from maxdiff import build, processes
from maxdiff.config import Run
from maxdiff.data.encoded import EncodedSource
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import make_mesh
from tests.test_sharding import AXES

ROOT = Path(__file__).parent.parent
SHARD = ROOT / "data" / "emoji" / "heldout-000000.tar"
DEVICES = 2
# The command, with a feature network that needs no compilation.
EVALUATE = """
import sys
import numpy as np
from maxdiff import evaluate, features
mean = lambda images: images.reshape(len(images), 2, -1, 6).mean(2).reshape(len(images), -1).astype(np.float32)
features.efficientnet = lambda: features.FeatureNetwork("means", mean, 12, is_inception=False, fingerprint="a")
sys.exit(evaluate.main(sys.argv[1:]))
"""
# The command, with shards so small that there are several.
ENCODE = """
import sys
from maxdiff.data import encode, encoded
encode.ROWS = encoded.ROWS = 16
sys.exit(encode.main(sys.argv[1:]))
"""


def environment() -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}"}


def together(commands: list[list[str]], folder: Path, timeout: float = 400.0) -> list[str]:
    return run_together(commands, environment(), folder, timeout)


def command(pipeline: Path, output: Path, *overrides: str) -> list[str]:
    keys = {
        "run_name": "r", "output_dir": output, "pretrained_model_name_or_path": pipeline, "activations_dtype": "float32",
        "train_data_dir": SHARD, "dataset_save_location": output.parent / "index", "resolution": 16, "center_crop": "true",
        "global_batch_size": 8, "data_workers": 1, "learning_rate": "1e-3", "max_train_steps": 6, "log_period": 1,
        "jax_cache_dir": output.parent / "cache", "checkpoint_every": 32, "eval_data_dir": SHARD, "eval_examples": 10,
        "attention": "dot_product", "caption_dropout": 0.1,
        # The gradient of a bias before a norm is nothing but rounding; Adam would make steps of full length of that.
        "adam_eps": "1e-4",
    }  # fmt: skip
    program = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/base14.yml")]
    return [*program, *(f"{key}={value}" for key, value in keys.items()), *overrides]


def values(output: Path, name: str) -> dict[int, float]:
    """step -> value; of a step that was made twice, the later."""
    lines = map(json.loads, (output / "r" / "metrics" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def assert_close(found: dict[int, float], expected: dict[int, float]):
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_two_processes_train_as_one_does_and_one_goes_on(one_level: Path, tmp_path: Path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    # Parameters are split over both processes, so that neither has them whole. All three at once, to use the cores.
    shared = ["ici_fsdp_parallelism=4", "num_processes=2", f"coordinator_address=localhost:{free_port()}"]
    prompts = ["validation_prompts=[a cat, a red dog]", "num_inference_steps=2"]
    pair = [command(one_level, split, *shared, *prompts, f"process_id={n}") for n in (0, 1)]
    _, first, second = together([command(one_level, whole, "ici_fsdp_parallelism=2"), *pair], tmp_path / "said")
    expected, held_out = values(whole, "loss"), values(whole, "held_out_loss")
    assert_close(values(split, "loss"), expected)
    assert_close(values(split, "held_out_loss"), held_out)
    assert (split / "r" / "samples" / "step-000006.png").is_file()
    assert all(first.count(f"step {step}/6 ") == 1 for step in expected)
    assert "wrote " in first
    # Gloo's lines, which its threads may write into each other.
    assert all("[Gloo]" in line or "peer ranks" in line for line in second.splitlines()), second
    ours, theirs = (Pipeline.load(output / "r" / "pipeline").unet.params for output in (split, whole))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)

    shutil.rmtree(split / "r" / "checkpoints" / "6")
    (said,) = together([command(one_level, split, "ici_fsdp_parallelism=2")], tmp_path / "again")
    assert "going on from step 4 " in said
    assert_close(values(split, "loss"), expected)
    assert_close(values(split, "held_out_loss"), held_out)

    # Two processes draw, each writing its own images; one alone draws the same.
    prompts = ["a cat", "a red dog", "a house"]
    draw = [sys.executable, str(ROOT / "generate.py"), str(ROOT / "configs/base14.yml"), "run_name=r", f"output_dir={split}",
            f"prompts={json.dumps(prompts)}", "num_inference_steps=2", "guidance_scale=1"]  # fmt: skip
    shared[-1] = f"coordinator_address=localhost:{free_port()}"
    first, second = together([[*draw, *shared, f"process_id={n}"] for n in (0, 1)], tmp_path / "drawn")
    assert "3 images drawn" in first
    assert "wrote" not in second
    (images,) = (split / "r" / "images").iterdir()
    names = ["00000-a-cat-0.png", "00001-a-red-dog-1.png", "00002-a-house-2.png"]
    assert sorted(path.name for path in images.iterdir()) == [*names, "sheet.png"]
    alone = Pipeline.load(split / "r" / "pipeline").generate(prompts, steps=2, guidance_scale=1.0, height=16, width=16)
    for name, expected in zip(names, alone, strict=True):
        with Image.open(images / name) as image:
            assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1


def test_two_processes_evaluate_as_one_does(one_level: Path, tmp_path: Path):
    keys = ["run_name=", "num_inference_steps=2", "eval_guidance_scales=[1, 3]", "eval_timesteps=2", "eval_images=5",
            "eval_examples=7", "global_batch_size=0"]  # fmt: skip
    evaluation = lambda name, *more: [sys.executable, "-c", EVALUATE, *command(one_level, tmp_path / name, *keys, *more)[2:]]
    shared = ["ici_fsdp_parallelism=4", "num_processes=2", f"coordinator_address=localhost:{free_port()}"]
    pair = [evaluation("pair", *shared, f"process_id={n}") for n in (0, 1)]
    _, first, second = together([evaluation("alone"), *pair], tmp_path / "said")
    assert "| guidance scale |" in first
    assert "guidance" not in second
    alone, both = (json.loads(next((tmp_path / name / "evaluation").glob("*.json")).read_text()) for name in ("alone", "pair"))
    assert both["settings"] == alone["settings"]
    assert both["weights"] == alone["weights"]
    assert both["losses"] == {t: pytest.approx(loss, rel=1e-5) for t, loss in alone["losses"].items()}
    for ours, theirs in zip(both["drawn"], alone["drawn"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)  # a pixel may be rounded the other way
    # Of what only the first looks for, the other hears.
    shared = ["inception_path=/nowhere", "num_processes=2", f"coordinator_address=localhost:{free_port()}"]
    pair = [evaluation("pair", *shared, f"process_id={n}") for n in (0, 1)]
    running = [
        subprocess.Popen(one, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for one in pair
    ]
    said = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2]
    assert "python -m maxdiff.evaluate: inception_path='/nowhere': there is no file /nowhere" in said[0]
    assert "process 0 of 2" in said[1]


def test_two_processes_encode_as_one_does(one_level: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each its own shards, with weights split over both while training would split them."""
    with tarfile.open(SHARD) as tar, tarfile.open(tmp_path / "few.tar", "w") as few:
        for member in tar.getmembers()[:120]:
            few.addfile(member, tar.extractfile(member))
    keys = ["encoded_dtype=float32", "random_flip=true", f"train_data_dir={tmp_path}/few.tar", "eval_data_dir=",
            "per_device_batch_size=4", "global_batch_size=0"]  # fmt: skip
    program = [sys.executable, "-c", ENCODE, str(ROOT / "configs/base14.yml")]

    def encoding(name: str, *more: str) -> list[str]:
        return [*program, *command(one_level, tmp_path / "runs", *keys, f"encoded_dir={tmp_path / name}", *more)[3:]]

    shared = ["ici_fsdp_parallelism=4", "num_processes=2", f"coordinator_address=localhost:{free_port()}"]
    pair = [encoding("pair", *shared, f"process_id={n}") for n in (0, 1)]
    alone, first, _ = together([encoding("alone"), *pair], tmp_path / "said")
    assert "examples encoded" in alone
    assert f"wrote {tmp_path / 'pair'}" in first
    monkeypatch.setattr("maxdiff.data.encoded.ROWS", 16)
    one, two = EncodedSource(tmp_path / "alone"), EncodedSource(tmp_path / "pair")
    assert one.fingerprint() == two.fingerprint()
    assert len(one) == len(two) > 32
    assert sum(1 for _ in (tmp_path / "pair").glob("shard-*")) > 2
    for i in range(len(one)):
        assert one.names(i) == two.names(i)
        for name, value in one[i].items():
            np.testing.assert_allclose(two[i][name], value, rtol=1e-5, atol=1e-5)


def fake_devices(count: int, process_of: Any) -> list[Any]:
    """Devices of several processes, of which a mesh asks only this."""
    return [type("Device", (), {"process_index": process_of(n), "id": n, "platform": "fake"})() for n in range(count)]


@pytest.mark.parametrize(
    ("sizes", "process_of", "expected"),
    [
        ((4, 1, 1), lambda n: n // 2, (0, 2)),
        ((1, 4, 1), lambda n: n % 2, (0, 2)),  # rows 0 and 2 are one part
        ((1, 1, 4), lambda n: n // 2, (0, 1)),  # both have the same examples
        ((1, 2, 4), lambda n: n // 2, (0, 2)),
    ],
)
def test_processes_load_what_their_devices_have(sizes, process_of, expected):
    devices = fake_devices(int(np.prod(sizes)), process_of)
    assert build.batch_part(make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {}, devices=devices)) == expected


def test_a_mesh_that_gives_processes_unequal_parts_is_an_error():
    devices = fake_devices(4, lambda n: int(n == 3))
    with pytest.raises(ValueError, match="does not split a batch evenly over 2 processes"):
        build.batch_part(make_mesh(AXES, {"data": 4}, {}, devices=devices))


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What jax.distributed.initialize is called with, in an environment without any cluster."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "KUBERNETES_", "TPU_", "JAX_COORD", "JAX_NUM", "JAX_PROCESS", "JAX_LOCAL", "CUDA_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(coordinator_address="a:1"), "num_processes=-1, process_id=-1: with coordinator_address"),
        (Run(coordinator_address="a:1", num_processes=2, process_id=2), "num_processes=2, process_id=2: with"),
        (Run(num_processes=2), "num_processes=2, process_id=-1 needs coordinator_address"),
        (Run(process_id=0), "num_processes=-1, process_id=0 needs coordinator_address"),
    ],
)
def test_half_of_what_is_needed_is_an_error(initialized, run: Run, message: str):
    with pytest.raises(ValueError, match=message):
        processes.start(run)
    assert not initialized


def test_an_mpi_job_that_jax_cannot_see_is_an_error(initialized, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="one of 4 processes of an MPI job"):
        processes.start(Run())
    processes.start(Run(skip_jax_distributed_system=True))
    assert not initialized
    processes.start(Run(coordinator_address="a:1", num_processes=4, process_id=3))
    assert initialized[0]["process_id"] == 3


def slurm(tasks: int, nodes: int, task: int = 0, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(tasks), "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % (tasks // nodes)), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes),
            **more}  # fmt: skip


ORTE = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        (slurm(8, 2, task=5), [1]),  # a process for each GPU, as JAX would have it
        (slurm(2, 2), []),  # a process for each host has all that is there
        (slurm(8, 2, task=5, CUDA_VISIBLE_DEVICES="1"), []),  # Slurm has hidden the others
        (slurm(4, 2, task=1, SLURM_GPUS_PER_TASK="4"), []),
        (slurm(8, 2, task=5, JAX_LOCAL_DEVICE_IDS="3"), None),
        (slurm(8, 2, task=5, PMI_SIZE="8"), [1]),  # srun --mpi=pmi2
        ({**ORTE, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, [1]),
        ({**ORTE, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, []),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, []),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_WORKER_HOSTNAMES": "a,b"}, []),
    ],
)
def test_clusters_are_left_to_jax_and_processes_get_their_gpus(initialized, monkeypatch, env: dict[str, str], devices):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    processes.start(Run())
    assert [call["local_device_ids"] for call in initialized] == [devices]


@pytest.mark.parametrize(
    "env",
    [
        slurm(1, 1),
        {**slurm(8, 1), "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step in a larger allocation
        {**ORTE, "OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a notebook's pod
    ],
)
def test_a_cluster_with_one_process_needs_no_coordinator(initialized, monkeypatch, env: dict[str, str]):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    processes.start(Run())
    assert not initialized


def test_the_environment_may_say_who_is_who(initialized, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    processes.start(Run())
    expected = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
    assert expected.items() <= initialized[0].items()


SUM = """
import jax, numpy as np
from jax.experimental import multihost_utils
from maxdiff.config import Run
from maxdiff import processes
processes.start(Run())
processes.wait_for_all("here")
print(jax.process_count(), jax.local_device_count(), multihost_utils.process_allgather(np.ones(1)).sum())
processes.say("first")
import os, pathlib
folder = pathlib.Path(os.environ["FOLDER"])
folder.mkdir(exist_ok=True)
try:
    processes.check_shared(folder)
    print("shared")
except ValueError as error:
    print(error)
"""


def test_tasks_of_slurm_find_each_other_and_one_alone_says_nothing(tmp_path: Path):
    port = str(free_port())
    steps = [slurm(2, 1, task, JAX_COORDINATOR_PORT=port) for task in (0, 1)]
    steps = [{**step, "FOLDER": str(tmp_path / f"runs-{task}")} for task, step in enumerate(steps)]
    commands = [["env", *(f"{k}={v}" for k, v in step.items()), sys.executable, "-c", SUM] for step in steps]
    first, second = together(commands, tmp_path / "two", 100)
    assert f"2 {DEVICES} 2.0\nfirst\n" in first
    assert f"2 {DEVICES} 2.0\n" in second
    assert "first" not in second
    for task, said in enumerate((first, second)):  # each has made a folder of its own
        assert (
            f"output_dir: {tmp_path}/runs-{task} of process 0 is not that of process 1; allowed: a folder that all share"
            in said
        )
    alone = ["env", *(f"{k}={v}" for k, v in slurm(1, 1, FOLDER=str(tmp_path)).items()), sys.executable, "-c", SUM]
    assert together([alone], tmp_path / "one", 100) == [f"1 {DEVICES} 1.0\nfirst\nshared\n"]
    assert (tmp_path / "one" / "0.err").read_text() == ""


# A run that goes on from step 300, and gets SIGUSR1 before its first step.
STOPPED_EARLY = """
import os, signal, time
from maxdiff import processes
from maxdiff.config import Run
from maxdiff.stop import Signals
processes.start(Run())
with Signals() as signals:
    if os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)
    signals.defer(300)
    number = 301
    while not signals.requested(number) and number < 500:
        number += 1
        time.sleep(0.05)
    processes.wait_for_all("stopped")
    print(f"\\n{number} {signals.requested(number + 1)}\\n", end="", flush=True)
"""


def test_a_signal_before_the_first_step_stops_a_run_that_goes_on(tmp_path: Path):
    steps = [slurm(2, 1, task, JAX_COORDINATOR_PORT=str(port)) for port in [free_port()] for task in (0, 1)]
    commands = [["env", *(f"{k}={v}" for k, v in step.items()), sys.executable, "-c", STOPPED_EARLY] for step in steps]
    stopped = [re.findall(r"^(\d+) (\w+)$", said, re.MULTILINE) for said in together(commands, tmp_path, 100)]
    assert stopped[0] == stopped[1]
    assert [was for _, was in stopped[0]] == ["True"]
