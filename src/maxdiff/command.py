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
