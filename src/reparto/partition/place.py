"""What one rank of a plan holds of a model: all strategies' cuts, composed by arithmetic.

Order of composition, each line needs the ones above:

    tensor     rectangles of every matrix (`cuts.py`)
    pipeline   which blocks a rank has, so which tensors at all
    expert     which experts of these blocks
    shard      rows of what is left, over data x context; of experts, over those that hold the same

`parallel/compose.py` acts on what this file says, `plan --show` prints it, and a checkpoint is
written by it, so there is one truth about who holds what, for any rank of any plan, without torch.

A tied weight whose places fall on two pipeline ranks is stored where its first place is; the other
rank has a *copy*, which is cut, gathered and reduced like any tensor but never updated: its summed
gradient goes to the owner, and the owner's updated rows come back. On one rank it is one tensor,
however many chunks use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.partition.cuts import cut_table, local_shape, match_rules, module_paths, rows_of
from reparto.partition.experts import EXPERT_COPIES, EXPERT_GROUPS, elsewhere, expert_numbers
from reparto.partition.flat import FlatLayout, flat_layout
from reparto.partition.grid import AXES, Grid
from reparto.partition.layers import pipeline_cuts
from reparto.partition.tensors import Placement, initial_table, rows_and_columns, split_evenly
from reparto.partition.volume import (
    Message,
    StateBytes,
    reduction_messages,
    state_bytes,
    unit_layouts,
)
from reparto.schedule.generate import generate
from reparto.units import DTYPE_BYTES

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelMap:
    """A model's parameters and how it may be taken apart; no tensors."""

    shapes: Mapping[str, Shape]
    "stored name -> global shape, tied weights once, in model order"
    aliases: Mapping[str, str]
    "further name of a tied weight -> the name it is stored under"
    blocks: Sequence[Sequence[str]]
    "names used by each block, in the order in which a microbatch meets them; aliases as such"
    decays: Mapping[str, bool]
    "stored name -> whether weight decay applies"
    frozen: frozenset[str] = frozenset()
    "stored names without a gradient"
    rules: Mapping[str, str] | None = None
    "module path pattern -> style (`cuts.py`); None: nothing can be cut by tensor"
    paths: Sequence[str] | None = None
    "module paths that rules may name; None: those that parameter names imply"
    costs: Sequence[float] | None = None
    "relative compute of each block, by which the pipeline is cut; None: all alike"

    def stored(self, name: str) -> str:
        """The stored name behind any name."""
        return self.aliases.get(name, name)

    def outside(self) -> list[str]:
        """Stored names that no block uses."""
        used = {self.stored(name) for block in self.blocks for name in block}
        return [name for name in self.shapes if name not in used]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters of a chunk that are reduced and gathered in the same groups."""

    groups: str = ""
    "beginning of the groups' names: `expert_` for experts that are shared out"
    layouts: tuple[FlatLayout, ...]
    "flat memory of the trainable parameters, in model order"
    frozen_layouts: tuple[FlatLayout, ...]
    "of those without a gradient, one a block that has any"
    frozen_gathers: tuple[int, ...]
    "per frozen layout: how often a microbatch gathers it, where weights are gathered by block"
    kept: tuple[bool, ...]
    "per layout: whether backward starts with its weights as forward left them"
    names: tuple[str, ...]
    "local names of all its parameters"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One virtual stage of a rank: consecutive blocks."""

    pipeline_stage: int
    "0 .. pipeline x chunks - 1, in the order in which a microbatch meets them"
    first_block: int
    num_blocks: int
    parts: tuple[Part, ...]
    "what it keeps; the second part are experts that are shared out"
    borrows: tuple[str, ...]
    "local names of parameters that it uses and an earlier chunk of this rank keeps"

    @property
    def names(self) -> tuple[str, ...]:
        """Local names of all parameters that the chunk keeps."""
        return tuple(name for part in self.parts for name in part.names)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank holds."""

    coordinates: Mapping[str, int]
    table: Mapping[str, Placement]
    "every name of the model -> what this rank updates and saves of it; `held` is empty elsewhere"
    chunks: tuple[Chunk, ...]
    "in order of their pipeline stage"
    copies: Mapping[str, str]
    "local name of a tied copy -> stored name on another rank, which owns it"
    copied_to: Mapping[str, tuple[int, ...]]
    "stored name on this rank -> pipeline positions that have a copy"
    copied_from: Mapping[str, int]
    "local name of a tied copy -> pipeline position of its owner"
    tensor_held: Mapping[str, Placement]
    "stored name -> placement before sharding: what the tensor rank computes with"

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for chunk in self.chunks for part in chunk.parts)

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Flat memory of this rank's trainable parameters."""
        return tuple(one for part in self.parts for one in part.layouts)


