"""Where each part of a pipeline comes from: a main checkpoint, a source of its own, or nowhere, being new."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxdiff.models.layers import Compute
from maxdiff.models.network import Network, Params, Placement
from maxdiff.weights import original
from maxdiff.weights.checkpoint import PARTS, TOKENIZERS, Checkpoint, PartConfig, make_network, open_checkpoint
from maxdiff.weights.load import check_params, load_params
from maxdiff.weights.source import FromPt
from maxdiff.weights.tokenizer import END, CLIPTokenizer, published_tokenizer


@dataclasses.dataclass(frozen=True)
class Origins:
    """Every part's origin, opened and not yet read; made by `open_origins`.

    Attributes:
        name: what the main checkpoint is called in messages; "" for none.
        main: the checkpoint that has what the others don't.
        opened: parts with a source of their own.
        new: parts that begin with random weights, and what of their architecture differs from the
            checkpoint's or, without one, from the network's defaults.
    """

    name: str
    main: Checkpoint | None
    opened: Mapping[str, Checkpoint]
    new: Mapping[str, Mapping[str, Any]]
    prediction_type: str | None = None

    def of(self, part: str) -> Checkpoint | None:
        """The checkpoint of a part, if there is one."""
        return self.opened.get(part, self.main)

    def has(self, part: str) -> bool:
        """Whether there is such a part."""
        checkpoint = self.of(part)
        return part in self.new or (checkpoint is not None and checkpoint.has(part))

    def names(self) -> list[str]:
        """The networks of a pipeline: a second text encoder only where there is one."""
        return [part for part in PARTS if part != "text_encoder_2" or self.has(part)]

    def networks(self, names: Iterable[str], compute: Compute | None = None) -> dict[str, Network]:
        """The networks of these parts, without weights.

        Raises:
            FileNotFoundError, ValueError: if a part has no origin, or a configuration that is not supported.
        """
        return {part: make_network(part, self._config(part), compute) for part in names}

    def check(self, networks: Mapping[str, Network]) -> None:
        """Raise ValueError if stored weights don't fit these networks; reads headers alone."""
        for part, network in networks.items():
            if part not in self.new:
                check_params(network, *self._of(part).tensors(part))

    def load(
        self, networks: Mapping[str, Network], *, dtype: Any = jnp.float32, placement: Placement | None = None, seed: int = 0
    ) -> dict[str, Params]:
        """The parameters of these networks, read or drawn from `seed`.

        Args:
            dtype: of the parameters.
            placement: (path, spec) -> sharding of each; by default the first device.
        """
        return {
            part: network.init(seed, dtype, placement)
            if part in self.new
            else load_params(network, *self._of(part).tensors(part), dtype=dtype, placement=placement)
            for part, network in networks.items()
        }

    def tokenizer(self, part: str) -> CLIPTokenizer:
        """One of TOKENIZERS; CLIP's where nothing says otherwise."""
        checkpoint = self.of(part)
        if checkpoint is None:
            return published_tokenizer(END if part == TOKENIZERS[0] else "!")
        return checkpoint.tokenizer(part)

    def scheduler(self) -> dict[str, Any]:
        """diffusers' scheduler_config.json; Stable Diffusion 1's where nothing says otherwise."""
        checkpoint = self.of("scheduler")
        scheduler = original.scheduler_config("sd1", "epsilon") if checkpoint is None else checkpoint.scheduler()
        return {**scheduler, "prediction_type": self.prediction_type} if self.prediction_type else scheduler

    def index(self) -> dict[str, Any]:
        """diffusers' model_index.json, or {}."""
        return self.main.index() if self.main else {}

    def _of(self, part: str) -> Checkpoint:
        checkpoint = self.of(part)
        if checkpoint is None:
            raise ValueError(
                f"nothing says where the {part} comes from (allowed: pretrained_model_name_or_path, "
                f"{part}_path, or {part}: {{...}} with an architecture for a new one)"
            )
        return checkpoint

    def _config(self, part: str) -> PartConfig:
        if part not in self.new:
            return self._stored_config(part)
        checkpoint = self.of(part)
        known = self._stored_config(part).to_dict() if checkpoint is not None and checkpoint.has(part) else {}
        return PARTS[part][1]({**known, **self.new[part]}, part)

    def _stored_config(self, part: str) -> PartConfig:
        """The part's configuration; a bare file of weights has the one that the main checkpoint gives the part."""
        checkpoint, main = self._of(part), self.main
        config = None
        if not checkpoint.bare:
            config = checkpoint.config(part)
        elif checkpoint is not main:
            config = main.config(part) if main is not None and main.has(part) else checkpoint.config(part)
        if config is None:
            where = self.name or "this file"
            raise ValueError(f"{where} is no whole checkpoint; name it as one of the sources={{{part!r}: ...}} of a pipeline")
        return config


def open_origins(
    name: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    from_pt: FromPt = "auto",
    sources: Mapping[str, str | Path] | None = None,
    new: Mapping[str, Mapping[str, Any]] | None = None,
    prediction_type: str | None = None,
) -> Origins:
    """Open what is named; see `Pipeline.load` for the arguments. An empty `name` is none.

    Raises:
        FileNotFoundError, ValueError: as `Pipeline.load`.
    """
    for part in sources or ():
        if part not in (*PARTS, *TOKENIZERS, "scheduler"):
            allowed = ", ".join((*PARTS, *TOKENIZERS, "scheduler"))
            raise ValueError(f"sources: {part!r} is no part of a pipeline (allowed: {allowed})")
    options: dict[str, Any] = {"prediction_type": prediction_type}
    main = open_checkpoint(name, revision=revision, variant=variant, from_pt=from_pt, **options) if name else None
    opened = {}
    for part, source in (sources or {}).items():
        try:
            opened[part] = open_checkpoint(source, **options)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{part}_path: {error}") from error
        if not opened[part].has(part):
            raise ValueError(f"{part}_path: {source} has no {part}")
    return Origins(str(name), main, opened, dict(new or {}), prediction_type)
