"""Reading a network's configuration: a checkpoint's config.json, or a dict of the same keys."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

C = TypeVar("C")

# How to compute rather than what, written by diffusers' and MaxDiffusion's Flax networks: no matter here.
FLAX_RUNTIME = frozenset(
    ("dtype", "weights_dtype", "precision", "mesh", "split_head_dim", "use_memory_efficient_attention", "attention_kernel",
     "flash_min_seq_length", "flash_block_sizes")
)  # fmt: skip


def read_config(cls: type[C], values: Mapping[str, Any], where: str, *, ignore_unknown: bool = False) -> C:
    """Make `cls`, a frozen dataclass, from a dict with the checkpoint's keys.

    `cls.FIXED` maps keys that have no field to the values that we compute correctly (the first is
    the default). Keys that begin with an underscore are the writer's notes and are skipped, as are FLAX_RUNTIME.

    Args:
        where: the file's name, for messages.
        ignore_unknown: skip keys we have never heard of (transformers writes dozens that no
            network reads). Otherwise such a key is an error unless it is off (None or False).

    Raises:
        ValueError: naming file, key and value, for anything we would compute wrongly.
    """
    fields = {f.name for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    fixed: dict[str, tuple] = cls.FIXED  # pyright: ignore[reportAttributeAccessIssue]
    chosen = {}
    for key, value in values.items():
        value = _tuples(value)
        if key.startswith("_") or key in FLAX_RUNTIME:
            continue
        if key in fields:
            chosen[key] = value
        elif key in fixed:
            # A value for each block, all alike, is that value. `1 == True` in Python, so compare types too.
            one = value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
            if not any(one == v and isinstance(one, bool) == isinstance(v, bool) for v in fixed[key]):
                raise ValueError(f"{where}: {key}={value!r} is not supported (allowed: {_choices(fixed[key])})")
        elif not ignore_unknown and value is not None and value is not False:
            raise ValueError(f"{where}: {key}={value!r} is not supported (the key is unknown)")
    hints = typing.get_type_hints(cls)
    for key, value in chosen.items():
        if not is_a(value, hints[key]):
            raise ValueError(f"{where}: {key}={value!r} is not supported (allowed: {spelled(hints[key])})")
    try:
        return cls(**chosen)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def write_config(config: Any, class_name: str) -> dict[str, Any]:
    """The dict that diffusers reads: every field of `config`, and what it keeps fixed."""
    fixed = {key: allowed[0] for key, allowed in config.FIXED.items()}
    return {"_class_name": class_name, **fixed, **dataclasses.asdict(config)}


def require(config: Any, key: str, *allowed: Any) -> None:
    """Raise ValueError unless `config.key` is one of `allowed`."""
    value = getattr(config, key)
    if value not in allowed:
        raise ValueError(f"{key}={value!r} is not supported (allowed: {_choices(allowed)})")


def require_integers(config: Any, *keys: str) -> None:
    """Raise ValueError unless each key holds a positive integer, or a tuple of them."""
    for key in keys:
        value = getattr(config, key)
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, int) or isinstance(item, bool) or item < 1:
                raise ValueError(f"{key}={value!r} is not supported (allowed: positive integers)")


def require_divisors(config: Any, *keys: str) -> None:
    """Raise ValueError unless each key's value for a block divides the block's channels."""
    for key in keys:
        values = per_block(getattr(config, key), len(config.block_out_channels), key)
        for value, channels in zip(values, config.block_out_channels, strict=True):
            if channels % value:
                raise ValueError(
                    f"{key}={getattr(config, key)!r} does not divide block_out_channels={config.block_out_channels}"
                )


def per_block(value: Any, blocks: int, key: str) -> tuple:
    """`value` for each block: one value stands for all, a tuple must have `blocks` of them."""
    if not isinstance(value, tuple):
        return (value,) * blocks
    if len(value) != blocks:
        raise ValueError(f"{key}={value!r} has {len(value)} values for {blocks} blocks")
    return value


def _choices(allowed: tuple) -> str:
    return ", ".join(repr(v) for v in allowed)


def is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value, with tuples for lists, is of an annotated type; an int serves as a float."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(is_a(value, option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if not isinstance(value, tuple):
            return False
        if items[-1] is Ellipsis:
            return all(is_a(item, items[0]) for item in value)
        return len(value) == len(items) and all(map(is_a, value, items))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def spelled(kind: Any) -> str:
    """An annotated type as a message shows it."""
    if typing.get_origin(kind) is tuple:
        return "list of " + spelled(typing.get_args(kind)[0])
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("NoneType", "None")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
