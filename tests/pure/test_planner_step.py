"""Step time, memory and timeline of one plan: the parts add up and agree with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.plan import Plan
from reparto.partition.layers import cut_by_cost
from reparto.planner.constants import shipped
from reparto.planner.hardware import load_cluster
from reparto.planner.job import Job, Software
from reparto.planner.memory import layer_activation_bytes, least_bytes, live_chunks, memory_of
from reparto.planner.model_spec import ModelSpec, load_model
from reparto.planner.simulate import simulate_step, steady_step_s, step_quantiles, straggler_factor
from reparto.planner.stages import even_cut
from reparto.planner.step import Predictor
from reparto.schedule.generate import generate
from reparto.schedule.live import peaks_by_rank

CLUSTER = load_cluster("a100x64")
PREDICTOR = Predictor(CLUSTER, shipped())
MODEL = load_model("llama-2-7b")


def _job(text: str, batch: int = 128, sequence: int = 2048, model: ModelSpec = MODEL) -> Job:
    return Job(
        model=model,
        cluster=CLUSTER,
        plan=Plan.parse(text),
        batch_size=batch,
        sequence_length=sequence,
    )


PLANS = (
    "data=64",
    "data=64,shard=parameters,gradient_sync=microbatch,num_microbatches=2",
    "data=16,tensor=4,shard=optimizer,sequence_parallel=true",
    "data=4,tensor=4,pipeline=4,num_microbatches=8,recompute=full",
    "data=8,pipeline=8,schedule=zb-h1,num_microbatches=16",
    "data=8,pipeline=8,schedule=interleaved,chunks=2,num_microbatches=16",
    "data=16,context=4,shard=gradients",
    "data=8,pipeline=8,schedule=zb-v,num_microbatches=16,shard=parameters",
)


@pytest.mark.parametrize("text", PLANS)
def test_the_parts_of_a_step_add_up(text: str) -> None:
    step = PREDICTOR.step(_job(text))
    parts = step.compute_s + step.slowed_s + step.bubble_s + step.optimizer_s + step.fixed_s
    assert parts + sum(s for _, s in step.exposed_s) == pytest.approx(step.step_s)
    assert min(step.compute_s, step.optimizer_s) > 0


@pytest.mark.parametrize("text", PLANS)
def test_memory_items_add_up_and_the_bound_is_a_bound(text: str) -> None:
    job = _job(text)
    memory = memory_of(job, PREDICTOR)
    for rank in memory.ranks:
        assert sum(size for _, size in rank.items) == pytest.approx(rank.total_bytes)
        assert list(rank.items) == sorted(rank.items, key=lambda item: -item[1])
    assert memory.peak_bytes == max(rank.total_bytes for rank in memory.ranks)
    assert least_bytes(job) <= memory.peak_bytes


@pytest.mark.parametrize("text", PLANS[3:6])
def test_simulation_and_closed_form_agree_on_even_stages(text: str) -> None:
    job = _job(text)
    stages = job.plan.pipeline * job.plan.num_chunks
    job = replace(job, stage_layers=(32 // stages,) * stages)
    closed = PREDICTOR.step(job)
    simulated = simulate_step(job, PREDICTOR, closed=closed)
    assert simulated.step_s == pytest.approx(closed.step_s, rel=0.06)
    assert steady_step_s(job, PREDICTOR, closed=closed) == pytest.approx(simulated.step_s, rel=0.02)


def test_spans_carry_the_names_of_the_action_lists() -> None:
    spans = simulate_step(_job(PLANS[3]), PREDICTOR).spans()
    names = {span.name for span in spans if span.rank == 0}
    assert {"0F0", "0B7", "0W7"} <= names
    assert all(span.end_s >= span.start_s >= 0 for span in spans)


@pytest.mark.parametrize(
    ("name", "v"),
    [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)
@pytest.mark.parametrize("p", [2, 4])
def test_live_activations_are_those_of_the_action_lists(name: str, v: int, p: int) -> None:
    m = 4 * p
    counted = peaks_by_rank(generate(name, pipeline=p, chunks=v, num_microbatches=m))
    for rank, peaks in enumerate(counted):
        assert live_chunks(name, p, m, v, rank) >= peaks.live
        assert live_chunks(name, p, m, v, rank) <= peaks.live + 1 or name == "dualpipe-v"


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(2, 60),
    stages=st.integers(1, 12),
    embed=st.floats(0, 2).map(lambda x: round(x, 2)),
    head=st.floats(0, 5).map(lambda x: round(x, 2)),
)
def test_the_closed_form_cut_is_as_good_as_the_exact_one(
    layers: int, stages: int, embed: float, head: float
) -> None:
    if stages > layers:
        return
    counts = even_cut(layers, stages, embed, head)
    assert sum(counts) == layers and min(counts) >= 1
    costs = [1.0] * layers
    costs[0] += embed
    costs[-1] += head
    exact = cut_by_cost(costs, stages)
    dearest = max(sum(costs[first : first + count]) for first, count in exact)
    ends = [0.0] * stages
    ends[0] += embed
    ends[-1] += head
    assert max(c + e for c, e in zip(counts, ends, strict=True)) <= dearest + 1e-6


def test_activations_are_korthikantis() -> None:
    """Table 2 of arXiv:2205.05198 for GPT-3: s b h (34 + 5 a s / h), and its variants."""
    model = load_model("gpt-3-175b")
    classic = Software(flash=False, dropout=True)
    one = replace(_job("data=1", batch=1, model=model), software=classic)
    s, h, a = 2048, 12288, 96
    assert layer_activation_bytes(one, moe=False) == s * h * (34 + 5 * a * s / h)
    cut = replace(one, plan=Plan.parse("tensor=8"))
    assert layer_activation_bytes(cut, moe=False) == s * h * (10 + 24 / 8 + 5 * a * s / (h * 8))
    split = replace(one, plan=Plan.parse("tensor=8,sequence_parallel=true,recompute=selective"))
    assert layer_activation_bytes(split, moe=False) == s * h * 34 / 8
    full = replace(one, plan=Plan.parse("recompute=full"))
    assert layer_activation_bytes(full, moe=False) == 2 * s * h


def test_states_are_eighteen_bytes_a_parameter() -> None:
    items = dict(memory_of(_job("data=64"), PREDICTOR).fullest.items)
    states = items["weights"] + items["gradients"] + items["optimizer"]
    assert states == pytest.approx(18 * MODEL.parameters)
    cut = dict(memory_of(_job("data=64,shard=optimizer"), PREDICTOR).fullest.items)
    states = cut["weights"] + cut["gradients"] + cut["optimizer"]
    assert states == pytest.approx((6 + 12 / 64) * MODEL.parameters)


def test_stragglers_slow_a_step_more_the_more_ranks_there_are() -> None:
    assert straggler_factor(0.0, 1000) == 1.0
    assert 1.0 < straggler_factor(0.02, 8) < straggler_factor(0.02, 1000) < 1.1
    low, middle, high = step_quantiles(_job(PLANS[3]), PREDICTOR, spread=0.05, draws=5)
    assert PREDICTOR.step(_job(PLANS[3])).step_s * 0.95 < low <= middle <= high


@pytest.mark.parametrize(
    ("batch", "sequence", "precision"), [(0, 8, "bf16"), (1, 0, "bf16"), (1, 8, "int4")]
)
def test_absurd_questions_are_refused(batch: int, sequence: int, precision: str) -> None:
    with pytest.raises(ValueError):
        Job(model=MODEL, cluster=CLUSTER, plan=Plan(data=1), batch_size=batch,
            sequence_length=sequence, precision=precision)  # fmt: skip
