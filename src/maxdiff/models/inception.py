"""InceptionV3 (Szegedy et al. 2015) as the Fréchet inception distance uses it (Heusel et al. 2017).

That is TensorFlow's network of 2015-12-05, whose weights pytorch-fid has brought to torchvision's names. It differs from
torchvision's in what is pooled inside the blocks: averages leave out the padding, and the last block takes maxima.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from maxdiff.models.layers import BatchNorm, Compute, Conv, check_shape

# Height and width of the images that the network was trained on, and of its features.
SIZE = 299
FEATURES = 2048
EPS = 0.001


class BasicConv2d(nnx.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, c_in: int, c_out: int, compute: Compute, **options: Any):
        self.conv = Conv(c_in, c_out, compute, use_bias=False, **options)
        self.bn = BatchNorm(c_out, compute, EPS)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(self.bn(self.conv(x)))


class InceptionA(nnx.Module):
    """Blocks of 35 x 35: 5x5 convolutions beside two 3x3 ones (figure 5 of the paper)."""

    def __init__(self, c_in: int, c_pool: int, compute: Compute):
        self.branch1x1 = BasicConv2d(c_in, 64, compute, kernel_size=1)
        self.branch5x5_1 = BasicConv2d(c_in, 48, compute, kernel_size=1)
        self.branch5x5_2 = BasicConv2d(48, 64, compute, kernel_size=5)
        self.branch3x3dbl_1 = BasicConv2d(c_in, 64, compute, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, compute)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, compute)
        self.branch_pool = BasicConv2d(c_in, c_pool, compute, kernel_size=1)

    def __call__(self, x: jax.Array) -> jax.Array:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return _beside(self.branch1x1(x), five, three, self.branch_pool(_average_around(x)))


class InceptionB(nnx.Module):
    """From 35 x 35 to 17 x 17."""

    def __init__(self, c_in: int, compute: Compute):
        self.branch3x3 = BasicConv2d(c_in, 384, compute, stride=2, padding="VALID")
        self.branch3x3dbl_1 = BasicConv2d(c_in, 64, compute, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, compute)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, compute, stride=2, padding="VALID")

    def __call__(self, x: jax.Array) -> jax.Array:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return _beside(self.branch3x3(x), double, _maxima(x, stride=2))


class InceptionC(nnx.Module):
    """Blocks of 17 x 17: 7x7 convolutions as pairs of 1x7 and 7x1 (figure 6)."""

    def __init__(self, c_in: int, width: int, compute: Compute):
        across, down = {"kernel_size": (1, 7)}, {"kernel_size": (7, 1)}
        self.branch1x1 = BasicConv2d(c_in, 192, compute, kernel_size=1)
        self.branch7x7_1 = BasicConv2d(c_in, width, compute, kernel_size=1)
        self.branch7x7_2 = BasicConv2d(width, width, compute, **across)
        self.branch7x7_3 = BasicConv2d(width, 192, compute, **down)
        self.branch7x7dbl_1 = BasicConv2d(c_in, width, compute, kernel_size=1)
        self.branch7x7dbl_2 = BasicConv2d(width, width, compute, **down)
        self.branch7x7dbl_3 = BasicConv2d(width, width, compute, **across)
        self.branch7x7dbl_4 = BasicConv2d(width, width, compute, **down)
        self.branch7x7dbl_5 = BasicConv2d(width, 192, compute, **across)
        self.branch_pool = BasicConv2d(c_in, 192, compute, kernel_size=1)

    def __call__(self, x: jax.Array) -> jax.Array:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return _beside(self.branch1x1(x), single, double, self.branch_pool(_average_around(x)))


class InceptionD(nnx.Module):
    """From 17 x 17 to 8 x 8."""

    def __init__(self, c_in: int, compute: Compute):
        self.branch3x3_1 = BasicConv2d(c_in, 192, compute, kernel_size=1)
        self.branch3x3_2 = BasicConv2d(192, 320, compute, stride=2, padding="VALID")
        self.branch7x7x3_1 = BasicConv2d(c_in, 192, compute, kernel_size=1)
        self.branch7x7x3_2 = BasicConv2d(192, 192, compute, kernel_size=(1, 7))
        self.branch7x7x3_3 = BasicConv2d(192, 192, compute, kernel_size=(7, 1))
        self.branch7x7x3_4 = BasicConv2d(192, 192, compute, stride=2, padding="VALID")

    def __call__(self, x: jax.Array) -> jax.Array:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return _beside(three, seven, _maxima(x, stride=2))


class InceptionE(nnx.Module):
    """Blocks of 8 x 8: 1x3 and 3x1 convolutions side by side (figure 7).

    Args:
        max_pool: take maxima of the surroundings in place of averages. The last block does so, by mistake perhaps, in the
            network whose features everybody compares.
    """

    def __init__(self, c_in: int, compute: Compute, *, max_pool: bool):
        across, down = {"kernel_size": (1, 3)}, {"kernel_size": (3, 1)}
        self.max_pool = max_pool
        self.branch1x1 = BasicConv2d(c_in, 320, compute, kernel_size=1)
        self.branch3x3_1 = BasicConv2d(c_in, 384, compute, kernel_size=1)
        self.branch3x3_2a = BasicConv2d(384, 384, compute, **across)
        self.branch3x3_2b = BasicConv2d(384, 384, compute, **down)
        self.branch3x3dbl_1 = BasicConv2d(c_in, 448, compute, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(448, 384, compute)
        self.branch3x3dbl_3a = BasicConv2d(384, 384, compute, **across)
        self.branch3x3dbl_3b = BasicConv2d(384, 384, compute, **down)
        self.branch_pool = BasicConv2d(c_in, 192, compute, kernel_size=1)

    def __call__(self, x: jax.Array) -> jax.Array:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = _maxima(x, stride=1, padding=1) if self.max_pool else _average_around(x)
        return _beside(
            self.branch1x1(x),
            self.branch3x3_2a(single), self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        )  # fmt: skip


class InceptionV3(nnx.Module):
    """Images to features; the classifier behind them is left out."""

    def __init__(self, config: None, compute: Compute):
        del config  # there is one
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, compute, stride=2, padding="VALID")
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, compute, padding="VALID")
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, compute)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, compute, kernel_size=1)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, compute, padding="VALID")
        self.Mixed_5b = InceptionA(192, 32, compute)
        self.Mixed_5c = InceptionA(256, 64, compute)
        self.Mixed_5d = InceptionA(288, 64, compute)
        self.Mixed_6a = InceptionB(288, compute)
        self.Mixed_6b = InceptionC(768, 128, compute)
        self.Mixed_6c = InceptionC(768, 160, compute)
        self.Mixed_6d = InceptionC(768, 160, compute)
        self.Mixed_6e = InceptionC(768, 192, compute)
        self.Mixed_7a = InceptionD(768, compute)
        self.Mixed_7b = InceptionE(1280, compute, max_pool=False)
        self.Mixed_7c = InceptionE(2048, compute, max_pool=True)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Pixels [b 299 299 3], about -1 to 1, to features [b 2048]: means of the last block's outputs.

        Raises:
            ValueError: for pixels of another shape.
        """
        check_shape("pixels", pixels, "batch", SIZE, SIZE, 3)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(pixels)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_maxima(x, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(_maxima(x, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((1, 2))


def _beside(*branches: jax.Array) -> jax.Array:
    return jnp.concatenate(branches, axis=-1)


def _maxima(x: jax.Array, *, stride: int, padding: int = 0) -> jax.Array:
    """The largest of each 3 x 3 pixels of x [b h w c]; padding never is."""
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, stride, stride, 1), around)


def _average_around(x: jax.Array) -> jax.Array:
    """The mean of each pixel of x [b h w c] and its neighbours, of which the edges have fewer: padding is not counted."""
    add = lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return add(x) / add(jnp.ones((1, *x.shape[1:3], 1), x.dtype))