def stage_cuts(model: ModelMap, plan: Plan) -> tuple[tuple[int, int], ...]:
    """`(first block, number of blocks)` of every virtual stage, cut by cost."""
    if plan.pipeline == 1:
        return ((0, len(model.blocks)),)
    costs = model.costs or [1.0] * len(model.blocks)
    return pipeline_cuts(costs, stage_owners(plan), plan.num_microbatches)


def stage_owners(plan: Plan) -> tuple[int, ...]:
    """Pipeline position of every virtual stage."""
    if plan.pipeline == 1:
        return (0,)
    chunks = plan.num_chunks
    return generate(plan.schedule, pipeline=plan.pipeline, chunks=chunks, num_microbatches=1).owners


def holding(model: ModelMap, plan: Plan, rank: int, *, gradient_bytes: int = 4) -> Holding:
    """What `rank` holds under `plan`.

    `gradient_bytes` is one element of a reduced gradient. Raises `UserError` for rules that do not
    fit the model and parameters that a pipeline cannot place.
    """
    grid = Grid.of(plan)
    coordinates = grid.coordinates(rank)
    table = initial_table(model.shapes, decays=model.decays, frozen=model.frozen, axes=AXES)
    if plan.tensor > 1:
        table = _cut_by_tensor(model, plan, table, coordinates["tensor"])
    shard = grid.group("shard", rank).index(rank)
    numbers = expert_numbers(model.rules, model.shapes) if plan.expert > 1 else {}
    absent = elsewhere(numbers, plan, shard % plan.expert)
    for name in numbers:
        over = tuple(a for a in table[name].replicated_over if a not in ("data", "context"))
        table[name] = table[name].with_(replicated_over=(*over, EXPERT_COPIES))
    cuts, owners = stage_cuts(model, plan), stage_owners(plan)
    where = _places(model, cuts)
    mine = [stage for stage, owner in enumerate(owners) if owner == coordinates["pipeline"]]
    local = _local_names(model, cuts, owners, coordinates["pipeline"])
    local = {stored: name for stored, name in local.items() if stored not in absent}
    tensor_held = dict(table)
    shapes = {name: local_shape(table[stored].held, table[stored].shape)
              for stored, name in local.items()}  # fmt: skip
    chunks = tuple(
        _chunk(model, plan, stage, cuts[stage], mine, where, local, shapes, numbers, gradient_bytes)
        for stage in mine
    )
    home = {stored: owners[stages[0]] for stored, stages in where.items()}
    copies = {name: stored for stored, name in local.items()
              if home[stored] != coordinates["pipeline"]}  # fmt: skip
    final = _by_name(model, plan, table, local, shard)
    return Holding(
        coordinates=coordinates,
        table=final,
        chunks=chunks,
        copies=copies,
        copied_to={
            stored: others
            for stored in local
            if home[stored] == coordinates["pipeline"]
            and (others := _others(where[stored], owners))
        },
        copied_from={name: home[stored] for name, stored in copies.items()},
        tensor_held=tensor_held,
    )


def _cut_by_tensor(
    model: ModelMap, plan: Plan, table: dict[str, Placement], index: int
) -> dict[str, Placement]:
    if model.rules is None:
        raise UserError(
            f"tensor={plan.tensor} needs a rule table, and this model has none",
            where="partition.tensor",
            legal="1, or a model with rules (module path pattern -> style)",
            nearest=plan.model_copy(update={"tensor": 1, "sequence_parallel": False}).text,
        )
    paths = model.paths or module_paths([*model.shapes, *model.aliases])
    return cut_table(
        table,
        match_rules(model.rules, paths),
        degree=plan.tensor,
        index=index,
        sequence_parallel=plan.sequence_parallel,
        aliases=model.aliases,
    )


