"""Scaled dot-product attention with a choice of kernels (Vaswani et al. 2017, eq. 1).

Every kernel has one signature, so a network is handed the one to use:

    kernel(q, k, v, *, mask=None, precision=None) -> [b q h d]

q is [b q h d], k and v are [b k h d]; `mask` is boolean, broadcastable to [b h q k], true where
a query may look. Scores are scaled by 1/sqrt(d), and their softmax is always taken in float32.
"""

import functools
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxdiff.models.gpus import compute_capability

logger = logging.getLogger(__name__)

AttentionKernel = Callable[..., jax.Array]

# Splash attention's blocks are multiples of 128 wide, and its backward refuses anything narrower. Each block costs something
# on top of its work, so they are as wide as divides the length, up to this; MaxText's are 512. No TPU has been timed.
TPU_BLOCK, TPU_WIDEST = 128, 640
# cuDNN's backward refuses odd lengths (CLIP's 77 keys); a multiple of 8 also keeps rows aligned.
CUDNN_MULTIPLE = 8
HOPPER = 9  # the first number of its compute capability
SEEDS = itertools.count()
# What `takes_long` keeps, by this name where a kernel lets us give one. Attention to fewer keys, as a text's, spares too
# little time for its memory.
RESULT, MANY_KEYS = "attention", 256


def dot_product(q, k, v, *, mask=None, precision=None):
    """Attention as two matrix products: exact, any shape, dtype and backend; O(q k) memory."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * (q.shape[-1] ** -0.5)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision)


def cudnn(q, k, v, *, mask=None, precision=None):
    """cuDNN's fused attention: bfloat16 or float16, head_dim a multiple of 8 up to 128 (256 on Hopper).

    Raises:
        ValueError: for inputs that cuDNN cannot take, naming them.
    """
    del precision  # the kernel multiplies in its inputs' dtype and accumulates in float32
    if reason := _cudnn_refuses(q, mask):
        raise ValueError(f"attention=cudnn: {reason}; use attention=flash or dot_product")
    return _cudnn(q, k, v)


def splash(q, k, v, *, mask=None, precision=None, interpret=False):
    """The Pallas flash kernel for TPUs ("splash attention"); no O(q k) memory, forward or backward.

    Lengths that are no multiple of 128 (77 keys, 24x24 queries) are padded, and the padding is
    fenced off by a segment id of its own. `interpret` runs the kernel on any backend, slowly.

    Raises:
        ValueError: for inputs that the kernel cannot take, naming them.
    """
    del precision
    if reason := _splash_refuses(q, mask):
        raise ValueError(f"splash attention: {reason}; use attention=flash or dot_product")
    return _splash(q, k, v, interpret)


def kernel(name: str, device: Any = None) -> AttentionKernel:
    """The kernel called `name`: `dot_product`, `cudnn` or `flash`.

    `flash` is splash attention on a TPU and cuDNN on a GPU, but `cross_attention` to at most 128 keys on a Hopper GPU.
    Where the device or the shapes have none, it computes `dot_product` instead and logs the reason, once for each reason.
    XLA's partitioner cannot split splash and `cross_attention`: on several devices they belong in a `shard_map`, as
    those of `Layout.attend` are.

    Args:
        name: one of KERNELS.
        device: of JAX, one of those that the network will run on. By default JAX's first, which is none of them when
            compiling ahead of time.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in KERNELS:
        raise ValueError(f"attention={name!r} is not known (allowed: {', '.join(KERNELS)})")
    if name != "flash":
        return KERNELS[name]
    return functools.partial(_flash, device=device or jax.devices()[0])


def takes_long(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether an operation is a fused kernel's attention to many keys: a policy of `jax.checkpoint`, which keeps its result."""
    if primitive.name == "dot_product_attention_fwd_wrapper":  # cuDNN's, of q, k, v and more
        return operands[1].shape[1] >= MANY_KEYS
    return primitive.name == "name" and params["name"] == RESULT


def _flash(q, k, v, *, mask=None, precision=None, device: Any):
    attend: Any = None
    if device.platform == "tpu":
        attend, reason = _splash, _splash_refuses(q, mask)
    elif device.platform == "gpu":
        attend, reason = _cudnn, _cudnn_refuses(q, mask)
        if compute_capability(device)[0] == HOPPER:
            from maxdiff.models import cross_attention  # here: Pallas costs a second of start-up

            if cross_attention.takes(q, k, mask):
                attend, reason = cross_attention.attend, None
    else:
        reason = f"there is no flash kernel for {device.platform}"
    if reason:
        _say_once(f"attention=flash: {reason}; computing dot_product there")
        return dot_product(q, k, v, mask=mask, precision=precision)
    return attend(q, k, v)


KERNELS: dict[str, AttentionKernel] = {"dot_product": dot_product, "cudnn": cudnn, "flash": _flash}


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _pad_length(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))


