"""Pipelines whose stages sleep run the real executor: order and live activations, no times."""

from __future__ import annotations

import pytest

from reparto.bench.schedules import costs_of, expected_actions, latency_of, of_spans
from reparto.bench.synthetic import Naps, spans_of_sleep
from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import fake_mesh
from reparto.config.plan import Plan
from reparto.parallel.compose import schedule_of
from reparto.partition.grid import Grid
from reparto.schedule.live import peaks_by_rank
from reparto.schedule.rules import NAMES
from reparto.trace import Ring


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (8, 5)])
def test_actions_run_in_the_order_of_the_schedule(name: str, ranks: int, microbatches: int) -> None:
    plan = Plan.parse(f"pipeline={ranks},schedule={name},num_microbatches={microbatches}")
    schedule = schedule_of(plan)
    naps = Naps(forward_s=0, backward_s=0, weight_s=0)
    ran: dict[int, tuple[str, ...]] = {}
    live: dict[int, int] = {}

    def work(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=4096)
        mesh = fake_mesh(Grid.of(plan), rank, world=world, ring=ring)
        steps, live[rank] = spans_of_sleep(schedule, mesh, naps, steps=1)
        ran[rank] = steps[0].actions

    run_threads(ranks, work)
    for rank, row in enumerate(expected_actions(schedule)):
        assert ran[rank] == tuple(map(str, row))
    assert [live[rank] for rank in range(ranks)] == [one.live for one in peaks_by_rank(schedule)]


def test_a_full_backward_leaves_one_record() -> None:
    schedule = schedule_of(Plan.parse("pipeline=2,num_microbatches=2,schedule=1f1b"))
    rows = [" ".join(map(str, row)) for row in expected_actions(schedule)]
    assert rows == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_step_and_bubble_of_measured_spans() -> None:
    # two ranks over four seconds: 3 s and 1 s of work, so half of 8 s is idle
    first = {"actions": ["0F0", "0B0"], "starts_s": [10.0, 12.0], "ends_s": [11.0, 14.0]}
    second = {"actions": ["1F0", "1B0"], "starts_s": [11.0, 11.5], "ends_s": [11.5, 12.0]}
    found = of_spans([first, second])
    assert found.step_s == 4.0
    assert found.bubble == 0.5
    schedule = schedule_of(Plan.parse("pipeline=2,num_microbatches=1,schedule=1f1b"))
    costs = costs_of(schedule, [[first, second]])
    assert costs == {"forward_s": [1.0, 0.5], "backward_s": [2.0, 0.5], "weight_s": [0.0, 0.0]}


def test_a_message_takes_as_long_as_an_idle_rank_waits_for_it() -> None:
    schedule = schedule_of(Plan.parse("pipeline=2,num_microbatches=2,schedule=gpipe"))
    first = {"actions": ["0F0", "0F1", "0B0", "0B1"], "starts_s": [1.0, 2.0, 6.25, 8.0],
             "ends_s": [2.0, 3.0, 7.0, 9.0]}  # fmt: skip
    # 1F1 starts 0.5 s after 0F1 has ended, and its rank was free; 1F0 has nothing before it
    second = {"actions": ["1F0", "1F1", "1B0", "1B1"], "starts_s": [2.25, 3.5, 5.0, 6.0],
              "ends_s": [2.5, 5.0, 6.0, 7.5]}  # fmt: skip
    # 0B0 waits 0.25 s for 1B0, 0B1 0.5 s for 1B1, with rank 0 free before both
    assert latency_of(schedule, [[first, second]]) == 0.5
