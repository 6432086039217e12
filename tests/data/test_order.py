import numpy as np
import pytest

from maxdiff.data.order import batch_positions, example_index, host_slice


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 3374])
def test_every_epoch_visits_every_example_once(n: int):
    epoch, index = example_index(5, n, np.arange(4 * n))
    np.testing.assert_array_equal(epoch, np.repeat(np.arange(4), n))
    for row in index.reshape(4, n):
        np.testing.assert_array_equal(np.sort(row), np.arange(n))
    assert epoch.dtype == index.dtype == np.int64


def test_the_order_never_changes():
    # A run that was begun with one version goes on with the next: these numbers are a promise.
    assert example_index(0, 3374, np.arange(6))[1].tolist() == [2636, 2948, 2180, 2616, 532, 2969]
    assert example_index(-1, 3374, 3374 * 10**6 + np.arange(3))[1].tolist() == [3059, 576, 103]


def test_a_position_does_not_depend_on_its_company():
    _, whole = example_index(3, 1000, np.arange(5000))
    some = np.random.default_rng(0).integers(0, 5000, (20, 5))
    np.testing.assert_array_equal(example_index(3, 1000, some)[1], whole[some])
    assert int(example_index(3, 1000, 4321)[1]) == whole[4321]


def test_seeds_and_epochs_give_different_orders():
    n = 1000
    orders = [example_index(seed, n, np.arange(n) + epoch * n)[1] for seed in (0, 1, 2, 2**63) for epoch in (0, 1, 7)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 10  # one is expected of two random orders
    # Nor is seed + 1 at epoch e seed at epoch e + 1.
    assert not np.array_equal(example_index(1, n, np.arange(n))[1], example_index(0, n, np.arange(n) + n)[1])


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations above its mean."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


def test_all_permutations_of_four_are_as_frequent():
    trials = 24_000
    orders = example_index(11, 4, np.arange(4 * trials))[1].reshape(trials, 4)
    _, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24
    assert abs(chi_square(counts)) < 4


@pytest.mark.parametrize("n", [2, 10, 37])
def test_examples_and_pairs_of_neighbours_are_spread_evenly(n: int):
    trials = 4000
    orders = example_index(7, n, np.arange(n * trials))[1].reshape(trials, n)
    places = np.zeros((n, n), int)
    np.add.at(places, (np.broadcast_to(np.arange(n), orders.shape), orders), 1)
    assert abs(chi_square(places)) < 5
    pairs = np.zeros((n, n), int)
    np.add.at(pairs, (orders[:, :-1], orders[:, 1:]), 1)
    assert abs(chi_square(pairs[~np.eye(n, dtype=bool)])) < 5


def test_successive_epochs_are_uncorrelated():
    n = 3374
    orders = example_index(0, n, np.arange(20 * n))[1].reshape(20, n)
    correlation = np.corrcoef(np.vstack([orders, np.arange(n)]))
    assert np.abs(correlation[~np.eye(21, dtype=bool)]).max() < 5 / np.sqrt(n)


def test_a_large_source_costs_no_memory():
    _, index = example_index(0, 10**12, 10**15 + np.arange(1000))
    assert len(set(index.tolist())) == 1000
    assert 0 <= index.min() < index.max() < 10**12
    assert abs(index.mean() / 10**12 - 0.5) < 0.05


def test_hosts_share_a_batch():
    positions = batch_positions(3, 12)
    np.testing.assert_array_equal(positions, np.arange(36, 48))
    assert positions.dtype == np.int64
    for count in (1, 2, 3, 12):
        parts = [positions[host_slice(i, count, 12)] for i in range(count)]
        np.testing.assert_array_equal(np.concatenate(parts), positions)


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"global_batch=10 does not divide among 4 processes \(allowed: multiples of 4\)"):
        host_slice(0, 4, 10)
    with pytest.raises(ValueError, match=r"process_index=4 of 4 processes \(allowed: 0 to 3\)"):
        host_slice(4, 4, 12)
    with pytest.raises(ValueError, match="n=0"):
        example_index(0, 0, 3)
    with pytest.raises(ValueError, match="position=-1"):
        example_index(0, 3, [-1, 2])
