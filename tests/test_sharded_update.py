"""The optimizer sharded over data: the same training with fewer bytes, and no more sent than must be."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiff import torus
from maxdiff.gradients import gradient_function
from maxdiff.models.network import flatten, unflatten
from maxdiff.optim import make_optimizer
from maxdiff.sharding import Layout, make_mesh
from maxdiff.state import TrainState, abstract_state, make_state, state_shardings
from maxdiff.step import Ema, ShardedUpdate, make_train_step
from tests.test_sharding import AXES, MAXDIFFUSION_RULES
from tests.tiny import tiny, tiny_batch, tiny_losses, tiny_params


def layout_of(*sizes: int) -> Layout:
    return Layout(make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {}), MAXDIFFUSION_RULES)


def train(layout: Layout, *, sharded: bool) -> tuple[list[float], TrainState, str]:
    """Losses of four steps, the state after them, the compiled step."""
    network = tiny(layout)
    stored, updates = layout.shardings(network), layout.update_shardings(network)
    optimizer = make_optimizer("adamw", lambda _: jnp.float32(1e-2), weight_decay=0.01)
    make = lambda: make_state(jax.tree.map(jnp.asarray, tiny_params()), optimizer, use_ema=True)
    abstract = abstract_state(make, optimizer, stored, updates if sharded else None)
    specs, update_specs = (unflatten(s.items()) for s in (layout.specs(network), layout.update_specs(network)))
    gradients = gradient_function(tiny_losses(network), layout.mesh, specs, 2, update_specs if sharded else None)
    step = make_train_step(gradients, optimizer, Ema(0.9), ShardedUpdate(stored, updates) if sharded else None)
    state, batch = jax.device_put(make(), state_shardings(abstract)), tiny_batch(layout)
    compiled = jax.jit(step, donate_argnums=0).lower(state, {}, batch, jax.random.key(0)).compile()
    losses = []
    for _ in range(4):  # the compiled step refuses a state that does not lie as the first did
        state, metrics = compiled(state, {}, batch, jax.random.key(0))
        losses.append(float(metrics["loss"]))
    return losses, state, compiled.as_text()


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_training_is_the_same_with_moments_and_average_split_over_data(sizes):
    layout = layout_of(*sizes)
    plain_losses, plain, _ = train(layout, sharded=False)
    losses, state, hlo = train(layout, sharded=True)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-6)
    assert losses[-1] < losses[0]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, state.params, plain.params)))
    # What tensor splits besides makes them smaller still.
    share = tiny().num_parameters() / (sizes[0] * sizes[1])
    assert per_device(state.ema) <= 1.02 * share
    assert per_device(state.opt_state) <= 1.02 * 2 * share
    if sizes == (8, 1, 1):
        assert per_device(state.ema) >= share
        check_collectives(hlo, layout)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1)])
def test_tpus_send_in_their_own_form_and_get_the_same(sizes, monkeypatch: pytest.MonkeyPatch):
    layout = layout_of(*sizes)
    plain, _, _ = train(layout, sharded=True)
    monkeypatch.setattr(torus, "on_tpu", lambda _: True)
    backwards = lambda mesh, axis: torus.Route([*range(mesh.shape[axis])][::-1], [[[*range(mesh.shape[axis])][::-1]]])
    monkeypatch.setattr(torus, "route", lambda mesh, axis: backwards(mesh, axis) if mesh.shape[axis] == 8 else torus.Route(
        [*range(mesh.shape[axis])], [None]))  # fmt: skip
    losses, _, hlo = train(layout, sharded=True)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    assert moved(hlo, "reduce-scatter")
    assert all(shape[-2:] == (8, 128) for shape in moved(hlo, "reduce-scatter"))


def per_device(tree) -> int:
    return sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(tree))


def check_collectives(hlo: str, layout: Layout):
    """Over data alone: each gradient is reduce-scattered and each new parameter gathered, once; all else is small."""
    shapes = {path: spec.shape for path, spec in tiny().specs.items()}
    shards = {path: s.shard_shape(shapes[path]) for path, s in flatten(layout.update_shardings(tiny()))}
    split = [path for path in shapes if shards[path] != shapes[path]]
    assert set(shapes) - set(split) == {("out", "bias")}  # 4 numbers for 8 devices
    assert moved(hlo, "reduce-scatter") == Counter(shards[path] for path in split)
    assert moved(hlo, "all-gather") == Counter(shapes[path] for path in split)
    assert set(moved(hlo, "all-reduce")) == {(), (4,)}
    assert not moved(hlo, "all-to-all") + moved(hlo, "collective-permute")


def moved(hlo: str, kind: str) -> Counter:
    """Shapes of what collectives of this kind give, and how often."""
    results = re.findall(rf"= (.*?) {kind}(?:-start)?\(", hlo)
    dims = (d for result in results for d in re.findall(r"\w+\[([\d,]*)\]", result))
    return Counter(tuple(int(n) for n in d.split(",") if n) for d in dims)
