"""From an example's texts to the caption it is trained with: decided by the example's position alone."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class CaptionPlan:
    """How captions are made.

    Attributes:
        mode: of several texts, `choose` one, another each time, or `join` them all.
        separator: between texts that are joined, and between tags.
        shuffle_tags: put the caption's tags in another order each time.
        keep_tags: as many stay in front, as they are.
        tag_dropout: share of the other tags that are left out, another each time.
        prefix: stands before every caption.
    """

    mode: str = "choose"
    separator: str = ", "
    shuffle_tags: bool = False
    keep_tags: int = 0
    tag_dropout: float = 0.0
    prefix: str = ""

    @property
    def varies(self) -> bool:
        """Whether one example may have another caption another time, for the same texts."""
        return self.shuffle_tags or self.tag_dropout > 0

    def caption(self, texts: Sequence[str], words: Sequence[int]) -> str:
        """The caption.

        Args:
            texts: at least one.
            words: four random 64-bit numbers, see `transforms.random_words`.
        """
        text = self.separator.join(filter(None, texts)) if self.mode == "join" else texts[words[0] * len(texts) >> 64]
        if self.varies:
            text = self._tags(text, words)
        return self.prefix + text

    def _tags(self, text: str, words: Sequence[int]) -> str:
        tags = [tag.strip() for tag in text.split(self.separator.strip() or None) if tag.strip()]
        kept, others = tags[: self.keep_tags], tags[self.keep_tags :]
        draws = _draws(words[1], 2 * len(others))
        if self.tag_dropout:
            others = [tag for tag, draw in zip(others, draws, strict=False) if draw >= self.tag_dropout]
        if self.shuffle_tags:
            order = sorted(range(len(others)), key=lambda i: draws[-1 - i])
            others = [others[i] for i in order]
        return self.separator.join(kept + others)


def _draws(word: int, count: int) -> list[float]:
    """Uniform numbers from 0 to 1, by splitmix64 (Steele, Lea and Flood 2014): in plain integers, so alike everywhere."""
    numbers, mask = [], 2**64 - 1
    for _ in range(count):
        word = (word + 0x9E3779B97F4A7C15) & mask
        z = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append((z ^ (z >> 31)) / 2**64)
    return numbers
