"""The peers of `bench tensor` and `bench pipeline` do the same work: one device's gradients.

A ratio beside a peer that computes something else says nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_RANK = """
import sys
import torch
import torch.distributed as dist
rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
from reparto.bench.contestants import Workload, batches, fresh
from reparto.bench.pipeline_peers import ORDERS, TorchPipeline, cut_evenly
from reparto.bench.tensor_peers import computing, dtensor_model, loss_of
from reparto.config.model import preset
from reparto.model.loss import cross_entropy_sum

load = Workload(config=preset("1m"), sequences=4, sequence_length=32, num_microbatches=4)
batch = next(batches(load, 0))
alone = fresh(load)
cross_entropy_sum(alone(batch.input_ids_BS), batch.labels_BS)[0].backward()
right = {name: one.grad for name, one in alone.named_parameters()}

if what.startswith("dtensor:"):
    cut = what.partition(":")[2]
    model = dtensor_model(load, cut)
    with computing(cut):
        loss_of(model(batch.input_ids_BS), batch.labels_BS).backward()
    found = {name: getattr(one.grad, "full_tensor", lambda g=one.grad: g)()
             for name, one in model.named_parameters()}
    assert found.keys() == right.keys()
else:
    cuts = cut_evenly(load.config.num_hidden_layers, 2 * ORDERS[what][1])
    pipe = TorchPipeline(fresh(load), what, rank=rank, ranks=2, cuts=cuts, num_microbatches=4)
    pipe.run(batch.input_ids_BS, batch.labels_BS)
    found = {pipe.names[id(one)]: one.grad for one in pipe.parameters}
for name, gradient in found.items():
    worst = float((gradient - right[name]).norm() / right[name].norm())
    assert worst < 1e-5, (what, name, worst)
print("same", ",".join(sorted(found)), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "what",
    [
        "dtensor:whole",
        "dtensor:vocab",
        "dtensor:sequence",
        "gpipe",
        "1f1b",
        "interleaved",
        "interleaved-zb",
        "zb-v",
        "dualpipe-v",
    ],
)
def test_a_peer_computes_the_gradients_of_one_device(what: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(rank), str(tmp_path / "store"), what],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=environment)
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        names: set[str] = set()
        for one in ranks:
            out, errors = one.communicate(timeout=120)
            assert one.returncode == 0, errors[-2000:]
            last = out.splitlines()[-1]
            assert last.startswith("same ")
            names |= set(last.removeprefix("same ").split(","))
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    finally:
        for one in ranks:
            one.kill()
            one.wait()
