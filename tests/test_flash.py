"""A training step with the TPU's attention kernel, interpreted, beside the same with plain products, on meshes of 8 devices."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiff import build, inputs, task
from maxdiff.config import Config
from maxdiff.data.pipeline import load_batch
from maxdiff.models import attention
from maxdiff.state import make_state, state_shardings
from tests.test_runs import TINY_TEXT, TINY_VAE, configuration

# 16 x 16 latents, so 256 queries.
UNET = ("{block_out_channels: [32], down_block_types: [CrossAttnDownBlock2D], up_block_types: [CrossAttnUpBlock2D], "
        "layers_per_block: 1, attention_head_dim: 2, norm_num_groups: 8, cross_attention_dim: 32}")  # fmt: skip


def losses(config: Config, steps: int = 3) -> list[float]:
    layout = build.layout_of(config)
    config, accumulation = build.settle_batch(config, layout.mesh)
    made = task.make_task(config, layout, None)
    optimizer = build.make_adam(config, build.make_rates(config, made))
    abstract = build.abstract_of(config, layout, made, optimizer)
    step = build.make_step(config, layout, made, optimizer, abstract, accumulation)
    state = jax.device_put(make_state(made.initial(), optimizer, use_ema=True), state_shardings(abstract))
    source, plan = inputs.open_training(config), inputs.make_plan(config, build.batch_part(layout.mesh))
    found = []
    for number in range(steps):
        batch, _ = load_batch(source, list(made.tokenizers.values()), plan, number)
        placed = build.place(build.batch_sharding(layout.mesh), batch)
        state, scalars = step(state, made.constants, placed, build.run_key(config, layout.mesh))
        found.append(float(scalars["loss"]))
    return found


def test_losses_are_those_of_plain_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = [
        f"vae={TINY_VAE}",
        f"unet={UNET}",
        f"text_encoder={TINY_TEXT}",
        "resolution=32",
        "global_batch_size=8",
        "use_ema=true",
    ]
    plain = losses(configuration(tmp_path, *keys, "ici_fsdp_parallelism=4"))
    calls = []

    def interpreted(q, k, v, *, mask=None, precision=None):
        del mask, precision
        calls.append((q.shape, k.shape))
        return attention.splash(q, k, v, interpret=True)

    monkeypatch.setattr(task, "kernel", lambda *_: interpreted)
    of = functools.partial(configuration, tmp_path, *keys)
    np.testing.assert_allclose(losses(of("ici_fsdp_parallelism=4")), plain, rtol=1e-5)
    # On its own examples alone, and with a tensor axis on its own heads too.
    assert {(q[:3], k[1]) for q, k in calls} == {((1, 256, 2), 256), ((1, 256, 2), 77)}
    calls.clear()
    np.testing.assert_allclose(losses(of("ici_tensor_parallelism=2", "per_device_batch_size=2")), plain, rtol=1e-5)
    assert {(q[:3], k[1]) for q, k in calls} == {((2, 256, 1), 256), ((2, 256, 1), 77)}
