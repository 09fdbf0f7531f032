"""Mixture of experts: each token passes a few of many feed-forward parts, chosen by a router.

Equation.  s = softmax(x W) or sigmoid(x W);  y = sum over the k best experts e of  w_e f_e(x),
           w = s of the chosen (over their sum, if `norm_topk_prob`).

Tokens are sorted by expert, each expert works on one run of rows, and the rows are put back:
nothing is padded and, without a capacity, nothing is dropped. The rows of one layer cross ranks in
`experts`, a module without code of its own for it: a strategy puts its forward in that place. An
expert without tokens is called with zero rows, so that its weights have a gradient like any other
and no rank waits for one that skipped it.

Note: one step late
    The balancing loss is E sum_e f_e P_e a layer (Fedus et al. 2021, equation 4): f_e the share of
    the step's tokens that went to e, P_e the mean score. Its gradient needs f of the *whole* batch,
    all ranks and microbatches, before the first backward, which no schedule that interleaves
    forward and backward can have. A load counted over a microbatch, or over a rank, makes the
    gradient depend on the plan: two microbatches routed to opposite experts look like 2.0 where the
    batch is even, 1.0. Here f is that of the step before, exact and over all ranks; P is of this
    step. It needs no message inside a layer, and one of (2 E + 1) numbers a layer and step. In the
    first step f is even, and an even f has no gradient, because scores sum to 1. The value that is
    reported takes f and P of the same step. Rejected besides: counting in a forward of its own,
    which is exact for a third more compute.

Note: what counts
    Load and both router losses are sums over tokens that count in the loss, divided by their number
    at the update with everything else. Padding of an uneven batch is routed and not counted, so
    the number of microbatches and ranks changes nothing. A capacity is one of a sequence, for the
    same reason: what one sequence loses does not depend on its neighbours in the batch. It is one
    of training; evaluation drops nothing.

    B batch   S sequence   D hidden   N tokens of a microbatch, B S   E experts   K of them a token
    M rows that go to experts, N K less what was dropped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from reparto.config.model import ModelConfig
from reparto.model.feed_forward import FeedForward


class Shared(Protocol):
    """What a layer reads of the context of a forward."""

    @property
    def counted_BS(self) -> Tensor | None: ...

    @property
    def token_numbers_BS(self) -> Tensor | None: ...


@dataclass(kw_only=True)
class Seen:
    """What a router has seen in backward since it was last emptied."""

    counts_E: Tensor
    "choices of each expert, int64"
    scores_E: Tensor
    "sum of scores by expert, float64"
    squares: Tensor
    "sum of squared log-sums of router logits, float64"
    routes: list[tuple[Tensor, Tensor, Tensor]] | None = None
    "(numbers of tokens, their experts, distance between the last chosen and the next score), kept \
    only for whoever compares routes"
    tokens: int = field(default=0)
    "tokens counted"

    @classmethod
    def nothing(cls, experts: int) -> Seen:
        return cls(
            counts_E=torch.zeros(experts, dtype=torch.int64, device="cpu"),
            scores_E=torch.zeros(experts, dtype=torch.float64, device="cpu"),
            squares=torch.zeros((), dtype=torch.float64, device="cpu"),
        )


class Router(nn.Linear):
    """Scores experts for every token and chooses. The weight is (E, D), without bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.config = config
        experts = config.num_experts
        self.share_E = torch.full((experts,), 1.0 / experts, dtype=torch.float64, device="cpu")
        "share of the last step's tokens by expert: a state of training, not a weight"
        self.bias_E = torch.zeros(experts, dtype=torch.float64, device="cpu")
        "added to scores for the choice alone"
        self.speaks = True
        "whether this rank's router losses count; one rank of a tensor group speaks for all"
        self.seen = Seen.nothing(experts)

    def choose(self, x_BSD: Tensor, context: Shared) -> tuple[Tensor, Tensor]:
        """x (B, S, D) -> experts (N, K) int64, E where a capacity has dropped one, and their
        weights (N, K).
        """
        config = self.config
        logits_NE = self(x_BSD).flatten(0, 1)
        wide_NE = logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()
        scores_NE = wide_NE.softmax(-1) if self._softmax else wide_NE.sigmoid()
        ranked_NE = scores_NE.detach()
        if config.router_balance == "bias":
            ranked_NE = ranked_NE + self.bias_E.to(ranked_NE)
        experts_NK = ranked_NE.topk(config.num_experts_per_tok, dim=-1).indices
        weights_NK = scores_NE.gather(-1, experts_NK)
        if config.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True).clamp_min(1e-20)
        weights_NK = weights_NK * config.routed_scaling_factor
        if torch.is_grad_enabled() and weights_NK.requires_grad:
            weights_NK = self._watched(weights_NK, experts_NK, wide_NE, scores_NE, context)
        if config.capacity_factor and self.training:
            experts_NK = self._within_capacity(experts_NK, sequences=x_BSD.shape[0])
        return experts_NK, weights_NK.to(x_BSD.dtype)

    def set_bias(self, steps_E: Tensor) -> None:
        """Take the bias from how often it went up less how often it went down."""
        self.bias_E = steps_E.double() * self.config.router_bias_rate

    @property
    def _softmax(self) -> bool:
        return self.config.router_scoring == "softmax"

    def _watched(
        self,
        weights_NK: Tensor,
        experts_NK: Tensor,
        logits_NE: Tensor,
        scores_NE: Tensor,
        context: Shared,
    ) -> Tensor:
        """The same weights; their backward adds the router's losses and counts the load."""
        config, experts = self.config, self.config.num_experts
        shares_NE = scores_NE if self._softmax else scores_NE / scores_NE.sum(-1, keepdim=True)
        squares_N = logits_NE.logsumexp(-1).square()
        counted_N = None if context.counted_BS is None else context.counted_BS.flatten()
        if counted_N is not None:
            shares_NE, squares_N = shares_NE[counted_N], squares_N[counted_N]
        extra = squares_N.sum() * config.router_z_loss_coef
        if config.router_balance == "loss":
            share_E = self.share_E.to(shares_NE)
            factor = config.router_aux_loss_coef * experts
            extra = extra + factor * (shares_NE.sum(0) * share_E).sum()
        if not self.speaks:
            extra = extra * 0.0
        chosen_NK = experts_NK if counted_N is None else experts_NK[counted_N]
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=experts)
        sums = shares_NE.detach().sum(0).double(), squares_N.detach().sum().double()
        tokens = chosen_NK.shape[0]
        numbers_BS = context.token_numbers_BS
        routes: tuple[Tensor, Tensor, Tensor] | None = None
        if self.seen.routes is not None and numbers_BS is not None:
            every = (numbers_BS.flatten(), experts_NK, self._margin(scores_NE.detach()))
            routes = every if counted_N is None else tuple(one[counted_N] for one in every)  # type: ignore[assignment]

        def note() -> None:
            seen = self.seen
            seen.counts_E += counts_E.cpu()
            seen.scores_E += sums[0].cpu()
            seen.squares += sums[1].cpu()
            seen.tokens += tokens
            if seen.routes is not None and routes is not None:
                seen.routes.append(routes)

        out: Tensor = _Watched.apply(weights_NK, extra, note)  # type: ignore[no-untyped-call]
        return out

    def _margin(self, scores_NE: Tensor) -> Tensor:
        """How far the last chosen score is above the first that was not."""
        chosen = self.config.num_experts_per_tok
        if chosen == self.config.num_experts:
            return torch.full_like(scores_NE[:, 0], torch.inf)
        ranked_NE = (scores_NE + self.bias_E.to(scores_NE)).topk(chosen + 1, dim=-1).values
        return ranked_NE[:, -2] - ranked_NE[:, -1]

    def _within_capacity(self, experts_NK: Tensor, *, sequences: int) -> Tensor:
        """E in place of every choice beyond what an expert takes of one sequence.

        All first choices of a sequence come before all second ones, earlier tokens first.
        """
        experts, chosen = self.config.num_experts, experts_NK.shape[1]
        length = experts_NK.shape[0] // sequences
        most = self.config.expert_capacity(length)
        by_turn_BX = experts_NK.view(sequences, length, chosen).transpose(1, 2).flatten(1)
        taken_BXE = nn.functional.one_hot(by_turn_BX, experts).cumsum(1)
        place_BX = taken_BXE.gather(-1, by_turn_BX[..., None]).squeeze(-1)
        kept_BX = torch.where(place_BX <= most, by_turn_BX, experts)
        return kept_BX.view(sequences, chosen, length).transpose(1, 2).reshape(-1, chosen)