def _places(model: ModelMap, cuts: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Stored name -> the virtual stages that use it, ascending. Without a pipeline: stage 0."""
    found: dict[str, dict[int, None]] = {name: {} for name in model.shapes}
    for stage, (first, count) in enumerate(cuts):
        for block in model.blocks[first : first + count]:
            for name in block:
                found[model.stored(name)].setdefault(stage)
    outside = [name for name, stages in found.items() if not stages]
    if outside and len(cuts) > 1:
        raise UserError(
            f"{len(outside)} parameters are outside every block, the first is `{outside[0]}`",
            where="partition.pipeline",
            legal="a model whose blocks use all of its parameters",
            nearest="pipeline=1",
        )
    return {name: tuple(stages) or (0,) for name, stages in found.items()}


def _local_names(
    model: ModelMap, cuts: Sequence[tuple[int, int]], owners: Sequence[int], position: int
) -> dict[str, str]:
    """Stored name -> its first name on this rank, for what the rank holds at all."""
    used: dict[str, str] = {}
    for (first, count), owner in zip(cuts, owners, strict=True):
        if owner == position:
            for block in model.blocks[first : first + count]:
                for name in block:
                    used.setdefault(model.stored(name), name)
    if len(owners) == 1:
        return {name: name for name in model.shapes}
    return {stored: used[stored] for stored in model.shapes if stored in used}


def _others(stages: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
    home = owners[stages[0]]
    return tuple(dict.fromkeys(owners[stage] for stage in stages if owners[stage] != home))


def _chunk(
    model: ModelMap,
    plan: Plan,
    stage: int,
    cut: tuple[int, int],
    mine: Sequence[int],
    where: Mapping[str, Sequence[int]],
    local: Mapping[str, str],
    shapes: Mapping[str, Shape],
    experts: Mapping[str, object],
    gradient_bytes: int,
) -> Chunk:
    first, count = cut
    blocks = [list(dict.fromkeys(model.stored(name) for name in block))
              for block in model.blocks[first : first + count]]  # fmt: skip
    by_block: list[list[str]] = []
    taken: set[str] = set()
    borrows: list[str] = []
    keeper = {stored: min(s for s in where[stored] if s in mine) for stored in local}
    outside = model.outside() if len(mine) == 1 and len(model.blocks) == count else []
    for block in [outside, *blocks]:
        kept_here = []
        for stored in block:
            if stored in taken or stored not in local:
                continue
            taken.add(stored)
            if keeper[stored] == stage:
                kept_here.append(local[stored])
            else:
                borrows.append(local[stored])
        by_block.append(kept_here)
    last = {local[stored] for stored in (*blocks[-1], *outside) if stored in local}
    kinds = [("", [[n for n in block if n not in experts] for block in by_block])]
    if experts:
        kinds.append((EXPERT_GROUPS, [[n for n in block if n in experts] for block in by_block]))
    frozen = {name for stored, name in local.items() if stored in model.frozen}
    # backward reaches a block if anything is trained in it or before it
    first_trained = min(
        (i for i, block in enumerate(by_block) if set(block) - frozen), default=len(by_block)
    )
    return Chunk(
        pipeline_stage=stage,
        first_block=first,
        num_blocks=count,
        parts=tuple(
            _part(groups, named, plan, shapes, frozen, last, first_trained, gradient_bytes)
            for groups, named in kinds
        ),
        borrows=tuple(borrows),
    )


def _part(
    groups: str,
    by_block: Sequence[Sequence[str]],
    plan: Plan,
    shapes: Mapping[str, Shape],
    frozen: set[str],
    last: set[str],
    first_trained: int,
    gradient_bytes: int,
) -> Part:
    """`last` are the names that the chunk's last block uses."""
    shards = 1
    if plan.shard != "none":
        shards = plan.num_shards // (plan.expert if groups else 1)
    layouts = unit_layouts(
        [{name: shapes[name] for name in block if name not in frozen} for block in by_block],
        plan=plan,
        shards=shards,
        gradient_bytes=gradient_bytes,
    )
    with_frozen = [index for index, block in enumerate(by_block) if frozen.intersection(block)]
    return Part(
        groups=groups,
        layouts=tuple(layouts),
        frozen_layouts=tuple(
            flat_layout({n: shapes[n] for n in by_block[i] if n in frozen}, num_shards=shards)
            for i in with_frozen
        ),
        frozen_gathers=tuple(
            1 if i == len(by_block) - 1 or i < first_trained else 2 for i in with_frozen
        ),
        kept=tuple(any(slot.name in last for slot in one.slots) for one in layouts),
        names=tuple(name for block in by_block for name in block),
    )


def _by_name(
    model: ModelMap,
    plan: Plan,
    table: Mapping[str, Placement],
    local: Mapping[str, str],
    shard: int,
) -> dict[str, Placement]:
    """The final table: pipeline and sharding applied, aliases beside what they stand for."""
    final: dict[str, Placement] = {}
    for stored, one in table.items():
        if plan.pipeline > 1:
            over = tuple(axis for axis in one.replicated_over if axis != "pipeline")
            one = one.with_(replicated_over=over)
        if local.get(stored) != stored:
            one = one.with_(held=())
        final[stored] = _reduced(one, plan, shard)
    for alias, stored in model.aliases.items():
        copy = final[stored]
        if local.get(stored) == alias:
            copy = _reduced(table[stored], plan, shard)
        final[alias] = copy.with_(name=alias, tied_to=stored)
    return final


def _reduced(one: Placement, plan: Plan, shard: int) -> Placement:
    """Under data parallelism gradients are partial sums; under sharding rows are cut as well.

    Frozen weights are cut only where weights are.
    """
    expert = EXPERT_COPIES in one.replicated_over
    along = (EXPERT_COPIES,) if expert else ("data", "context")
    partial = (*one.partial_over, "replicas", *along)
    if plan.shard == "none":
        return one.with_(partial_over=partial)
    if not one.trainable and plan.shard != "parameters":
        return one
    rows, _ = rows_and_columns(local_shape(one.held, one.shape))
    degree = plan.expert if expert else 1
    start, size = split_evenly(rows, plan.num_shards // degree, shard // degree)
    return one.with_(
        held=rows_of(one.held, start, size) if one.held else (),
        replicated_over=tuple(a for a in one.replicated_over if a not in along),
        partial_over=partial,
    )


def held_messages(
    held: Holding, plan: Plan, *, compute_dtype: str = "float32", master_dtype: str = "float32"
) -> list[Message]:
    """Messages of data parallelism and sharding of one rank and step, frozen weights included."""
    found: list[Message] = []
    for groups in dict.fromkeys(part.groups for part in held.parts):
        parts = [part for part in held.parts if part.groups == groups]
        found += reduction_messages(
            [one for part in parts for one in part.layouts],
            plan=plan,
            groups=groups,
            compute_dtype=compute_dtype,
            master_dtype=master_dtype,
            kept=[one for part in parts for one in part.kept],
        )
        shards = plan.num_shards // (plan.expert if groups else 1)
        if plan.shard == "parameters" and shards > 1:
            for part in parts:
                for layout, times in zip(part.frozen_layouts, part.frozen_gathers, strict=True):
                    found.append(
                        Message(
                            what="weight",
                            operation="all_gather",
                            group=f"{groups}shard",
                            group_size=shards,
                            payload_bytes=layout.whole_numel * DTYPE_BYTES[compute_dtype],
                            count=1 if plan.pipeline > 1 else times * plan.num_microbatches,
                            hidden_behind="the neighbouring block",
                        )
                    )
    return found


def held_state(
    held: Holding, plan: Plan, *, compute_dtype: str = "float32", master_dtype: str = "float32"
) -> StateBytes:
    """Bytes of training state of one rank: its chunks', with frozen weights, without the moments
    of tied copies, which their owner has. Peaks of gradients are added up over chunks.
    """
    types = {"compute_dtype": compute_dtype, "master_dtype": master_dtype}
    parameters = gradients = optimizer = 0
    for part in held.parts:
        one = state_bytes(part.layouts, plan=plan, **types)
        frozen = state_bytes(part.frozen_layouts, plan=plan, **types)
        without_master = plan.shard in ("optimizer", "gradients")
        parameters += one.parameters + (
            _natural(part.frozen_layouts) * DTYPE_BYTES[compute_dtype]
            if without_master
            else frozen.parameters
        )
        gradients += one.gradients
        optimizer += one.optimizer
        copies = [slot for layout in part.layouts for slot in layout.slots
                  if slot.name in held.copies]  # fmt: skip
        optimizer -= 2 * sum(slot.numel for slot in copies) * DTYPE_BYTES[master_dtype]
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=optimizer)


def _natural(layouts: Sequence[FlatLayout]) -> int:
    return sum(slot.rows * slot.columns for layout in layouts for slot in layout.slots)


def names_by_block(names: Iterable[str], prefixes: Sequence[str]) -> list[list[str]]:
    """Parameter names under each block's module path, for models known by name only."""
    listed = list(names)
    return [[one for one in listed if one.rpartition(".")[0] == prefix
             or one.startswith(prefix + ".")] for prefix in prefixes]  # fmt: skip
