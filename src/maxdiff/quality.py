"""How near generated pictures are to real ones, from the features of both: pure functions of arrays.

Features are float [n d], one row for each picture, of whatever network. With Inception's alone the Fréchet distance is FID, and
the kernel distance KID.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

NEIGHBOURS = 3  # Kynkäänniemi et al. 2019
ROWS = 1000  # of a table of distances, at once


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the Fréchet distance knows of a set of pictures: mean [d] and covariance [d d] of its features, float64."""

    mean: np.ndarray
    covariance: np.ndarray
    count: int

    @classmethod
    def of(cls, features: np.ndarray) -> "Statistics":
        """Raises ValueError for less than two rows, or features that are not finite."""
        if len(features) < 2 or not np.isfinite(features).all():
            raise ValueError(f"features of {len(features)} pictures are not enough, or not finite (allowed: 2 or more, finite)")
        features = features.astype(np.float64)
        centred = features - features.mean(0)
        return cls(features.mean(0), centred.T @ centred / (len(features) - 1), len(features))


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^1/2), the squared distance of two normal distributions (Heusel et al. 2017).

    The trace of the root is the sum of the roots of the eigenvalues of C_a^1/2 C_b C_a^1/2, which is symmetric: so it is
    real, and exact to rounding, also with fewer pictures than features.
    """
    values, vectors = np.linalg.eigh(a.covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    between = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ b.covariance @ root), 0)).sum()
    distance = np.square(a.mean - b.mean).sum() + np.trace(a.covariance) + np.trace(b.covariance) - 2 * between
    return float(max(distance, 0.0))


def kernel_distance(
    real: np.ndarray, generated: np.ndarray, *, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """(mean, standard deviation over subsets) of the squared maximum mean discrepancy (Binkowski et al. 2018).

    Its kernel is (x y / d + 1)^3, and it is unbiased: it may be negative, and is not larger for small sets, as the
    Fréchet distance is. Subsets are drawn from each set without putting back; where one is all that there is of both sets,
    it is the only one, and the deviation 0.

    Args:
        subset_size: pictures of each set in a subset; no more than there are.

    Raises:
        ValueError: for less than two pictures in a set.
    """
    size = min(subset_size, len(real), len(generated))
    if size < 2:
        raise ValueError(
            f"{len(real)} real and {len(generated)} generated pictures are not enough (allowed: 2 or more of each)"
        )
    subsets = 1 if size == len(real) == len(generated) else subsets
    rng = np.random.default_rng(seed)
    pick = lambda features: features[rng.choice(len(features), size, replace=False)].astype(np.float64)
    found = [_discrepancy(pick(real), pick(generated)) for _ in range(subsets)]
    return float(np.mean(found)), float(np.std(found))


def _discrepancy(x: np.ndarray, y: np.ndarray) -> float:
    kernel = lambda a, b: (a @ b.T / a.shape[1] + 1) ** 3
    within = sum((k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (kernel(x, x), kernel(y, y)))
    return float(within - 2 * kernel(x, y).mean())


def precision_and_recall(real: np.ndarray, generated: np.ndarray, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """(share of generated pictures among real ones, share of real ones among generated) (Kynkäänniemi et al. 2019).

    A picture is among others if it is no further from one of them than that one is from its k-th nearest neighbour.

    Raises:
        ValueError: unless each set has more pictures than `neighbours`.
    """
    if min(len(real), len(generated)) <= neighbours:
        raise ValueError(f"{len(real)} real and {len(generated)} generated pictures are not enough for {neighbours} neighbours "
                         f"(allowed: {neighbours + 1} or more of each)")  # fmt: skip
    return _share_among(generated, real, neighbours), _share_among(real, generated, neighbours)


def _share_among(pictures: np.ndarray, others: np.ndarray, neighbours: int) -> float:
    # Row by row of the table of distances, which is too large to be kept. The nearest of all is the picture itself.
    radii = np.concatenate([np.partition(table, neighbours, axis=1)[:, neighbours] for table in _distances(others, others)])
    return float(np.concatenate([(table <= radii[None]).any(1) for table in _distances(pictures, others)]).mean())


def _distances(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """The table of squared distances [n m], ROWS of its rows at a time."""
    for first in range(0, len(x), ROWS):
        yield _squared_distances(x[first : first + ROWS], y)


def _squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[n m], float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    squares = np.square(x).sum(1)[:, None] + np.square(y).sum(1)[None] - 2 * x @ y.T
    return np.maximum(squares, 0.0)
