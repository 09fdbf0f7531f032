"""Any plan against one device: ranks as threads, real values, float64.

`train` runs a few steps of any module under any plan and returns what every rank saw; `departures`
compares that with one device: loss, norm, every gradient, every updated weight. Bytes that the
recorder saw stand beside those that `partition/volume.py` says, and so do bytes of state.

Steps run free, each from the weights the last one left: a wrong update shows in the next loss too.
float64 keeps rounding near 1e-15, so a tolerance of 1e-10 leaves five digits for Adam, which
amplifies rounding of near-zero gradients, and is five digits below the smallest real fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import Mesh, fake_mesh, single_mesh
from reparto.config.model import ModelConfig, decays
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.model.chain import Chain, Tokens, decoder_chain
from reparto.model.huggingface import llama, llama_chain
from reparto.model.transformer import Decoder, initial_tensor
from reparto.parallel.compose import Parallel, apply, dtype_name
from reparto.partition.activations import Flow, activation_messages, decoder_flow
from reparto.partition.grid import Grid
from reparto.partition.place import held_messages
from reparto.partition.tensors import Placement
from reparto.trace import Kind, Record, Ring
from reparto.train.step import StepResult, Trainer

torch.set_num_threads(1)

LOSS_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-10
WEIGHT_TOLERANCE = 1e-10

#: (what, operation) -> (how many, payload bytes in all)
Bytes = dict[tuple[str, str], tuple[int, int]]


@dataclass(kw_only=True)
class Outcome:
    """What one rank saw of a few steps."""

    results: list[StepResult] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    "whole gradients of every step, divided by the global token count"
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    "whole weights after every step"
    records: list[Record] = field(default_factory=list)
    seen: Bytes = field(default_factory=dict)
    "messages of the last step, as recorded"
    expected: Bytes = field(default_factory=dict)
    "the same, as `partition/volume.py` says"
    state: tuple[int, int, int] = (0, 0, 0)
    "bytes of weights, gradients at their peak and moments, as held"
    expected_state: tuple[int, int, int] = (0, 0, 0)
    table: Mapping[str, Placement] = field(default_factory=dict)
    copies: list[dict[str, tuple[int, Tensor]]] = field(default_factory=list)
    "after every step: tied weight -> (pipeline position, what this position computes with)"
    place: tuple[int, int, int, int] = (0, 0, 0, 0)
    "coordinates on replicas, data, context and tensor"
    model_place: tuple[int, int] = (0, 0)
    "coordinates on pipeline and tensor"
    moments: dict[str, Tensor] = field(default_factory=dict)
    "second moments of what this rank owns, after the last step"
    peak_live: int = 0
    "most activations held at once, in chunks"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A small module and what it is trained on."""

    make: Callable[[], nn.Module]
    "the module, parameters on meta or not"
    initial: Mapping[str, Tensor]
    "global name -> whole initial tensor"
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    loss: Callable[..., tuple[Tensor, Tensor]] | None
    "(module, microbatch) -> (sum, count); None: the module is a chain of its blocks"
    losses: Callable[..., tuple[Tensor, Tensor]] | None = None
    "of a chain: (output, microbatch, token loss) -> (losses, which count)"
    hidden_shape: Callable[..., tuple[int, ...]] | None = None
    "of a chain: (microbatch, block) -> shape of the hidden state"
    decays: Callable[[str], bool] = lambda name: True
    rules: Mapping[str, str] | None = None


def train_toy(
    toy: Toy,
    plan: str,
    batches: Callable[[int, int], list[object]],
    *,
    steps: int = 1,
    compute: torch.dtype = torch.float64,
    master: torch.dtype = torch.float64,
    synchronize: Synchronize | None = None,
    by_rank: Callable[[int, int], list[object]] | None = None,
) -> list[Outcome]:
    """Steps of a toy on every rank; `batches(batch index of the rank, step)` are microbatches.

    `by_rank(rank, step)` is for faults that need ranks of one tensor group to see different things.
    """

    def build(mesh: Mesh, parsed: Plan) -> Built:
        model = toy.make()
        names = [name for name, _ in model.named_parameters()]
        parallel = apply(
            model,
            mesh=mesh,
            plan=parsed,
            blocks=toy.blocks(model),
            rules=toy.rules,
            initial=lambda name: toy.initial[name].to(master),
            decays=toy.decays,
            compute=compute,
            master=master,
        )
        chain: Chain[object] | None = None
        if toy.losses is not None:
            assert toy.hidden_shape is not None
            chain = Chain(
                blocks=toy.blocks(model),
                enter=_as_tensor,
                context=lambda batch: None,
                hidden_shape=toy.hidden_shape,
                losses=toy.losses,
                call=lambda block, hidden, context: block(hidden),
            )
        return Built(parallel=parallel, names=names, loss=toy.loss, chain=chain)

    return _run(
        plan,
        build,
        batches,
        steps=steps,
        synchronize=synchronize or Synchronize(learning_rate=1e-2, warmup_steps=0),
        by_rank=by_rank,
    )


