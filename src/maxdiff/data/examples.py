"""What a source of training data is: examples at random access, each an image's bytes and its texts."""

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

# "text" is the usual name of the column, and of what a .txt member or file holds.
TEXT_COLUMNS = ("text", "txt")


class Example(NamedTuple):
    """One captioned image.

    Attributes:
        key: its name within the source, for messages.
        image: the image file, undecoded.
        texts: what `Columns.names` name and the example has, in that order, from which a caption is made.
    """

    key: str
    image: bytes
    texts: tuple[str, ...]


class BadExample(ValueError):
    """An example that cannot be used, by its key; others are not affected."""

    def __init__(self, key: str, reason: str):
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self):
        return f"{self.key}: {self.reason}"


class LostExample(BadExample):
    """An example that could not be read this time: its file is lost or cut, or elsewhere and out of reach."""


class Source(Protocol):
    """What a pipeline asks of a source. It may be pickled, and read from many threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Example:
        """Raises BadExample for an example that cannot be used, OSError or ValueError for a source that cannot."""
        ...

    def fields(self, i: int, /) -> Mapping[str, Any]:
        """All that is known of an example besides its image, for filters; raises as `source[i]`."""
        ...

    def fingerprint(self) -> str:
        """A hash of which examples there are, in which order: of their names and sizes, not of where they lie."""
        ...


@dataclasses.dataclass(frozen=True)
class Columns:
    """Which texts of an example captions are made of.

    Attributes:
        names: columns of metadata, fields of a .json, `text` (also the .txt beside an image) or `cls`.
        labels: class -> text, where a column holds numbers of classes ("idx_to_prompt").
    """

    names: tuple[str, ...] = ("text",)
    labels: Mapping[str, str] | None = None

    def texts(self, fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """The texts of an example with these fields; of several columns, those that it has.

        Raises:
            BadExample: if it has none of them, or something that is no text.
        """
        there = [name for name in self.names if fields.get(name) is not None]
        if not there and (empty := [name for name in self.names if name in fields]):
            raise BadExample(key, f"caption_column={empty[0]!r} holds None, not a text")
        if not there:
            wanted = f"caption_column={', '.join(self.names)!r}"
            raise BadExample(key, f"no {wanted} (allowed: {sorted(map(str, fields))})")
        return tuple(self._text(name, fields[name], key) for name in there)

    def _text(self, name: str, value: Any, key: str) -> str:
        if self.labels is not None and (label := str(value).strip()).isdigit():
            if label not in self.labels:
                raise BadExample(key, f"caption_column={name!r} holds {value!r}, which idx_to_prompt has not")
            return self.labels[label]
        if not isinstance(value, str):
            raise BadExample(key, f"caption_column={name!r} holds {value!r}, not a text")
        return value.strip()


OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Filter:
    """A condition on one field, such as pwatermark "<=0.5"; an example without the field does not meet it."""

    field: str
    condition: str

    def __post_init__(self):
        if not re.fullmatch(rf"\s*({'|'.join(OPERATORS)})\s*\S.*", self.condition):
            raise ValueError(f"filters: {self.field}: {self.condition!r} is no condition (allowed: one of "
                             f"{', '.join(OPERATORS)} and a value, as \"<=0.5\")")  # fmt: skip
        sign, wanted = self._parts
        if sign not in ("==", "!=") and _number(wanted) is None:
            raise ValueError(f"filters: {self.field}: {self.condition!r} compares with {wanted!r} (allowed: a number)")

    def keeps(self, fields: Mapping[str, Any]) -> bool:
        """Whether an example with these fields is kept: compared as numbers where both sides are, else == and != as texts.

        True and false, in any spelling, are the numbers 1 and 0.
        """
        (sign, wanted), value = self._parts, fields.get(self.field)
        if value is None:
            return False
        if (number := _number(value)) is not None and (limit := _number(wanted)) is not None:
            return OPERATORS[sign](number, limit)
        return sign in ("==", "!=") and OPERATORS[sign](str(value), wanted)

    @property
    def _parts(self) -> tuple[str, str]:
        condition = self.condition.strip()
        sign = next(sign for sign in OPERATORS if condition.startswith(sign))
        return sign, condition[len(sign) :].strip()


def _number(value: Any) -> float | None:
    truth = {"true": 1.0, "false": 0.0}.get(str(value).strip().lower())
    try:
        return float(value) if truth is None else truth
    except (TypeError, ValueError):
        return None
