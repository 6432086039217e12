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

EXAMPLES, BATCH = 72, 8
# Batches of the first epoch with an infinite example: one alone, and two in a row.
BAD = (1, 4, 5)


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
    assert int(after([1.0] * 20 + [2.9], Guard(10, 3.0)).bad_batch) == -1
    assert int(after([1.0] * 19 + [3.1], Guard(10, 3.0)).bad_batch) == -1  # too early to know
    health = after([1.0] * 20 + [3.1, 1.0], Guard(10, 3.0))
    assert int(health.bad_batch) == 20
    assert float(health.usual_loss) == pytest.approx(1.0)  # it is no part of the mean
    assert int(after([1.0] * 20 + [30.0], Guard(10)).bad_batch) == -1
    assert float(after([2.0, 4.0], Guard()).usual_loss) == pytest.approx(0.99 * 2 + 0.01 * 4)


def configuration(data: Path, output: Path, *overrides: str) -> Config:
    config = scratch(output, "center_crop=true", "encoded_dtype=float32", f"encoded_dir={output / 'e'}", "checkpoint_every=24",
                     f"per_device_batch_size={BATCH // jax.device_count()}", *overrides)  # fmt: skip
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train_data_dir=str(data)))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Encoded data of which some examples are infinite, and the names of these."""
    folder = tmp_path_factory.mktemp("spoilt")
    write_tar(folder / "one.tar", np.random.default_rng(0), EXAMPLES)
    config = configuration(folder / "one.tar", folder)
    task = make_task(config, build.layout_of(config), None)
    encoding.encode(config, task, inputs.open_examples(config, "train_data_dir"), folder / "e")
    order = example_index(config.run.seed, EXAMPLES, np.arange(EXAMPLES))[1]
    bad = [int(order[batch * BATCH + 2]) for batch in BAD]
    source = EncodedSource(folder / "e")
    rows = [source[i] for i in range(EXAMPLES)]
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    arrays["mean"][bad] = np.inf
    names = [(key, *texts) for key, texts in map(source.names, range(EXAMPLES))]
    write_shard(folder / "e", 0, arrays, names, text=True)
    return folder / "e", [source.names(i)[0] for i in bad]


def last_health(folder: Path) -> dict[str, int]:
    with Checkpoints(folder / "r" / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        names = ("batch", "skipped", "in_a_row", "bad_batch", "rollbacks")
        whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        found = checkpoints.restore(
            step, {f"health.{n}": jax.ShapeDtypeStruct((), np.int32, sharding=whole) for n in names}, part=True
        )
    return {name.removeprefix("health."): int(value) for name, value in found.items()} | {"step": step}


def logged(folder: Path) -> list[dict]:
    """The records of steps."""
    return [record for record in read_metrics(folder / "r") if "loss" in record]


def test_a_batch_that_is_not_finite(spoilt: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture):
    data, names = spoilt
    keys = ("max_train_steps=6", "max_skipped_steps=1")
    # The first is skipped, and training goes on; of the next two in a row it goes back: the steps after the last
    # checkpoint are made of the batches after them.
    state = train(configuration(data, tmp_path / "back", *keys))
    said = capsys.readouterr().out
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.ema)))
    assert f"from batch 4 on (its examples are named in {tmp_path / 'back' / 'r' / 'rollbacks.jsonl'})" in said
    assert "going back to step 3, and on with batch 6, for the 1. time of 3" in said
    assert last_health(tmp_path / "back") == {
        "step": 6,
        "batch": 9,
        "skipped": 1,
        "in_a_row": 0,
        "bad_batch": -1,
        "rollbacks": 1,
    }
    (report,) = [json.loads(line) for line in (tmp_path / "back" / "r" / "rollbacks.jsonl").read_text().splitlines()]
    assert (report["step"], report["first_bad_batch"], report["next_batch"]) == (6, 4, 6)
    assert {*names[1:]} <= {*report["examples"]}
    assert names[0] not in report["examples"]
    assert len(report["examples"]) == 2 * BATCH
    records = logged(tmp_path / "back")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.get("skipped_steps", 0) for record in records] == [0, 1, 1, 1, 1, 1]
    losses = [record["loss"] for record in records]
    assert [bool(finite) for finite in np.isfinite(losses)] == [True, False, True, True, True, True]
    # An audit knows that step 5 was made of the eighth batch.
    rows = list(audit.audit(load_config(tmp_path / "back" / "r" / "config.yml"), 5))[2:]
    assert [int(row.split("\t")[0]) for row in rows] == list(range(7 * BATCH, 8 * BATCH))

    # The limit: the error says where, and the checkpoint before it is whole.
    with pytest.raises(ValueError, match="the run ends, as max_rollbacks=0 is reached") as caught:
        train(configuration(data, tmp_path / "limit", *keys, "max_rollbacks=0"))
    assert "after step 6 on host " in caught.value.__notes__[0]
    assert caught.value.__notes__[0].endswith("the last checkpoint is of step 3")
    assert last_health(tmp_path / "limit")["step"] == 3
    # Up to there it is the other run, bit for bit.
    np.testing.assert_array_equal(losses[:3], [record["loss"] for record in logged(tmp_path / "limit")][:3], strict=True)