def _as_tensor(batch: object) -> Tensor:
    assert isinstance(batch, Tensor)
    return batch


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model on one rank."""

    parallel: Parallel
    names: list[str]
    "parameters that are compared"
    loss: Callable[..., tuple[Tensor, Tensor]] | None = None
    chain: Chain[object] | None = None


def _run(
    text: str,
    build: Callable[[Mesh, Plan], Built],
    batches: Callable[[int, int], list[object]],
    *,
    steps: int,
    synchronize: Synchronize,
    total_steps: int = 10,
    flow: Callable[[Plan], Flow] | None = None,
    by_rank: Callable[[int, int], list[object]] | None = None,
) -> list[Outcome]:
    plan = Plan.parse(text)
    grid = Grid.of(plan)
    outcomes = [Outcome() for _ in range(plan.world_size)]

    def work(rank: int, world: FakeWorld | None) -> None:
        ring = Ring(None, rank=rank, capacity=16384)
        mesh = fake_mesh(grid, rank, world=world, ring=ring) if world else single_mesh(ring=ring)
        built = build(mesh, plan)
        parallel = built.parallel
        trainer: Trainer[object] = Trainer(
            parallel, chain=built.chain, loss=built.loss, synchronize=synchronize, steps=total_steps
        )
        seen = outcomes[rank]
        for step in range(1, steps + 1):
            given = by_rank(rank, step) if by_rank else batches(grid.batch_index(rank), step)
            _one_step(trainer, built.names, given, step, seen)
        seen.records = ring.records()
        seen.seen = _recorded(seen.records, steps)
        seen.expected = _expected(parallel, flow(plan) if flow else None)
        state, optimizer = parallel.expected_state(), trainer.optimizer
        weights, gradients = parallel.strategy.state_bytes()
        seen.state = (weights, gradients, optimizer.state_bytes() if optimizer else 0)
        seen.expected_state = (state.parameters, state.gradients, state.optimizer)
        seen.table = parallel.table
        seen.peak_live = trainer.peak_live
        here = parallel.mesh.coordinates
        seen.place = (here["replicas"], here["data"], here["context"], here["tensor"])
        seen.model_place = (here["pipeline"], here["tensor"])
        if optimizer is not None:
            for one in parallel.strategy.owned():
                seen.moments[one.name] = optimizer.moments(one.name)[1]

    if plan.world_size == 1:
        work(0, None)
    else:
        run_threads(plan.world_size, work)
    return outcomes


def _one_step(
    trainer: Trainer[object],
    names: Sequence[str],
    microbatches: list[object],
    step: int,
    seen: Outcome,
) -> None:
    strategy = trainer.parallel.strategy
    gradients: dict[str, Tensor] = {}
    model = trainer.parallel.model
    if isinstance(model, Decoder):
        model.set_step(1, step)

    def look(agreed: object) -> None:
        tokens = max(1, getattr(agreed, "tokens", 1))
        for name in names:
            gradients[name] = strategy.full_gradient(name).clone() / tokens

    result = trainer.step(microbatches, number=step, position=100 * step, before_update=look)
    seen.results.append(result)
    seen.gradients.append(gradients)
    seen.weights.append({name: strategy.full_weight(name).clone() for name in names})
    seen.copies.append(_copies(trainer.parallel))


def _copies(parallel: Parallel) -> dict[str, tuple[int, Tensor]]:
    """Weights that two pipeline positions hold, as this one computes with them."""
    held, position = parallel.holding, parallel.mesh.coordinates["pipeline"]
    names = {**{stored: stored for stored in held.copied_to}, **held.copies}
    found = {}
    for local, stored in names.items():
        keeper = next(
            parallel.parts[chunk.pipeline_stage] for chunk in held.chunks if local in chunk.names
        )
        found[stored] = (position, keeper.full_weight(local).clone())
    return found


#: messages that no step of a plan is made of, and those whose size depends on the routes
_UNCOUNTED = ("word", "inspect")
_ROUTED = ("dispatch", "dispatch-gradient", "combine", "combine-gradient")


def _recorded(records: Sequence[Record], step: int) -> Bytes:
    found: Bytes = {}
    for one in records:
        what = one.tag.split()[0]
        if one.kind == Kind.COLLECTIVE and one.step == step and what not in _UNCOUNTED:
            count, total = found.get((what, one.op.name), (0, 0))
            found[what, one.op.name] = (count + 1, total + one.payload_bytes)
    return found


def _expected(parallel: Parallel, flow: Flow | None) -> Bytes:
    found: Bytes = {}
    plan = parallel.plan
    types = {
        "compute_dtype": dtype_name(parallel.compute),
        "master_dtype": dtype_name(parallel.master),
    }
    messages = held_messages(parallel.holding, plan, **types)
    if flow is not None:
        messages += activation_messages(flow, plan, parallel.holding, **types)
    for one in messages:
        key = (one.what, one.operation.upper())
        count, total = found.get(key, (0, 0))
        found[key] = (count + one.count, total + one.total_payload_bytes)
    return found


# --- our decoder ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decoder and a batch. Valid-token counts differ between sequences, so between all parts."""

    layers: int = 3
    tied: bool = True
    bias: bool = False
    dropout: float = 0.0
    vocabulary: int = 97
    heads: int = 4
    kv_heads: int = 2
    sequences: int = 12
    length: int = 16
    label_smoothing: float = 0.0
    steps: int = 3
    frozen: str = ""
    "beginning of the names of parameters without a gradient"
    clip_norm: float = 1.0
    experts: int = 0
    chosen: int = 2
    sparse_step: int = 1
    shared: int = 0
    balance: Literal["loss", "bias", "none"] = "loss"
    aux: float = 0.05
    z: float = 0.01
    capacity: float = 0.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    foreign: bool = False
    "whether the model is transformers' own Llama"
    compute: torch.dtype = torch.float64
    master: torch.dtype = torch.float64

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            attention_bias=self.bias,
            mlp_bias=self.bias,
            dropout=self.dropout,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            moe_intermediate_size=24,
            decoder_sparse_step=self.sparse_step,
            n_shared_experts=self.shared,
            router_balance=self.balance,
            router_aux_loss_coef=self.aux,
            router_z_loss_coef=self.z,
            router_scoring=self.scoring,
            capacity_factor=self.capacity,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Ids and labels (N, S); a third of the labels is ignored, and all of sequence 5."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.sequences, self.length)
        ids_NS = torch.randint(0, self.vocabulary, shape, generator=generator)
        labels_NS = torch.randint(0, self.vocabulary, shape, generator=generator)
        share_N1 = torch.linspace(0.0, 0.6, self.sequences)[:, None]  # uneven counts
        labels_NS[torch.rand(shape, generator=generator) < share_N1] = -100
        if self.sequences > 5:
            labels_NS[5] = -100
        return ids_NS, labels_NS


