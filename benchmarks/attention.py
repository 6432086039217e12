"""Attention kernels on this machine's accelerator: error against float32, and time, forward and with gradients.

    python benchmarks/attention.py                        every shape of SD 1.x, 2.x and XL at their resolutions
    python benchmarks/attention.py --batch 8 --kernels dot_product flash
    python benchmarks/attention.py --compile-for v5e:2x2  no TPU needed, but `pip install maxdiff[tpu]`

Prints one JSON line per shape and kernel. Errors are relative L2 of the output and of the worst of the three
gradients; times are medians in milliseconds of one call, compiled. Compiling for a TPU gives the seconds that
it took, the peak memory of the gradients, and how many TPU kernels the program calls.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiff.models import attention

# model: (queries, keys, heads, head_dim) of each level; None keys: as many as queries.
SHAPES = {
    "sd1-512": [(4096, None, 8, 40), (1024, None, 8, 80), (256, None, 8, 160), (64, None, 8, 160), (4096, 77, 8, 40),
                (256, 77, 8, 160)],
    "sd2-768": [(9216, None, 5, 64), (2304, None, 10, 64), (576, None, 20, 64), (144, None, 20, 64), (9216, 77, 5, 64)],
    "sdxl-1024": [(4096, None, 10, 64), (1024, None, 20, 64), (4096, 77, 10, 64), (1024, 77, 20, 64)],
    "odd": [(221, None, 4, 64), (221, 77, 4, 64)],
}  # fmt: skip


def relative(a: Any, b: Any) -> float:
    """||a - b|| / ||b||."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def seconds(function: Callable, *args: Any, repeats: int = 10) -> float:
    """Median time of a call."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, shape: tuple, batch: int) -> dict[str, Any]:
    """Errors and times of one kernel on one shape."""
    queries, keys, heads, dim = shape
    rng = np.random.default_rng(0)
    q, k, v, w = (
        jnp.asarray(rng.standard_normal((batch, n, heads, dim)), jnp.bfloat16)
        for n in (queries, keys or queries, keys or queries, queries)
    )
    exact = [x.astype(jnp.float32) for x in (q, k, v, w)]

    def loss(kernel: Callable) -> Callable:
        return lambda q, k, v, w: jnp.sum((kernel(q, k, v) * w).astype(jnp.float32))

    plain = lambda q, k, v: attention.dot_product(q, k, v, precision=jax.lax.Precision.HIGHEST)
    chosen = attention.kernel(name)
    forward, backward = jax.jit(chosen), jax.jit(jax.grad(loss(chosen), (0, 1, 2)))
    expected = jax.jit(plain)(*exact[:3])
    gradients = jax.jit(jax.grad(loss(plain), (0, 1, 2)))(*exact)
    return {
        "output_error": round(relative(forward(q, k, v), expected), 5),
        "gradient_error": round(max(relative(a, b) for a, b in zip(backward(q, k, v, w), gradients, strict=True)), 5),
        "forward_ms": round(1e3 * seconds(forward, q, k, v), 3),
        "gradients_ms": round(1e3 * seconds(backward, q, k, v, w), 3),
    }


def compile_for(topology: str, name: str, shape: tuple, batch: int) -> dict[str, Any]:
    """Compile forward and gradients for a TPU that is not here."""
    from jax.experimental.topologies import get_topology_desc

    device = get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    queries, keys, heads, dim = shape
    sharding = jax.sharding.SingleDeviceSharding(device)
    q, k, v = (
        jax.ShapeDtypeStruct((batch, n, heads, dim), jnp.bfloat16, sharding=sharding)
        for n in (queries, keys or queries, keys or queries)
    )
    chosen = attention.kernel(name, device)
    loss = lambda q, k, v: jnp.sum(chosen(q, k, v).astype(jnp.float32))
    start = time.perf_counter()
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
    return {
        "topology": topology,
        "compile_s": round(time.perf_counter() - start, 1),
        "peak_mib": round(compiled.memory_analysis().peak_memory_in_bytes / 2**20, 1),
        "tpu_kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


def main(argv: list[str]) -> int:
    """Print a line for each case; 1 if an error is above 2%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--compile-for", metavar="TOPOLOGY", help="a TPU topology, such as v5e:2x2, v5p:2x2x1 or v6e:2x2")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--kernels", nargs="+", default=["dot_product", "flash"], choices=attention.KERNELS)
    args = parser.parse_args(argv)
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), "device": jax.devices()[0].device_kind, "jax": jax.__version__}))
    worst = 0.0
    for model in args.models:
        for shape in SHAPES[model]:
            for name in args.kernels:
                case = {
                    "model": model,
                    "queries": shape[0],
                    "keys": shape[1] or shape[0],
                    "heads": shape[2],
                    "head_dim": shape[3],
                }
                if args.compile_for:
                    result = compile_for(args.compile_for, name, shape, args.batch)
                    print(json.dumps({**case, "kernel": name, "batch": args.batch, **result}), flush=True)
                    continue
                result = measure(name, shape, args.batch)
                worst = max(worst, result["output_error"], result["gradient_error"])
                print(json.dumps({**case, "kernel": name, "batch": args.batch, **result}), flush=True)
    return int(worst > 0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
