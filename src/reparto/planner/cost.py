"""Seconds of one decoder layer and of the model's two ends on one rank: F, B and W apart.

Matmuls of a layer, T tokens a microbatch, t tensor ranks, in (rows, columns, inner):

| part | forward | source |
|---|---|---|
| q, k, v | (T, (a + 2 kv) d / t, h) | Vaswani 2017; grouped heads: Ainslie 2023 |
| latent attention | four low-rank products instead | DeepSeek-V2, eq. 1-8 |
| out | (T, h, a d / t) | |
| gate and up | (T, 2 f / t, h), one f / t if not gated | Shazeer 2020 |
| down | (T, h, f / t) | |
| experts | the same on T k E_local / E x ranks tokens, in E_local groups | |
| scores | T span a / t (d + d_v) x 2 | halved: causal |
| head | (T, V / t, h) | |

B is the same product with columns and inner dimension exchanged, W with rows and inner dimension
exchanged. Full recompute adds F to B; selective recompute adds the attention's core.
Everything else moves memory: norms, residuals, activations, masks, casts (`_traffic`).

Collectives of a layer: two all-reduces of T h forward and two backward (Shoeybi 2019), the same
bytes as all-gather + reduce-scatter with sequence parallelism (Korthikanti 2022, section 4.2.2);
two all-to-alls of T k h each way for experts; keys and values around the context ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reparto.planner.constants import Constants
from reparto.planner.job import Job
from reparto.planner.kernels import Kernels
from reparto.planner.links import Links


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds of one microbatch of something on one rank."""

    forward_s: float = 0.0
    "F: compute, exposed communication included"
    input_s: float = 0.0
    "B: gradient of the input, recomputation and exposed communication included"
    weight_s: float = 0.0
    "W: gradient of the weights"
    exposed_s: tuple[tuple[str, float], ...] = ()
    "the communication in the three above, by axis"

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    def __add__(self, other: Cost) -> Cost:
        exposed = dict(self.exposed_s)
        for axis, seconds in other.exposed_s:
            exposed[axis] = exposed.get(axis, 0.0) + seconds
        return Cost(
            forward_s=self.forward_s + other.forward_s,
            input_s=self.input_s + other.input_s,
            weight_s=self.weight_s + other.weight_s,
            exposed_s=tuple(exposed.items()),
        )

    def times(self, count: float) -> Cost:
        """The cost of `count` of them."""
        return Cost(
            forward_s=self.forward_s * count,
            input_s=self.input_s * count,
            weight_s=self.weight_s * count,
            exposed_s=tuple((axis, seconds * count) for axis, seconds in self.exposed_s),
        )


