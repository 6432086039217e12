"""Where everything lies: mesh, logical axis rules, shardings. The only file that knows a mesh.

Networks name the dimensions of their parameters and activations; `logical_axis_rules` in the YAML maps
those names to mesh axes. A rule is (name, mesh axis), (name, [mesh axes]) or (name, None).
"""

import dataclasses
import difflib
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxdiff.models.attention import AttentionKernel
from maxdiff.models.layers import Axes
from maxdiff.models.network import Network, ParameterSpec, Params, unflatten
from maxdiff.models.network import Path as ParameterPath
from maxdiff.torus import slice_of

Rules = Sequence[Sequence[Any]]

# Every name that the networks use, and those that only MaxDiffusion's rules for these models name.
LOGICAL_AXES = {
    "embed": "residual stream, as input or output of attention and feed-forward",
    "heads": "heads x head_dim, of attention projections",
    "mlp": "width inside the feed-forward",
    "geglu": "both halves of GEGLU's projection as stored; keep it off the tensor axis",
    "conv_in": "input channels of a convolution",
    "conv_out": "output channels of a convolution",
    "out_c": "output channels of the time embedding's projection in a residual block",
    "vocab": "rows of the token table",
    "norm": "scale and bias of norms, and small biases",
    "activation_batch": "examples, in attention",
    "activation_length": "tokens or pixels, in attention",
    "activation_embed": "residual stream of activations",
    "activation_heads": "heads of activations",
    "activation_kv": "head_dim of activations",
    "conv_batch": "examples, in convolutions",
    "height": "height of activations",
    "width": "width of activations",
    "out_channels": "channels of activations",
    "batch": "examples of the input",
    "hidden": "MaxDiffusion's; names nothing here",
    "length": "MaxDiffusion's; names nothing here",
    "temb_in": "MaxDiffusion's; names nothing here",
    "keep_1": "MaxDiffusion's; names nothing here",
    "keep_2": "MaxDiffusion's; names nothing here",
}


def make_mesh(
    axes: Sequence[str],
    ici: Mapping[str, int],
    dcn: Mapping[str, int],
    *,
    devices: Sequence[Any] | None = None,
    allow_split_physical_axes: bool = False,
) -> Mesh:
    """The devices in the shape that the configuration asks for.

    Args:
        axes: names of the mesh axes, outermost first: data, fsdp, tensor.
        ici: size of each axis within a slice; one may be -1, for what is left.
        dcn: size of each axis across slices; likewise.
        devices: by default all of jax.devices(), of every process.
        allow_split_physical_axes: as in jax.experimental.mesh_utils.

    Raises:
        ValueError: if the sizes don't multiply to the devices there are, or don't fit how a TPU's lie.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({*map(slice_of, devices)})
    across = _sizes(axes, dcn, slices, "dcn", f"{slices} slices")
    within = _sizes(axes, ici, len(devices) // slices, "ici", f"{len(devices) // slices} devices in a slice")
    physical = {"devices": devices, "allow_split_physical_axes": allow_split_physical_axes}
    try:
        if slices > 1:
            grid = mesh_utils.create_hybrid_device_mesh(within, across, **physical)
        elif devices[0].platform == "tpu":
            grid = mesh_utils.create_device_mesh(within, **physical)
        else:
            grid = np.array(devices).reshape(within)
    except NotImplementedError as error:
        shown = _shown(axes, ici, "ici")
        raise ValueError(f"{shown} do not fit the TPU's physical axes ({error}); allowed with "
                         "allow_split_physical_axes=true") from None  # fmt: skip
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _sizes(axes: Sequence[str], given: Mapping[str, int], total: int, kind: str, have: str) -> tuple[int, ...]:
    sizes = [given.get(axis, 1) for axis in axes]
    shown = _shown(axes, given, kind)
    if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"{shown}: sizes must be positive, and one of them may be -1")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and total % known == 0:
        sizes[sizes.index(-1)] = total // known
    if math.prod(sizes) != total:
        raise ValueError(f"{shown}: the product must be the number of {have}")
    return tuple(sizes)


def _shown(axes: Sequence[str], given: Mapping[str, int], kind: str) -> str:
    return ", ".join(f"{kind}_{axis}_parallelism={given.get(axis, 1)}" for axis in axes)


def check_rules(rules: Rules, mesh: Mesh) -> None:
    """Raise ValueError for a rule of the wrong form, or with a name or mesh axis that does not exist."""
    for rule in rules:
        if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str) or not _is_target(rule[1]):
            raise ValueError(f"logical_axis_rules: {rule!r} is not a pair [name, mesh axis or axes]")
        name, target = rule
        if name not in LOGICAL_AXES:
            raise ValueError(f"logical_axis_rules: {name!r} is no logical axis{_nearest(name, LOGICAL_AXES)}")
        for axis in mesh_axes(target):
            if axis not in mesh.shape:
                raise ValueError(
                    f"logical_axis_rules: {name!r} maps to {axis!r}, which is not in mesh_axes={list(mesh.axis_names)}"
                )


def _nearest(name: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, allowed, 1)
    return f"; did you mean {close[0]!r}?" if close else f" (allowed: {', '.join(allowed)})"


def _is_target(target: Any) -> bool:
    axes = target if isinstance(target, list | tuple) else (target,)
    return target is None or all(isinstance(axis, str) for axis in axes)


def mesh_axes(target: Any) -> tuple[str, ...]:
    """Of a rule's target, or of an entry of a PartitionSpec."""
    if target is None:
        return ()
    return (target,) if isinstance(target, str) else tuple(target)


