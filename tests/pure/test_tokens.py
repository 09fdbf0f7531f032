"""The order of samples and their cut over ranks: exactly once, for any plan and any resume."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.errors import UserError
from reparto.partition.packing import pack, pieces
from reparto.partition.tokens import (
    MixtureOrder,
    ShuffledOrder,
    balanced,
    batch_slices,
    evaluation_cells,
    permutation,
    sample_at,
)


def ids(seed: int, n: int, start: int, stop: int) -> list[int]:
    return [sample_at(seed, position, n)[1] for position in range(start, stop)]


@given(st.integers(), st.integers(0, 1 << 40), st.integers(1, 700))
def test_a_permutation_is_a_bijection(seed: int, epoch: int, n: int) -> None:
    order = permutation(seed, epoch, n)
    assert sorted(order[place] for place in range(n)) == list(range(n))


def test_order_is_the_same_on_every_machine() -> None:
    order = permutation(seed=1, epoch=0, n=10)
    assert [order[place] for place in range(10)] == FIRST_TEN


def test_one_place_of_a_huge_epoch_needs_no_memory() -> None:
    n = 10**15
    order = permutation(seed=3, epoch=2, n=n)
    found = [order[place] for place in range(0, n, n // 50)]
    assert len(set(found)) == len(found) and all(0 <= sample < n for sample in found)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 11])
def test_every_sample_is_equally_likely_at_every_place(n: int) -> None:
    rounds = 3000
    seen = Counter(
        (place, permutation(seed, 0, n)[place]) for seed in range(rounds) for place in range(n)
    )
    expected = rounds / n
    chi_square = sum(
        (seen[place, sample] - expected) ** 2 / expected
        for place in range(n)
        for sample in range(n)
    )
    # (n - 1)^2 degrees of freedom: mean that, standard deviation sqrt(2) (n - 1)
    assert chi_square < (n - 1) ** 2 + 5 * 1.42 * (n - 1) + 5


def test_neighbours_do_not_stay_neighbours() -> None:
    order = permutation(seed=5, epoch=0, n=10_000)
    steps = Counter(order[place + 1] - order[place] for place in range(9_999))
    # in a random order a given difference is seen about once; a linear order would repeat one
    assert max(steps.values()) < 12


@given(st.integers(0, 9), st.integers(1, 60), st.integers(0, 500), st.integers(1, 200))
def test_order_of_many_positions_is_the_order_of_each(
    seed: int, n: int, start: int, count: int
) -> None:
    order = ShuffledOrder(seed=seed, num_samples=n)
    assert order.at(range(start, start + count)) == ids(seed, n, start, start + count)
    assert order.epoch_length == n


def test_L34_orders_differ_between_epochs_and_each_epoch_is_the_whole_set() -> None:
    n, ranks, batch = 22, 2, 2
    seen: list[list[int]] = [[], []]
    split = batch_slices(batch, ranks, 1)
    for start in range(0, 3 * n, batch):
        for rank in range(ranks):
            positions = [start + offset for offset in split.cells[rank][0]]
            seen[rank] += [sample_at(7, position, n)[1] for position in positions]
    epochs = [
        seen[0][11 * epoch : 11 * epoch + 11] + seen[1][11 * epoch : 11 * epoch + 11]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert ids(7, n, 0, 3 * n) == ids(7, n, 0, 3 * n) != ids(8, n, 0, 3 * n)


def test_L36_resume_in_a_later_epoch_reads_that_epochs_order() -> None:
    batch = 4
    n, stop = 125 * batch, 200 * batch
    unbroken = ids(1, n, 0, 250 * batch)
    assert ids(1, n, stop, stop + batch) == unbroken[stop : stop + batch]
    assert sample_at(1, stop, n)[0] == 1
    assert ids(1, n, stop, stop + batch) != unbroken[stop - n : stop - n + batch]


def test_L37_a_second_resume_inside_an_epoch_keeps_the_first_one() -> None:
    batch, n = 2, 1000
    position, seen = 0, []
    for batches in (30, 10, 5):
        seen += ids(1, n, position, position + batches * batch)
        position += batches * batch
    assert position == 45 * batch
    assert seen == ids(1, n, 0, 45 * batch)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5)), max_size=5),
)
def test_L40_steps_and_samples_do_not_depend_on_ranks_or_microbatches(
    n: int, runs: list[tuple[int, int, int]]
) -> None:
    batch, position, seen = 24, 0, []
    for data, num_microbatches, steps in runs:
        split = batch_slices(batch, data, num_microbatches)
        for _ in range(steps):
            offsets = [offset for row in split.cells for cell in row for offset in cell]
            seen += [sample_at(1, position + offset, n)[1] for offset in offsets]
            position += batch
    steps_done = sum(steps for _, _, steps in runs)
    assert len(seen) == steps_done * batch == position
    assert seen == ids(1, n, 0, position)


def test_L40_the_reported_case() -> None:
    before, after = batch_slices(4, 1, 4), batch_slices(4, 1, 1)
    assert [len(cell) for cell in before.cells[0]] == [1, 1, 1, 1]
    assert [len(cell) for cell in after.cells[0]] == [4]
    steps, position = 0, 0
    for split in [before] * 3 + [after] * 5:
        position += sum(len(cell) for row in split.cells for cell in row)
        steps += 1
    assert (steps, position) == (8, 8 * 4)


def test_L09_no_update_mixes_more_than_its_own_microbatches() -> None:
    n, accumulation, epochs = 63, 8, 2
    split = batch_slices(accumulation, 1, accumulation)
    updates: list[list[tuple[int, int]]] = []
    position = 0
    while position < n * epochs:
        cells = [cell for cell in split.cells[0] if position + cell.start < n * epochs]
        updates.append([sample_at(1, position + cell.start, n) for cell in cells])
        position += accumulation
    assert max(map(len, updates)) == 8
    assert sum(map(len, updates)) == 126
    assert Counter(pair for update in updates for pair in update) == Counter(
        (epoch, sample) for epoch in range(2) for sample in range(n)
    )


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_a_batch_is_cut_once_and_evenly(batch: int, data: int, num_microbatches: int) -> None:
    cells = data * num_microbatches
    if batch < cells:
        with pytest.raises(UserError) as caught:
            batch_slices(batch, data, num_microbatches)
        assert caught.value.where == "data.batch_size"
        assert caught.value.nearest == f"batch_size = {cells}"
        return
    split = batch_slices(batch, data, num_microbatches)
    assert len(split.cells) == data
    assert all(len(row) == num_microbatches for row in split.cells)
    lengths = [len(cell) for row in split.cells for cell in row]
    assert [offset for row in split.cells for cell in row for offset in cell] == list(range(batch))
    assert max(lengths) - min(lengths) <= 1
    assert split.sequences == max(lengths)
    assert split.padding == sum(split.sequences - length for length in lengths)


def test_an_uneven_batch_says_what_it_costs() -> None:
    split = batch_slices(10, 2, 2)
    assert [[len(cell) for cell in row] for row in split.cells] == [[2, 3], [2, 3]]
    assert (split.sequences, split.padding) == (3, 2)
    assert split.padding_share == pytest.approx(1 / 6)
    assert "2 padding sequences a step, 16.7% of the compute" in split.warning()
    assert "8 or 12 would waste none" in split.warning()
    assert batch_slices(12, 2, 2).warning() == ""


def test_L33_evaluation_counts_each_sample_once() -> None:
    wrong = {0}
    cells = [evaluation_cells(10, 4, rank, microbatch_size=2) for rank in range(4)]
    seen = [sample for rank in cells for cell in rank for sample in cell]
    assert sorted(seen) == list(range(10))
    assert sum(sample not in wrong for sample in seen) / len(seen) == 0.900


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 7))
def test_evaluation_keeps_all_ranks_in_step(n: int, data: int, microbatch_size: int) -> None:
    cells = [evaluation_cells(n, data, rank, microbatch_size) for rank in range(data)]
    assert [sample for rank in cells for cell in rank for sample in cell] == list(range(n))
    assert len({len(rank) for rank in cells}) == 1
    assert all(len(cell) <= microbatch_size for rank in cells for cell in rank)


members = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0.25, 0.5, 1.0, 1.3, 2.0, 3.0])),
    min_size=1,
    max_size=4,
)


@given(members, st.integers(1, 4), st.integers(0, 5))
def test_a_mixture_reads_every_sample_by_its_weight(
    corpora: list[tuple[int, float]], epochs: int, seed: int
) -> None:
    order = MixtureOrder(
        seed=seed,
        sizes=tuple(size for size, _ in corpora),
        passes=tuple(passes for _, passes in corpora),
    )
    assert order.shares == tuple(round(passes * size) for size, passes in corpora)
    if not order.epoch_length:
        return
    seen = Counter(order.at(range(epochs * order.epoch_length)))
    first = 0
    for (size, passes), share in zip(corpora, order.shares, strict=True):
        counts = [seen[first + sample] for sample in range(size)]
        assert sum(counts) == epochs * share
        assert max(counts) - min(counts) <= 1
        if passes == int(passes):
            assert set(counts) == {epochs * int(passes)}
        first += size


def test_a_mixture_with_weights_of_one_is_every_sample_once_an_epoch_mixed() -> None:
    order = MixtureOrder(seed=1, sizes=(50, 30), passes=(1.0, 1.0))
    first, second = order.at(range(80)), order.at(range(80, 160))
    assert sorted(first) == sorted(second) == list(range(80)) and first != second
    assert 8 <= sum(sample >= 50 for sample in first[:40]) <= 22


def test_a_mixture_is_a_pure_function_of_position() -> None:
    order = MixtureOrder(seed=1, sizes=(7, 3, 5), passes=(1.0, 2.5, 0.5))
    whole = order.at(range(100))
    assert [order.at([position])[0] for position in reversed(range(100))] == whole[::-1]
    assert order.at(range(37, 60)) == whole[37:60]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 40))
def test_packing_places_every_piece_once_and_whole(documents: list[int], capacity: int) -> None:
    cut = [(d, piece) for d, tokens in enumerate(documents) for piece in pieces(tokens, capacity)]
    asked = [(d, question) for d, piece in cut for question in piece]
    assert asked == [(d, q) for d, tokens in enumerate(documents) for q in range(tokens - 1)]
    lengths = [len(piece) for _, piece in cut]
    bins = pack(lengths, capacity)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(cut)))
    assert all(sum(lengths[index] for index in chosen) <= capacity for chosen in bins)
    filled = sorted(sum(lengths[index] for index in chosen) for chosen in bins)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity  # no two would have fitted into one


def test_packing_finds_the_tight_fit() -> None:
    assert pack([3, 7, 5, 5, 4, 6], 10) == [[1, 0], [5, 4], [2, 3]]
    assert pack([], 10) == []
    assert pieces(1, 8) == [] and pieces(9, 8) == [range(8)]
    assert pieces(11, 8) == [range(8), range(8, 10)]


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_balanced_parts(count: int, parts: int) -> None:
    cuts = balanced(count, parts)
    assert [index for cut in cuts for index in cut] == list(range(count))
    lengths = [len(cut) for cut in cuts]
    assert len(cuts) == parts and max(lengths) - min(lengths) <= 1


#: written down once, so that no later change can silently reorder the samples of old runs
FIRST_TEN = [8, 4, 2, 6, 1, 7, 0, 3, 5, 9]