def train_decoder(case: Case, plan: str) -> list[Outcome]:
    """A few steps of our decoder under `plan`, on every rank."""
    config, (ids_NS, labels_NS) = case.config, case.batch()
    parsed = Plan.parse(plan)

    def build(mesh: Mesh, plan: Plan) -> Built:
        model: nn.Module = llama(config) if case.foreign else Decoder(config)
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            if case.frozen and name.startswith(case.frozen):
                one.requires_grad_(False)
        chain = _chain(case, model)
        parallel = apply(
            model,
            mesh=mesh,
            plan=plan,
            blocks=chain.blocks,
            rules=chain.rules,
            costs=chain.costs,
            initial=lambda name: initial_tensor(
                name, shapes[name], seed=1, config=config, dtype=case.master
            ),
            decays=decays,
            compute=case.compute,
            master=case.master,
        )
        trained = [name for name in shapes if not (case.frozen and name.startswith(case.frozen))]
        return Built(parallel=parallel, names=trained, chain=chain)

    def batches(index: int, step: int) -> list[object]:
        mine = list(range(case.sequences))[index :: parsed.data]
        each = [mine[j :: parsed.num_microbatches] for j in range(parsed.num_microbatches)]
        return [(ids_NS[rows], labels_NS[rows], torch.tensor(rows)) for rows in each]

    synchronize = Synchronize(learning_rate=1e-2, warmup_steps=0, clip_norm=case.clip_norm)

    def flow(plan: Plan) -> Flow:
        parts = plan.data * plan.num_microbatches
        tokens = case.sequences * case.length // parts
        return decoder_flow(config, tokens=tokens, label_smoothing=case.label_smoothing)

    return _run(plan, build, batches, steps=case.steps, synchronize=synchronize, flow=flow)


