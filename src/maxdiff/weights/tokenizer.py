"""CLIP's tokenizer, by the `tokenizers` package: ids equal to transformers' CLIPTokenizer."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from maxdiff.weights.source import Source
from maxdiff.weights.tensors import write_atomically

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclasses.dataclass(frozen=True)
class CLIPTokenizer:
    """Text to token ids: start, byte-pair codes, end, and padding up to `max_length`.

    Attributes:
        vocab: token -> id.
        merges: pairs of tokens in order of merging, "a b".
        pad_token: end-of-text in SD 1.x and SDXL's first tokenizer; `!` in SD 2.x and SDXL's second.
        max_length: tokens of a text, start and end included.
    """

    vocab: dict[str, int]
    merges: tuple[str, ...]
    pad_token: str = END
    max_length: int = 77

    def __post_init__(self):
        for token in (START, END, self.pad_token):
            if token not in self.vocab:
                raise ValueError(f"the tokenizer's vocabulary has no {token!r}")

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Ids of each text (or of one), int32 [n max_length]; a longer text is cut, its end token kept."""
        texts = [texts] if isinstance(texts, str) else texts
        ids = np.full((len(texts), self.max_length), self.vocab[self.pad_token], np.int32)
        for row, encoding in zip(ids, self._backend.encode_batch(list(texts)), strict=True):
            found = encoding.ids
            if len(found) > self.max_length:
                found = [*found[: self.max_length - 1], self.vocab[END]]
            row[: len(found)] = found
        return ids

    def contents(self) -> list[Any]:
        """What decides the tokens of a text, as a JSON value."""
        return [self.vocab, self.merges, self.pad_token]

    def length(self, text: str) -> int:
        """How many tokens the text has uncut, start and end included."""
        return len(self._backend.encode(text).ids)

    def cut(self, text: str) -> str:
        """The end of the text that is beyond max_length tokens; "" if nothing is."""
        offsets = self._backend.encode(text).offsets
        return text[offsets[self.max_length - 1][0] :] if len(offsets) > self.max_length else ""

    @cached_property
    def _backend(self) -> Tokenizer:
        pairs = [(a, b) for a, _, b in (merge.partition(" ") for merge in self.merges)]
        backend = Tokenizer(
            models.BPE(
                self.vocab, pairs, unk_token=END, continuing_subword_prefix="", end_of_word_suffix="</w>", fuse_unk=False
            )
        )
        backend.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [
                pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        backend.post_processor = processors.RobertaProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            (END, self.vocab[END]), (START, self.vocab[START]), trim_offsets=False, add_prefix_space=False
        )
        # As transformers does: a special token written in a prompt is that token (even SD 2.x's `!`).
        backend.add_special_tokens([START, END, self.pad_token])
        return backend

    def save(self, folder: Path) -> list[str]:
        """Write the files that transformers reads; returns their names."""
        special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": self.pad_token}
        config = {
            "tokenizer_class": "CLIPTokenizer",
            "add_prefix_space": False,
            "do_lower_case": True,
            "errors": "replace",
            "model_max_length": self.max_length,
            **special,
        }
        files = {
            "vocab.json": json.dumps(self.vocab, ensure_ascii=False),
            "merges.txt": "\n".join(("#version: 0.2", *self.merges, "")),
            "special_tokens_map.json": json.dumps(special, indent=2),
            "tokenizer_config.json": json.dumps(config, indent=2),
        }
        for name, text in files.items():
            write_atomically(folder / name, [text.encode()])
        return list(files)


def published_tokenizer(pad_token: str = END, max_length: int = 77) -> CLIPTokenizer:
    """The tokenizer with CLIP's published vocabulary of 49,408 tokens, which every Stable Diffusion uses."""
    folder = resources.files("maxdiff.weights") / "clip_vocabulary"
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return CLIPTokenizer(vocab, _merges((folder / "merges.txt").read_text(encoding="utf-8")), pad_token, max_length)


def read_tokenizer(source: Source, folder: str) -> CLIPTokenizer:
    """Read the tokenizer in a folder of a source: vocab.json and merges.txt, or tokenizer.json.

    Raises:
        FileNotFoundError: if neither is there.
        ValueError: if the files are not those of a CLIP tokenizer.
    """
    prefix = f"{folder}/" if folder else ""
    config = source.json(f"{prefix}tokenizer_config.json") if source.has(f"{prefix}tokenizer_config.json") else {}
    kind = config.get("tokenizer_class", "CLIPTokenizer")
    if kind not in ("CLIPTokenizer", "CLIPTokenizerFast"):
        raise ValueError(f"{source.name}/{prefix}tokenizer_config.json: tokenizer_class={kind!r} is not supported "
                         "(allowed: 'CLIPTokenizer')")  # fmt: skip
    if source.has(f"{prefix}added_tokens.json"):
        raise ValueError(f"{source.name}/{prefix}added_tokens.json: added tokens (textual inversion) are not supported")
    special = source.json(f"{prefix}special_tokens_map.json") if source.has(f"{prefix}special_tokens_map.json") else {}
    pad = _token(special.get("pad_token") or config.get("pad_token") or END)
    max_length = min(int(config.get("model_max_length") or 77), 77)
    if source.has(f"{prefix}vocab.json"):
        vocab = source.json(f"{prefix}vocab.json")
        merges = _merges(source.local(f"{prefix}merges.txt").read_text(encoding="utf-8"))
    elif source.has(f"{prefix}tokenizer.json"):
        whole = source.json(f"{prefix}tokenizer.json")
        if whole.get("model", {}).get("type", "BPE") != "BPE" or "merges" not in whole.get("model", {}):
            raise ValueError(f"{source.name}/{prefix}tokenizer.json is not that of a CLIP tokenizer")
        vocab = whole["model"]["vocab"]
        merges = tuple(m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"])
        if extra := [t["content"] for t in whole.get("added_tokens", ()) if t["content"] not in vocab]:
            raise ValueError(
                f"{source.name}/{prefix}tokenizer.json: added tokens {extra} (textual inversion) are not supported"
            )
    else:
        raise FileNotFoundError(f"{source.name} has neither {prefix}vocab.json nor {prefix}tokenizer.json")
    return CLIPTokenizer(vocab, merges, pad, max_length)


def _token(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else value


def _merges(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.split("\n") if line and not line.startswith("#version"))
