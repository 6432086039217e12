"""Distances of sets of features, against closed forms and their definitions."""

import numpy as np
import pytest

from maxdiff import quality
from maxdiff.quality import Statistics, frechet_distance, kernel_distance, precision_and_recall


def test_the_frechet_distance_of_normal_distributions_is_that_of_the_formula():
    """With covariances that commute, the root is taken number by number."""
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    first, second = rng.uniform(0.1, 3, (2, 6))
    a, b = (Statistics(rng.standard_normal(6), turn @ np.diag(values) @ turn.T, 100) for values in (first, second))
    expected = np.square(a.mean - b.mean).sum() + np.square(np.sqrt(first) - np.sqrt(second)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-12)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-12)


def test_the_frechet_distance_is_that_of_scipys_root():
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(1)
    mix = rng.standard_normal((2, 8, 8))
    x, y = (rng.standard_normal((50, 8)) @ m + i for i, m in enumerate(mix))
    a, b = Statistics.of(x), Statistics.of(y)
    np.testing.assert_allclose(a.covariance, np.cov(x, rowvar=False), rtol=1e-12)
    root = np.real(sqrtm(a.covariance @ b.covariance))
    expected = np.square(a.mean - b.mean).sum() + np.trace(a.covariance + b.covariance - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_fewer_pictures_than_features_are_no_trouble():
    rng = np.random.default_rng(2)
    a, b = (Statistics.of(rng.standard_normal((10, 64)).astype(np.float32)) for _ in range(2))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert 0 < frechet_distance(a, b) < np.inf
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-6)


def test_the_kernel_distance_by_its_definition():
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 5, 4))
    kernel = lambda a, b: (a @ b / 4 + 1) ** 3
    pairs = [(i, j) for i in range(5) for j in range(5)]
    within = [np.mean([kernel(z[i], z[j]) for i, j in pairs if i != j]) for z in (x, y)]
    expected = sum(within) - 2 * np.mean([kernel(x[i], y[j]) for i, j in pairs])
    mean, spread = kernel_distance(x, y, subsets=3)  # each subset is the whole set
    assert mean == pytest.approx(expected, rel=1e-12)
    assert spread == pytest.approx(0, abs=1e-12)


def test_the_kernel_distance_is_unbiased_and_repeatable():
    rng = np.random.default_rng(4)
    same = [kernel_distance(*rng.standard_normal((2, 60, 8)), subsets=10, subset_size=40)[0] for _ in range(40)]
    assert abs(np.mean(same)) < 3 * np.std(same) / np.sqrt(40)
    x, y = rng.standard_normal((60, 8)), rng.standard_normal((60, 8)) + 1
    assert kernel_distance(x, y, subset_size=40) == kernel_distance(x, y, subset_size=40)
    assert kernel_distance(x, y, subset_size=40)[0] > 0.5


def test_precision_and_recall_of_sets_that_overlap_in_part(monkeypatch: pytest.MonkeyPatch):
    line = np.arange(20.0)[:, None]
    real, generated = line[:12], line[8:]  # 4 of each are the other's; radii of 3 reach 3 further (of 2 inside)
    precision, recall = precision_and_recall(real, generated)
    assert (precision, recall) == (7 / 12, 7 / 12)
    assert precision_and_recall(line, line) == (1.0, 1.0)
    monkeypatch.setattr(quality, "ROWS", 5)  # of the table of distances, at once
    assert precision_and_recall(real, generated) == (precision, recall)
    assert precision_and_recall(line, line + 100) == (0.0, 0.0)
    # All alike: each is real, and little of what is real is there.
    alike = 5.0 + 1e-3 * line
    assert precision_and_recall(line, alike)[0] == 1.0
    assert precision_and_recall(line, alike)[1] < 0.2


@pytest.mark.parametrize(("call", "message"), [
    (lambda: Statistics.of(np.zeros((1, 3))), "features of 1 pictures"),
    (lambda: Statistics.of(np.full((3, 3), np.nan)), "not finite"),
    (lambda: kernel_distance(np.zeros((1, 3)), np.zeros((5, 3))), "1 real and 5 generated"),
    (lambda: precision_and_recall(np.zeros((3, 3)), np.zeros((5, 3))), "3 real and 5 generated pictures are not enough for 3"),
])  # fmt: skip
def test_too_few_pictures_are_an_error(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
