"""Orders of several sources in proportion, and orders that keep reads near each other."""

import numpy as np
import pytest

from maxdiff.data.examples import BadExample, Example
from maxdiff.data.mixed import Mixed, examples_at, siblings
from maxdiff.data.order import RUNS_TOGETHER, SOURCES, batch_positions, example_index, host_slice, mixed_index
from maxdiff.data.pipeline import BatchPlan, batches, load_batch, load_example
from tests.data.test_sources import image

IMAGE = image(0)


class Numbers:
    """`n` examples, some of them bad."""

    def __init__(self, name: str, n: int, bad: tuple[int, ...] = ()):
        self.name, self.n, self.bad = name, n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Example:
        if not 0 <= i < self.n:
            raise IndexError(i)
        if i in self.bad:
            raise BadExample(f"{self.name}{i}", "bad")
        return Example(f"{self.name}{i}", IMAGE, (self.name,))

    def fields(self, i: int) -> dict[str, str]:
        return {"text": self[i].key}

    def fingerprint(self) -> str:
        return f"{self.name} {self.n}"


# --- Several sources ---------------------------------------------------------------------------------------------

MIXES = [((5,), (3,)), ((7, 3), (1, 1)), ((10, 4, 9), (5, 1, 2)), ((2, 3, 4, 5), (1, 10, 100, 3)), ((3, 3), (6, 4))]


@pytest.mark.parametrize(("sizes", "weights"), MIXES)
def test_each_period_has_each_source_as_often_as_its_weight(sizes: tuple[int, ...], weights: tuple[int, ...]):
    period, starts = sum(weights), np.cumsum((0, *sizes))
    epoch, index = mixed_index(3, sizes, weights, np.arange(50 * period))
    source = np.searchsorted(starts, index, "right") - 1
    for row in source.reshape(50, period):
        np.testing.assert_array_equal(np.bincount(row, minlength=len(sizes)), weights)
    for number, (n, weight) in enumerate(zip(sizes, weights, strict=True)):
        mine = np.flatnonzero(source == number)
        # Its k-th position of all has the k-th example of its own order.
        epochs, own = example_index(3 + number * SOURCES, n, np.arange(len(mine)))
        np.testing.assert_array_equal(index[mine] - starts[number], own)
        np.testing.assert_array_equal(epoch[mine], epochs)
        # And comes within half a position, for each source, of when it is due.
        due = (np.arange(len(mine)) + 0.5) * period / weight
        assert np.abs(mine + 0.5 - due).max() <= len(sizes) / 2


def test_a_mix_never_changes():
    # A run that was begun with one version goes on with the next: these numbers are a promise.
    _, index = mixed_index(0, (100, 10), (5, 2), np.arange(14))
    assert (index >= 100).astype(int).tolist() == [0, 1, 0, 0, 0, 1, 0] * 2
    assert index.tolist() == [46, 108, 44, 81, 50, 104, 20, 58, 102, 33, 95, 94, 105, 92]


def test_sources_of_one_size_are_not_drawn_in_step():
    _, index = mixed_index(0, (100, 100), (1, 1), np.arange(200))
    first, second = index[index < 100], index[index >= 100] - 100
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first == second).sum() < 10


def test_positions_of_a_mix_do_not_depend_on_their_company():
    epoch, whole = mixed_index(1, (7, 30), (2, 3), np.arange(1000))
    some = np.random.default_rng(0).integers(0, 1000, (4, 25))
    for block in (0, 2):
        _, blocked = mixed_index(1, (7, 30), (2, 3), np.arange(1000), block)
        np.testing.assert_array_equal(mixed_index(1, (7, 30), (2, 3), some, block)[1], (blocked if block else whole)[some])
    assert int(mixed_index(1, (7, 30), (2, 3), 999)[0]) == epoch[999]


def test_large_mixes_cost_no_memory():
    _, index = mixed_index(0, (10**12, 10**11), (999_999, 7), 10**14 + np.arange(1000))
    assert len(set(index.tolist())) == 1000
    with pytest.raises(ValueError, match=r"weights \[1000000, 1000001\] add up to 2000001 \(allowed: at most"):
        mixed_index(0, (1, 1), (10**6, 10**6 + 1), 0)
    with pytest.raises(ValueError, match="position=-1"):
        mixed_index(0, (1, 1), (1, 1), -1)


def test_a_mix_is_a_source():
    mix = Mixed([Numbers("a", 3), Numbers("b", 2)], (2, 1))
    assert [mix[i].key for i in range(len(mix))] == ["a0", "a1", "a2", "b0", "b1"]
    assert mix.fields(3) == {"text": "b0"}
    for i in (-1, 5):
        with pytest.raises(IndexError):
            mix[i]
    others = [Mixed([Numbers("a", 3), Numbers("b", 2)], (1, 1)), Mixed([Numbers("b", 2), Numbers("a", 3)], (1, 2))]
    assert len({mix.fingerprint(), *(other.fingerprint() for other in others)}) == 3