class Costs:
    """Costs of layers on one cluster under one set of constants; remembers what it computed."""

    def __init__(self, kernels: Kernels, links: Links, constants: Constants) -> None:
        self.kernels = kernels
        self.links = links
        self.constants = constants
        self._layers: dict[tuple[object, ...], Cost] = {}

    def layer(self, job: Job, *, moe: bool) -> Cost:
        """One layer, one microbatch, one rank."""
        plan = job.plan
        key = (
            moe, job.model, job.software, job.precision, job.sequence_length, job.microbatch_size,
            plan.tensor, plan.sequence_parallel, plan.context, plan.context_mode,
            plan.expert if moe else 1, plan.recompute,
        )  # fmt: skip
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(job, moe)
        return found

    def _layer(self, job: Job, moe: bool) -> Cost:
        matmul = self._projections(job) + self._feed_forward(job, moe)
        core = self._attention(job)
        passes = self._passes(job, moe)
        compute = self._not_faster_than_host(job, matmul + core + passes)
        again = 0.0
        if job.plan.recompute == "full":
            again = compute.forward_s
        elif job.plan.recompute == "selective":
            again = core.forward_s if not job.software.flash else 0.5 * passes.forward_s
            again += job.software.recomputed_matmuls * matmul.forward_s
        comm = self._collectives(job, moe, recompute=job.plan.recompute == "full")
        total = compute + comm
        return replace(total, input_s=total.input_s + again)

    def ends(self, job: Job) -> tuple[Cost, Cost]:
        """(embedding, final norm + head + loss) of one microbatch."""
        key = ("ends", job.model.hidden, job.model.vocab, job.software, job.microbatch_tokens,
               job.plan.tensor, job.precision)  # fmt: skip
        first, last = self._layers.get((*key, 0)), self._layers.get((*key, 1))
        if first is None or last is None:
            first, last = self._ends(job)
            self._layers[(*key, 0)], self._layers[(*key, 1)] = first, last
        return first, last

    def _ends(self, job: Job) -> tuple[Cost, Cost]:
        model, tokens, t = job.model, job.microbatch_tokens, job.plan.tensor
        width = job.element_bytes
        table = self.kernels.pass_s(2 * tokens * model.hidden * width)
        precision = "fp32" if job.precision == "fp32" else "bf16"
        head = self._matmul(tokens, model.vocab / t, model.hidden, precision)
        # logits: written, cast to 32 bit, read for the maximum, the sum and the picked entry
        scores = tokens * model.vocab / t
        factor = 1.0 if job.software.fused else 1.6
        loss = Cost(
            forward_s=self.kernels.pass_s(scores * 10 * factor),
            input_s=self.kernels.pass_s(scores * 10 * factor),
        )
        reduce_s = self.links.collective_s(
            "all_reduce", tokens * model.hidden * width, job.group("tensor")
        )
        comm = Cost(input_s=reduce_s, exposed_s=(("tensor", reduce_s),))
        # the table's gradient is dense, as large as the table, for every microbatch
        added = Cost(weight_s=self._accumulate_s(job, model.embedding_parameters / t))
        embed = Cost(
            forward_s=table + reduce_s, weight_s=2 * table, exposed_s=(("tensor", reduce_s),)
        )
        return embed + added, head + loss + comm + added

    # --- compute -----------------------------------------------------------------------------

    def _matmul(self, m: float, n: float, k: float, precision: str) -> Cost:
        """Forward (m, n, k), input gradient (m, k, n), weight gradient (k, n, m)."""
        time = self.kernels.matmul_s
        return Cost(
            forward_s=time(m, n, k, precision),
            input_s=time(m, k, n, precision),
            weight_s=time(k, n, m, precision),
        )

    def _projections(self, job: Job) -> Cost:
        model, tokens, t = job.model, job.microbatch_tokens, job.plan.tensor
        h, heads = model.hidden, model.heads / t
        out = self._matmul(tokens, h, heads * model.value_dim, job.precision)
        if not model.kv_rank:
            kv = max(model.kv_heads / t, 1)
            columns = heads * model.head_dim + kv * (model.head_dim + model.value_dim)
            return self._matmul(tokens, columns, h, job.precision) + out
        plain = model.head_dim - model.rope_dim
        down = model.kv_rank + model.rope_dim + model.q_rank
        up = self._matmul(
            tokens, heads * (plain + model.value_dim), model.kv_rank, job.precision
        ) + self._matmul(tokens, heads * model.head_dim, model.q_rank or h, job.precision)
        return self._matmul(tokens, down, h, job.precision) + up + out

    def _feed_forward(self, job: Job, moe: bool) -> Cost:
        model, tokens, t = job.model, job.microbatch_tokens, job.plan.tensor
        if not moe:
            return self._gated(job, tokens, model.ffn / t)
        expert = job.plan.expert
        per_expert = tokens * expert * model.active_experts / model.experts
        local = model.experts / expert
        routed = self._gated(job, per_expert, model.expert_ffn / t).times(
            local * self.constants["moe"]
        )
        router = self._matmul(tokens, model.experts, model.hidden, "bf16")
        shared = Cost()
        if model.shared_ffn:
            shared = self._gated(job, tokens, model.shared_ffn / t)
        return routed + router + shared

    def _gated(self, job: Job, tokens: float, inner: float) -> Cost:
        h = job.model.hidden
        up = inner * (2 if job.model.gated else 1)
        return self._matmul(tokens, up, h, job.precision) + self._matmul(
            tokens, h, inner, job.precision
        )

    def _attention(self, job: Job) -> Cost:
        """Scores and values: the part of a layer that grows with the square of the sequence."""
        model, tokens = job.model, job.microbatch_tokens
        heads = model.heads / job.plan.tensor
        widths = model.head_dim + model.value_dim
        if job.software.flash:
            span = model.attention_span(job.sequence_length)
            flops = 2 * tokens * span * heads * widths
            forward = self.kernels.attention_s(
                flops, widths / 2, span, kernel=job.software.flash_kernel
            )
            # backward makes five products where forward makes two (Dao 2023, section 3.1.2)
            return Cost(forward_s=forward, input_s=2.5 * forward)
        scores = tokens * job.sequence_length * heads
        forward = self.kernels.batched_s(2 * scores * widths, model.head_dim)
        moved = self.kernels.pass_s(scores * self.constants["softmax_bytes"])
        return Cost(forward_s=forward + moved, input_s=2 * forward + moved)

    def _passes(self, job: Job, moe: bool) -> Cost:
        """Norms, residuals, activation function, rotation, permutation, casts: bytes only."""
        model, tokens, plan = job.model, job.microbatch_tokens, job.plan
        t = plan.tensor
        outside = t if plan.sequence_parallel else 1
        factor = self.constants["traffic.fused" if job.software.fused else "traffic.eager"]
        masks = 1.0 if job.software.dropout else 0.0
        residual = (8 + 2 * masks) * model.hidden / outside
        heads = 2 * (model.heads + 2 * model.kv_heads) * model.head_dim / t
        kinds = 3 if model.gated else 2
        inner = model.ffn
        permuted = 0.0
        if moe:
            inner = model.expert_ffn * model.active_experts + model.shared_ffn
            permuted = 4 * model.active_experts * model.hidden
        elements = residual + heads + kinds * inner / t + permuted
        forward = tokens * elements * job.element_bytes * factor
        casts = 0.0
        if job.precision in ("fp8", "fp4"):
            # every matmul input is read, scaled and written twice (as it is and transposed)
            casts = 4.0 * (
                tokens * (2 * model.hidden + model.heads * model.head_dim / t + inner / t)
                + (model.attention_parameters + model.ffn_matrices * model.hidden * inner) / t
            )
        return Cost(
            forward_s=self.kernels.pass_s(forward + casts),
            input_s=self.kernels.pass_s(1.6 * forward + casts),
            weight_s=self._accumulate_s(job, self._held(job, moe)),
        )

    def _accumulate_s(self, job: Job, elements: float) -> float:
        """Adding so many elements of weight gradient to what earlier microbatches left.

        Inside the matmul the sum's reads and writes hide behind the products. Otherwise a gradient
        of its own is written, read and added, with the casts and clears that go around it.
        """
        if job.software.fused_accumulation:
            return 0.0
        return self.kernels.pass_s(self.constants["accumulate"] * elements)

    @staticmethod
    def _held(job: Job, moe: bool) -> float:
        """Elements of one layer's weights on a rank."""
        model, plan = job.model, job.plan
        if not moe:
            return model.layer_parameters(False) / plan.tensor
        routed = model.experts * model.expert_parameters
        rest = model.layer_parameters(True) - routed
        return (rest + routed / plan.expert) / plan.tensor

    def _not_faster_than_host(self, job: Job, cost: Cost) -> Cost:
        """Kernels cannot run faster than the host starts them."""
        kernels = 18 if job.software.fused else 40
        start = kernels * self.kernels.kernel_s
        return Cost(
            forward_s=max(cost.forward_s, start),
            input_s=max(cost.input_s, start),
            weight_s=max(cost.weight_s, 0.3 * start),
        )

    # --- communication -----------------------------------------------------------------------

    def _collectives(self, job: Job, moe: bool, *, recompute: bool) -> Cost:
        model, plan, tokens = job.model, job.plan, job.microbatch_tokens
        width = job.element_bytes
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        if plan.tensor > 1:
            hidden = 1.0
            if job.software.overlap_tensor:
                hidden = 1 - self.constants["tensor_overlap"]
            payload = tokens * model.hidden * width
            group = job.group("tensor")
            if plan.sequence_parallel:
                one = sum(
                    self.links.collective_s(op, payload, group)
                    for op in ("all_gather", "reduce_scatter")
                )
            else:
                one = self.links.collective_s("all_reduce", payload, group)
            forward["tensor"] = backward["tensor"] = 2 * one * hidden
        if plan.context > 1:
            forward["context"], backward["context"] = self._context_s(job)
        if moe and plan.expert > 1:
            payload = tokens * model.hidden * width
            one = self.links.dispatch_s(payload, model.active_experts, job.group("expert"))
            forward["expert"] = backward["expert"] = 2 * one * self.constants["expert_exposed"]
        exposed: dict[str, float] = {}
        for axis in forward:
            exposed[axis] = forward[axis] * (2 if recompute else 1) + backward[axis]
        return Cost(
            forward_s=sum(forward.values()),
            input_s=sum(backward.values()) + (sum(forward.values()) if recompute else 0.0),
            exposed_s=tuple(exposed.items()),
        )

    def _context_s(self, job: Job) -> tuple[float, float]:
        """Exposed seconds of context parallelism, forward and backward of one layer."""
        model, plan, tokens = job.model, job.plan, job.microbatch_tokens
        n, width = plan.context, job.element_bytes
        kv = max(model.kv_heads / plan.tensor, 1) * (model.head_dim + model.value_dim)
        group = job.group("context")
        if plan.context_mode == "ulysses":
            heads = model.heads / plan.tensor * (model.head_dim + model.value_dim)
            one = self.links.collective_s("all_to_all", tokens * (heads + kv) * width, group)
            return one, one
        ring = (n - 1) * self.links.collective_s("send", tokens * kv * width, group)
        core = self._attention(job)
        left = 1 - self.constants["overlap"]
        return (
            max(ring - core.forward_s * (1 - left), ring * left),
            max(2 * ring - core.input_s * (1 - left), 2 * ring * left),
        )
