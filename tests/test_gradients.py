import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import parity
from maxdiff import build
from maxdiff.gradients import gradient_function, norm_function, sums_function
from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params, flatten, unflatten
from maxdiff.models.unet import UNet2DConditionModel, UNetConfig
from maxdiff.sharding import Layout, make_mesh
from tests.observe import small_task
from tests.test_runs import configuration
from tests.test_sharding import AXES, MAXDIFFUSION_RULES
from tests.tiny import tiny, tiny_batch, tiny_losses, tiny_params

CONFIG = {**parity.SMALL, "block_out_channels": (32,), "down_block_types": (parity.DOWN,), "up_block_types": (parity.UP,),
          "attention_head_dim": 4}  # fmt: skip
RULES = [*MAXDIFFUSION_RULES, ["mlp", "tensor"]]
EXAMPLES = 16


def network(compute: Compute | None = None) -> Network:
    return Network(UNet2DConditionModel, UNetConfig.from_dict(CONFIG), compute)


def inputs() -> tuple[Params, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32) * 0.1, network().abstract())
    x = {
        "sample": rng.standard_normal((EXAMPLES, 4, 4, 4), np.float32),
        "timesteps": rng.integers(0, 1000, EXAMPLES).astype(np.int32),
        "encoder_hidden_states": rng.standard_normal((EXAMPLES, 8, CONFIG["cross_attention_dim"]), np.float32),
        "target": rng.standard_normal((EXAMPLES, 4, 4, 4), np.float32),
    }
    return params, x


def losses(compute: Compute | None = None):
    """Each example's mean square error [b]."""
    apply = network(compute).apply

    def function(params: Params, constants: Any, batch: dict[str, Any]) -> jax.Array:
        del constants
        out = apply(params, batch["sample"], batch["timesteps"], batch["encoder_hidden_states"])
        return jnp.mean(jnp.square(out - batch["target"]), axis=(1, 2, 3))

    return function


def compile_on(sizes: tuple[int, int, int], accumulation: int, sharded: bool):
    """The compiled gradient on a mesh, its inputs placed there, and the shardings that it is to have."""
    mesh = make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {})
    layout = Layout(mesh, RULES)
    specs = unflatten(layout.specs(network()).items())
    compute = Compute(constrain=layout.constrain) if sizes[2] > 1 else Compute()
    params, batch = inputs()
    params = jax.device_put(params, layout.shardings(network()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(("data", "fsdp"))))
    update_specs = unflatten(layout.update_specs(network()).items()) if sharded else None
    gradients = gradient_function(losses(compute), mesh, specs, accumulation, update_specs)
    expected = layout.update_shardings(network()) if sharded else layout.shardings(network())
    return jax.jit(gradients).lower(params, {}, batch).compile(), params, batch, dict(flatten(expected))


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict]:
    params, batch = inputs()
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: jnp.mean(losses()(p, {}, batch))))(params)
    return float(loss), dict(flatten(gradient))


@pytest.mark.parametrize(
    ("sizes", "accumulation", "sharded"),
    [((8, 1, 1), 1, False), ((1, 8, 1), 2, False), ((2, 4, 1), 2, True), ((2, 2, 2), 2, False)],
)
def test_loss_and_gradients_are_those_of_one_device(sizes, accumulation: int, sharded: bool, expected):
    compiled, params, batch, shardings = compile_on(sizes, accumulation, sharded)
    loss, gradient = compiled(params, {}, batch)
    assert float(loss) == pytest.approx(expected[0], rel=1e-5)
    largest = max(float(np.linalg.norm(g)) for g in expected[1].values())
    for path, g in flatten(gradient):
        assert g.dtype == jnp.float32
        assert g.sharding.is_equivalent_to(shardings[path], g.ndim), path
        assert np.linalg.norm(g - expected[1][path]) <= 1e-5 * max(np.linalg.norm(expected[1][path]), 1e-2 * largest), path
    if sizes == (2, 4, 1):
        check_collectives(compiled.as_text())


BF16, F32 = "bfloat16", "float32"


@pytest.mark.parametrize(("sizes", "sharded", "dtype", "expected"), [
    # Whole convolutions of every device, before they are summed over devices.
    ((8, 1, 1), False, BF16, [((3, 3, 3, 32), BF16), ((3, 3, 32, 48), BF16)]),
    ((8, 1, 1), False, F32, [((3, 3, 3, 32), F32), ((3, 3, 32, 48), F32)]),
    ((8, 1, 1), True, BF16, [((3, 3, 3, 32), BF16), ((3, 3, 32, 48), BF16)]),
    # What each device has left, of products along their outputs too.
    ((2, 4, 1), False, BF16, [((3, 3, 3, 8), F32), ((3, 3, 32, 12), F32), ((64, 1), F32)]),
    ((2, 4, 1), False, F32, [((3, 3, 3, 8), F32), ((3, 3, 32, 12), F32), ((64, 1), F32)]),
    # Of what is scattered once more, along another dimension, nothing; conv_in's outputs are scattered twice.
    ((2, 4, 1), True, BF16, [((3, 3, 3, 4), F32), ((12, 32), F32)]),
])  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 2])
def test_which_gradients_are_turned(sizes, sharded: bool, dtype: str, expected: list, accumulation: int):
    """Those that lie in memory with their last dimension outermost, once each."""
    layout = Layout(make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {}), MAXDIFFUSION_RULES)
    network = tiny().with_compute(Compute(dtype=jnp.dtype(dtype)))
    specs, update_specs = (unflatten(of(network).items()) for of in (layout.specs, layout.update_specs))
    found = []

    def turned(gradient: jax.Array) -> jax.Array:
        found.append((gradient.shape, str(gradient.dtype)))
        return gradient

    gradients = gradient_function(
        tiny_losses(network), layout.mesh, specs, accumulation, update_specs if sharded else None, jnp.dtype(dtype), turned
    )
    params = jax.device_put(tiny_params(), layout.shardings(network))
    _, gradient = jax.eval_shape(gradients, params, {}, tiny_batch(layout))
    assert sorted(found) == sorted(expected)
    assert {str(g.dtype) for g in jax.tree.leaves(gradient)} == {F32}


