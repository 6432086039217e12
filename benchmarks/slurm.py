"""A run under launch/slurm.sbatch on a cluster of two nodes, played by this machine: interrupted, beside one that is not.

    python benchmarks/slurm.py      # as root; on Debian or Ubuntu it installs slurm-wlm and munge if they are missing

Slurm runs from a temporary folder, with its own configuration and ports, and is gone at the end. Both runs train a small model
on two nodes with a process each (CPU, gloo). One of them meets its time limit, a signal before its first step, a job with
priority and `scontrol requeue`, and each time has to save and to be queued again once. At the end every array of its last
checkpoint, every file of pipeline/ and every held-out loss must be that of the other, bit for bit. Prints a JSON line a start,
and one for all.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from crashes import ROOT, command, fingerprint  # beside this file
from together import free_port

from maxdiff.checkpoint import newest_step
from maxdiff.metrics import read_metrics

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
# After the time limit there are so many steps more: enough for the two interruptions that come after a few steps each.
MORE, A_FEW = 150, 3
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n.spool
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=15
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
# The first must be a name that resolves: JAX makes its host the coordinator. Slurm takes "localhost" for no name of a node.
HOST = os.uname().nodename
NODES = (HOST, f"{HOST}-second")


class Cluster:
    """Two nodes on this machine; a context manager, for one use."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        self._folder.mkdir(mode=0o755)
        for name in ("state", *(f"{node}.spool" for node in NODES)):
            (self._folder / name).mkdir()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=4000"
            for node in NODES
        )
        written = CONFIGURATION.format(host=HOST, port=free_port(), folder=self._folder, nodes=nodes)
        (self._folder / "slurm.conf").write_text(written)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self._start("munged", "--foreground", "--force", *(f"--{k}={self._folder}/munge.{v}" for k, v in files.items()))
            wait_until("munged listens", lambda: (self._folder / "munge.socket").exists(), 20)
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            wait_until(
                "both nodes are idle",
                lambda: self.ask("sinfo", "-h", "-N", "-o", "%T", check=False).split()[:2] == ["idle"] * 2,
                60,
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("scancel", "--user=root", check=False)  # what runs under slurmd outlives it
        with contextlib.suppress(RuntimeError):
            wait_until("no job is left", lambda: not self.ask("squeue", "-h", check=False), 40)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)

    def _start(self, *arguments: str) -> None:
        with (self._folder / f"{arguments[0]}.out").open("ab") as out:
            self._daemons.append(subprocess.Popen(arguments, env=self.environment, stdout=out, stderr=out))

    def ask(self, *arguments: str, check: bool = True, **environment: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(arguments, env={**self.environment, **environment}, cwd=ROOT, text=True, capture_output=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", number)))


def wait_until(what: str, is_so: Callable[[], bool], seconds: float) -> None:
    """Return when it is so; RuntimeError after so many seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError(f"after {seconds:g} s it is not so that {what}")
        time.sleep(0.1)


class Run:
    """A run under launch/slurm.sbatch; its job is that of the last `submit`."""

    def __init__(self, cluster: Cluster, folder: Path, cache: Path):
        folder.mkdir()
        self.output, self._cluster = folder / "runs", cluster
        self._printed, self._configuration = folder / "printed", folder / "run.yml"
        self._keys = [key for key in command(self.output, cache)[3:] if not key.startswith("max_train_steps=")]
        self.number, self._before = "", 0

    def set_steps(self, last: int) -> None:
        """The run's length from its next start on."""
        self._configuration.write_text(f"base: {ROOT}/configs/base.yml\nmax_train_steps: {last}\n")

    def submit(self, *options: str) -> None:
        """Give it to Slurm, with options of sbatch."""
        # Adam divides by the gradient's size, and eight examples are four on each node.
        keys = ["skip_jax_distributed_system=false", "global_batch_size=8", "checkpoint_every=-1", "adam_eps=1e-4",
                f"eval_data_dir={ROOT}/data/emoji/heldout-000000.tar", "eval_examples=16"]  # fmt: skip
        cores = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        self.number = self._cluster.ask(
            "sbatch", "--parsable", "--gpus-per-node=0", "--mem=1000", f"--output={self._printed}", *options,
            "launch/slurm.sbatch", str(self._configuration), *self._keys, *keys,
            **cores, PYTHON=sys.executable, PYTHONPATH=str(ROOT / "src"),
        ).strip()  # fmt: skip

    def fields(self) -> dict[str, str]:
        """Of its job."""
        return self._cluster.job(self.number)

    def steps(self) -> list[int]:
        """Those that were printed, in all starts."""
        return [int(number) for number in re.findall(r"^step (\d+)/", self.printed(), re.MULTILINE)]

    def printed(self) -> str:
        """In all starts."""
        return self._printed.read_text() if self._printed.exists() else ""

    def make_steps(self, count: int) -> None:
        """Wait until it has made so many more."""
        goal = len(self.steps()) + count
        self._wait(f"{count} steps are made", lambda: len(self.steps()) >= goal)

    def wait_for(self, line: str) -> None:
        """Wait until it prints a line that begins so, in its last start."""
        self._wait(f"{line!r} is printed", lambda: f"\n{line}" in self.printed()[self._before :])

    def interrupt(self, by: str, how: Callable[[], object]) -> None:
        """Do so, wait until the job is queued again, and start it at once; RuntimeError if it was not queued once."""
        restarts = int(self.fields()["Restarts"])
        how()
        began = time.monotonic()
        self._wait("the job is queued again", lambda: self.fields()["Reason"] == "BeginTime")
        seconds = time.monotonic() - began
        time.sleep(2)  # in which nobody may queue it again
        fields, saved = self.fields(), newest_step(self.output / "r" / "checkpoints")
        if fields["JobState"] != "PENDING" or int(fields["Restarts"]) != restarts + 1 or saved != self.steps()[-1]:
            raise RuntimeError(f"after {by}, step {saved} is saved and {self.steps()[-1]} was made last; the job is {fields}")
        print(json.dumps({"start": restarts + 1, "ended_by": by, "saved_step": saved,
                          "seconds_until_queued_again": round(seconds, 1)}), flush=True)  # fmt: skip

    def go_on(self) -> None:
        """Start at once, where Slurm lets a job that was queued again wait for two minutes; no time limit is met any more."""
        self._before = len(self.printed())
        self._cluster.ask("scontrol", "update", f"jobid={self.number}", "starttime=now", "timelimit=60")

    def finish(self) -> None:
        """Wait for its end."""
        self._wait("the job ends", lambda: self.fields()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
        if (state := self.fields()["JobState"]) != "COMPLETED":
            raise RuntimeError(f"the job is {state}:\n{self.printed()[-3000:]}")

    def held_out(self) -> dict[int, float]:
        """Step -> held-out loss."""
        name = "held_out_loss"
        return {record["step"]: record[name] for record in read_metrics(self.output / "r") if name in record}

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        try:
            wait_until(what, is_so, 400)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the job is {self.fields()}:\n{self.printed()[-3000:]}") from None


def trial(folder: Path) -> dict:
    """Both runs; the summary."""
    began = time.monotonic()
    with Cluster(folder / "cluster") as cluster:
        split = Run(cluster, folder / "split", folder / "cache")
        split.set_steps(1_000_000)
        # Slurm looks at time limits each half minute: the signal comes 30 to 60 seconds after the start.
        split.submit("--time=3", "--signal=B:USR1@150")
        split.interrupt("its time limit (--signal)", lambda: split.wait_for("SIGUSR1: saving"))
        last = split.steps()[-1] + MORE
        split.set_steps(last)
        split.go_on()
        split.wait_for("going on from step ")
        split.interrupt(
            "SIGUSR1 before its first step", lambda: cluster.ask("scancel", "--signal=USR1", "--batch", split.number)
        )
        split.go_on()
        split.make_steps(A_FEW)
        urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--mem=100", "--output=/dev/null", "--wrap=true"]
        split.interrupt("a job with priority (PreemptMode=REQUEUE)", lambda: cluster.ask(*urgent))
        split.go_on()
        split.make_steps(A_FEW)
        split.interrupt("scontrol requeue", lambda: cluster.ask("scontrol", "requeue", split.number))
        split.go_on()
        split.finish()
        starts = int(split.fields()["Restarts"]) + 1
        whole = Run(cluster, folder / "whole", folder / "cache")
        whole.set_steps(last)
        whole.submit()
        whole.finish()
        version = cluster.ask("sbatch", "--version").strip()
    expected, found = fingerprint(whole.output), fingerprint(split.output)
    different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return {"slurm": version, "steps": last, "starts": starts, "each_step_once": split.steps() == list(range(1, last + 1)),
            "compared": len(expected), "different": different[:8], "held_out_losses": whole.held_out(),
            "same_held_out_losses": split.held_out() == whole.held_out(),
            "seconds": round(time.monotonic() - began)}  # fmt: skip


def install() -> None:
    """See to it that Slurm is there."""
    if all(map(shutil.which, NEEDED)):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit(f"{', '.join(NEEDED)} are needed: apt-get install slurm-wlm munge")
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "slurm-wlm", "munge"]):
        subprocess.run(["apt-get", *arguments], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Print the lines; exit status 1 if anything differs."""
    install()
    if os.geteuid():
        raise SystemExit("only root may start Slurm's daemons")
    with tempfile.TemporaryDirectory() as name:
        summary = trial(Path(name))
    print(json.dumps(summary), flush=True)
    return int(bool(summary["different"]) or not (summary["each_step_once"] and summary["same_held_out_losses"]))


if __name__ == "__main__":
    sys.exit(main())
