"""Which files a path, a glob or brace notation names, and what kind of source they are."""

import glob
import re
from collections.abc import Callable
from pathlib import Path

# Kind of source -> what its files' names end with, and what is said of a file that does not.
KINDS = {
    "webdataset": (r"\.tar", "a tar (allowed: uncompressed .tar files)"),
    "parquet": (r"\.parquet", "a parquet file (allowed: .parquet files)"),
    "table": (r"\.(csv|jsonl)", "a table of images (allowed: .csv and .jsonl files)"),
    "arrayrecord": (r"\.array_?record(-\d+-of-\d+)?", "an ArrayRecord file (allowed: .array_record and .arrayrecord files)"),
}


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}{,x}.tar` -> its six names, as a shell does; a number keeps its zeros."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    inner = match[1]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inner):
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        items = [f"{i:0{width}d}" for i in range(int(numbers[1]), int(numbers[2]) + 1)]
    elif "," in inner:
        items = inner.split(",")
    else:
        raise ValueError(f"path={pattern!r}: {{{inner}}} is no brace notation (allowed: {{000..009}} and {{a,b}})")
    if not items:
        raise ValueError(f"path={pattern!r}: {{{inner}}} counts down to nothing")
    return [name for item in items for name in expand_braces(pattern[: match.start()] + item + pattern[match.end() :])]


def local_names(pattern: str) -> list[str]:
    """The files that a path, a glob or brace notation names; raises as `open_source`."""
    # A file may have braces or brackets in its name.
    names = [pattern] if Path(pattern).is_file() else expand_braces(pattern)
    found = each_once(pattern, names, lambda name: [name] if Path(name).is_file() else sorted(glob.glob(name, recursive=True)))
    if folders := [name for name in found if not Path(name).is_file()]:
        raise ValueError(f"path={pattern!r} names {folders[0]}, which is not a file (allowed: files, or one folder)")
    return found


def each_once(pattern: str, names: list[str], find: Callable[[str], list[str]]) -> list[str]:
    """What `find` finds for each of the names that `pattern` expands to.

    Raises:
        FileNotFoundError: if it finds nothing for one.
        ValueError: if it finds something twice.
    """
    found: list[str] = []
    for name in names:
        more = find(name)
        if not more:
            other = f" (of path={pattern!r})" if name != pattern else ""
            raise FileNotFoundError(f"nothing matches {name}{other}: a path names a folder of images, or one or more tars, "
                                    "parquet files, tables, ArrayRecord files (on the hub: dataset_type=hf)")  # fmt: skip
        found += more
    if len(set(found)) < len(found):
        raise ValueError(f"path={pattern!r} names {max(found, key=found.count)} more than once")
    return found


def kind_of(name: str) -> str:
    """What kind of source a file is by its name: the ending that stands first in it, else a tar."""
    found = {kind: re.search(ending + r"(?!\w)", name) for kind, (ending, _) in KINDS.items()}
    return min(found, key=lambda kind: match.start() if (match := found[kind]) else len(name))


def check_names(pattern: str, names: list[str], kind: str) -> None:
    """Raise ValueError if one of the files that `pattern` names is by its name of another kind."""
    ending, said = KINDS[kind]
    if wrong := [name for name in names if not re.search(ending + "$", name)]:
        raise ValueError(f"path={pattern!r} names {wrong[0]}, which is not {said}")