def routers_of(model: nn.Module) -> list[Router]:
    """All routers, in model order."""
    return [one for one in model.modules() if isinstance(one, Router)]


def set_bias(model: nn.Module, bias_steps: Sequence[Sequence[int]]) -> None:
    """Give every router, in model order, the bias that a checkpoint keeps of it: how often it went
    up less how often it went down.
    """
    for router, steps in zip(routers_of(model), bias_steps, strict=True):
        router.set_bias(torch.tensor(steps))


class _Watched(Function):
    """Weights as they are. Backward runs once a microbatch, whatever is computed again, so what is
    counted there is counted once; and the losses join with factor 1, as sums over tokens.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, weights_NK: Tensor, extra: Tensor, note: Callable[[], None]
    ) -> Tensor:
        ctx.note = note  # type: ignore[attr-defined]
        ctx.save_for_backward(extra)
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NK: Tensor) -> tuple[Tensor, Tensor, None]:
        (extra,) = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.note()  # type: ignore[attr-defined]
        return grad_NK, torch.ones_like(extra), None


class Experts(nn.ModuleList):
    """The routed experts: rows sorted by expert in, rows in the same order out."""

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """`counts_E` says how many rows each expert has."""
        return run_experts(list(self), rows_MD, counts_E.tolist())


def run_experts(experts: list[nn.Module], rows_MD: Tensor, counts: list[int]) -> Tensor:
    """Each expert on its run of rows; one without rows is called all the same."""
    parts = torch.split(rows_MD, counts)
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


class MixtureOfExperts(nn.Module):
    """The feed-forward part of a layer with experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(
            FeedForward(config, config.expert_size) for _ in range(config.num_experts)
        )
        self.shared_experts: FeedForward | None = None
        if config.n_shared_experts:
            inner = config.n_shared_experts * config.expert_size
            self.shared_experts = FeedForward(config, inner)

    def forward(self, x_BSD: Tensor, context: Shared) -> Tensor:
        """(B, S, D) -> the same."""
        experts_NK, weights_NK = self.gate.choose(x_BSD, context)
        order, place_NK, counts_E = sorted_by_expert(experts_NK, len(self.experts))
        x_ND = x_BSD.flatten(0, 1)
        rows_MD = _Spread.apply(x_ND, order, place_NK)  # type: ignore[no-untyped-call]
        done_MD = self.experts(rows_MD, counts_E)
        picked_NKD = _Collect.apply(done_MD, order, place_NK)  # type: ignore[no-untyped-call]
        y_ND = torch.bmm(weights_NK[:, None, :], picked_NKD).squeeze(1)
        y_BSD: Tensor = y_ND.view(x_BSD.shape)
        return y_BSD if self.shared_experts is None else y_BSD + self.shared_experts(x_BSD)


