"""What every rank of a collective does in the tests: the same code over threads and processes.

A case gets a `Place` and returns values that JSON can carry. Inputs are a function of the member's
place in its group, so that the test can work out what must come of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reparto.comm.collectives import Check, Communicator, Handle
from reparto.comm.mesh import Mesh
from reparto.errors import Fault
from reparto.trace import Kind, Ring
from reparto.train.agree import Word, agree

#: 4 ranks with groups of 4 (`world`) and of 2 (`shard`: 0 1 and 2 3)
PLAN = "data=4,replicas=2,shard=gradients"

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
          "int64": torch.int64}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank."""

    mesh: Mesh
    checked: Mapping[str, Communicator]
    "group name -> the same group, with signatures compared before data moves"
    new_check: Callable[[int], Check]
    "a check of its own for a generation, which counts from 0"

    @property
    def ring(self) -> Ring:
        return self.mesh.ring


def whole_numbers(member: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Small whole numbers, so that sums are exact in every type and order."""
    numel = 1
    for extent in shape:
        numel *= extent
    values = (torch.arange(numel) * (member + 3) + 7 * member) % 11 - 5
    return values.reshape(shape).to(DTYPES[dtype])


def fractions(member: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Numbers whose sum depends on the order of its terms."""
    generator = torch.Generator().manual_seed(100 + member)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])


def rows_for(sender: int, receiver: int) -> int:
    """Rows of an uneven exchange; some are zero."""
    return (3 * sender + 2 * receiver) % 4


def message(sender: int) -> bytes:
    """Bytes of different length a member: none, every value there is, and some more."""
    return bytes(range(256)) * sender


# --- cases: (place, **arguments) -> JSON ---------------------------------------------------------


def all_reduce(place: Place, group: str, dtype: str, op: str, shape: list[int]) -> object:
    one = place.mesh.group(group)
    tensor = whole_numbers(one.index, tuple(shape), dtype)
    one.all_reduce(tensor, tag="t", op=op).wait()
    return tensor.tolist()


def all_gather(place: Place, group: str, dtype: str, shape: list[int], inside: bool) -> object:
    """`inside`: the piece already lies at its place in the output, as after an update."""
    one = place.mesh.group(group)
    piece = whole_numbers(one.index, tuple(shape), dtype)
    out = torch.full((one.size, *shape), -99, dtype=piece.dtype)
    if inside:
        out[one.index] = piece
        piece = out[one.index]
    one.all_gather(out, piece, tag="t").wait()
    return out.tolist()


def reduce_scatter(place: Place, group: str, dtype: str, numel: int) -> object:
    one = place.mesh.group(group)
    whole = fractions(one.index, (one.size, numel), dtype)
    out = torch.empty(numel, dtype=whole.dtype)
    one.reduce_scatter(out, whole, tag="t").wait()
    return out.tolist()


def all_to_all(place: Place, group: str, dtype: str, columns: int, uneven: bool) -> object:
    one = place.mesh.group(group)
    if not uneven:
        source = whole_numbers(one.index, (2 * one.size, columns), dtype)
        out = torch.empty_like(source)
        one.all_to_all(out, source, tag="t").wait()
        return out.tolist()
    to_each = [rows_for(one.index, other) for other in range(one.size)]
    from_each = [rows_for(other, one.index) for other in range(one.size)]
    source = whole_numbers(one.index, (sum(to_each), columns), dtype)
    out = torch.empty(sum(from_each), columns, dtype=source.dtype)
    one.all_to_all(out, source, tag="t", out_sizes=from_each, in_sizes=to_each).wait()
    return out.tolist()


def broadcast(place: Place, group: str, dtype: str) -> object:
    """From every member in turn."""
    one = place.mesh.group(group)
    found = []
    for source in range(one.size):
        tensor = whole_numbers(one.index, (5,), dtype)
        one.broadcast(tensor, source=source, tag="t").wait()
        found.append(tensor.tolist())
    return found


def messages_in_order(place: Place, group: str, dtype: str) -> object:
    """Three messages to the next member, three from the one before: all sent before any wait."""
    one = place.mesh.group(group)
    to, source = (one.index + 1) % one.size, (one.index - 1) % one.size
    out = [torch.empty(4, dtype=DTYPES[dtype]) for _ in range(3)]
    sent = [whole_numbers(one.index + 10 * turn, (4,), dtype) for turn in range(3)]
    handles: list[Handle] = []
    for turn in range(3):
        handles.append(one.send(sent[turn], to=to, tag="t"))
        handles.append(one.recv(out[turn], source=source, tag="t"))
    for handle in handles:
        handle.wait()
    return [tensor.tolist() for tensor in out]