def test_a_bad_example_is_replaced_by_one_of_its_own_source():
    mix = Mixed([Numbers("a", 3, bad=(2,)), Numbers("b", 2, bad=(0, 1))], (1, 1))
    assert [siblings(mix, i) for i in range(5)] == [(0, 3)] * 3 + [(3, 2)] * 2
    assert load_example(mix, BatchPlan(0, 1, 8), 0, 2).key == "a0"
    with pytest.raises(ValueError, match="examples in a row are bad, the last b"):
        load_example(mix, BatchPlan(0, 1, 8), 0, 3)
    plain = Numbers("a", 3)
    assert [siblings(plain, i) for i in range(3)] == [(0, 3)] * 3


# --- Reads near each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 65, 1000, 3374, 20_000])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 50, 1000, 10**6])
def test_blocks_permute(n: int, block: int):
    epoch, index = example_index(5, n, np.arange(3 * n), block)
    np.testing.assert_array_equal(epoch, np.repeat(np.arange(3), n))
    for row in index.reshape(3, n):
        np.testing.assert_array_equal(np.sort(row), np.arange(n))


def test_no_block_is_the_order_of_old():
    for n in (1, 10, 3374):
        np.testing.assert_array_equal(example_index(9, n, np.arange(2 * n), 0), example_index(9, n, np.arange(2 * n)))
    assert example_index(0, 3374, np.arange(6), 0)[1].tolist() == [2636, 2948, 2180, 2616, 532, 2969]


def test_blocks_never_change():
    assert example_index(0, 3374, np.arange(6), 10)[1].tolist() == [1619, 2947, 3015, 246, 2354, 46]
    some = np.random.default_rng(0).integers(0, 30_000, (20, 50))
    np.testing.assert_array_equal(example_index(3, 5000, some, 16)[1], example_index(3, 5000, np.arange(30_000), 16)[1][some])


def test_blocks_keep_reads_near_each_other():
    n, block = 100_003, 50
    span = RUNS_TOGETHER * block
    index = example_index(2, n, np.arange(n), block)[1]
    for start in range(0, n - n % span, span):
        window = np.sort(index[start : start + span])
        # In the circle of examples, runs begin where the one before has no neighbour.
        begins = np.count_nonzero(np.diff(np.append(window, window[0] + n)) != 1)
        assert begins <= RUNS_TOGETHER
        # But neighbours in the order are not neighbours in the data.
        assert np.mean(np.abs(np.diff(index[start : start + span])) == 1) < 0.01
    # Of the whole order, runs are shuffled: places say nothing of examples.
    assert abs(np.corrcoef(index, np.arange(n))[0, 1]) < 0.1


def test_blocks_are_cut_and_shuffled_anew_in_each_epoch():
    n, block = 10_000, 10
    orders = example_index(0, n, np.arange(8 * n), block)[1].reshape(8, n)
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert np.mean(a == b) < 0.01
    first = [set(order[: RUNS_TOGETHER * block].tolist()) for order in orders]
    assert len(set.union(*first)) > 4 * RUNS_TOGETHER * block
    # Where runs begin moves too: all of an epoch's windows have ends at other examples.
    ends = {int(i) % block for order in orders for i in np.sort(order[: RUNS_TOGETHER * block])[:1]}
    assert len(ends) > 2


def test_each_example_comes_anywhere_alike():
    n, block, trials = 37, 3, 4000
    orders = example_index(7, n, np.arange(n * trials), block)[1].reshape(trials, n)
    places = np.zeros((n, n), int)
    np.add.at(places, (np.broadcast_to(np.arange(n), orders.shape), orders), 1)
    expected = trials / n
    chi = (((places - expected) ** 2 / expected).sum() - (n * n - 1)) / np.sqrt(2 * (n * n - 1))
    assert abs(chi) < 5


def test_large_sources_with_blocks_cost_no_memory():
    _, index = example_index(0, 10**12, 10**13 + np.arange(1000), 10**6)
    assert len(set(index.tolist())) == 1000
    assert len(set((index // 10**6).tolist())) <= 2 * RUNS_TOGETHER
    with pytest.raises(ValueError, match="block=-1"):
        example_index(0, 3, 0, -1)


# --- Processes and restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 4])
def test_processes_and_restarts_change_nothing(block: int):
    source = Mixed([Numbers("a", 30), Numbers("b", 11, bad=(3,))], (3, 1))
    plan = lambda index, count: BatchPlan(1, 8, 8, process_index=index, process_count=count, shuffle_block=block)
    whole = [load_batch(source, [], plan(0, 1), step)[0]["index"] for step in range(12)]
    for count in (2, 4):
        for step in range(12):
            parts = [load_batch(source, [], plan(index, count), step)[0]["index"] for index in range(count)]
            np.testing.assert_array_equal(np.concatenate(parts), whole[step])
    resumed = batches(source, [], plan(1, 2), start_step=7, max_bad_fraction=1)  # in the middle of an epoch of both
    for step in range(7, 12):
        np.testing.assert_array_equal(next(resumed)["index"], whole[step][host_slice(1, 2, 8)])
    resumed.close()  # pyright: ignore
    expected = examples_at(source, 1, batch_positions(5, 8), block)[1]
    np.testing.assert_array_equal(np.where(expected == 33, 34, expected), whole[5])
