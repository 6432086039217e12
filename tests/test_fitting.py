"""Settings with which a step would fit, for steps that are made up."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from maxdiff import fitting
from maxdiff.config import Config, make_config
from maxdiff.task import REMAT

PARAMETERS = 1000
WEIGHTS = 4 * PARAMETERS


def prepare(config: Config) -> SimpleNamespace:
    """On 8 devices: weights, average and two moments of 4 bytes a number; no batch."""
    mesh, optimizer = config.mesh, config.optimizer
    fsdp = mesh.ici_fsdp_parallelism
    shape = {"data": 8 // fsdp, "fsdp": fsdp, "tensor": 1}
    moments = 2 * WEIGHTS // (2 if optimizer.moment_dtype == "bfloat16" else 1)
    split = 8 if optimizer.shard_optimizer else fsdp
    held = {"parameters": WEIGHTS // fsdp, "others": (WEIGHTS + moments) // split}
    devices = SimpleNamespace(flat=[object()] * 8)
    state = SimpleNamespace(params={"kernel": jax.ShapeDtypeStruct((PARAMETERS,), jnp.float32)})
    accumulation = config.batch.global_batch_size // (8 * config.batch.per_device_batch_size)
    return SimpleNamespace(
        config=config,
        accumulation=accumulation,
        mesh=SimpleNamespace(shape=shape, devices=devices),
        state=state,
        held=lambda: held,
    )


def nearest(has: int, an_example: int = 3000, **keys) -> list[dict]:
    config = make_config({"per_device_batch_size": 8, "global_batch_size": 64, **keys})
    step = prepare(config)
    needs = sum(step.held().values()) + WEIGHTS + 8 * an_example
    found = fitting.nearest(config, needs, has, prepare)
    assert all(predicted <= has for _, predicted in found)
    return [changes for changes, _ in found]


def test_one_change_is_nearer_than_two():
    # 16 kB of state, 4 kB of gradients, 24 kB of activations.
    assert nearest(40_000) == [
        {"shard_optimizer": True}, {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2}, {"moment_dtype": "bfloat16"},
        {"remat": "dots"}, {"per_device_batch_size": 4, "global_batch_size": 64},
    ]  # fmt: skip
    # Accumulated, a micro-batch's 4 kB of gradients lie beside their sums.
    assert nearest(27_900) == [{"remat": "selective"}, {"per_device_batch_size": 1, "global_batch_size": 64}]
    assert nearest(26_500) == [{"remat": "full"}]


def test_two_changes_where_one_is_not_enough():
    assert {"shard_optimizer": True, "remat": "full"} in nearest(16_000)
    found = nearest(17_000)
    assert {"shard_optimizer": True, "remat": "selective"} in found
    assert {"shard_optimizer": True, "per_device_batch_size": 1, "global_batch_size": 64} in found
    assert all(len({*changes} - {"global_batch_size", "ici_data_parallelism"}) == 2 for changes in found)


def test_the_batch_is_changed_last():
    """remat=dots needs with 1 what remat=full needs with 2."""
    found = nearest(18_000, an_example=9000)
    assert {"shard_optimizer": True, "remat": "full", "per_device_batch_size": 2, "global_batch_size": 64} in found


def test_every_recomputation_has_its_share():
    assert {*fitting.KEPT} == {*REMAT}
    for remat in REMAT:
        assert make_config({"remat": remat}).model.remat == remat


def test_what_is_so_already_is_no_change():
    found = nearest(28_000, remat="full", shard_optimizer=True, moment_dtype="bfloat16", an_example=10_000)
    assert found == [{"per_device_batch_size": 1, "global_batch_size": 64}]


def test_a_step_may_keep_less_than_its_gradients():
    # As XLA does where they are more than there is room for: less memory is still less.
    found = nearest(19_000, an_example=-300)
    assert {"shard_optimizer": True} in found


def test_what_cannot_be_prepared_is_no_choice():
    def sometimes(config: Config) -> SimpleNamespace:
        if config.optimizer.shard_optimizer:
            raise ValueError("nothing divides")
        return prepare(config)

    config = make_config({"per_device_batch_size": 8, "global_batch_size": 64})
    assert {"shard_optimizer": True} not in [changes for changes, _ in fitting.nearest(config, 44_000, 40_000, sometimes)]
    assert {"shard_optimizer": True} in [changes for changes, _ in fitting.nearest(config, 44_000, 40_000, prepare)]


def test_nothing_may_help():
    assert nearest(4_000) == []
    with pytest.raises(ValueError, match="remat='some'"):
        fitting.changed(make_config({}), {"remat": "some"})