def activation_spec(shape: Sequence[int], axes: Axes, rules: Rules, mesh: Mesh) -> PartitionSpec:
    """How an activation is split: by the first rule of each name whose mesh axes are free and divide it."""
    used: set[str] = set()
    entries: list[Any] = []
    for size, name in zip(shape, axes, strict=True):
        chosen = ()
        for target in _targets(name, rules):
            if not used & set(target) and size % _ways(target, mesh) == 0:
                chosen = target
                break
        used |= set(chosen)
        entries.append(_entry(chosen, mesh))
    return PartitionSpec(*entries)


def parameter_spec(shape: Sequence[int], axes: Axes, rules: Rules, mesh: Mesh) -> PartitionSpec:
    """How a parameter is split.

    Each dimension goes to the mesh axes of its name's rule. Where they don't divide it, they fall to the last
    other dimension that they divide (320 channels over 256 chips); where there is none, they are left out.

    Raises:
        ValueError: if the rules give one mesh axis to two dimensions.
    """
    wanted = [next(iter(_targets(name, rules)), ()) for name in axes]
    flat = [axis for target in wanted for axis in target]
    for axis in flat:
        if flat.count(axis) > 1:
            names = [name for name, target in zip(axes, wanted, strict=True) if axis in target]
            raise ValueError(
                f"logical_axis_rules: a parameter with axes {list(axes)} would be split twice over {axis!r}, by {names}"
            )
    chosen: list[tuple[str, ...]] = [()] * len(axes)
    homeless = []
    for dim, target in enumerate(wanted):
        if shape[dim] % _ways(target, mesh) == 0:
            chosen[dim] = target
        else:
            homeless.append(target)
    for target in homeless:
        for dim in reversed(range(len(axes))):
            if not chosen[dim] and shape[dim] % _ways(target, mesh) == 0 and shape[dim] > 1:
                chosen[dim] = target
                break
    return PartitionSpec(*(_entry(target, mesh) for target in chosen))


