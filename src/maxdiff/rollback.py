"""Going back to the last good checkpoint, and past the data that spoilt what came after it."""

import dataclasses
import json
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxdiff.checkpoint import Checkpoints, restore_latest, root_cause
from maxdiff.config import Config, Safety
from maxdiff.data.encoded import EncodedSource
from maxdiff.data.examples import BadExample, Source
from maxdiff.data.pipeline import BatchPlan, step_examples
from maxdiff.processes import say
from maxdiff.state import TrainState

logger = logging.getLogger(__name__)

REPORT = "rollbacks.jsonl"
# Examples of the batches that were bad, named in the report.
MAX_NAMED = 1024


def roll_back(
    config: Config, checkpoints: Checkpoints, abstract: TrainState, state: TrainState, source: Source | EncodedSource,
    plan: BatchPlan,
) -> TrainState:  # fmt: skip
    """The state to go on from: the last checkpoint's, with the next batch after all that were drawn.

    The batches between that checkpoint and the first bad one are passed over too: what was made of them is thrown away.

    Raises:
        ValueError: past max_rollbacks, or if there is no checkpoint yet.
    """
    safety, report = config.safety, config.run.folder / REPORT
    spoilt, first, drawn = int(state.step), int(state.health.bad_batch), int(state.health.batch)
    count = int(state.health.rollbacks) + 1
    jax.tree.map(lambda leaf: leaf.delete(), state)  # there may be no room for two
    why = f"more than max_skipped_steps={safety.max_skipped_steps} updates in a row were skipped"
    if safety.max_loss_spike:
        why += f", or a loss was more than max_loss_spike={safety.max_loss_spike:g} times its mean"
    what = f"step {spoilt}: {why}, from batch {first} on (its examples are named in {config.run.shown(report)})"
    if jax.process_index() == 0:
        said = {"step": spoilt, "reason": why, "first_bad_batch": first, "next_batch": drawn,
                "examples": names(source, plan, range(first, drawn))}  # fmt: skip
        with report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(said, ensure_ascii=False) + "\n")
    try:
        checkpoints.wait()
    except Exception as error:  # of a save that failed; those before it are whole
        logger.error("A CHECKPOINT COULD NOT BE WRITTEN: %s", root_cause(error))
    if limit := reached(safety, count, checkpoints.steps()):
        raise ValueError(f"{what}; the run ends, as {limit}")
    step, good = restore_latest(checkpoints, abstract)
    say(f"{what}: going back to step {step}, and on with batch {drawn}, for the {count}. time of {safety.max_rollbacks}")
    # Made on the devices: arrays of one process cannot be sent to another's.
    new = {"batch": drawn, "rollbacks": count, "in_a_row": 0}
    later = jax.jit(
        lambda health: dataclasses.replace(health, **{name: jnp.int32(value) for name, value in new.items()}),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract.health),
    )
    return dataclasses.replace(good, health=later(good.health))


def reached(safety: Safety, count: int, checkpoints: Sequence[int]) -> str:
    """Why a run cannot go back for the `count`-th time; "" if it can."""
    if not checkpoints:
        return "there is no checkpoint yet"
    return f"max_rollbacks={safety.max_rollbacks} is reached" if count > safety.max_rollbacks else ""


def names(source: Source | EncodedSource, plan: BatchPlan, batches: range) -> list[str]:
    """The keys of the first examples of these batches."""
    found: list[str] = []
    for batch in batches:
        for index in step_examples(source, plan, batch)[2].tolist():
            if len(found) == MAX_NAMED:
                return found
            try:
                found.append(source.names(index)[0] if isinstance(source, EncodedSource) else source[index].key)
            except BadExample as error:
                found.append(error.key)
    return found
