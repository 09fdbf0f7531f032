"""Accelerators, clusters, links: names, files, wrong units, and that more is never slower."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.cluster import Cluster
from reparto.errors import UserError
from reparto.partition.volume import Operation
from reparto.planner.constants import shipped
from reparto.planner.hardware import accelerators, find_accelerator, load_cluster
from reparto.planner.kernels import Kernels
from reparto.planner.links import Group, Links


def test_every_accelerator_loads_and_is_found_by_its_aliases() -> None:
    for device in accelerators().values():
        for word in (device.name, *device.aliases):
            assert find_accelerator(word) == device


def test_cluster_by_name_has_usual_nodes() -> None:
    cluster = load_cluster("h100x512")
    assert [tier.size for tier in cluster.tiers] == [8, 512]
    assert load_cluster("h100x4").tiers[-1].size == 4


def _write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return str(file)


def test_a_link_in_gbit_is_caught_and_converted(tmp_path: Path) -> None:
    text = """
accelerator = "h100"
count = 16
tiers = [{ name = "node", size = 8, gb_s = 450 }, { name = "network", size = 16, gb_s = 400 }]
"""
    with pytest.raises(UserError, match="Gbit") as error:
        load_cluster(_write(tmp_path, text))
    assert error.value.nearest == "50"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('accelerator = "h100"\ncount = -4', "count"),
        ('accelerator = "h100"\ncount = 0', "count"),
        ('accelerator = "h1000"\ncount = 8', "h1000"),
        ('accelerator = "h100"', "count"),
        ('accelerator = "h100"\ncount = 8\nhours_to_fault = -1.0', "hours_to_fault"),
        ('accelerator = "h100"\ncount = 8\ncolour = "red"', "colour"),
        ('accelerator = "h100"\ncount = 8\ntiers = [{name = "node", size = 4, gb_s = 9}]', "tier"),
    ],
)
def test_impossible_clusters_are_refused(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(UserError) as error:
        load_cluster(_write(tmp_path, line))
    assert word in str(error.value)


def test_a_cluster_file_carries_measured_curves(tmp_path: Path) -> None:
    text = """
accelerator = "cpu"
count = 2
[measured]
host = "here"
matmul = [[256, 256, 256, 0.0005], [1024, 1024, 1024, 0.02]]
memory_tb_s = 0.03
collectives = [
  { operation = "all_reduce", group_size = 2, tier = "node", points = [
    [4096, 0.0006], [67108864, 0.05],
  ] },
]
"""
    cluster = load_cluster(_write(tmp_path, text))
    kernels = Kernels(cluster.accelerator, shipped(), cluster.measured)
    assert kernels.matmul_s(1024, 1024, 1024) == pytest.approx(0.02)
    links = Links(cluster, shipped())
    assert links.collective_s("all_reduce", 67108864, Group(2, 1)) == pytest.approx(0.05)
    assert links.collective_s("all_reduce", 1, Group(2, 1)) == pytest.approx(0.0006)


def test_groups_share_the_cards_of_their_node() -> None:
    links = Links(load_cluster("a100x64"), shipped())
    # eight neighbours are in one node; one rank of each node has one card; 16 neighbours have eight
    inside, _ = links.slowest(Group(8, 1))
    across, _ = links.slowest(Group(8, 8))
    both, _ = links.slowest(Group(16, 1))
    share = shipped()["network_link"]
    assert inside == pytest.approx(300e9 * shipped()["node_link"])
    assert across == pytest.approx(25e9 * share)
    assert both == pytest.approx(8 * 25e9 * share)


def _faster(cluster: Cluster, factor: float) -> Cluster:
    tiers = tuple(t.model_copy(update={"gb_s": t.gb_s * factor}) for t in cluster.tiers)
    return cluster.model_copy(update={"tiers": tiers})


@settings(max_examples=60, deadline=None)
@given(
    operation=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]),
    payload=st.integers(1, 1 << 34),
    size=st.sampled_from([2, 4, 8, 16, 64]),
    stride=st.sampled_from([1, 2, 8]),
    factor=st.floats(1.0, 4.0),
)
def test_more_bandwidth_is_never_slower(
    operation: Operation, payload: int, size: int, stride: int, factor: float
) -> None:
    cluster = load_cluster("a100x512")
    group = Group(size, stride)
    slow = Links(cluster, shipped()).collective_s(operation, payload, group)
    fast = Links(_faster(cluster, factor), shipped()).collective_s(operation, payload, group)
    assert 0 < fast <= slow


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000))
def test_a_matmul_is_never_faster_than_the_peak(m: int, n: int, k: int) -> None:
    device = find_accelerator("a100")
    seconds = Kernels(device, shipped()).matmul_s(m, n, k)
    assert seconds >= 2 * m * n * k / (device.peak_bf16_tflops * 1e12)


def test_a_partly_filled_wave_costs_a_step() -> None:
    kernels = Kernels(find_accelerator("a100"), shipped())
    whole = kernels.matmul_s(128 * 108, 256, 4096)
    more = kernels.matmul_s(128 * 109, 256, 4096)
    assert more > 1.2 * whole * 109 / 108
