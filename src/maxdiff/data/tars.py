"""WebDataset tars, at random access."""

import bisect
import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from maxdiff.data.examples import TEXT_COLUMNS, BadExample, Columns, Example, LostExample
from maxdiff.data.files import Files
from maxdiff.data.tar_index import CLASS, JSON, SUFFIXES, TEXT, TarIndex

# What a member's text is called among an example's fields.
NAMES = {TEXT: TEXT_COLUMNS, CLASS: ("cls",)}


class TarSource:
    """Examples in tars, in the order of the tars and of their members."""

    def __init__(self, tars: Sequence[TarIndex], columns: Columns):
        self._tars, self._columns = tars, columns
        self._ends = list(accumulate(len(tar) for tar in tars))
        self._files = Files()
        for tar in tars:
            self._check_captions(tar)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int, /) -> Example:
        tar, row, key = self._find(i)
        return Example(key, self._bytes(tar, tar.image(row), key), self._texts(tar, row, key))

    def fields(self, i: int, /) -> dict[str, Any]:
        """See `Source`."""
        tar, row, key = self._find(i)
        return self._read(tar, row, key, TEXT, CLASS, JSON)

    def fingerprint(self) -> str:
        """See `Source`."""
        return hashlib.sha256("".join(tar.fingerprint for tar in self._tars).encode()).hexdigest()

    def _find(self, i: int) -> tuple[TarIndex, int, str]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        number = bisect.bisect_right(self._ends, i)
        tar, row = self._tars[number], i - (self._ends[number - 1] if number else 0)
        return tar, row, f"{tar.path}:{tar.key(row)}"

    def _bytes(self, tar: TarIndex, member: tuple[int, int], key: str) -> bytes:
        """A shard that was lost or cut during the run costs its examples, and not the run: others stand in for them."""
        try:
            return self._files.read(tar.path, *member)
        except (OSError, ValueError) as error:
            raise LostExample(key, f"{tar.path} cannot be read: {error}") from None

    def _texts(self, tar: TarIndex, row: int, key: str) -> tuple[str, ...]:
        """Reads no member that no column needs."""
        from_text = [name for name in self._columns.names if name in TEXT_COLUMNS and tar.has_member(row, TEXT)]
        from_class = [name for name in self._columns.names if name == "cls" and tar.has_member(row, CLASS)]
        more = len(self._columns.names) > len(from_text) + len(from_class)
        kinds = [TEXT] * bool(from_text) + [CLASS] * bool(from_class) + [JSON] * more
        return self._columns.texts(self._read(tar, row, key, *kinds), key)

    def _read(self, tar: TarIndex, row: int, key: str, *kinds: int) -> dict[str, Any]:
        """The fields of an example's members of these kinds; of .txt and .json, the .txt's `text`."""
        fields: dict[str, Any] = {}
        for kind in kinds:
            if (member := tar.member(row, kind)) is None:
                continue
            try:
                text = self._bytes(tar, member, key).decode("utf-8")
                found = json.loads(text) if kind == JSON else dict.fromkeys(NAMES[kind], text.strip())
            except UnicodeDecodeError as error:
                raise BadExample(key, f"its caption is not UTF-8 ({error})") from None
            except json.JSONDecodeError as error:
                raise BadExample(key, f"its .json is no JSON ({error})") from None
            if not isinstance(found, dict):
                raise BadExample(key, f"its .json holds a {type(found).__name__}, not fields")
            fields = {**found, **fields}
        return fields

    def _check_captions(self, tar: TarIndex) -> None:
        """Of one column all examples must have what may hold it; the first of a tar speaks for its layout."""
        names = self._columns.names
        kinds = [TEXT] * any(name in TEXT_COLUMNS for name in names) + [CLASS] * ("cls" in names) + [JSON]
        captioned = tar.has(*kinds)
        if not captioned.all():
            row = int(captioned.argmin())
            wanted = " and ".join(f"no {SUFFIXES[kind]}" for kind in kinds)
            raise ValueError(f"{tar.path}: {tar.key(row)} has no caption: it has {wanted} "
                             f"(caption_column={', '.join(names)!r})")  # fmt: skip
        if not all(tar.has_member(0, kind) for kind in kinds if kind != JSON) or kinds == [JSON]:
            try:
                self._texts(tar, 0, tar.key(0))
            except BadExample as error:
                raise ValueError(f"{tar.path}: {error}") from None