def _chain(case: Case, model: nn.Module) -> Chain[object]:
    if case.foreign:
        return llama_chain(
            model,
            case.config,
            read=_tokens,
            dtype=case.compute,
            sequence_length=case.length,
            label_smoothing=case.label_smoothing,
        )
    assert isinstance(model, Decoder)
    return decoder_chain(
        model,
        read=_tokens,
        dtype=case.compute,
        sequence_length=case.length,
        label_smoothing=case.label_smoothing,
    )


def _tokens(batch: object) -> Tokens:
    assert isinstance(batch, tuple)
    return Tokens(input_ids_BS=batch[0], labels_BS=batch[1], sample_ids_B=batch[2])


@lru_cache(maxsize=32)
def one_device(case: Case) -> Outcome:
    """The reference: the same steps on one device, whole batch at once."""
    return train_decoder(case, "data=1")[0]


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The largest relative differences over all ranks and steps."""

    loss: float
    norm: float
    gradient: float
    weight: float


def departures(outcomes: Sequence[Outcome], reference: Outcome) -> Departure:
    """How far every rank is from the reference, relative to the size of each tensor."""
    loss = norm = gradient = weight = 0.0
    for outcome in outcomes:
        assert len(outcome.results) == len(reference.results)
        for step, (ours, theirs) in enumerate(zip(outcome.results, reference.results, strict=True)):
            assert ours.num_tokens == theirs.num_tokens
            loss = max(loss, abs(ours.loss - theirs.loss) / abs(theirs.loss))
            norm = max(norm, abs(ours.norm - theirs.norm) / theirs.norm)
            gradient = max(gradient, _worst(outcome.gradients[step], reference.gradients[step]))
            weight = max(weight, _worst(outcome.weights[step], reference.weights[step]))
    return Departure(loss=loss, norm=norm, gradient=gradient, weight=weight)


def _worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        size = expected.norm().item()
        apart = (ours[name] - expected).norm().item()
        worst = max(worst, apart / size if size else apart)
    return worst


def assert_equal_to_one_device(case: Case, plan: str) -> list[Outcome]:
    """Train under `plan`, compare with one device, and return what the ranks saw."""
    outcomes = train_decoder(case, plan)
    found = departures(outcomes, one_device(case))
    assert found.loss < LOSS_TOLERANCE, (plan, found)
    assert found.norm < LOSS_TOLERANCE, (plan, found)
    assert found.gradient < GRADIENT_TOLERANCE, (plan, found)
    assert found.weight < WEIGHT_TOLERANCE, (plan, found)
    return outcomes


def _unrouted(found: Bytes) -> Bytes:
    return {key: value for key, value in found.items() if key[0] not in _ROUTED}


def assert_bytes(outcomes: Sequence[Outcome]) -> None:
    """Recorded payload equals the formula exactly; the fullest shard's state is within 2 %."""
    for outcome in outcomes:
        assert _unrouted(outcome.seen) == _unrouted(outcome.expected)
        for key, (count, least) in outcome.expected.items():
            if key[0] in _ROUTED:  # no less than with even loads
                seen = outcome.seen[key]
                assert seen[0] == count and seen[1] >= least
    for stage in {outcome.model_place for outcome in outcomes}:
        alike = [outcome for outcome in outcomes if outcome.model_place == stage]
        for kind, expected in enumerate(alike[0].expected_state):
            most = max(outcome.state[kind] for outcome in alike)
            assert abs(most - expected) <= 0.02 * expected, (stage, kind, most, expected)
