"""The planner against published figures: a few runs by hand, and the zero-bubble table.

The full table of published runs is not part of the repository; `plan --validate ROWS.csv` scores
it. The rows here are transcribed from the papers named beside them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from reparto.config.plan import Plan, ScheduleName
from reparto.errors import UserError
from reparto.planner.calibrate import fit, linearise, timed_runs
from reparto.planner.constants import Constants, read_constants, shipped
from reparto.planner.hardware import load_cluster
from reparto.planner.job import Job, Software
from reparto.planner.model_spec import ModelSpec
from reparto.planner.published import Unusable, read_rows, run_of, source_of
from reparto.planner.simulate import bubble_rate
from reparto.planner.step import Predictor
from reparto.planner.validate import quantile, spearman, validate

# Korthikanti et al. 2022, arXiv:2205.05198, tables 3 and 5; vTrain (MICRO 2024), table of runs;
# SimuMax release notes for B200; Zero Bubble, arXiv:2401.10241, table 4
ROWS = """
id,source,model_name,params_b,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,gpu,n_gpus,gpus_per_node,inter_bw,global_batch,micro_batch,tp,pp,vpp,dp,cp,zero_stage,sequence_parallel,recompute,schedule,precision,attention,measured_step_s,measured_mem_gb,note
a,arXiv:2205.05198,GPT-22B,22,48,6144,24576,64,64,51200,2048,A100-80GB-SXM,8,8,,4,4,8,1,1,1,1,0,0,full,none,fp16,non-flash,1.42,,
b,arXiv:2205.05198,GPT-22B,22,48,6144,24576,64,64,51200,2048,A100-80GB-SXM,8,8,,4,4,8,1,1,1,1,0,1,selective,none,fp16,non-flash,1.10,,
c,arXiv:2205.05198,GPT-175B,175,96,12288,49152,96,96,51200,2048,A100-80GB-SXM,64,8,1600 Gbit/s per node,64,1,8,8,3,1,1,0,0,full,interleaved 1F1B,fp16,non-flash,18.13,,
d,arXiv:2205.05198,GPT-175B,175,96,12288,49152,96,96,51200,2048,A100-80GB-SXM,64,8,1600 Gbit/s per node,64,1,8,8,3,1,1,0,1,selective,interleaved 1F1B,fp16,non-flash,13.75,,
e,VIA-Research/vTrain data,GPT-3.6B,3.6,30,3072,12288,32,32,,2048,A100-80GB-SXM,64,8,800 Gbit/s per node,512,8,1,1,1,64,1,,0,full,1F1B,fp16,non-flash,3.5665,,Megatron-DeepSpeed
f,VIA-Research/vTrain data,GPT-3.6B,3.6,30,3072,12288,32,32,,2048,A100-80GB-SXM,64,8,800 Gbit/s per node,512,4,4,1,1,16,1,,0,full,1F1B,fp16,non-flash,4.764,,Megatron-DeepSpeed
g,VIA-Research/vTrain data,GPT-3.6B,3.6,30,3072,12288,32,32,,2048,A100-80GB-SXM,64,8,800 Gbit/s per node,512,4,16,1,1,4,1,,0,full,1F1B,fp16,non-flash,11.96,,Megatron-DeepSpeed
h,MooreThreads/SimuMax docs,cut,,12,8192,28672,64,8,128256,4096,B200,8,8,,16,1,1,2,1,4,1,1,0,none,1F1B,bf16,flash (TE),0.843,66.55,max_allocated GiB
i,arXiv:2401.10241,GPT-6.2B,6.2,30,4096,16384,32,32,,1024,A100-80GB-SXM,8,8,,72,3,1,8,1,1,1,0,0,none,1F1B,,,2.571,39,
j,MooreThreads/SimuMax docs,cut,,12,8192,28672,64,8,128256,4096,B200,8,8,,64,64,1,1,1,8,1,1,0,none,none,bf16,flash (TE),,,OOM
k,nobody/here,Mystery,,,,,,,,4096,A100-80GB-SXM,8,8,,64,64,1,1,1,8,1,1,0,none,none,bf16,flash,1.0,,
"""  # noqa: E501


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS.strip() + "\n", encoding="utf-8")
    return file


def test_validation_scores_known_runs_within_fifteen_percent(table: Path) -> None:
    found = validate(table)
    assert (found["rows"], found["taken"]) == (11, 10)
    assert found["skipped"] == [{"id": "k", "why": "layers or hidden size are not published"}]
    time, memory = found["time"], found["memory"]
    assert isinstance(time, dict) and isinstance(memory, dict)
    assert time["mean_abs_pct"] < 15 and memory["mean_abs_pct"] < 5
    assert isinstance(found["baseline"], dict) and isinstance(found["leave_one_out"], dict)
    assert time["mean_abs_pct"] < found["baseline"]["mean_abs_pct"]
    assert found["out_of_memory"] == {"known": 1, "called": 1, "ran": 9, "ran_but_called": 0}
    keys = {"mean_abs_pct", "median_abs_pct", "p90_abs_pct", "bias_pct"}
    for name in ("time", "baseline", "leave_one_out", "memory"):
        view = found[name]
        assert isinstance(view, dict) and keys <= set(view)
    assert isinstance(found["by_source"], dict)
    assert set(found["by_source"]) == {
        "arXiv:2205.05198", "VIA-Research/vTrain", "MooreThreads/SimuMax", "arXiv:2401.10241"
    }  # fmt: skip
    sweeps = found["sweeps"]
    assert isinstance(sweeps, list)
    assert [s["top1_regret_pct"] for s in sweeps if "vTrain" in s["group"]] == [0.0]


def test_nothing_depends_on_a_rows_id_or_source(table: Path) -> None:
    for row in read_rows(table)[:9]:
        renamed = {**row, "id": "other", "source": "somebody/else", "model_name": "x"}
        assert run_of(row).job.plan == run_of(renamed).job.plan
        left = Predictor(run_of(row).job.cluster, shipped()).step(run_of(row).job)
        right = Predictor(run_of(renamed).job.cluster, shipped()).step(run_of(renamed).job)
        assert left == right


def test_a_fit_pulls_a_wrong_constant_back(table: Path) -> None:
    runs = timed_runs(table)[:7]
    constants = read_constants()
    wrong = shipped().replaced({"matmul.ampere": 0.5})
    fitted = fit(runs, constants, wrong, linear=linearise(runs, constants, wrong), rounds=8)
    assert 0.75 < fitted["matmul.ampere"] < 1.1
    assert fitted["matmul.volta"] == pytest.approx(constants["matmul.volta"].prior, rel=0.01)


def test_every_constant_says_what_it_was_fitted_on() -> None:
    for name, row in read_constants().items():
        assert row.about and row.value > 0 and row.prior > 0, name
        assert row.spread > 0 or row.value == row.prior, f"{name} is fixed but was moved"
    assert isinstance(shipped(), Constants)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pytorch/torchtitan benchmarks/x.md Table 2", "pytorch/torchtitan"),
        ("Korthikanti et al. 2022 arXiv:2205.05198 Tables 3+5", "arXiv:2205.05198"),
        ("VIA-Research/vTrain data/x.csv (MICRO-57, arXiv:2312.12391)", "VIA-Research/vTrain"),
    ],
)
def test_a_source_is_a_repository_or_a_paper(text: str, source: str) -> None:
    assert source_of(text) == source


@pytest.mark.parametrize(("text", "word"), [("", "no rows"), ("id,gpu\n1,A100\n", "lacks")])
def test_other_files_are_refused(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "other.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=word):
        read_rows(file)
    with pytest.raises(UserError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


def test_an_unknown_device_is_skipped_with_its_name(table: Path) -> None:
    row = {**read_rows(table)[0], "gpu": "Z900"}
    with pytest.raises(Unusable, match="Z900"):
        run_of(row)


def test_small_statistics() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert spearman([(1, 10), (2, 20), (3, 15)]) == pytest.approx(0.5)
    assert spearman([(1, 1), (1, 2), (2, 3)]) == pytest.approx(0.866, abs=1e-3)


# --- zero bubble, arXiv:2401.10241, table 5 ------------------------------------------------------

MODELS = {"1.5B": (22, 2304, 24, 6), "6.2B": (30, 4096, 32, 3),
          "14.6B": (46, 5120, 40, 1), "28.3B": (62, 6144, 48, 1)}  # fmt: skip
# model, p, m, (1F1B, interleaved with as many chunks as layers allow, ZB-H1)
RATES = [
    ("1.5B", 8, 24, (0.2431, 0.1055, 0.1585)),
    ("1.5B", 8, 32, (0.1985, 0.0818, 0.1242)),
    ("1.5B", 8, 64, (0.124, 0.0443, 0.0674)),
    ("6.2B", 8, 24, (0.2347, 0.0808, 0.1323)),
    ("6.2B", 8, 32, (0.1898, 0.0628, 0.1045)),
    ("6.2B", 8, 64, (0.1091, 0.032, 0.0554)),
    ("14.6B", 16, 48, (0.2552, 0.1104, 0.1397)),
    ("14.6B", 16, 64, (0.2082, 0.0852, 0.1088)),
    ("14.6B", 16, 128, (0.1251, 0.0445, 0.0576)),
    ("28.3B", 32, 96, (0.2646, 0.1493, 0.1421)),
    ("28.3B", 32, 128, (0.2168, 0.1164, 0.1106)),
]


@pytest.mark.parametrize(("name", "p", "m", "rates"), RATES)
def test_zero_bubble_rates_within_two_points(
    name: str, p: int, m: int, rates: tuple[float, float, float]
) -> None:
    layers, hidden, heads, micro = MODELS[name]
    model = ModelSpec(name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
                      head_dim=hidden // heads, ffn=4 * hidden, vocab=51200, gated=False,
                      tied=True)  # fmt: skip
    cluster = load_cluster(f"a100x{p}")
    predictor = Predictor(cluster, shipped())
    chunks = (layers + 2) // p
    names: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("interleaved", chunks), ("zb-h1", 1)]
    for (schedule, v), published in zip(names, rates, strict=True):
        each = (layers + 2) // (p * v)
        job = Job(
            model=model,
            cluster=cluster,
            plan=Plan(pipeline=p, schedule=schedule, num_microbatches=m, chunks=v if v > 1 else 0),
            batch_size=micro * m,
            sequence_length=1024,
            software=Software(flash=False, overlap_data=False, dropout=True),
            # the paper takes one layer off the first and the last stage
            stage_layers=(each - 1, *([each] * (p * v - 2)), each - 1),
        )
        assert bubble_rate(job, predictor) == pytest.approx(published, abs=0.0205), schedule
