"""CLIP's tokenizer with those tokens alone that the captions of some shards need: a table of 6,729 embeddings, not 49,408.

    python data/make_emoji_tokenizer.py 'data/emoji/train-*.tar' FOLDER

These captions have the same tokens by both; a word that is in none of them falls into smaller ones, as rare words do by CLIP's.
The folder is a tokenizer as diffusers and transformers read it.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from emoji_shards import NONE, examples

from maxdiff.weights.tokenizer import END, START, CLIPTokenizer, published_tokenizer


def captions(pattern: str) -> Iterator[str]:
    """Every caption of the shards: their .txt, and the phrases and tags of their .json."""
    for _, files in examples(pattern):
        said = json.loads(files["json"])
        yield from (files["txt"].decode(), said["phrase"], said["tags"])


def pruned(whole: CLIPTokenizer, texts: Iterable[str]) -> CLIPTokenizer:
    """`whole` with the merges that lead to these texts' tokens, in the same order: their tokens stay what they are."""
    token = {number: name for name, number in whole.vocab.items()}
    halves = {merge.replace(" ", ""): merge for merge in whole.merges}
    wanted: set[str] = set()
    numbers = {number for text in texts for number in whole(text)[0].tolist()} - {whole.vocab[START], whole.vocab[END]}
    left = [token[number] for number in numbers]
    while left:
        if (merge := halves.get(left.pop())) and merge not in wanted:
            wanted.add(merge)
            left += merge.split(" ")
    merges = tuple(merge for merge in whole.merges if merge in wanted)
    characters = sorted(whole.vocab.keys() - halves.keys() - {START, END}, key=whole.vocab.__getitem__)
    names = [*characters, *(merge.replace(" ", "") for merge in merges), START, END]
    return CLIPTokenizer({name: number for number, name in enumerate(names)}, merges)


def main() -> None:
    """Write the tokenizer of the shards named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a glob of WebDataset tars")
    parser.add_argument("output", type=Path, help="folder for the tokenizer")
    arguments = parser.parse_args()
    texts = list(captions(arguments.shards))
    if not texts:
        parser.error(f"shards={arguments.shards} {NONE}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    tokenizer = pruned(published_tokenizer(), texts)
    tokenizer.save(arguments.output)
    print(f"{arguments.output}: {len(tokenizer.vocab):,} tokens")


if __name__ == "__main__":
    main()
