"""Bad steps: skipped, counted, gone back on."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff import audit, build, inputs
from maxdiff.checkpoint import Checkpoints
from maxdiff.config import Config, load_config
from maxdiff.data import encode as encoding
from maxdiff.data.encoded import EncodedSource, write_shard
from maxdiff.data.order import example_index
from maxdiff.health import Guard, Health, after_batch, healthy, is_good
from maxdiff.metrics import read_metrics
from maxdiff.task import make_task
from maxdiff.train import train
from tests.test_keys import write_tar
from tests.test_runs import scratch

EXAMPLES, BATCH = 48, 8


def after(losses: list[float], guard: Guard) -> Health:
    health = healthy()
    for loss in losses:
        scalar = jnp.float32(loss)
        health = after_batch(health, guard, scalar, is_good(scalar, scalar))
    return health


def test_skips_are_counted_and_too_many_in_a_row_are_bad():
    nan, inf = np.nan, np.inf
    health = after([1.0, nan, inf, 2.0, nan], Guard(2))
    assert (int(health.batch), int(health.skipped), int(health.in_a_row), int(health.bad_batch)) == (5, 3, 1, -1)
    health = after([1.0, nan, nan, 1.0, nan, nan, nan, 1.0], Guard(2))
    assert (int(health.skipped), int(health.bad_batch)) == (5, 4)  # the first of the row, and it stays so
    assert int(after([nan], Guard(0)).bad_batch) == 0
    assert not is_good(jnp.float32(1), jnp.float32(inf))


def test_a_spike_is_a_loss_many_times_the_mean():
    assert int(after([1.0] * 5 + [2.9], Guard(10, 3.0)).bad_batch) == -1
    health = after([1.0] * 5 + [3.1, 1.0], Guard(10, 3.0))
    assert int(health.bad_batch) == 5
    assert float(health.usual_loss) == pytest.approx(1.0)  # it is no part of the mean
    assert int(after([1.0] * 5 + [30.0], Guard(10)).bad_batch) == -1
    assert float(after([2.0, 4.0], Guard()).usual_loss) == pytest.approx(0.99 * 2 + 0.01 * 4)


def configuration(data: Path, output: Path, *overrides: str) -> Config:
    config = scratch(output, "center_crop=true", "encoded_dtype=float32", f"encoded_dir={output / 'e'}", "checkpoint_every=24",
                     f"per_device_batch_size={BATCH // jax.device_count()}", *overrides)  # fmt: skip
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train_data_dir=str(data)))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Encoded data of which one example is infinite; its name, and the batch of the first epoch that it is in."""
    folder = tmp_path_factory.mktemp("spoilt")
    write_tar(folder / "one.tar", np.random.default_rng(0), EXAMPLES)
    config = configuration(folder / "one.tar", folder)
    task = make_task(config, build.layout_of(config), None)
    encoding.encode(config, task, inputs.open_examples(config, "train_data_dir"), folder / "e")
    batch, order = 3, example_index(config.run.seed, EXAMPLES, np.arange(EXAMPLES))[1]
    bad = int(order[batch * BATCH + 2])
    source = EncodedSource(folder / "e")
    rows = [source[i] for i in range(EXAMPLES)]
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    arrays["mean"][bad] = np.inf
    write_shard(folder / "e", 0, arrays, [source.names(i) for i in range(EXAMPLES)])
    return folder / "e", source.names(bad)[0], batch


def last_health(folder: Path) -> dict[str, int]:
    with Checkpoints(folder / "r" / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        names = ("batch", "skipped", "in_a_row", "bad_batch", "rollbacks")
        whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = checkpoints.restore(
            step, {f"health.{n}": jax.ShapeDtypeStruct((), np.int32, sharding=whole) for n in names}, part=True
        )
    return {name.removeprefix("health."): int(value) for name, value in found.items()} | {"step": step}


@pytest.mark.usefixtures("compiled_once")
def test_a_batch_that_is_not_finite(spoilt: tuple[Path, str, int], tmp_path: Path, capsys: pytest.CaptureFixture,
                                    caplog: pytest.LogCaptureFixture):  # fmt: skip
    data, name, batch = spoilt
    # Skipped: everything but step and batch stays as it was, and training goes on.
    state = train(configuration(data, tmp_path / "skipped", "max_train_steps=5"))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.ema)))
    assert last_health(tmp_path / "skipped") == {
        "step": 5,
        "batch": 5,
        "skipped": 1,
        "in_a_row": 0,
        "bad_batch": -1,
        "rollbacks": 0,
    }
    records = {record["step"]: record for record in read_metrics(tmp_path / "skipped" / "r") if "loss" in record}
    assert [record.get("skipped_steps", 0) for record in records.values()] == [0, 0, 0, 1, 1]
    assert not np.isfinite(records[batch + 1]["loss"])

    # Gone back on: the steps after the last checkpoint are made of the batches after the bad one.
    capsys.readouterr()
    train(configuration(data, tmp_path / "back", "max_train_steps=5", "max_skipped_steps=0"))
    said = capsys.readouterr().out
    assert f"from batch {batch} on (its examples are named in {tmp_path / 'back' / 'r' / 'rollbacks.jsonl'})" in said
    assert f"going back to step {batch}, and on with batch {batch + 1}, for the 1. time of 3" in said
    assert last_health(tmp_path / "back") == {
        "step": 5,
        "batch": 6,
        "skipped": 0,
        "in_a_row": 0,
        "bad_batch": -1,
        "rollbacks": 1,
    }
    (report,) = [json.loads(line) for line in (tmp_path / "back" / "r" / "rollbacks.jsonl").read_text().splitlines()]
    assert (report["step"], report["first_bad_batch"], report["next_batch"]) == (batch + 1, batch, batch + 1)
    assert name in report["examples"]
    assert len(report["examples"]) == BATCH
    losses = [record["loss"] for record in read_metrics(tmp_path / "back" / "r") if "loss" in record]
    assert len(losses) == 5
    assert np.isfinite(losses).all()
    # An audit knows that step 5 was made of the sixth batch.
    rows = list(audit.audit(load_config(tmp_path / "back" / "r" / "config.yml"), 5))[2:]
    assert [int(row.split("\t")[0]) for row in rows] == list(range(5 * BATCH, 6 * BATCH))
    # Up to there it is the other run, bit for bit.
    assert losses[:batch] == [record["loss"] for record in records.values()][:batch]

    # The limit: the error says where, and the checkpoint before it is whole.
    with pytest.raises(ValueError, match="the run ends, as max_rollbacks=0 is reached") as caught:
        train(configuration(data, tmp_path / "limit", "max_train_steps=5", "max_skipped_steps=0", "max_rollbacks=0"))
    assert f"after step {batch + 1} on host " in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith(f"the last checkpoint is of step {batch}")
    assert last_health(tmp_path / "limit")["step"] == batch
