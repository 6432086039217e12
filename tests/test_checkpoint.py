import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.checkpoint import Checkpoints, checksums
from maxdiff.sharding import make_mesh

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
    with Checkpoints(tmp_path, keep_last=2, keep_every=40) as checkpoints:
        for number in range(10, 101, 10):
            checkpoints.save(number, state())
        checkpoints.wait()
    with Checkpoints(tmp_path, keep_last=2, keep_every=40) as checkpoints:
        assert checkpoints.steps() == [40, 80, 90, 100]


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


@pytest.mark.parametrize(
    ("choose", "message"), [(max, "1 is damaged: big differ"), (min, "1 cannot be restored: .*its list of arrays")]
)
def test_damaged_data_is_an_error_that_names_the_step(tmp_path: Path, choose, message: str):
    value = {"big": jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32), "small": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, value)
    # The largest file holds the arrays' bytes, which Orbax does not check; the smallest their index, which it does.
    file = choose((p for p in (tmp_path / "1").rglob("d/*")), key=lambda p: p.stat().st_size)
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
