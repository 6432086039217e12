"""What the command lines of train.py, generate.py and the modules have in common."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from maxdiff import bucket
from maxdiff.accelerators import add_flags, make_deterministic
from maxdiff.config import Config, load_config, write_config
from maxdiff.stop import Stopped

# What is told in one line, without a traceback.
MISTAKES = (ValueError, OSError)
LOST = 76  # the exit status of a run that lost what it needs, such as a process or a disk: another start may not
STEP = "[step=N]"
BASE = Path(__file__).parent.parent.parent / "configs" / "base.yml"


class Lost(OSError):
    """Something that the run needs does not answer any more, and that is nothing to change in its configuration."""


def run(program: str, argv: Sequence[str], action: Callable[[Config], object], more: str = "") -> int:
    """Do `action` with the configuration that the arguments give: `CONFIG.yml [OTHER.yml ...] [key=value ...]`.

    `--help` prints every key, and `--print-config` the resolved configuration; neither does anything else.

    Args:
        more: what the program itself takes besides, for its usage: "[step=N]".

    Returns:
        The exit status: 2 for a user's mistake, which is told in one line on stderr, and LOST for `Lost`; that of `Stopped`;
        130 after Ctrl-C.
    """
    arguments = [argument for argument in argv if not argument.startswith("-")]
    options = [argument for argument in argv if argument.startswith("-")]
    usage = f"usage: {program} CONFIG.yml [OTHER.yml ...] [key=value ...] {more and f'{more} '}[--print-config] [--help]"
    if "--help" in options or "-h" in options or not argv:
        print(f"{usage}\n\nThe keys, with their defaults:\n\n{BASE.read_text(encoding='utf-8') if BASE.is_file() else ''}")
        return 0
    try:
        if unknown := set(options) - {"--print-config"}:
            allowed = ", ".join([*re.findall(r"--[\w-]+", more), "--print-config", "--help"])
            raise ValueError(f"there is no option {min(unknown)} (allowed: {allowed}, and key=value for keys)")
        if not arguments:
            raise ValueError(f"which configuration? {usage}")
        config = load_config(arguments[0], arguments[1:])
        if options:
            print(write_config(config), end="")
        else:
            if config.run.deterministic:
                make_deterministic()
            if config.run.libtpu_init_args:
                add_flags("LIBTPU_INIT_ARGS", config.run.libtpu_init_args)
            action(config)
    except MISTAKES as error:
        return tell_mistake(program, error)
    except Stopped as stopped:
        print(f"{program}: {stopped}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    return 0


def tell_mistake(program: str, error: Exception) -> int:
    """Say what a user has to change, or what was in the way; returns the exit status."""
    print("\n".join([f"{program}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    return LOST if isinstance(error, Lost) else 2


def run_on_step(program: str, argv: Sequence[str], action: Callable[[Config, int | None], object]) -> int:
    """As `run`, for what looks at a run that was started: its own config.yml counts, under the keys given here.

    `step=N` among the arguments is passed on as a number; None without it.
    """
    rest, step = split_number(argv, "step")

    def on_run(config: Config) -> None:
        saved = saved_config(config, rest)
        if saved is None:
            raise FileNotFoundError(f"there is no run in {config.run.place} (run_name and output_dir are required)")
        action(saved, step())

    return run(program, rest, on_run, STEP)


def split_number(argv: Sequence[str], name: str) -> tuple[list[str], Callable[[], int | None]]:
    """The other arguments, and what gives N of `name=N`, or None without it; called, that raises ValueError."""
    numbers = [argument.removeprefix(f"{name}=") for argument in argv if argument.startswith(f"{name}=")]

    def number() -> int | None:
        if len(numbers) > 1 or any(not number.isdigit() or int(number) < 1 for number in numbers):
            raise ValueError(f"{name}={','.join(numbers)} is not one whole number (allowed: 1 or more)")
        return int(numbers[0]) if numbers else None

    return [argument for argument in argv if not argument.startswith(f"{name}=")], number


def saved_config(config: Config, argv: Sequence[str]) -> Config | None:
    """The run's own config.yml, under the keys among the arguments; None if there is no such run."""
    if not config.run.run_name:
        return None
    bucket.fetch(config.run.place, config.run.folder, ["config.yml"])
    saved = config.run.folder / "config.yml"
    if not saved.is_file():
        return None
    overrides = [argument for argument in argv if not argument.startswith("-")][1:]
    return load_config(saved, overrides)
