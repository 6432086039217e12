"""What the command lines of train.py, generate.py and the modules have in common."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from maxdiff.config import Config, load_config, write_config

BASE = Path(__file__).parent.parent.parent / "configs" / "base.yml"


def run(program: str, argv: Sequence[str], action: Callable[[Config], object]) -> int:
    """Do `action` with the configuration that the arguments give: `CONFIG.yml [key=value ...]`.

    `--help` prints every key, and `--print-config` the resolved configuration; neither does anything else.

    Returns:
        The exit status: 2 for a user's mistake, which is told in one line on stderr.
    """
    arguments = [argument for argument in argv if not argument.startswith("-")]
    options = [argument for argument in argv if argument.startswith("-")]
    usage = f"usage: {program} CONFIG.yml [key=value ...] [--print-config] [--help]"
    if "--help" in options or "-h" in options or not argv:
        print(f"{usage}\n\nThe keys, with their defaults:\n\n{BASE.read_text(encoding='utf-8') if BASE.is_file() else ''}")
        return 0
    try:
        if unknown := set(options) - {"--print-config"}:
            raise ValueError(f"there is no option {min(unknown)} (allowed: --print-config, --help, and key=value for keys)")
        if not arguments:
            raise ValueError(f"which configuration? {usage}")
        config = load_config(arguments[0], arguments[1:])
        if options:
            print(write_config(config), end="")
        else:
            action(config)
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0


def run_on_step(program: str, argv: Sequence[str], action: Callable[[Config, int | None], object]) -> int:
    """As `run`, for what looks at a run that was started: its own config.yml counts, under the keys given here.

    `step=N` among the arguments is passed on as a number; None without it.
    """
    steps = [argument.removeprefix("step=") for argument in argv if argument.startswith("step=")]
    rest = [argument for argument in argv if not argument.startswith("step=")]

    def on_run(config: Config) -> None:
        saved = config.run.folder / "config.yml"
        if not config.run.run_name or not saved.is_file():
            raise FileNotFoundError(f"there is no run in {config.run.folder} (run_name and output_dir are required)")
        if len(steps) > 1 or any(not step.isdigit() or int(step) < 1 for step in steps):
            raise ValueError(f"step={','.join(steps)} is not one step of the run (allowed: 1 or more)")
        overrides = [argument for argument in rest[1:] if not argument.startswith("-")]
        action(load_config(saved, overrides), int(steps[0]) if steps else None)

    return run(program, rest, on_run)
