"""Which examples, captions, timesteps and noise made a step: determinism that a person can look at.

    python -m maxdiff.audit configs/base14.yml run_name=my_run output_dir=runs step=1000

It is computed from the run's config.yml as the step itself did; metrics.jsonl says how many batches a run has passed over.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff import bucket, command, inputs
from maxdiff.config import Config
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.order import batch_positions
from maxdiff.data.pipeline import encoded_caption, load_example, step_examples
from maxdiff.diffusion.objective import draw_timesteps, drop_caption, example_keys
from maxdiff.diffusion.schedule import noise_schedule
from maxdiff.metrics import METRICS, read_metrics
from maxdiff.task import make_objective
from maxdiff.weights.checkpoint import open_checkpoint


def main(argv: Sequence[str]) -> int:
    """The command line: as train.py's, and step=N."""

    def action(config: Config, step: int | None) -> None:
        if step is None:
            raise ValueError("step=N is required: which step?")
        for line in audit(config, step):
            print(line)

    return command.run_on_step("maxdiff.audit", argv, action)


def audit(config: Config, step: int) -> Iterator[str]:
    """Lines about each example of optimizer step `step`, counted from 1, of a run with this configuration.

    Raises:
        ValueError, OSError: if there is no such step, or the run's data are not where they were.
    """
    bucket.fetch(config.run.place, config.run.folder, ["pipeline/scheduler", "pipeline/model_index.json"])
    if step > (last := config.batch.steps(config.batch.global_batch_size)):
        raise ValueError(f"step={step} is not one of the run's {last} steps")
    source, made = inputs.open_training(config), step - 1 + batches_ahead(config.run.folder, step)
    plan = inputs.with_buckets(config, inputs.make_plan(config), source)
    rows = np.arange(plan.global_batch)
    positions = batch_positions(made, plan.global_batch)
    size, epochs, wanted = step_examples(source, plan, made)
    key = jax.random.fold_in(jax.random.key(config.run.seed), made)
    noise = np.asarray(jax.random.key_data(example_keys(key, jnp.asarray(rows))))
    columns = {"noise key": [f"{high:08x}{low:08x}" for high, low in noise]}
    if not config.model.train_vae:
        schedule = noise_schedule(open_checkpoint(config.run.folder / "pipeline").scheduler())
        objective = make_objective(config, schedule)
        columns["timestep"] = [str(t) for t in np.asarray(draw_timesteps(objective, schedule, key, jnp.asarray(rows)))]
        dropped = np.asarray(drop_caption(objective, key, jnp.asarray(rows)))
    else:
        dropped = np.ones(len(rows), bool)
    yield f"step {step} of {config.run.place}: {plan.global_batch} examples of {len(source)}, seed {plan.seed}"
    yield "\t".join(["position", "epoch", "index", *columns, "crop", "example", "caption"])
    for row in rows:
        index, bad = int(wanted[row]), []
        if isinstance(source, EncodedSource):
            key, crop = source.names(index)[0], source[index]["crop"]
            caption = encoded_caption(source, plan, int(positions[row]), index)
        else:
            example = load_example(source, plan, int(positions[row]), index, size)
            index, key, caption, crop, bad = example.index, example.key, example.caption, example.picture.crop, example.bad
        yield "\t".join([str(positions[row]), str(epochs[row]), str(index), *(c[row] for c in columns.values()),
                         ",".join(map(str, crop)), key, "(none)" if dropped[row] else caption])  # fmt: skip
        for error in bad:
            yield f"\tinstead of the bad example {error}"


def batches_ahead(run: Path, step: int) -> int:
    """How many batches more than steps were drawn before `step`: those that the run has passed over (`rollback`)."""
    records = read_metrics(run) if (run / METRICS).is_file() else []
    # The first step after going back is logged always.
    before = [record for record in records if record["step"] <= step and "loss" in record]
    return int(before[-1].get("batches_ahead", 0)) if before else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
