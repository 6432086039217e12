"""What launch/ hands to clusters: with programs in the place of Slurm's; benchmarks/slurm.py has a real one."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from launch import sweep
from maxdiff.command import LOST
from maxdiff.config import load_config, write_config
from maxdiff.stop import INTERRUPTED, STOPPED
from maxdiff.watch import HUNG

ROOT = Path(__file__).parent.parent
BASE = str(ROOT / "configs" / "base15.yml")
# Logs that it began and its arguments, then ends with STATUS; with WAIT, when it gets SIGUSR1.
SRUN = """#!/bin/bash
trap 'echo "srun heard USR1" >> "$LOG"; exit "$STATUS"' USR1
printf '<%s>' srun "$@" >> "$LOG"; echo >> "$LOG"
if [[ $WAIT ]]; then while :; do sleep 0.02; done; fi
exit "$STATUS"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo "JobId=7 JobName=a RunTime=00:00:01 JobState=$STATE Reason=None"; else echo "scontrol $*" >> "$LOG"; fi
"""
# Takes the place of sbatch, or of train.py.
STARTS = """#!/bin/bash
printf '%s\\n' "$@" '' >> "$LOG"
exit "${STATUS:-0}"
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def batch(tmp_path: Path):
    """Starts launch/slurm.sbatch as Slurm does; what it calls logs to tmp_path/log."""
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "bin" / "scontrol", SCONTROL)

    def start(status: int, *arguments: str, cwd: Path = ROOT, **environment: str) -> "subprocess.Popen[str]":
        env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": f"{tmp_path}/log", "STATUS": str(status),
               "STATE": "RUNNING", "WAIT": "", "SLURM_JOB_ID": "7", **environment}  # fmt: skip
        return subprocess.Popen(["bash", str(ROOT / "launch/slurm.sbatch"), *arguments], cwd=cwd, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    return start


def log(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("status", "environment", "requeued"),
    [
        (0, {}, False),
        (1, {}, False),
        (2, {}, False),
        (INTERRUPTED, {}, False),
        (STOPPED, {}, True),
        (STOPPED, {"SLURM_RESTART_COUNT": "40"}, True),
        (STOPPED, {"STATE": "SIGNALING"}, True),
        (STOPPED, {"STATE": "COMPLETING"}, False),  # Slurm has cancelled or requeued it
        (HUNG, {}, True),
        (LOST, {"SLURM_RESTART_COUNT": "40"}, True),
        (HUNG, {"RESTARTS_AFTER_FAILURE": "0"}, False),
        (HUNG, {"STATE": "COMPLETING"}, False),
        (128 + signal.SIGKILL, {}, True),
    ],
)
def test_a_status_is_passed_on_and_the_job_requeued_at_most_once(status, environment, requeued, batch, tmp_path: Path):
    running = batch(status, "c.yml", **environment)
    running.communicate(timeout=20)
    assert running.returncode == status
    assert log(tmp_path)[1:] == (["scontrol requeue 7"] if requeued else [])


def test_failures_are_counted_until_a_start_lasts(batch, tmp_path: Path):
    def requeued(status: int, **environment: str) -> bool:
        (tmp_path / "log").unlink(missing_ok=True)
        batch(status, "c.yml", cwd=folder, **environment).communicate(timeout=20)
        return log(tmp_path)[1:] == ["scontrol requeue 7"]

    folder = tmp_path / "submitted"
    folder.mkdir()
    (folder / "train.py").touch()
    assert [requeued(status) for status in (HUNG, STOPPED, LOST, HUNG)] == [True] * 4
    assert not requeued(HUNG)
    assert not [*folder.glob("*.failures")]  # submitted again, it has all three once more
    assert [requeued(HUNG) for _ in range(3)] == [True] * 3
    assert requeued(HUNG, FORGET_FAILURES_AFTER="0")
    assert requeued(HUNG)
    assert not requeued(0)
    assert not [*folder.glob("*.failures")]


def test_train_py_gets_the_arguments_whole(batch, tmp_path: Path):
    batch(0, "c.yml", "prompt=a  cat", "unet={a: [1, 2]}", PYTHON="a python").communicate(timeout=20)
    (line,) = log(tmp_path)
    assert line.endswith("<a python><train.py><c.yml><prompt=a  cat><unet={a: [1, 2]}>")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("status", [STOPPED, 128 + signal.SIGUSR1])  # the second: before train.py could hear it
def test_a_signal_reaches_srun_as_usr1(number: int, status: int, batch, tmp_path: Path):
    running = batch(status, "c.yml", WAIT="yes", SLURM_RESTART_COUNT="9")
    end = time.monotonic() + 10
    while not log(tmp_path) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)  # srun is started a moment before the script waits for signals
    running.send_signal(number)
    running.communicate(timeout=20)
    assert running.returncode == status
    assert log(tmp_path)[1:] == ["srun heard USR1", "scontrol requeue 7"]


