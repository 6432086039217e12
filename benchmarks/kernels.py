"""GPU time by kind of kernel, from a trace of jax.profiler."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

# Of a kernel's name and of the HLO operation it came from, in this order; the first that matches says what it is.
KINDS = {
    "attention": r"sdpa|flash|fmha|cudnn::fusion|attention",
    "norms and sums": r"channel_sums|layer_norm",
    "update": r"loop_select",  # the optimizer's: it chooses, element by element, whether the step is good
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|implicit",
    "matmul": r"gemm|nvjet|cutlass|cublas|matmul|splitk|dot",
    "communication": r"nccl|all-reduce|all-gather|reduce-scatter",
    "transposes and copies": r"transpose|turned|copy|memcpy|nchw|nhwc|concatenate|pad",
    "reductions": r"reduce",
    "elementwise": r"fusion|wrapped|loop|add|multiply|convert",
}
LARGEST = 24


def profile(run: Callable[[], Any], repeats: int = 1) -> dict[str, Any]:
    """What the first GPU did in a call of `run`, which has been called before.

    Returns:
        busy_ms: some kernel ran; idle_share: of the time between the first kernel's start and the last one's end.
        kinds_ms: kind of kernel -> ms of a call.
        largest: the kernels that took the longest, [ms of a call, times launched, name].
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                result = run()
            jax.block_until_ready(result)
        rows = [row for path in Path(folder).rglob("*.xplane.pb") for row in launches(path)]
    if not rows:
        raise ValueError("the trace has no kernels of a GPU: --profile is for NVIDIA GPUs")
    seconds, counts = collections.Counter(), collections.Counter()
    for name, _, duration in rows:
        seconds[name] += duration
        counts[name] += 1
    kinds = collections.Counter()
    for name, duration in seconds.items():
        kinds[kind_of(name)] += duration
    ms = lambda ns: round(ns / 1e6 / repeats, 2)
    first, last = min(start for _, start, _ in rows), max(start + length for _, start, length in rows)
    busy = covered(rows)
    return {
        "busy_ms": ms(busy),
        "idle_share": round(1 - busy / (last - first), 4),
        "kinds_ms": {kind: ms(ns) for kind, ns in kinds.most_common()},
        "largest": [[ms(ns), counts[name] // repeats, name] for name, ns in seconds.most_common(LARGEST)],
    }


def launches(path: Path) -> Iterator[tuple[str, float, float]]:
    """(kernel and the HLO operation it came from, start, duration), in nanoseconds, of the first GPU."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key is not None}
                # Copies of one operation in the program have numbers, which would hide that they are one.
                operation = re.sub(r"[._]\d+", "", str(stats.get("hlo_op", "")))
                yield f"{event.name} <{operation}>", event.start_ns, event.duration_ns


def kind_of(name: str) -> str:
    """One of KINDS, or other."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "other")


def covered(rows: list[tuple[str, float, float]]) -> float:
    """Nanoseconds in which at least one kernel ran."""
    total, end = 0.0, 0.0
    for _, start, length in sorted(rows, key=lambda row: row[1]):
        total += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return total
