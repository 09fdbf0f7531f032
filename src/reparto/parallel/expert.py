"""Expert parallelism: ranks that see different tokens hold different experts, and exchange rows.

Equation.  rank r of n holds experts r E/n .. (r+1) E/n - 1;  a layer's rows, sorted by expert, go
           to their holders (all_to_all), pass the experts, and come back the same way. The
           gradient of an exchange is the exchange backwards, so an expert's gradient is a sum over
           the tokens of all n ranks, and is summed once more over ranks that hold the same one.

| what | collective | when | payload a layer and microbatch, a rank |
|---|---|---|---|
| rows by expert | all_to_all | forward | 8 E |
| rows out and back | 2 all_to_all | forward | c D max(rows sent, rows received) each |
| their gradients | 2 all_to_all | backward | the same |
| gradients of experts | as `data.py`, `zero.py` | once a step | 1 / n of what replicas would send |

Exposed: a layer's experts cannot begin before their rows are there.
(E experts, D hidden width, c bytes of the compute type. Of T tokens with K experts each, even loads
send K T (n-1)/n rows to other ranks.)

It pays when experts do not fit, and where gradients that need not travel weigh more than the rows
that do: a layer's experts with W weights save 8 W (n-1)/n bytes a step on the wire, and the four
exchanges of rows cost 4 c K T D (n-1)/n, so in float32 where  T < W / (2 K D)  tokens a rank.
Source: Lepikhin et al. 2020 (GShard), section 3.2; Rajbhandari et al. 2022 (DeepSpeed-MoE).

The strategy puts its own forward into the module that rules call `experts`; the model holds no
code for it. Counts travel first, so every size is exact: no padding, and a rank or an expert
without rows takes part with none. Rejected: fixed room for each expert (capacity), which sends
zeros when loads are uneven and drops tokens when they are more so; here a capacity is a choice of
the model.

    N tokens   M rows sent   R rows received   D hidden   E experts   L = E / n of them here
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from reparto.comm.autograd import all_to_all
from reparto.comm.collectives import Communicator
from reparto.comm.mesh import Mesh
from reparto.model.moe import Seen, routers_of, run_experts
from reparto.partition.cuts import Style


def exchange_naively(rows_by_rank: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The naive twin: what an exchange is. Entry [r][s] of the result is what rank s had for r."""
    ranks = range(len(rows_by_rank))
    return [[rows_by_rank[source][target] for source in ranks] for target in ranks]


def apply(model: nn.Module, *, styles: Mapping[str, Style], group: Communicator) -> None:
    """Let the experts of every layer be those of the whole group, of which this rank runs its own.

    Parameters of experts that are elsewhere are taken away by whoever shares out the memory.
    """
    for path, style in styles.items():
        if style.name == "experts":
            module = model.get_submodule(path)
            forward = _shared_experts(list(module.children()), path, group)
            module.forward = forward