def many_under_way(place: Place, group: str, number: int) -> object:
    """Issued one after another, waited for in the opposite order, and once too often."""
    one = place.mesh.group(group)
    tensors = [whole_numbers(one.index + turn, (6,), "float32") for turn in range(number)]
    handles = [one.all_reduce(tensor, tag=f"t{turn}") for turn, tensor in enumerate(tensors)]
    for handle in reversed(handles):
        handle.wait()
    for handle in handles:
        handle.wait()
    return [tensor.tolist() for tensor in tensors]


def two_lanes(place: Place) -> object:
    """Gathering and reducing under way at once, begun in another order on odd ranks."""
    gather, reduce = place.mesh.group("unshard"), place.mesh.group("shard")
    piece = whole_numbers(gather.index, (3,), "float32")
    out = torch.empty(gather.size, 3)
    total = whole_numbers(reduce.index, (3,), "float32")
    issue: list[Callable[[], Handle]] = [
        lambda: gather.all_gather(out, piece, tag="weight"),
        lambda: reduce.all_reduce(total, tag="gradient"),
    ]
    if place.mesh.rank % 2:
        issue.reverse()
    for handle in [begin() for begin in issue]:
        handle.wait()
    return [out.tolist(), total.tolist()]


def barrier_and_bytes(place: Place, group: str) -> object:
    one = place.mesh.group(group)
    one.barrier(tag="here").wait()
    return [data.hex() for data in one.exchange(message(one.index), tag="digests")]


def records_of_everything(place: Place, group: str) -> object:
    """One of each; returns what the ring says of them."""
    one = place.mesh.group(group)
    since = place.ring.sequence
    place.ring.set_step(7)
    all_reduce(place, group, "bfloat16", "sum", [3, 5])
    all_gather(place, group, "float32", [6], False)
    reduce_scatter(place, group, "float64", 4)
    all_to_all(place, group, "float32", 3, False)
    all_to_all(place, group, "int64", 3, True)
    one.broadcast(torch.zeros(9), source=0, tag="t").wait()
    messages_in_order(place, group, "float32")
    one.barrier(tag="t").wait()
    return [
        [r.op.name, r.lowered_as.name, r.payload_bytes, r.state.name, r.step, r.group, r.digest,
         r.start_ns <= r.wait_ns <= r.end_ns]
        for r in place.ring.records(since=since)
        if r.kind is Kind.COLLECTIVE
    ]  # fmt: skip


def fingerprint(place: Place, group: str, order: list[str]) -> object:
    """The step's fingerprint after sums of the given names."""
    place.ring.set_step(3)
    for name in order:
        place.mesh.group(group).all_reduce(torch.zeros(4), tag=name).wait()
    return place.ring.fingerprint


# --- memory of one host --------------------------------------------------------------------------


def buffer_sums(place: Place, group: str, dtype: str, numel: int, parts: int) -> object:
    """Sums of parts of a buffer, all under way at once, waited for from the last to the first."""
    one = place.mesh.group(group)
    buffer = one.buffer(numel, dtype=DTYPES[dtype], device=torch.device("cpu"))
    zeros = bool((buffer == 0).all())
    seen = []
    for turn in range(2):  # the second finds what the first left
        buffer.copy_(fractions(one.index + turn, (numel,), dtype))
        pieces = torch.tensor_split(buffer, parts)
        handles = [one.all_reduce(piece, tag=f"part {i}") for i, piece in enumerate(pieces)]
        for handle in handles if turn else reversed(handles):
            handle.wait()
        seen.append(buffer.tolist())
    return [zeros, *seen]


def unread_messages(place: Place, number: int) -> object:
    """More messages sent than a box holds, read from the last to the first, then some more."""
    one = place.mesh.group("shard")
    if one.index == 0:
        for value in range(number):
            one.send(torch.full((3,), float(value)), to=1, tag="m").wait()
        return []
    inputs = [torch.empty(3) for _ in range(number)]
    handles = [one.recv(tensor, source=0, tag="m") for tensor in inputs]
    for at in range(0, number, 100):  # within what a box holds, in any order
        for handle in reversed(handles[at : at + 100]):
            handle.wait()
    return [tensor[0].item() for tensor in inputs]


