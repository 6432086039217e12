import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff import build
from maxdiff.checkpoint import Checkpoints, restore_latest
from maxdiff.checkpoint_command import main
from maxdiff.checksums import checksums
from maxdiff.config import Config, Run
from maxdiff.loop import Loop
from maxdiff.sharding import make_mesh
from maxdiff.stop import Signals, Stopped
from maxdiff.watch import Watch

AXES = ("data", "fsdp")


def placed(tree, data: int, fsdp: int):
    """The tree on a mesh, the first dimension of each leaf split over fsdp where it can be."""
    mesh = make_mesh(AXES, {"data": data, "fsdp": fsdp}, {}, devices=jax.devices()[: data * fsdp])
    spec = lambda x: P("fsdp") if x.ndim and x.shape[0] % fsdp == 0 else P()
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def state(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "step": jnp.asarray(seed, jnp.int32),
        "params": {
            "blocks": {
                0: {"kernel": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)},
                1: {"bias": jnp.ones(3, jnp.bfloat16)},
            }
        },
        "moments": (jnp.asarray(rng.standard_normal((8, 4, 2)), jnp.float32), jnp.zeros((), bool)),
    }


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def test_saved_on_one_mesh_and_restored_on_another(tmp_path: Path):
    saved = placed(state(), 2, 4)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(7, saved, {"seed": 3})
    for data, fsdp in ((2, 4), (1, 2), (8, 1)):
        target = placed(state(1), data, fsdp)
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            assert checkpoints.steps() == [7]
            assert checkpoints.notes(7) == {"seed": 3}
            found = checkpoints.restore(7, abstract(target))
        assert_equal(found, saved)
        assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, target))


def test_a_state_may_be_donated_while_it_is_saved(tmp_path: Path):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + x.astype(x.dtype) if x.dtype != bool else x, s), donate_argnums=0)
    current = placed(state(), 2, 4)
    expected = jax.device_get(current)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, current)
        for _ in range(3):
            current = step(current)
        checkpoints.save(2, current)
        assert_equal(jax.device_get(checkpoints.restore(1, abstract(current))), expected)


def test_retention(tmp_path: Path):
    with Checkpoints(tmp_path, keep_last=2, keep_every=35) as checkpoints:
        for number in range(10, 101, 10):
            checkpoints.save(number, state())
        checkpoints.wait()
    with Checkpoints(tmp_path, keep_last=2, keep_every=35) as checkpoints:
        assert checkpoints.steps() == [40, 70, 90, 100]  # the first from 35 on, and from 70


def test_a_flipped_bit_is_noticed_and_its_leaf_named(tmp_path: Path):
    value = state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
        checkpoints.wait()
        kernel = value["params"]["blocks"][0]["kernel"]
        flipped = kernel.view(jnp.uint32).at[3, 2].add(1).view(jnp.float32)
        assert int(checksums({"x": kernel})["x"]) != int(checksums({"x": flipped})["x"])
        swapped = kernel.at[0].set(kernel[1]).at[1].set(kernel[0])
        assert int(checksums({"x": kernel})["x"]) != int(checksums({"x": swapped})["x"])


def size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize(
    ("choose", "message"), [(max, "1 is damaged: big differ"), (min, "1 cannot be restored: .*its list of arrays")]
)
def test_damaged_data_is_an_error_that_names_the_step(tmp_path: Path, choose, message: str):
    value = {"big": jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32), "small": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
    # The largest file holds the arrays' bytes, which Orbax does not check; the smallest their index, which it does.
    file = choose((p for p in (tmp_path / "1").rglob("d/*") if choose is max or p.parent.parent.name == "state"), key=size)
    data = bytearray(file.read_bytes())
    for position in range(len(data) // 2, len(data) // 2 + 4):
        data[position] ^= 0x55
    file.write_bytes(bytes(data))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(1, abstract(value))


def test_a_missing_file_and_a_missing_step(tmp_path: Path):
    value = state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2 \(there are: 1\)"),
    ):
        checkpoints.restore(2, abstract(value))
    for file in (tmp_path / "1").rglob("*"):
        if file.is_file() and "/d/" in file.as_posix():
            file.unlink()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="1 cannot be restored: "):
        checkpoints.restore(1, abstract(value))


