"""Write a checkpoint of a run, which may still be training, into its pipeline/.

    python -m maxdiff.export configs/base14.yml run_name=my_run output_dir=runs [step=1000] [export_dtype=float16]

Training does the same when it ends. The mesh is as the run's configuration says; on another number of devices, give its
sizes here (ici_fsdp_parallelism=1).
"""

import sys
from collections.abc import Sequence

import jax

from maxdiff import build, command, inputs
from maxdiff.checkpoint import Checkpoints
from maxdiff.config import Config
from maxdiff.mirror import Mirror
from maxdiff.processes import start
from maxdiff.task import make_task
from maxdiff.train import export


def main(argv: Sequence[str]) -> int:
    """The command line: as train.py's, and step=N for another checkpoint than the latest."""

    def action(config: Config, step: int | None) -> None:
        start(config.run)
        export_step(config, step)

    return command.run_on_step("maxdiff.export", argv, action)


def export_step(config: Config, step: int | None) -> None:
    """Export a checkpoint of the run; the latest where `step` is None.

    Raises:
        FileNotFoundError, ValueError: if there is no such checkpoint, or it is damaged.
    """
    with Mirror(config.run, ["pipeline"], uploads=jax.process_index() == 0):
        layout = build.layout_of(config)
        with Checkpoints(config.run.checkpoints, read_only=True) as checkpoints:
            steps = checkpoints.steps()
            if not steps:
                raise FileNotFoundError(f"{checkpoints.folder} has no checkpoint yet")
            task = make_task(config, layout, config.run.folder / "pipeline")
            optimizer = build.make_adam(config, build.make_rates(config, task))
            abstract = build.abstract_of(config, layout, task, optimizer)
            state = checkpoints.restore(steps[-1] if step is None else step, abstract)
        source = inputs.open_training(config)
        export(config, layout, task, state, source, build.run_key(config, layout.mesh))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
