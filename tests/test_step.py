"""Training steps end to end on tiny pipelines: exact across restarts, and they learn.

That meshes and processes change no loss is tested with whole runs, in test_processes.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiff.diffusion.objective import Objective
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.gradients import gradient_function
from maxdiff.losses import diffusion_losses
from maxdiff.models.network import flatten, unflatten
from maxdiff.optim import learning_rate_schedule, make_optimizer
from maxdiff.pipeline import Pipeline
from maxdiff.sharding import Layout, make_mesh
from maxdiff.state import abstract_state, describe, make_state, state_shardings
from maxdiff.step import Ema, make_train_step
from tests.test_sharding import AXES, MAXDIFFUSION_RULES

EXAMPLES = 8
OVERFIT_STEPS = 60


class Run:
    """What train.py would set up: a pipeline on a mesh, its UNet trained."""

    def __init__(self, folder: Path, sizes: tuple[int, int, int]):
        self.mesh = make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {}, devices=jax.devices()[: int(np.prod(sizes))])
        self.layout = Layout(self.mesh, MAXDIFFUSION_RULES)
        pipeline = Pipeline.load(folder)
        self.networks = {name: part.network for name, part in pipeline.networks()}
        shardings = {"unet": self.layout.shardings(self.networks["unet"])}
        self.optimizer = make_optimizer("adamw", lambda _: jnp.float32(1e-3), weight_decay=0.01)
        make = lambda: make_state({"unet": pipeline.unet.params}, self.optimizer, use_ema=True)
        self.abstract = abstract_state(make, self.optimizer, shardings)
        # Copied, as the step donates what it is given and these are kept.
        self.fresh = lambda: jax.device_put(jax.tree.map(jnp.copy, make()), state_shardings(self.abstract))
        whole = NamedSharding(self.mesh, P())
        frozen = {name: part.params for name, part in pipeline.networks() if name != "unet"}
        self.constants = jax.device_put({"frozen": frozen, "empty_ids": jnp.asarray(pipeline.tokenizer(""))}, whole)
        self.key = jax.device_put(jax.random.key(5), whole)
        specs = {"unet": unflatten(self.layout.specs(self.networks["unet"]).items())}
        losses = diffusion_losses(self.networks, Objective(caption_dropout=0.2), noise_schedule(pipeline.scheduler))
        step = make_train_step(gradient_function(losses, self.mesh, specs, 1), self.optimizer, Ema(0.9))
        self.step = jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(self.abstract), None))

    def batch(self, number: int) -> dict[str, jax.Array]:
        rng = np.random.default_rng(number)
        arrays = {
            "image": rng.integers(0, 256, (EXAMPLES, 16, 16, 3), np.uint8),
            "input_ids": rng.integers(0, 40000, (EXAMPLES, 77)).astype(np.int32),
            "position": np.arange(EXAMPLES, dtype=np.int32),
        }
        return jax.device_put(arrays, NamedSharding(self.mesh, P(("data", "fsdp"))))


@pytest.fixture(scope="module")
def alone(one_level: Path) -> Run:
    return Run(one_level, (1, 1, 1))


def test_moments_and_average_lie_as_the_parameters_do(folders):
    run = Run(folders["sd1"], (1, 8, 1))
    per_device = lambda tree: sum(int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(tree))
    params = per_device(run.abstract.params)
    assert params < 0.15 * run.networks["unet"].num_parameters()
    assert per_device(run.abstract.ema) == params
    assert per_device(run.abstract.opt_state) == pytest.approx(2 * params, rel=0.01)
    state = run.fresh()
    held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)) / 2**20
    for line, tree in zip(describe(run.abstract), (state.params, state.ema, state.opt_state), strict=True):
        assert line.endswith(f" MiB, {held(tree):.1f} MiB a device")


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion"])
def test_every_optimizers_state_has_a_place(folders, name: str):
    layout = Layout(make_mesh(AXES, {"data": 2, "fsdp": 4}, {}), MAXDIFFUSION_RULES)
    network = Pipeline.load(folders["sd1"]).unet.network
    optimizer = make_optimizer(name, lambda _: jnp.float32(1e-3))
    make = lambda: make_state({"unet": jax.tree.map(lambda s: jnp.zeros(s.shape), network.abstract())}, optimizer, use_ema=True)
    for updates in (None, {"unet": layout.update_shardings(network)}):
        for leaf in jax.tree.leaves(abstract_state(make, optimizer, {"unet": layout.shardings(network)}, updates)):
            leaf.sharding.shard_shape(leaf.shape)  # raises where the sharding is not for such a shape


def test_a_small_model_overfits_eight_images_and_its_average_follows(alone: Run, folders):
    losses = diffusion_losses(alone.networks, Objective(), noise_schedule(Pipeline.load(folders["sd1"]).scheduler))
    specs = jax.tree.map(lambda _: P(), alone.abstract.params)
    fixed = jax.random.key(11)  # the same noise and timesteps at every step
    gradients = gradient_function(
        lambda params, constants, batch: losses(params, {**constants, "key": fixed}, batch), alone.mesh, specs, 1
    )
    optimizer = make_optimizer("adamw", learning_rate_schedule("cosine", 5e-3, 10, OVERFIT_STEPS))
    whole = NamedSharding(alone.mesh, P())  # before the first step as after it, for which it would be compiled again
    step = jax.jit(make_train_step(gradients, optimizer, Ema(0.9)), donate_argnums=0, out_shardings=(whole, None))
    batch, start = alone.batch(0), jax.tree.map(jnp.copy, alone.fresh().params)
    state = jax.device_put(make_state(jax.tree.map(jnp.copy, start), optimizer, use_ema=True), whole)
    for number in range(OVERFIT_STEPS):
        state, metrics = step(state, alone.constants, batch, alone.key)
        if number == 0:
            assert float(metrics["loss"]) > 0.5
    assert float(metrics["loss"]) < 0.02
    path = ("unet", "conv_out", "kernel")
    average, current, before = (dict(flatten(tree))[path] for tree in (state.ema, state.params, start))
    # Between where the weights began and where they are.
    assert 0 < np.linalg.norm(average - current) < np.linalg.norm(current - before)


def test_sdxl_trains_on_size_and_crop(folders):
    pipeline = Pipeline.load(folders["sdxl"])
    assert pipeline.tokenizer_2 is not None
    networks = {name: part.network for name, part in pipeline.networks()}
    losses = diffusion_losses(networks, Objective(), noise_schedule(pipeline.scheduler))
    frozen = {name: part.params for name, part in pipeline.networks() if name != "unet"}
    constants: dict[str, Any] = {
        "frozen": frozen,
        "key": jax.random.key(0),
        "empty_ids": jnp.asarray(pipeline.tokenizer("")),
        "empty_ids_2": jnp.asarray(pipeline.tokenizer_2("")),
    }
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(rng.integers(0, 256, (2, 16, 16, 3), np.uint8)),
        "input_ids": jnp.asarray(pipeline.tokenizer(["a cat", "a dog"])),
        "input_ids_2": jnp.asarray(pipeline.tokenizer_2(["a cat", "a dog"])),
        "position": jnp.arange(2, dtype=jnp.int32),
        "original_size": jnp.array([[512, 640], [100, 120]], jnp.int32),
        "crop": jnp.zeros((2, 2), jnp.int32),
    }
    function = jax.jit(lambda b: losses({"unet": pipeline.unet.params}, constants, b))
    plain = function(batch)
    assert plain.shape == (2,)
    assert np.all(np.isfinite(plain))
    # Only the example whose crop changed has another loss.
    moved = function({**batch, "crop": batch["crop"].at[1].set(30)})
    assert plain[0] == moved[0]
    assert plain[1] != moved[1]