def test_another_model_is_named_before_anything_is_read(tmp_path: Path):
    value = state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
        checkpoints.wait()
        other = {**value, "ema": jnp.ones(2)}
        with pytest.raises(ValueError, match="is of another model or optimizer: it lacks ema"):
            checkpoints.restore(1, abstract(other))
        with pytest.raises(ValueError, match="this run has no moments.0, moments.1"):
            checkpoints.restore(1, abstract({k: v for k, v in value.items() if k != "moments"}))
        half = {**value, "moments": (value["moments"][0].astype(jnp.bfloat16), value["moments"][1])}
        with pytest.raises(ValueError, match=r"moments.0 is float32\[8, 4, 2\], here bfloat16\[8, 4, 2\]"):
            checkpoints.restore(1, abstract(half))


KILLED = """
import sys, jax.numpy as jnp
from maxdiff.checkpoint import Checkpoints
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"x": jnp.ones(1000)})
    checkpoints.wait()
    print("saved", flush=True)
    n = 2
    while True:
        checkpoints.save(n, {"x": jnp.full((8_000_000,), n, jnp.float32)})
        n += 1
"""


def test_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with Checkpoints(tmp_path) as checkpoints:
        steps = checkpoints.steps()
        assert steps
        last = steps[-1]
        size = 1000 if last == 1 else 8_000_000
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = checkpoints.restore(last, {"x": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=here)})
        np.testing.assert_array_equal(found["x"], np.full(size, last, np.float32))
        checkpoints.save(last + 1, found)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps()[-1] == last + 1


def damage(folder: Path, how: str) -> None:
    """The largest file of a checkpoint, flipped in its middle, cut, or gone."""
    file = max((path for path in folder.rglob("*") if path.is_file()), key=size)
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture):
    value = lambda step: {"big": jnp.asarray(np.random.default_rng(step).standard_normal((256, 256)), jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, value(step))
    damage(tmp_path / "3", how)
    with Checkpoints(tmp_path) as checkpoints:
        step, found = restore_latest(checkpoints, abstract(value(0)))
        assert step == 2
        assert_equal(found, value(2))
        assert checkpoints.steps() == [1, 2]
        assert f"{tmp_path / '3'} " in caplog.text
        assert f"IT IS NOT USED, and kept as {tmp_path / 'damaged-3'}" in caplog.text
        checkpoints.save(3, value(3))  # another takes its place
        checkpoints.wait()
        assert restore_latest(checkpoints, abstract(value(0)))[0] == 3


def test_no_whole_checkpoint_is_an_error_and_another_model_no_damage(tmp_path: Path):
    value = {"big": jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="is of another model or optimizer: it lacks other"):
            restore_latest(checkpoints, abstract({"other": value["big"]}))
        assert checkpoints.steps() == [1]
    damage(tmp_path / "1", "flipped")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"no checkpoint of .* is whole \(damaged: .*damaged-1\)"),
    ):
        restore_latest(checkpoints, abstract(value))


def test_the_best_is_kept(tmp_path: Path):
    with Checkpoints(tmp_path, keep_last=1, keep_best=True) as checkpoints:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None), (5, 0.2)):
            checkpoints.save(step, {"x": jnp.ones(2)})
            if loss:
                checkpoints.losses[step] = loss
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 8 MB; only root may have one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("error", [
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17.74GiB"), OSError(errno.ESTALE, "Stale file handle"),
    MemoryError(),
])  # fmt: skip
def test_what_is_no_damage_sets_nothing_aside(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {"x": jnp.arange(4.0)}
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()

        def fails(*_: Any):
            raise ValueError("Orbax's") from error

        with monkeypatch.context() as patched:
            patched.setattr(checkpoints._checkpointer, "load", fails)
            with pytest.raises(ValueError, match="Orbax's"):
                restore_latest(checkpoints, abstract(state))
        assert checkpoints.steps() == [1]
        assert_equal(restore_latest(checkpoints, abstract(state))[1], state)


def test_what_is_only_read_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture):
    for command in ("list", "verify"):
        assert main([command, str(tmp_path / "nowhere")]) == 2
        assert f"there is no folder {tmp_path / 'nowhere' / 'checkpoints'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_signal_does_not_break_into_a_checkpoint_that_is_read():
    """Orbax would take it for damage."""
    reached = []

    def hears(*around: Any):
        with contextlib.ExitStack() as stack:
            for one in around:
                stack.enter_context(one)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            reached.append(True)

    with Signals() as signals, pytest.raises(Stopped, match="SIGTERM: stopped before the first step"):
        hears(signals.held())
    assert reached == [True]
    with Signals(), pytest.raises(Stopped, match="SIGTERM: stopped before the first step"):
        hears()
    assert reached == [True]