def sorted_by_expert(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(choices in the order of their experts (M), row of every choice (N, K), rows by expert (E)).

    A choice is token * K + k. A dropped one has row M, one beyond the last. Within an expert,
    tokens keep their order.
    """
    choice_X = experts_NK.flatten()
    counts_E = torch.bincount(choice_X, minlength=experts + 1)[:experts]
    order = choice_X.argsort(stable=True)
    kept = int(counts_E.sum())
    order = order[:kept]
    place_X = torch.full_like(choice_X, kept)
    place_X[order] = torch.arange(kept, device=choice_X.device)
    return order, place_X.view(experts_NK.shape), counts_E


def _with_zero_row(rows_MD: Tensor, place_NK: Tensor) -> Tensor:
    """Rows with a row of zeros behind them, where a dropped choice looks; as they are without."""
    if place_NK.numel() == rows_MD.shape[0]:
        return rows_MD
    return torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])


class _Spread(Function):
    """(N, D) -> (M, D): each token once for every expert that it goes to.

    The transpose of a copy is a sum; made by looking rows up, it has one order on every machine,
    which adding into rows by index has not.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_ND: Tensor, order: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return x_ND.index_select(0, order.div(place_NK.shape[1], rounding_mode="floor"))

    @staticmethod
    def backward(ctx: FunctionCtx, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (place_NK,) = ctx.saved_tensors  # type: ignore[attr-defined]
        rows = _with_zero_row(grad_MD, place_NK).index_select(0, place_NK.flatten())
        return rows.view(*place_NK.shape, -1).sum(1), None, None


class _Collect(Function):
    """(M, D) -> (N, K, D): what every choice of a token came to; zeros where it was dropped."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_MD: Tensor, order: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        rows = _with_zero_row(rows_MD, place_NK).index_select(0, place_NK.flatten())
        return rows.view(*place_NK.shape, -1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NKD: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_NKD.flatten(0, 1).index_select(0, order), None, None
