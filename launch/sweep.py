"""Starts one run for each combination of values.

    python launch/sweep.py [--dry-run] [--submit COMMAND] CONFIG.yml run_name=sweep output_dir=/shared/runs \
        learning_rate=1e-4,1e-5 seed=0,1

A comma separates alternatives. A value in brackets, braces or quotes is one value, and so are the items of a list of such:
`data_mix=[[a, 1], [b, 2]]` is one, `unet={...},{...}` are two, `prompt="a, b"` (with the quotes reaching this program) is one.
The run of a combination is called `run_name`, then the keys with alternatives and their values:
`sweep-learning_rate_1e-4-seed_0`. The name depends on nothing else, so that the same command, with other alternatives too,
goes on with the runs that were begun, and skips those that are done.

COMMAND gets CONFIG.yml and key=value as train.py does. `sbatch ...`, by default `sbatch launch/slurm.sbatch`, queues a job for
each run, which has the run's name and waits for any other job of that name. Another, such as --submit 'python train.py', makes
the runs here, one after the other. Before the first is started, all configurations are validated.
"""

import argparse
import hashlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from maxdiff import build
from maxdiff.checkpoint import newest_step
from maxdiff.config import Config, is_file_name, load_config

SUBMIT = "sbatch launch/slurm.sbatch"
LONGEST = 120  # of a run's name: folders' names end at 255 bytes, and a queue's table sooner
CLOSES = {"[": "]", "{": "}", "(": ")"}


def alternatives(text: str) -> list[str]:
    """The parts of a value between its commas, but those within brackets, braces and quotes.

    Raises:
        ValueError: for a bracket, a brace or a leading quote that is not closed.
    """
    parts, open_brackets, quote = [""], [], ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (open_brackets or not parts[-1].strip()):  # elsewhere it is an apostrophe
            quote = character
        elif character in CLOSES:
            open_brackets.append(CLOSES[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets:
            parts.append("")
            continue
        parts[-1] += character
    if quote or open_brackets:
        raise ValueError(f"{text!r} has no closing {quote or open_brackets[-1]}")
    return parts


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run: the run's own run_name, all further files, and one of the alternatives of each key.

    Raises:
        ValueError: for what is not key=value, a key or an alternative that stands twice, alternatives of run_name or
            output_dir, an empty one, or no run_name.
    """
    values: dict[str, list[str]] = {}
    files = [override for override in overrides if is_file_name(override)]
    for override in overrides:
        if override in files:
            continue
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} is not of the form key=value")
        if key in values:
            raise ValueError(f"{key} stands twice (allowed: once, with its alternatives between commas: {key}=1,2)")
        values[key] = [text] if key == "output_dir" else alternatives(text)
        if len(values[key]) > 1 and "" in values[key]:
            raise ValueError(
                f"{override}: an alternative is empty (allowed: values between commas; '' in quotes is the empty text)"
            )
        if len({*values[key]}) < len(values[key]):
            raise ValueError(f"{override}: an alternative stands twice")
    if len(values.get("run_name", [])) != 1 or not values["run_name"][0]:
        raise ValueError(
            f"run_name={','.join(values.get('run_name', []))}: a sweep needs one, to which it adds each run's values"
        )
    (sweep,) = values.pop("run_name")
    made = []
    for chosen in itertools.product(*values.values()):
        pairs = list(zip(values, chosen, strict=True))
        name = run_name(sweep, [(key, value) for key, value in pairs if len(values[key]) > 1])
        made.append([f"run_name={name}", *files, *(f"{key}={value}" for key, value in pairs)])
    return made


def run_name(sweep: str, chosen: Sequence[tuple[str, str]]) -> str:
    """A name for the run with these values, which is that of no other: what it cannot say is in a checksum at its end."""
    said = "-".join([sweep, *(f"{key}_{value}" for key, value in chosen)])
    name = re.sub(r"[^\w.+-]+", "_", said, flags=re.ASCII)
    if name == said and len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def check(path: str, runs: Sequence[Sequence[str]]) -> list[Config]:
    """Every run's configuration; ValueError or FileNotFoundError, naming the run, if one is wrong, or two are the same."""
    configs: list[Config] = []
    for overrides in runs:
        try:
            config = load_config(path, overrides)
            build.require(config, "run_name", "output_dir", "train_data_dir")
        except ValueError as error:
            raise ValueError(f"{overrides[0]}: {error}") from None
        configs.append(config)
    unnamed = [replace(config, run=replace(config.run, run_name="")) for config in configs]
    for (one, first), (two, second) in itertools.combinations(zip(configs, unnamed, strict=True), 2):
        if first == second:
            raise ValueError(f"{one.run.run_name} and {two.run.run_name} have the same values")
    return configs


def is_done(config: Config) -> bool:
    """Whether the run has made all its steps, and exported what it learnt."""
    saved = config.run.folder / "config.yml"
    if not saved.is_file() or (config.run.folder / "lock.json").exists():
        return False
    # How many examples a step has, it settled when it began.
    batch = load_config(saved).batch.global_batch_size
    step = newest_step(config.run.folder / "checkpoints")
    if step is None or step < config.batch.steps(batch):
        return False
    newest = (config.run.folder / "checkpoints" / str(step)).stat().st_mtime
    trained = ["vae"] if config.model.train_vae else ["unet"]
    if config.model.train_text_encoder:
        trained += ["text_encoder", "text_encoder_2"]
    # The folder of each part is there from the start, with its weights from the end.
    parts = [part for name in trained if (part := config.run.folder / "pipeline" / name).is_dir()]
    return all(any(file.stat().st_mtime >= newest for file in part.glob("*.safetensors")) for part in parts)


def start(command: Sequence[str], name: str) -> None:
    """Do it; raises RuntimeError if it fails."""
    if status := subprocess.run(command).returncode:
        raise RuntimeError(f"{name} ended with status {status}; the same sweep goes on from here")


def main(argv: Sequence[str]) -> int:
    """The command line; exit status 2 for a mistake, before anything is started, and 1 if a run cannot be started or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and do nothing")
    parser.add_argument("--submit", default=SUBMIT, metavar="COMMAND", help=f"what starts a run; {SUBMIT!r} if not given")
    parser.add_argument("config", metavar="CONFIG.yml")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    args = parser.parse_intermixed_args(argv)
    try:
        submit = shlex.split(args.submit)
        if not submit or (not args.dry_run and not shutil.which(submit[0])):
            raise ValueError(f"--submit={args.submit!r} is no command here (allowed: {SUBMIT!r}, 'python train.py', ...)")
        runs = combinations(args.overrides)
        configs = check(args.config, runs)
        done = [is_done(config) for config in configs]
    except (ValueError, OSError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    queues = submit[0] == "sbatch"
    for overrides, config, skipped in zip(runs, configs, done, strict=True):
        name = config.run.run_name
        options = [f"--job-name={name}", "--dependency=singleton"] if queues else []
        command = [submit[0], *options, *submit[1:], args.config, *overrides]
        print(f"{'# done: ' if skipped else ''}{shlex.join(command)}", flush=True)
        if not skipped and not args.dry_run:
            try:
                start(command, name)
            except RuntimeError as error:
                print(f"sweep.py: {error}", file=sys.stderr)
                return 1
    print(f"{len(runs)} runs, of which {sum(done)} are done already", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