def test_slurm_sbatch_says_how_it_is_used(batch, tmp_path: Path):
    for running in (batch(0), batch(0, "c.yml", cwd=tmp_path)):
        said, _ = running.communicate(timeout=20)
        assert "usage, from the repository's root: sbatch launch/slurm.sbatch CONFIG.yml" in said
        assert running.returncode == 2
    assert log(tmp_path) == []


# --- Sweeps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("1e-4,1e-5", ["1e-4", "1e-5"]),
        ("[a, b]", ["[a, b]"]),
        ("{a: [1, 2], b: 3},{}", ["{a: [1, 2], b: 3}", "{}"]),
        ("shards/{a,b}.tar,c.tar", ["shards/{a,b}.tar", "c.tar"]),
        ("'a, b',c", ["'a, b'", "c"]),
        ("['a]', b],c", ["['a]', b]", "c"]),
        ("a dog's life,cat", ["a dog's life", "cat"]),
    ],
)
def test_a_comma_separates_alternatives(text: str, expected: list[str]):
    assert sweep.alternatives(text) == expected


KEYS = ["run_name=s", "output_dir=out", "train_data_dir=d"]


def test_a_dry_run_prints_what_would_be_started(capsys):
    arguments = [str(ROOT / "configs" / "tpu" / "v4-8.yml"), "learning_rate=1e-4,1e-5", "seed=0,1", "validation_prompts=[a, b]",
                 "variant=variant"]  # fmt: skip
    assert sweep.main(["--dry-run", BASE, *KEYS, *arguments]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    names = [f"s-learning_rate_{rate}-seed_{seed}" for rate in ("1e-4", "1e-5") for seed in (0, 1)]
    for command, name in zip(commands, names, strict=True):
        assert command[:5] == ["sbatch", f"--job-name={name}", "--dependency=singleton", "launch/slurm.sbatch", BASE]
        config = load_config(command[4], command[5:])
        assert config.run.run_name == name
        assert config.sampling.validation_prompts == ("a", "b")
        assert (config.optimizer.shard_optimizer, config.model.variant) == (True, "variant")
    assert load_config(BASE, commands[1][5:]).run.seed == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sed=1,2"], "s-sed_1: the command line: there is no key 'sed'; did you mean 'seed'?"),
        (["remat=full,some"], "s-remat_some: remat='some' is not supported (allowed: 'none', 'full', 'selective', 'dots')"),
        (["seed=0,0"], "seed=0,0: an alternative stands twice"),
        (["seed=0,"], "seed=0,: an alternative is empty"),
        (["seed=0", "seed=1"], "seed stands twice (allowed: once, with its alternatives between commas: seed=1,2)"),
        (["learning_rate=1e-4,0.0001"], "s-learning_rate_1e-4 and s-learning_rate_0.0001 have the same values"),
        (["mesh_axes=[data"], "'[data' has no closing ]"),
        (["verbose"], "'verbose' is not of the form key=value"),
        (["--submit", "no-such-program"], "--submit='no-such-program' is no command here (allowed: 'sbatch launch/slurm.sbatch'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_started(arguments, message: str, capsys, tmp_path: Path):
    submit = ["--submit", f"{program(tmp_path / 'starts', STARTS)}"]
    assert sweep.main([*submit, BASE, *KEYS, *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize(("given", "message"), [
    (["output_dir=out", "train_data_dir=d"], "run_name=: a sweep needs one, to which it adds each run's values"),
    (["run_name=a,b", "output_dir=out"], "run_name=a,b: a sweep needs one"),
    (["run_name=a", "seed=1,2", "train_data_dir=d"], "a-seed_1: output_dir is required"),
])  # fmt: skip
def test_a_sweep_needs_a_name_and_a_place(given: list[str], message: str, capsys):
    assert sweep.main(["--dry-run", BASE, *given]) == 2
    assert message in capsys.readouterr().err


def test_names_are_valid_and_each_its_own():
    values = ["a b", "a_b", "a/b", "[a, b]", "x" * 400, "x" * 401]
    names = [sweep.run_name("s", [("prompt", value)]) for value in values]
    assert len({*names}) == len(values)
    assert all(re.fullmatch(r"[A-Za-z0-9_.+-]{1,140}", name) for name in names)
    assert names[1] == "s-prompt_a_b"


def test_runs_are_submitted_in_order_until_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program(tmp_path / "bin" / "sbatch", STARTS)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", f"{tmp_path}/log")
    assert sweep.main([BASE, *KEYS, "seed=0,1", "unet={},{layers_per_block: 1}"]) == 0
    calls = (tmp_path / "log").read_text().split("\n\n")[:-1]
    assert len(calls) == 4
    name, *rest = calls[0].splitlines()
    assert re.fullmatch(r"--job-name=s-seed_0-unet__-[0-9a-f]{8}", name)
    assert rest == [
        "--dependency=singleton",
        "launch/slurm.sbatch",
        BASE,
        f"run_name={name[11:]}",
        *KEYS[1:],
        "seed=0",
        "unet={}",
    ]
    monkeypatch.setenv("STATUS", "3")
    monkeypatch.setenv("LOG", f"{tmp_path}/failing")
    here = program(tmp_path / "here", STARTS)
    assert sweep.main(["--submit", f"{here} train.py", BASE, *KEYS, "seed=0,1"]) == 1
    assert (tmp_path / "failing").read_text().splitlines() == ["train.py", BASE, "run_name=s-seed_0", *KEYS[1:], "seed=0", ""]


def test_runs_that_are_done_are_skipped(capsys, tmp_path: Path):
    run = tmp_path / "s-seed_0"
    arguments = ["run_name=s", f"output_dir={tmp_path}", "train_data_dir=d"]

    def skipped(examples: int = 40) -> list[bool]:
        assert sweep.main(["--dry-run", BASE, *arguments, "seed=0,1", f"num_examples_to_see={examples}"]) == 0
        return [line.startswith("# done: sbatch ") for line in capsys.readouterr().out.splitlines()]

    (run / "checkpoints" / "10").mkdir(parents=True)
    (run / "pipeline" / "unet").mkdir(parents=True)
    assert skipped() == [False, False]
    (run / "config.yml").write_text(write_config(load_config(BASE, [*arguments, "global_batch_size=4"])))
    assert skipped() == [False, False]  # not exported
    (run / "pipeline" / "unet" / "w.safetensors").touch()
    assert skipped() == [True, False]
    assert skipped(44) == [False, False]
    (run / "lock.json").touch()
    assert skipped() == [False, False]
    (run / "lock.json").unlink()
    os.utime(run / "pipeline" / "unet" / "w.safetensors", (1, 1))  # that of a shorter run, which was made longer
    assert skipped() == [False, False]


# --- Kubernetes --------------------------------------------------------------------------------------------------


def test_the_jobset_starts_what_train_py_takes_and_knows_its_statuses():
    jobset = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:2] == ["python", "train.py"]
    config = load_config(ROOT / container["command"][2], container["command"][3:])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert [config.run.output_dir.startswith(f"{path}/") for path in mounts] == [True]
    assert config.safety.hang_timeout_seconds > 0
    assert job["parallelism"] == job["completions"]
    assert {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule} == {
        container["name"]
    }

    def action(status: int) -> str:
        """Of JobSet, for a pod that ended so: Kubernetes' message, and the first rule that it meets."""
        for place, rule in enumerate(job["podFailurePolicy"]["rules"]):
            if status in rule.get("onExitCodes", {"values": []})["values"]:
                message = f"Container train for pod a/b failed with exit code {status} matching FailJob rule at index {place}"
                rules = jobset["spec"]["failurePolicy"]["rules"]
                return next(r["action"] for r in rules if re.search(r["onJobFailureMessagePatterns"][0], message))
        return "RestartJobSet"

    assert action(STOPPED) == "RestartJobSetAndIgnoreMaxRestarts"
    assert [action(status) for status in (1, 2, INTERRUPTED)] == ["FailJobSet"] * 3
    assert [action(status) for status in (HUNG, 128 + signal.SIGKILL)] == ["RestartJobSet"] * 2