def update_spec(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """How a parameter's update is split: as the parameter (`spec`) and over the mesh axis data besides.

    That goes to the largest dimension that it divides and nothing splits; where there is none, within the
    shards of fsdp; where it divides neither, nowhere.
    """
    ways = mesh.shape.get("data", 1)
    entries = [mesh_axes(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    if ways == 1 or any("data" in entry for entry in entries):
        return spec
    # The largest, so that no kernel is cut between its pixels; of equals the last.
    free = [dim for dim in reversed(range(len(shape))) if not entries[dim]]
    split = [dim for dim, entry in enumerate(entries) if "fsdp" in entry]
    for dim in [*sorted(free, key=lambda dim: -shape[dim]), *split]:
        if shape[dim] % (_ways(entries[dim], mesh) * ways) == 0:
            entries[dim] = (*entries[dim], "data")
            break
    return PartitionSpec(*(_entry(entry, mesh) for entry in entries))


def _targets(name: str | None, rules: Rules) -> Iterable[tuple[str, ...]]:
    return (mesh_axes(target) for rule, target in rules if rule == name)


def _ways(target: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in target)


def _entry(target: tuple[str, ...], mesh: Mesh) -> Any:
    """One entry of a PartitionSpec; axes of size 1 split nothing and are left out."""
    target = tuple(axis for axis in target if mesh.shape[axis] > 1)
    return target[0] if len(target) == 1 else target or None


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and rules, and what they make of a network.

    Attributes:
        max_replicated_mib: a parameter larger than this (float32) that no rule splits, though the mesh has
            an fsdp or tensor axis to split it over, is an error; 0 for no limit.
    """

    mesh: Mesh
    rules: Rules
    max_replicated_mib: float = 64.0

    def __post_init__(self):
        check_rules(self.rules, self.mesh)

    def specs(self, network: Network) -> dict[ParameterPath, PartitionSpec]:
        """The PartitionSpec of every parameter.

        Raises:
            ValueError: for a parameter above `max_replicated_mib` that would lie whole on every device.
        """
        found = {path: parameter_spec(s.shape, s.axes, self.rules, self.mesh) for path, s in network.specs.items()}
        if self.max_replicated_mib and any(size > 1 for axis, size in self.mesh.shape.items() if axis != "data"):
            for path, spec in found.items():
                mib = _bytes(network.specs[path]) / 2**20
                if mib > self.max_replicated_mib and not any(spec):
                    raise ValueError(
                        f"logical_axis_rules leave {'.'.join(map(str, path))} {network.specs[path].shape} of {mib:.0f} MiB "
                        f"whole on every device (max_replicated_mib={self.max_replicated_mib:g}); "
                        f"its axes are {network.specs[path].axes}"
                    )
        return found

    def shardings(self, network: Network) -> Params:
        """The NamedSharding of every parameter, as the parameter tree."""
        return unflatten((path, NamedSharding(self.mesh, spec)) for path, spec in self.specs(network).items())

    def update_specs(self, network: Network) -> dict[ParameterPath, PartitionSpec]:
        """The PartitionSpec of every parameter's gradient, moments and average, where the update is sharded too.

        Raises:
            ValueError: as `specs`.
        """
        return {path: update_spec(network.specs[path].shape, spec, self.mesh) for path, spec in self.specs(network).items()}

    def update_shardings(self, network: Network) -> Params:
        """The NamedSharding of every parameter's update, as the parameter tree."""
        return unflatten((path, NamedSharding(self.mesh, spec)) for path, spec in self.update_specs(network).items())

    def place(self, path: ParameterPath, spec: ParameterSpec) -> NamedSharding:
        """Where a parameter lies; for `load_params` and `Pipeline.load`."""
        del path
        return NamedSharding(self.mesh, parameter_spec(spec.shape, spec.axes, self.rules, self.mesh))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Give an activation its sharding; for `Compute.constrain`."""
        mesh, spec = self._here(activation_spec(x.shape, axes, self.rules, self.mesh))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def attend(self, kernel: AttentionKernel) -> AttentionKernel:
        """The kernel on each device's own examples and heads; for `Compute.attention`.

        The partitioner, which places all else, cannot split a Pallas kernel.
        """

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, mask: Any = None, precision: Any = None) -> jax.Array:
            assert mask is None
            axes = ("activation_batch", None, "activation_heads", None)
            mesh, spec = self._here(activation_spec(q.shape, axes, self.rules, self.mesh))
            local = functools.partial(kernel, precision=precision)
            return jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False,
                                 axis_names={*mesh.axis_names} - {*mesh.manual_axes})(q, k, v)  # fmt: skip

        return attention

    def _here(self, spec: PartitionSpec) -> tuple[AbstractMesh, PartitionSpec]:
        """The mesh, and what of an activation's split is left to do: not over the axes of a shard_map that it is in."""
        mesh = jax.sharding.get_abstract_mesh()
        mesh = self.mesh.abstract_mesh if mesh.empty else mesh
        left = [tuple(axis for axis in mesh_axes(entry) if axis not in mesh.manual_axes) or None for entry in spec]
        return mesh, PartitionSpec(*left)

    def describe(self, network: Network) -> list[str]:
        """What the rules did: parameters and bytes a device by PartitionSpec and, by name, what lies whole."""
        specs = self.specs(network)
        groups = defaultdict(list)
        for path, spec in specs.items():
            groups[str(spec)].append(path)
        lines = [f"mesh {dict(self.mesh.shape)}: {self.mesh.size} devices"]
        for shown, paths in sorted(groups.items()):
            size = sum(_bytes(network.specs[path]) for path in paths)
            share = sum(_bytes(network.specs[path]) / self._ways(specs[path]) for path in paths)
            lines.append(f"{shown}: {len(paths)} parameters, {size / 2**20:.1f} MiB, {share / 2**20:.1f} MiB a device")
        whole = [path for path, spec in specs.items() if not any(spec) and path[-1] == "kernel"]
        if whole and self.mesh.size > self.mesh.shape.get("data", 1):
            lines.append("whole on every device: " + ", ".join(".".join(map(str, path)) for path in whole))
        return lines

    def _ways(self, spec: PartitionSpec) -> int:
        return math.prod(_ways(mesh_axes(entry), self.mesh) for entry in spec)


def bytes_a_device(leaf: Any) -> int:
    """Of an array, or an abstract one, on each device that has a part of it."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """The arrays of a tree as jax.ShapeDtypeStructs that lie so."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _bytes(spec: ParameterSpec) -> int:
    return 4 * math.prod(spec.shape)
