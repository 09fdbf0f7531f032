"""The search: equal to the exhaustive one, monotone, honest when nothing fits; what-if; goodput."""

from __future__ import annotations

import json
import math

import pytest

from reparto.config.cluster import Cluster
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.planner.answer import PlanSearch, Ranked
from reparto.planner.constants import shipped
from reparto.planner.goodput import daly_s, goodput, lost_share, young_s
from reparto.planner.hardware import load_cluster
from reparto.planner.model_spec import ModelSpec, load_model
from reparto.planner.render import memory_bars, plan_table, rejected_table, timeline_svg
from reparto.planner.search import plan_search
from reparto.planner.step import Predictor
from reparto.planner.what_if import WhatIf, parse_what_if

SMALL = ModelSpec(
    name="small", layers=8, hidden=2048, heads=16, kv_heads=4, head_dim=128, ffn=5632, vocab=32000
)
MOE = ModelSpec(
    name="moe", layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=128, ffn=2816, vocab=32000,
    experts=8, active_experts=2, expert_ffn=1408,
)  # fmt: skip


def _search(model: ModelSpec, cluster: str | Cluster, **options: object) -> PlanSearch:
    machine = load_cluster(cluster) if isinstance(cluster, str) else cluster
    settings: dict[str, object] = {"batch_size": 32, "sequence_length": 2048, "keep": 8}
    return plan_search(model, machine, **{**settings, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (SMALL, {"forbid": ["context"]}),
        (SMALL, {"forbid": ["context", "tensor"], "objective": "memory"}),
        (SMALL, {"forbid": ["recompute", "shard"], "objective": "energy"}),
        (MOE, {"forbid": ["context", "recompute"]}),
    ],
)
def test_pruned_search_equals_the_exhaustive_one_on_64_devices(
    model: ModelSpec, options: dict[str, object]
) -> None:
    # little memory, so that the memory bounds decide as well as the time bounds
    cluster = load_cluster("a100x64")
    tight = cluster.accelerator.model_copy(update={"memory_gb": 12.0})
    cluster = cluster.model_copy(update={"accelerator": tight})
    pruned = _search(model, cluster, simulate_best=False, **options)
    whole = _search(model, cluster, simulate_best=False, exhaustive=True, **options)
    assert pruned.evaluated <= whole.evaluated
    by_memory = options.get("objective") == "memory"

    def value(entry: Ranked) -> float:
        return entry.memory.peak_bytes if by_memory else entry.step_s

    assert [value(e) for e in pruned.ranked] == [value(e) for e in whole.ranked]
    assert all(entry.fits for entry in pruned.ranked)


def test_bounds_leave_a_fraction_of_the_plans_of_a_large_model() -> None:
    found = _search(load_model("llama-2-13b"), "a100-40gbx64", batch_size=256,
                    forbid=["context"], simulate_best=False)  # fmt: skip
    assert found.evaluated < 0.3 * found.searched