def test_a_run_turns_them_by_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels, handed = SimpleNamespace(turned=object()), []
    monkeypatch.setattr(build, "gradient_function", lambda *args: handed.append(args[-1]))
    config, task = configuration(tmp_path, "global_batch_size=8"), small_task("unet")
    layout, optimizer = build.layout_of(config), build.make_adam(config, build.make_rates(config, task))
    abstract = build.abstract_of(config, layout, task, optimizer)
    for found in (kernels, None):
        monkeypatch.setattr(build, "fused_kernels", lambda norms, mesh, found=found: found)
        build.make_step(config, layout, task, optimizer, abstract, 1)
    assert handed == [kernels.turned, None]


def check_collectives(hlo: str):
    """Weights are gathered whole and gradients reduced, once each, outside of the accumulation's loop."""
    computations = re.split(r"\n(?=%?[\w.-]+ \(|ENTRY )", hlo)
    entry = next(c for c in computations if c.startswith("ENTRY"))
    kinds = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    assert not re.search(kinds, hlo.replace(entry, ""))  # nothing in a loop's body
    assert not re.search(r"(all-to-all|collective-permute)(?:-start)?\(", entry)
    shapes = {tuple(spec.shape) for spec in network().specs.values()}
    gathered = re.findall(r"f32\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", entry)
    assert gathered
    for dims in gathered:
        assert tuple(int(d) for d in dims.split(",") if d) in shapes, dims


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_the_norm_is_that_of_one_device(sizes):
    mesh = make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {})
    rng = np.random.default_rng(5)
    shapes = {"kernel": (3, 3, 128, 128), "table": (97, 512), "bias": (64,), "count": ()}
    specs = {"kernel": P(None, None, "fsdp", "tensor"), "table": P(None, ("data", "fsdp")), "bias": P("tensor"), "count": P()}
    gradient = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in gradient.items()}
    expected = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in gradient.values()))
    assert float(jax.jit(norm_function(mesh, specs))(placed)) == pytest.approx(expected, rel=1e-6)


def test_small_gradients_are_summed_over_devices_together():
    mesh = make_mesh(AXES, {"data": 2, "fsdp": 4, "tensor": 1}, {})
    params = {str(i): jnp.full(i + 1, 0.1) for i in range(20)}
    losses = lambda params, _, batch: batch["x"] * sum(jnp.sum(p) for p in params.values())
    gradients = gradient_function(losses, mesh, dict.fromkeys(params, P()))
    batch = {"x": jnp.arange(8.0)}
    _, gradient = jax.jit(gradients)(params, {}, batch)
    assert all(np.array_equal(gradient[name], np.full(p.shape, 3.5)) for name, p in params.items())
    sums = jax.jit(gradients).lower(params, {}, batch).as_text().count("all_reduce")
    assert sums <= 3  # the loss, and one of each axis


def test_a_batch_that_does_not_divide_is_an_error():
    params, batch = inputs()
    mesh = make_mesh(AXES, {"data": 8}, {})
    specs = jax.tree.map(lambda _: P(), params)
    gradients = gradient_function(losses(), mesh, specs, accumulation=4)
    with pytest.raises(
        ValueError, match="global batch of 16 does not divide into 8 devices \\(data x fsdp\\) and 4 micro-batches"
    ):
        gradients(params, {}, batch)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_sums_are_those_of_one_device_over_the_examples_that_count(sizes):
    layout = Layout(make_mesh(AXES, dict(zip(AXES, sizes, strict=True)), {}), RULES)
    counted = np.ones(EXAMPLES, np.float32)
    counted[[0, 3, 14, 15]] = 0
    plain, batch = tiny_batch(), tiny_batch(layout)
    batch["counted"] = jax.device_put(counted, batch["sample"].sharding.update(spec=P(("data", "fsdp"))))
    batch["sample"] = batch["sample"].at[15].set(jnp.nan)
    network = tiny(layout)

    def measures(params: Params, constants: Any, batch: dict[str, Any]) -> dict[str, jax.Array]:
        error = tiny_losses(network)(params, {}, batch)
        return {"loss": error.astype(jnp.bfloat16), "scaled": constants["scale"] * error, "examples": jnp.ones_like(error)}

    params = jax.device_put(tiny_params(), layout.shardings(network))
    specs = unflatten(layout.specs(network).items())
    sums = jax.jit(sums_function(measures, layout.mesh, specs))(params, {"scale": jnp.float32(3)}, batch)
    each = np.where(counted, jax.jit(tiny_losses(tiny()))(tiny_params(), {}, plain), 0)
    assert {name: (x.shape, x.dtype, x.sharding.is_fully_replicated) for name, x in sums.items()} == dict.fromkeys(
        ("loss", "scaled", "examples"), ((), jnp.float32, True)
    )
    assert float(sums["examples"]) == 12
    assert float(sums["scaled"]) == pytest.approx(3 * each.sum(), rel=1e-6)
    assert float(sums["loss"]) == pytest.approx(each.sum(), rel=2**-8)  # rounded example by example, summed in float32


def test_held_out_batches_must_divide_too():
    sums = sums_function(lambda *_: {}, make_mesh(AXES, {"data": 8}, {}), {})
    with pytest.raises(ValueError, match="global batch of 12 does not divide into 8 devices"):
        sums({}, {}, {"counted": jnp.ones(12)})