def crossed_waits(place: Place) -> object:
    """Two lanes of one group, waited for in opposite orders by the two members."""
    one, other = place.mesh.group("shard"), place.mesh.group("unshard")
    a, b = torch.full((2,), 1.0 + one.index), torch.full((2,), 10.0 + one.index)
    handles = [one.all_reduce(a, tag="a"), other.all_reduce(b, tag="b")]
    for handle in handles if one.index else reversed(handles):
        handle.wait()
    return [a.tolist(), b.tolist()]


def different_things(place: Place, how: str) -> object:
    """Two ranks that do not do the same; returns what each is told. Uses a lane of its own."""
    one = place.mesh.group("replicas")
    place.ring.set_step(4)
    try:
        if how == "operation" and one.index:
            one.all_gather(torch.empty(2, 4), torch.ones(4), tag="gather").wait()
        else:
            one.all_reduce(torch.ones(4 + one.index * (how == "size")), tag="sum").wait()
    except Fault as fault:
        return str(fault)
    return "nothing was noticed"


# --- disagreement --------------------------------------------------------------------------------


def refused(place: Place, group: str, mine: dict[str, list[list[object]]]) -> object:
    """Sums in checked mode, of what `mine` says for this rank; returns the refusals, or values.

    Afterwards a sum that all agree on: it comes out right only if nothing was sent before.
    """
    one = place.checked[group]
    place.ring.set_step(12)
    tensors: list[Tensor] = []
    try:
        for tag, size, value, dtype in mine[str(place.mesh.rank)]:
            tensors.append(torch.full((int(str(size)),), float(str(value)),
                                      dtype=DTYPES[str(dtype)]))  # fmt: skip
            one.all_reduce(tensors[-1], tag=str(tag)).wait()
        told = ""
    except Fault as fault:
        told = str(fault)
    after = torch.full((2,), float(one.index + 1))
    one.all_reduce(after, tag="after").wait()
    return {"told": told, "values": [one.tolist() for one in tensors], "after": after.tolist()}


def late(place: Place, group: str, absent: int, generation: int) -> object:
    """One member does not come; the others are told who."""
    one = place.mesh.group(group)
    place.ring.set_step(9)
    if place.mesh.rank == absent:
        return ["absent", ""]
    try:
        place.new_check(generation)(group, one.ranks, one.index, "all_reduce `alone` (3,) float32")
    except Fault as fault:
        return [type(fault).__name__, str(fault)]
    return ["nothing", "was noticed"]


def uneven_is_no_disagreement(place: Place, group: str) -> object:
    """Members of an uneven exchange have different shapes and still do the same."""
    one = place.checked[group]
    to_each = [rows_for(one.index, other) for other in range(one.size)]
    from_each = [rows_for(other, one.index) for other in range(one.size)]
    out = torch.empty(sum(from_each), 2)
    source = torch.full((sum(to_each), 2), float(one.index))
    place.ring.set_step(4)
    one.all_to_all(out, source, tag="tokens", out_sizes=from_each, in_sizes=to_each).wait()
    return [out[:, 0].tolist(), place.ring.fingerprint]


# --- the agreement word --------------------------------------------------------------------------

WORD = {"finite": True, "stop": False, "has_next": True, "guard": 0, "fingerprint": 7,
        "position": 640, "squares": 0.0, "loss": 0.0, "tokens": 0}  # fmt: skip


def word(place: Place, changes: dict[str, dict[str, object]]) -> object:
    """Every rank says `WORD` with its own changes; returns what all agree on, or the fault."""
    place.ring.set_step(21)
    mine = {**WORD, **changes.get(str(place.mesh.rank), {})}
    try:
        agreed = agree(place.mesh, Word(**mine))  # type: ignore[arg-type]
    except Fault as fault:
        return {"fault": str(fault)}
    return {
        "unfinite": list(agreed.unfinite), "stop": list(agreed.stop), "short": list(agreed.short),
        "has_next": agreed.has_next, "guard": agreed.guard, "norm": agreed.norm,
        "loss": agreed.loss, "tokens": agreed.tokens,
    }  # fmt: skip


CASES: Mapping[str, Callable[..., object]] = {
    case.__name__: case
    for case in (
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, messages_in_order,
        many_under_way, two_lanes, barrier_and_bytes, records_of_everything, fingerprint, refused,
        late, uneven_is_no_disagreement, word, buffer_sums, unread_messages, crossed_waits,
        different_things,
    )
}  # fmt: skip