def test_orbax_asks_jax_for_no_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its questions, of other numbers than the loop's, would make the loop miss the step that all agreed on."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda number: asked.append(number) or False)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"x": jnp.zeros(2)})
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    assert not asked


def test_a_disk_that_becomes_read_only_loses_that_save_alone(small_disk: Path, caplog: pytest.LogCaptureFixture):
    value = lambda step: {"x": jnp.full(100, step, jnp.float32)}
    folder = small_disk / "r" / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        loop = Loop(Config(), None, {}, None, {}, 9, checkpoints, None, None, None, None, Watch(None))
        loop._save_now(1, value(1))
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        loop._save(2, value(2))
        loop._try(loop._saved)
        assert "A CHECKPOINT COULD NOT BE WRITTEN, the last whole one is of step 1; training goes on: " in caplog.text
        assert "Read-only file system" in caplog.text
        with pytest.raises(
            OSError, match="step 3 could not be saved, the last whole one is of step 1: .*Read-only file system"
        ):
            loop._save_now(3, value(3))
        with pytest.raises(ValueError, match=f"output_dir='{small_disk}' cannot be written to: .*Read-only|read-only"):
            build.make_folder(Config(run=Run(run_name="r", output_dir=str(small_disk))))
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        loop._save_now(4, value(4))
        assert checkpoints.steps() == [1, 4]
        assert_equal(checkpoints.restore(4, abstract(value(0))), value(4))


def test_a_full_disk_loses_that_save_alone(small_disk: Path, caplog: pytest.LogCaptureFixture):
    value = lambda step: {"noise": jnp.asarray(np.random.default_rng(step).standard_normal(500_000), jnp.float32)}  # 2 MB
    ballast = small_disk / "ballast"
    with Checkpoints(small_disk / "checkpoints") as checkpoints:
        watch = Watch(None)
        loop = Loop(Config(), None, {}, None, {}, 9, checkpoints, None, None, None, None, watch)
        loop._save(1, value(1))
        loop._try(loop._saved)
        ballast.write_bytes(bytes(5_000_000))
        loop._save(2, value(2))
        loop._try(loop._saved)
        assert "A CHECKPOINT COULD NOT BE WRITTEN, the last whole one is of step 1; training goes on: " in caplog.text
        assert checkpoints.steps() == [1]
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["1"]  # nothing of it takes any room
        with pytest.raises(OSError, match="step 3 could not be saved, the last whole one is of step 1: "):
            loop._save_now(3, value(3))
        ballast.unlink()
        loop._save_now(4, value(4))
        assert checkpoints.steps() == [1, 4]
        assert_equal(checkpoints.restore(4, abstract(value(0))), value(4))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    with Checkpoints(tmp_path / "r" / "checkpoints") as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, {"big": jnp.arange(65536.0)})
    assert main(["list", str(tmp_path / "r")]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["step", "2"], ["step", "4"]]
    assert main(["verify", str(tmp_path / "r")]) == 0
    assert "step 4: whole, 0.3 MB" in capsys.readouterr().out
    damage(tmp_path / "r" / "checkpoints" / "4", "flipped")
    assert main(["verify", str(tmp_path / "r")]) == 1
    said = capsys.readouterr().out
    assert "step 2: whole" in said
    assert "step 4: " in said
    assert "is damaged: big differ" in said
    for arguments, message in (
        (["list"], "which run?"),
        (["lost", str(tmp_path)], "'lost' is not one of list, verify, export"),
        (["list", str(tmp_path / "other")], "there is no folder "),
        (["verify", str(tmp_path / "r"), "step=3"], "has no checkpoint of step 3 (there are: 2, 4)"),
        (["export", str(tmp_path / "r")], "there is no configuration"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