def _cudnn_refuses(q: jax.Array, mask: Any) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention needs bfloat16 or float16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > _cudnn_head_limit():
        return f"cuDNN attention needs a head_dim that is a multiple of 8 up to {_cudnn_head_limit()}, not {q.shape[-1]}"
    if mask is not None:
        return "a mask is not passed on to cuDNN"
    return None


def _cudnn_head_limit() -> int:
    """128, and 256 from Hopper on; JAX asks a GPU of this host, and so finds none when compiling ahead of time."""
    return 256 if compute_capability(jax.local_devices()[0])[0] >= HOPPER else 128


def _cudnn(q, k, v):
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    q, k, v = (_pad_length(x, CUDNN_MULTIPLE) for x in (q, k, v))
    padded = q.shape[1] != queries or k.shape[1] != keys
    lengths: dict[str, Any] = {}
    if padded:
        lengths = {
            "query_seq_lengths": jnp.full((batch,), queries, jnp.int32),
            "key_value_seq_lengths": jnp.full((batch,), keys, jnp.int32),
        }
    if "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "").split():
        return _distinct_cudnn(q, k, v, *lengths.values())[:, :queries]
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **lengths)[:, :queries]


def _distinct_cudnn(q, k, v, *lengths) -> Any:
    """As JAX calls cuDNN, but no two calls are equal.

    Of a program with two equal ones XLA (of jaxlib 0.11.2) cannot run the deterministic backward: it ends with
    "raw_hash_map::at". So each gets a seed of its own, that of a dropout which is off.
    """
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    masked = MaskType.PADDING if lengths else MaskType.NO_MASK
    return dot_product_attention(q, k, v, None, None, *lengths, scale=q.shape[-1] ** -0.5, mask_type=masked, seed=next(SEEDS))


def _splash_refuses(q: jax.Array, mask: Any) -> str | None:
    if q.shape[1] < TPU_BLOCK:
        return f"splash attention needs at least {TPU_BLOCK} queries, not {q.shape[1]}"
    if mask is not None:
        return "a mask is not passed on to splash attention"
    return None


def _splash_block(length: int) -> int:
    """The widest block for a length that is a multiple of 128."""
    return next(width for width in range(TPU_WIDEST, 0, -TPU_BLOCK) if length % width == 0)


def _splash(q, k, v, interpret=False):
    # Imported here: Pallas costs a second of start-up, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as sm

    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5
    q, k, v = (_pad_length(x, TPU_BLOCK).swapaxes(1, 2) for x in (q * scale, k, v))  # [b h l d]
    masks = sm.MultiHeadMask([sm.FullMask((q.shape[2], k.shape[2]))] * heads)
    wide_q, wide_k = _splash_block(q.shape[2]), _splash_block(k.shape[2])
    blocks = sk.BlockSizes(
        block_q=wide_q, block_kv=wide_k, block_kv_compute=wide_k, block_q_dkv=wide_q, block_kv_dkv=wide_k,
        block_kv_dkv_compute=wide_k, block_q_dq=wide_q, block_kv_dq=wide_k,
    )  # fmt: skip
    name = RESULT if keys >= MANY_KEYS else None
    attend = sk.make_splash_mha(
        masks, block_sizes=blocks, head_shards=1, q_seq_shards=1, residual_checkpoint_name=name, interpret=interpret
    )
    segments = None
    if q.shape[2] != queries or k.shape[2] != keys:
        # Real positions are segment 1, padded ones 0. Keys alone may be padded: padded queries
        # look at padded keys and are cut off below.
        segments = sk.SegmentIds(
            q=(jnp.arange(q.shape[2]) < queries).astype(jnp.int32),
            kv=(jnp.arange(k.shape[2]) < keys).astype(jnp.int32),
        )
    out: Any = jax.vmap(lambda q, k, v: attend(q, k, v, segments))(q, k, v)
    return out.swapaxes(1, 2)[:, :queries]
