"""One run in several processes: how they find each other, who speaks, and how weights come together."""

import os
import warnings
from typing import Any

import jax
from jax.experimental import multihost_utils

from maxdiff.config import Run


def start(run: Run) -> None:
    """Join the other processes of this job, before anything else asks jax for its devices.

    1. skip_jax_distributed_system: this process is alone.
    2. coordinator_address, num_processes and process_id, or JAX's environment variables of these names.
    3. What a TPU pod, Slurm, Open MPI or Kubernetes says of itself; without any of them this process is alone.

    Raises:
        ValueError: for a coordinator without the number of processes, or the other way round.
    """
    if run.skip_jax_distributed_system:
        return
    given = {"num_processes": run.num_processes, "process_id": run.process_id}
    if run.coordinator_address:
        if not 0 <= run.process_id < run.num_processes:
            shown = ", ".join(f"{key}={value}" for key, value in given.items())
            raise ValueError(f"{shown}: with coordinator_address, 0 <= process_id < num_processes is needed")
        jax.distributed.initialize(run.coordinator_address, run.num_processes, run.process_id)
        return
    for key, value in given.items():
        if value != -1:
            raise ValueError(f"{key}={value} needs coordinator_address")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clusters that it recognises but has no client for
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if "coordinator_address" not in str(error) or "JAX_COORDINATOR_ADDRESS" in os.environ:
                raise
            # No cluster: this process is alone.


def say(text: str) -> None:
    """Print a line, from the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def gather(tree: Any) -> Any:
    """Arrays that any process can read, whichever devices have their parts; every process calls it."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)