def test_every_ranked_plan_is_legal_and_uses_all_devices() -> None:
    for entry in _search(MOE, "h100x32", forbid=["context", "recompute"]).ranked:
        plan = entry.job.plan
        assert plan.world_size == 32
        assert Plan.parse(plan.text) == plan
        assert (plan.data // plan.replicas * plan.context) % plan.expert == 0


def test_the_object_has_the_frozen_fields_and_survives_json() -> None:
    found = json.loads(json.dumps(_search(SMALL, "a100x16").to_json()))
    assert {"best", "ranked", "naive", "rejected", "searched", "seconds"} <= set(found)
    wanted = {"plan", "step_s", "step_s_interval", "tokens_per_s", "mfu", "memory_bytes_per_rank",
              "bubble_share", "exposed_share", "cost"}  # fmt: skip
    assert wanted <= set(found["best"]) and wanted <= set(found["naive"])
    assert found["best"] == found["ranked"][0]
    low, high = found["best"]["step_s_interval"]
    assert low < found["best"]["step_s"] < high
    assert all({"plan", "reason"} <= set(entry) for entry in found["rejected"])
    assert found["naive"]["plan"] == "data=16"


def test_forbidden_axes_stay_unused() -> None:
    found = _search(SMALL, "a100x16", forbid=["pipeline", "tensor", "recompute"])
    for entry in found.ranked:
        plan = entry.job.plan
        assert (plan.pipeline, plan.tensor, plan.recompute) == (1, 1, "none")


def _with(cluster: Cluster, **change: float) -> Cluster:
    return cluster.model_copy(update={"accelerator": cluster.accelerator.model_copy(update=change)})


def test_more_bandwidth_is_never_slower_and_more_memory_never_worse() -> None:
    cluster = load_cluster("a100x16")
    base = _search(SMALL, cluster).best.step_s
    wide = tuple(t.model_copy(update={"gb_s": 2 * t.gb_s}) for t in cluster.tiers)
    assert _search(SMALL, cluster.model_copy(update={"tiers": wide})).best.step_s <= base
    everything = {"keep": 10**6, "simulate_best": False, "forbid": ["context", "recompute"]}
    fits = [
        _search(SMALL, _with(cluster, memory_gb=gb), exhaustive=True, **everything)
        for gb in (16.0, 24.0, 80.0)
    ]
    plans = [{entry.job.plan.text for entry in found.ranked} for found in fits]
    assert plans[0] <= plans[1] <= plans[2]
    times = [found.best.step_s for found in fits]
    assert times == sorted(times, reverse=True)


def test_when_nothing_fits_the_nearest_and_what_is_missing_are_named() -> None:
    with pytest.raises(UserError, match=r"GB are missing") as error:
        _search(load_model("llama-3-405b"), "a100x8", sequence_length=8192, batch_size=8)
    assert "no plan fits" in error.value.what and "more devices" in error.value.nearest


@pytest.mark.parametrize("options", [{"objective": "speed"}, {"forbid": ["pipes"]}])
def test_unknown_words_are_refused_with_the_nearest(options: dict[str, object]) -> None:
    with pytest.raises(UserError) as error:
        _search(SMALL, "a100x8", **options)
    assert error.value.legal and error.value.nearest


def test_looks_can_be_made_of_every_answer() -> None:
    found = _search(SMALL, "a100x16", forbid=["data"])
    assert plan_table(found).row_count == len(found.ranked[:8]) + 1
    assert rejected_table(found).row_count > 0
    assert len(memory_bars(found.best.job, found.best.memory)) >= 1
    svg = timeline_svg(found.best, Predictor(found.best.job.cluster, shipped()))
    assert svg.startswith(("<svg", "<?xml"))


# --- what if -------------------------------------------------------------------------------------


def test_what_if_changes_what_it_says() -> None:
    cluster = load_cluster("h100x64")
    change = parse_what_if("remove=node, link.network=0.5, sequence=x2, batch=512, forbid=tensor")
    changed = change.cluster(cluster)
    assert changed.count == 56 and changed.tiers[-1].size == 56
    assert changed.tiers[-1].gb_s == cluster.tiers[-1].gb_s / 2
    assert change.sequence_length(4096) == 8192 and change.batch_size(64) == 512
    assert change.forbid == {"tensor"}
    assert WhatIf().cluster(cluster) == cluster


@pytest.mark.parametrize(
    "text",
    ["", "sequence", "sequenc=x2", "sequence=x0", "link=0.5", "link.network=-1", "remove=all",
     "devices=0", "batch=two"],
)  # fmt: skip
def test_wrong_changes_are_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_what_if(text)
    assert error.value.legal


def test_a_change_that_leaves_nothing_or_names_no_tier_is_refused() -> None:
    with pytest.raises(UserError, match="no device is left"):
        parse_what_if("remove=node").cluster(load_cluster("h100x8"))
    with pytest.raises(UserError, match="no tier") as error:
        parse_what_if("link.rack=0.5").cluster(load_cluster("h100x64"))
    assert error.value.nearest.startswith("link.")


# --- goodput -------------------------------------------------------------------------------------


def test_daly_is_near_the_true_optimum_and_young_above_it() -> None:
    for checkpoint, between in ((60.0, 3600.0), (10.0, 11135.0), (300.0, 1200.0)):
        best = daly_s(checkpoint, between)
        assert best < young_s(checkpoint, between) * (1 + math.sqrt(checkpoint / between))
        around = [lost_share(best * f, checkpoint, between, 0) for f in (0.8, 1.0, 1.25)]
        assert around[1] < 1.1 * min(around)


def test_llama_3_stops_are_the_published_ones() -> None:
    """419 unplanned stops in 54 days on 16,384 devices; more than 90 % effective time."""
    cluster = load_cluster("h100x16384").model_copy(update={"restart_s": 300.0})
    found = goodput(cluster, step_s=5.0, step_tokens=16_000_000, checkpoint_s=10.0,
                    total_tokens=16_000_000 * 54 * 86400 / 5.0)  # fmt: skip
    assert found.stops * found.goodput == pytest.approx(419, rel=0.02)
    assert 0.9 < found.goodput < 1.0
    assert found.cost is not None and found.cost > 0


@pytest.mark.parametrize("key", ["step_s", "total_tokens", "checkpoint_s"])
def test_absurd_runs_are_refused(key: str) -> None:
    values = {"step_s": 1.0, "step_tokens": 10, "total_tokens": 1e6, "checkpoint_s": 1.0, key: -1.0}
    with pytest.raises(UserError) as error:
        goodput(load_cluster("h100x8"), **values)  # type: ignore[arg-type]
    assert error.value.where == key