def _shared_experts(
    experts: list[nn.Module], path: str, group: Communicator
) -> Callable[[Tensor, Tensor], Tensor]:
    local = len(experts) // group.size
    mine = experts[group.index * local : (group.index + 1) * local]
    # rows arrive by rank and then by expert; each expert wants its rows of all ranks together
    kinds_X = torch.arange(local).repeat(group.size)

    def forward(rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        counts_NL = counts_E.view(group.size, local)
        arriving_NL = torch.empty_like(counts_NL)
        group.all_to_all(arriving_NL, counts_NL, tag=f"route {path}").wait()
        sent, received = counts_NL.sum(1).tolist(), arriving_NL.sum(1).tolist()
        rows_RD = all_to_all(
            rows_MD, group, out_sizes=received, in_sizes=sent, tag=f"dispatch {path}"
        )
        kinds_R = kinds_X.to(rows_RD.device).repeat_interleave(arriving_NL.flatten())
        order_R = kinds_R.argsort(stable=True)
        done_RD = run_experts(mine, _permuted(rows_RD, order_R), arriving_NL.sum(0).tolist())
        back_RD = _permuted(done_RD, order_R.argsort())
        return all_to_all(back_RD, group, out_sizes=sent, in_sizes=received, tag=f"combine {path}")

    return forward


class _Permute(Function):
    """Rows in another order; backward is the inverse order, looked up and not added."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RD: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_RD.index_select(0, order_R.argsort()), None


def _permuted(rows_RD: Tensor, order_R: Tensor) -> Tensor:
    out: Tensor = _Permute.apply(rows_RD, order_R)  # type: ignore[no-untyped-call]
    return out


def keep_only(model: nn.Module, names: Sequence[str]) -> None:
    """Take away the parameters of experts that are on other ranks; module paths stay."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, None)


# --- load ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    """How tokens were shared out over experts in one step, over the whole batch and all layers."""

    counts: tuple[tuple[int, ...], ...]
    "by layer with experts: choices of each expert, by tokens that count in the loss"
    balance_loss: float
    "sum over layers of E sum_e f_e P_e, not weighted; the number of such layers when even"
    z_loss: float
    "sum over layers of the mean squared log-sum of router logits, not weighted"

    @property
    def worst(self) -> float:
        """Largest load of an expert over the mean of its layer, over all layers; 1 when even."""
        ratios = [max(row) * len(row) / sum(row) for row in self.counts if sum(row)]
        return max(ratios, default=0.0)

    @property
    def idle(self) -> int:
        """Experts that got no token, over all layers."""
        return sum(row.count(0) for row in self.counts)


class Balance:
    """The load of all routers: summed over ranks once a step, and handed to the next step."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        """Every rank keeps the numbers of all layers; they are few."""
        self._routers = routers_of(model)
        self._mesh = mesh
        speaks = mesh.coordinates["tensor"] == 0
        for router in self._routers:
            router.speaks = speaks
        experts = self._routers[0].config.num_experts if self._routers else 0
        shape = (len(self._routers), experts)
        self._counts_LE = torch.zeros(shape, dtype=torch.int64)
        self._steps_LE = torch.zeros(shape, dtype=torch.int64)
        "how often the bias of each expert went up less how often it went down"

    def __bool__(self) -> bool:
        return bool(self._routers)

    def begin_step(self) -> None:
        """Forget what the last step's routers saw."""
        for router in self._routers:
            kept = router.seen.routes
            router.seen = Seen.nothing(router.config.num_experts)
            router.seen.routes = None if kept is None else []

    def settle(self) -> Load | None:
        """The load of the whole batch; None for a model without experts. One message."""
        if not self._routers:
            return None
        experts = self._routers[0].config.num_experts
        rows = torch.zeros(len(self._routers), 2 * experts + 2, dtype=torch.float64)
        for row, router in zip(rows, self._routers, strict=True):
            if router.weight is not None and router.speaks:  # None: on another pipeline rank
                seen = router.seen
                row[:experts] = seen.counts_E
                row[experts:-2] = seen.scores_E
                row[-2], row[-1] = seen.squares, seen.tokens
        self._mesh.world.all_reduce(rows, tag="expert-load").wait()
        counts_LE, scores_LE = rows[:, :experts], rows[:, experts:-2]
        tokens_L = rows[:, -1].clamp_min(1)
        share_LE = counts_LE / counts_LE.sum(-1, keepdim=True).clamp_min(1)
        balance_L = experts * (share_LE * scores_LE).sum(-1) / tokens_L
        return Load(
            counts=tuple(tuple(map(int, row)) for row in counts_LE.tolist()),
            balance_loss=float(balance_L.sum()),
            z_loss=float((rows[:, -2] / tokens_L).sum()),
        )

    def follow(self, load: Load) -> None:
        """After an update: what the next step's routers go by."""
        self._counts_LE = torch.tensor(load.counts, dtype=torch.int64)
        mean_L1 = self._counts_LE.double().mean(-1, keepdim=True)
        self._steps_LE += (mean_L1 - self._counts_LE).sign().long()
        self._hand_out()

    def _hand_out(self) -> None:
        for router, counts_E, steps_E in zip(
            self._routers, self._counts_LE, self._steps_LE, strict=True
        ):
            total = int(counts_E.sum())
            if total:
                router.share_E = counts_E.double() / total
            router.set_bias(steps_E)

    def state(self) -> dict[str, list[list[int]]]:
        """What a checkpoint keeps: integers, the same under every plan."""
        return {"counts": self._counts_LE.tolist(), "bias_steps": self._steps_LE.tolist()}

    def load_state(self, state: Mapping[str, object]) -> None:
        """The inverse. Raises `ValueError` for anything but integers by layer and expert."""
        shape = tuple(self._counts_LE.shape)
        found = []
        for name in ("counts", "bias_steps"):
            one = torch.tensor(state.get(name))
            if one.dtype != torch.int64 or tuple(one.shape) != shape:
                raise ValueError(
                    f"`{name}` of experts: {one.dtype} {tuple(one.shape)}, not {shape}"
                )
            found.append(one)
        self._counts_LE, self._steps_LE = found
        self._hand_out()

    def watch_routes(self) -> None:
        """Keep which experts every token chose, from now on."""
        for router in self._routers:
            router.seen.routes = []

    def routes(self) -> dict[int, list[tuple[Tensor, Tensor, Tensor]]]:
        """Layer (counted over those with experts) -> what its router noted in this step, here."""
        return {
            index: router.seen.routes or []
            for index, router in enumerate(self._routers)
            if router.weight is not None and router.speaks
        }
