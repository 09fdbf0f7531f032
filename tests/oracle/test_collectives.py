"""Every operation of `comm/collectives.py`, over threads and over real gloo processes.

The expected value of each is worked out here from everyone's input. Both transports must give it,
bit for bit: sums of whole numbers are exact in any order, and reduce_scatter, whose order we fix,
is exact for fractions too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
from collective_cases import CASES, PLAN, Place, fractions, message, rows_for, whole_numbers
from processes import Pool
from torch import Tensor

from reparto.comm.backend import TorchTransport
from reparto.comm.collectives import Communicator
from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import SignatureCheck, fake_mesh, single_mesh
from reparto.config.plan import Plan
from reparto.errors import Fault, PeerLost
from reparto.partition.grid import Grid
from reparto.trace import Ring, State
from reparto.train.agree import Word, agree

GRID = Grid.of(Plan.parse(PLAN))
#: group name -> its size
GROUPS = {"world": 4, "shard": 2}
Run = Callable[..., list[object]]


class ThreadStore:
    """The blocking store that signatures are laid in, for threads."""

    def __init__(self, timeout_s: float = 1.0) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, self._timeout_s):
                raise RuntimeError(f"nobody set {key}")
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def over_threads(case: str, **arguments: object) -> list[object]:
    """A case on 4 threads; values in rank order, as JSON would carry them."""
    answers: list[object] = [None] * GRID.world_size
    store = ThreadStore()
    told = json.loads(json.dumps(arguments))

    def work(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=1024)

        def new_check(generation: int) -> SignatureCheck:
            return SignatureCheck(store, ring=ring, generation=generation)

        checked = {}
        for ident, name in enumerate(GROUPS):
            ranks = GRID.group(name, rank)
            transport = world.transport(f"checked {name}", ranks, rank)
            checked[name] = Communicator(
                name, transport, ring=ring, ident=ident, ranks=ranks, check=new_check(1)
            )
        mesh = fake_mesh(GRID, rank, world=world, ring=ring)
        place = Place(mesh=mesh, checked=checked, new_check=new_check)
        answers[rank] = json.loads(json.dumps(CASES[case](place, **told)))

    run_threads(GRID.world_size, work)
    return answers


@pytest.fixture(params=["threads", "processes", "shared"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a case on 4 ranks, over threads, over gloo and over shared memory."""
    if request.param == "threads":
        return over_threads
    pool: Pool = request.getfixturevalue("gloo")
    return partial(pool.run, over="shared") if request.param == "shared" else pool.run


def members(group: str, make: Callable[[int], Tensor]) -> list[Tensor]:
    return [make(member) for member in range(GROUPS[group])]


def assert_group_sees(values: list[object], group: str, expected: Callable[[int], object]) -> None:
    """Each rank's value is the one that its place in the group calls for."""
    for rank, value in enumerate(values):
        assert value == expected(rank % GROUPS[group]), f"rank {rank}"


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("dtype", "op", "shape"),
    [("float32", "sum", [3, 5]), ("float64", "sum", []), ("bfloat16", "sum", [7]),
     ("int64", "sum", [1]), ("float32", "max", [4]), ("float64", "min", [2, 2])],
)  # fmt: skip
def test_all_reduce(run: Run, group: str, dtype: str, op: str, shape: list[int]) -> None:
    stack = torch.stack(members(group, lambda m: whole_numbers(m, tuple(shape), dtype)))
    total = stack.sum(0) if op == "sum" else getattr(stack, f"a{op}")(0)
    values = run("all_reduce", group=group, dtype=dtype, op=op, shape=shape)
    assert_group_sees(values, group, lambda member: total.tolist())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("dtype", "shape"), [("float32", [2, 3]), ("bfloat16", [5]),
                                              ("int64", [1])])  # fmt: skip
def test_all_gather(run: Run, group: str, dtype: str, shape: list[int], inside: bool) -> None:
    whole = torch.stack(members(group, lambda m: whole_numbers(m, tuple(shape), dtype)))
    values = run("all_gather", group=group, dtype=dtype, shape=shape, inside=inside)
    assert_group_sees(values, group, lambda member: whole.tolist())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_reduce_scatter_adds_in_rank_order_to_the_bit(run: Run, group: str, dtype: str) -> None:
    size = GROUPS[group]
    wholes = members(group, lambda m: fractions(m, (size, 9), dtype))

    def expected(member: int) -> object:
        total = wholes[0][member].clone()
        for whole in wholes[1:]:
            total += whole[member]
        return total.tolist()

    assert_group_sees(run("reduce_scatter", group=group, dtype=dtype, numel=9), group, expected)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_to_all_is_a_transpose(run: Run, group: str, dtype: str) -> None:
    size = GROUPS[group]
    sources = members(group, lambda m: whole_numbers(m, (2 * size, 3), dtype))
    values = run("all_to_all", group=group, dtype=dtype, columns=3, uneven=False)
    assert_group_sees(
        values,
        group,
        lambda member: torch.cat([one[2 * member : 2 * member + 2] for one in sources]).tolist(),
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_uneven_all_to_all_with_empty_pieces(run: Run, group: str, dtype: str) -> None:
    size = GROUPS[group]
    sizes = [[rows_for(a, b) for b in range(size)] for a in range(size)]
    assert any(0 in row for row in sizes)
    pieces = [
        torch.split(whole_numbers(a, (sum(sizes[a]), 3), dtype), sizes[a]) for a in range(size)
    ]
    values = run("all_to_all", group=group, dtype=dtype, columns=3, uneven=True)
    assert_group_sees(
        values, group, lambda member: torch.cat([piece[member] for piece in pieces]).tolist()
    )


@pytest.mark.parametrize("group", GROUPS)
def test_broadcast_from_every_member(run: Run, group: str) -> None:
    expected = [one.tolist() for one in members(group, lambda m: whole_numbers(m, (5,), "float32"))]
    values = run("broadcast", group=group, dtype="float32")
    assert_group_sees(values, group, lambda member: expected)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_messages_of_a_pair_arrive_in_their_order(run: Run, group: str, dtype: str) -> None:
    def expected(member: int) -> object:
        before = (member - 1) % GROUPS[group]
        return [whole_numbers(before + 10 * turn, (4,), dtype).tolist() for turn in range(3)]

    assert_group_sees(run("messages_in_order", group=group, dtype=dtype), group, expected)


@pytest.mark.parametrize("group", GROUPS)
def test_many_under_way_may_be_waited_for_in_any_order_and_twice(run: Run, group: str) -> None:
    def total(turn: int) -> list[float]:
        found = torch.zeros(6)
        for member in range(GROUPS[group]):
            found += whole_numbers(member + turn, (6,), "float32")
        return found.tolist()

    expected = [total(turn) for turn in range(5)]
    values = run("many_under_way", group=group, number=5)
    assert_group_sees(values, group, lambda member: expected)


def test_two_lanes_of_a_group_keep_their_own_order(gloo: Pool) -> None:
    whole = [whole_numbers(member, (3,), "float32") for member in range(2)]
    expected = [[one.tolist() for one in whole], sum(whole).tolist()]  # type: ignore[union-attr]
    assert gloo.run("two_lanes") == [expected] * 4


@pytest.mark.parametrize("group", GROUPS)
def test_bytes_of_any_length_are_laid_before_all(run: Run, group: str) -> None:
    expected = [message(member).hex() for member in range(GROUPS[group])]
    assert expected[0] == ""
    values = run("barrier_and_bytes", group=group)
    assert_group_sees(values, group, lambda member: expected)


def test_a_group_of_one_copies_and_records_nothing() -> None:
    mesh = single_mesh()
    one = mesh.group("shard")
    source = torch.arange(6.0)
    for operation in (one.all_gather, one.reduce_scatter, one.all_to_all):
        out = torch.zeros(6)
        operation(out, source, tag="t").wait()
        assert torch.equal(out, source)
    kept = source.clone()
    one.all_reduce(kept, tag="t").wait()
    one.broadcast(kept, source=0, tag="t").wait()
    one.barrier(tag="t").wait()
    assert torch.equal(kept, source)
    assert one.exchange(b"alone", tag="t") == [b"alone"]
    assert mesh.ring.records() == [] and mesh.exposed_s == 0.0


# --- records -------------------------------------------------------------------------------------

#: operation, payload bytes for a group of n at place i, what gloo really runs
EVERYTHING: list[tuple[str, Callable[[int, int], int], str]] = [
    ("ALL_REDUCE", lambda n, i: 3 * 5 * 2, "ALL_REDUCE"),
    ("ALL_GATHER", lambda n, i: n * 6 * 4, "SEND"),
    ("REDUCE_SCATTER", lambda n, i: n * 4 * 8, "ALL_TO_ALL"),
    ("ALL_TO_ALL", lambda n, i: 2 * n * 3 * 4, "ALL_TO_ALL"),
    ("ALL_TO_ALL", lambda n, i: 3 * 8 * max(sum(rows_for(i, j) for j in range(n)),
                                            sum(rows_for(j, i) for j in range(n))),
     "ALL_TO_ALL"),
    ("BROADCAST", lambda n, i: 9 * 4, "BROADCAST"),
    *[(name, lambda n, i: 16, name) for _ in range(3) for name in ("SEND", "RECV")],
    ("BARRIER", lambda n, i: 0, "BARRIER"),
]  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_every_collective_leaves_a_record_with_its_payload_and_what_ran(
    run: Run, group: str
) -> None:
    size = GROUPS[group]
    lowered = run is not over_threads and not isinstance(run, partial)  # on gloo
    for rank, rows in enumerate(run("records_of_everything", group=group)):
        assert isinstance(rows, list)
        assert [row[:3] for row in rows] == [
            [name, on_gloo if lowered else name, payload(size, rank % size)]
            for name, payload, on_gloo in EVERYTHING
        ]
        assert all(row[3] == "DONE" and row[4] == 7 and row[7] for row in rows)
        assert len({row[5] for row in rows}) == 1  # one group, one id
        for row in rows:  # ranks of a pair do different things, so their digest says nothing
            assert (row[6] == 0) == (row[0] in ("SEND", "RECV"))


def test_digests_are_equal_on_all_members_also_of_an_uneven_exchange(run: Run) -> None:
    values = run("records_of_everything", group="world")
    digests = [[row[6] for row in rows] for rows in values]  # type: ignore[attr-defined]
    assert all(one == digests[0] for one in digests)
    assert len(set(digests[0]) - {0}) == len([one for one in digests[0] if one])


def test_exposed_time_of_a_rank_is_the_sum_of_its_records() -> None:
    def work(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=64)
        mesh = fake_mesh(GRID, rank, world=world, ring=ring)
        for group in ("world", "shard", "world"):
            mesh.group(group).all_reduce(torch.zeros(2), tag="t").wait()
        recorded = ring.records()
        assert len(recorded) == 3 and all(one.state is State.DONE for one in recorded)
        assert mesh.exposed_s == pytest.approx(sum(one.exposed_s for one in recorded), abs=1e-9)

    run_threads(4, work)


# --- ranks that do not do the same ---------------------------------------------------------------


def test_L50_different_sizes_are_named_before_anything_is_sent(run: Run) -> None:
    six, four = [["gradient 3", 6, 1.0, "float32"]], [["gradient 3", 4, 1.0, "float32"]]
    mine = {"0": six, "1": four, "2": six, "3": four}
    for rank, found in enumerate(run("refused", group="shard", mine=mine)):
        assert isinstance(found, dict)
        first = 0 if rank < 2 else 2
        lines = found["told"].splitlines()
        assert lines[0].startswith(
            f"rank {rank}, step 12: the ranks of group `shard` disagree on its collective "
        )
        assert lines[0].endswith(", so nothing was sent:")
        assert lines[1:] == [
            f"  rank {first}: all_reduce `gradient 3` (6,) float32",
            f"  rank {first + 1}: all_reduce `gradient 3` (4,) float32",
        ]
        assert found["values"] == [[1.0] * (6 if rank % 2 == 0 else 4)]  # untouched
        assert found["after"] == [3.0, 3.0]  # the channel is clean: 1 + 2


def test_L51_the_same_shape_in_another_order_is_named(run: Run) -> None:
    forth = [["a", 1, 1.0, "float32"], ["b", 1, 10.0, "float32"]]
    back = [["b", 1, 11.0, "float32"], ["a", 1, 2.0, "float32"]]
    found = run("refused", group="shard", mine={"0": forth, "1": back, "2": forth, "3": back})
    for rank, one in enumerate(found):
        assert isinstance(one, dict)
        first = 0 if rank < 2 else 2
        assert one["told"].splitlines()[1:] == [
            f"  rank {first}: all_reduce `a` (1,) float32",
            f"  rank {first + 1}: all_reduce `b` (1,) float32",
        ]
        assert one["values"] == [[1.0]] if rank % 2 == 0 else [[11.0]]  # not 12 on both
        assert one["after"] == [3.0, 3.0]


def test_L50_another_type_is_named_with_the_sequence_number_of_the_group(run: Run) -> None:
    before = [["x", 2, 1.0, "float32"]] * 2
    mine = {
        str(rank): [*before, ["y", 2, 1.0, "float64" if rank == 3 else "float32"]]
        for rank in range(4)
    }
    found = run("refused", group="world", mine=mine)
    numbers = set()
    for one in found:
        assert isinstance(one, dict)
        lines = one["told"].splitlines()
        numbers.add(int(lines[0].split("collective ")[1].split(",")[0]))
        assert lines[4] == "  rank 3: all_reduce `y` (2,) float64"
        assert lines[1:4] == [f"  rank {r}: all_reduce `y` (2,) float32" for r in range(3)]
        assert one["values"][:2] == [[4.0, 4.0]] * 2 and one["values"][2] == [1.0, 1.0]
        assert one["after"] == [10.0, 10.0]
    assert len(numbers) == 1  # all name the same one; two went well before it
    if run is over_threads:
        assert numbers == {2}


def test_equal_work_passes_the_check(run: Run) -> None:
    mine = {str(rank): [["x", 3, float(rank), "bfloat16"]] for rank in range(4)}
    for one in run("refused", group="world", mine=mine):
        assert one == {"told": "", "values": [[6.0, 6.0, 6.0]], "after": [10.0, 10.0]}


def test_a_member_that_does_not_come_is_named_within_the_time_limit(run: Run) -> None:
    began = time.monotonic()
    found = run("late", group="world", absent=2, generation=77)
    assert time.monotonic() - began < 30
    for rank, told in enumerate(found):
        if rank != 2:
            assert told == [
                "PeerLost",
                f"rank {rank}, step 9: all_reduce `alone` (3,) float32, collective 0 of group "
                "`world`: rank 2 has not come",
            ]


def test_an_uneven_exchange_is_no_disagreement(run: Run) -> None:
    found = run("uneven_is_no_disagreement", group="world")
    prints = set()
    for rank, one in enumerate(found):
        assert isinstance(one, list)
        rows, fingerprint = one
        assert rows == [float(a) for a in range(4) for _ in range(rows_for(a, rank))]
        prints.add(fingerprint)
    assert len(prints) == 1


def test_L51_fingerprints_of_a_step_differ_when_the_order_differs(run: Run) -> None:
    forth = run("fingerprint", group="world", order=["a", "b"])
    back = run("fingerprint", group="world", order=["b", "a"])
    assert len(set(map(str, forth))) == len(set(map(str, back))) == 1
    assert forth[0] != back[0]


def test_a_lost_peer_is_told_with_rank_step_tag_group_and_peers() -> None:
    """A thread that fails breaks what the others are in; they name what they were doing."""
    told: dict[int, PeerLost] = {}

    def work(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=64)
        mesh = fake_mesh(GRID, rank, world=world, ring=ring)
        ring.set_step(5)
        if rank == 3:
            raise KeyError("the cause")
        try:
            mesh.world.all_reduce(torch.zeros(2), tag="gradient 1").wait()
        except PeerLost as error:
            told[rank] = error

    with pytest.raises(KeyError, match="the cause"):
        run_threads(4, work)
    assert str(told[1]) == (
        "rank 1, step 5: collective `gradient 1` in group `world` with rank 0, 2, 3 failed: "
        "another rank has left"
    )
    assert set(told) == {0, 1, 2} and told[0].exit_code == 4


def test_a_dead_peer_that_gloo_tells_of_when_a_message_is_issued_is_told_on_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """all_gather is lowered to single messages, so the agreement word meets a dead peer so."""

    def refuse(tensor: Tensor, rank: int, group: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242\nand more")

    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("torch.distributed.isend", refuse)
    monkeypatch.setattr("torch.distributed.irecv", refuse)
    transport = TorchTransport(None, ranks=(0, 1), index=0)  # type: ignore[arg-type]
    ring = Ring(None, rank=0, capacity=8)
    one = Communicator("world", transport, ring=ring, ident=1, ranks=(0, 1))
    for handle in (
        one.send(torch.zeros(1), to=1, tag="word"),
        one.recv(torch.zeros(1), source=1, tag="word"),
        one.all_gather(torch.zeros(2), torch.zeros(1), tag="word"),
    ):
        with pytest.raises(PeerLost, match="`word` in group `world` with rank 1 failed: Conn"):
            handle.wait()
    assert all(one.state is State.STARTED for one in ring.records())  # the ring shows where


# --- the agreement word --------------------------------------------------------------------------

NOTHING = {"unfinite": [], "stop": [], "short": [], "has_next": True, "guard": 0, "norm": 0.0,
           "loss": 0.0, "tokens": 0}  # fmt: skip


def test_sums_are_of_all_ranks_and_the_norm_is_their_root(run: Run) -> None:
    said = {"0": {"squares": 9.0, "loss": 1.5, "tokens": 5}, "1": {"squares": 16.0},
            "2": {"loss": 0.25, "tokens": 1}, "3": {"squares": 144.0}}  # fmt: skip
    expected = {**NOTHING, "norm": 13.0, "loss": 1.75, "tokens": 6}
    assert run("word", changes=said) == [expected] * 4


@pytest.mark.parametrize(
    ("squares", "norm"),
    [
        pytest.param([9.0, 16.0, 0.0, 0.0], 5.0, id="L20: stages with norms 3 and 4"),
        pytest.param([20.0, 100.0, 0.0, 0.0], 120.0**0.5, id="L22: experts, two ranks idle"),
        pytest.param([0.0, 0.0, 120.0, 0.0], 120.0**0.5, id="L22: the same experts elsewhere"),
    ],
)
def test_the_norm_is_one_for_all_wherever_its_parts_lie(
    run: Run, squares: list[float], norm: float
) -> None:
    said = {str(rank): {"squares": part} for rank, part in enumerate(squares)}
    assert [one["norm"] for one in run("word", changes=said)] == [norm] * 4  # type: ignore[index]


def test_L45_L46_one_decision_for_all_whoever_asked_for_it(run: Run) -> None:
    """Stop, guard and end of data are one rank's knowledge; what follows is the same everywhere."""
    said = {"1": {"stop": True}, "2": {"guard": 2}, "3": {"guard": 1, "has_next": False}}
    expected = {**NOTHING, "stop": [1], "guard": 2, "short": [3], "has_next": False}
    assert run("word", changes=said) == [expected] * 4


def test_a_rank_that_is_not_finite_is_named_and_its_sums_do_not_spoil_the_others(run: Run) -> None:
    said = {"2": {"finite": False}, "0": {"squares": 4.0, "loss": 3.0, "tokens": 2}}
    expected = {**NOTHING, "unfinite": [2], "norm": 2.0, "loss": 3.0, "tokens": 2}
    assert run("word", changes=said) == [expected] * 4


def test_sums_keep_large_counts_and_are_made_in_rank_order(run: Run) -> None:
    losses = [1e16, 1.0, -1e16, 1.0]  # in rank order 1.0; in another, 2.0 or 0.0
    said = {str(rank): {"loss": loss, "tokens": 2**50} for rank, loss in enumerate(losses)}
    for one in run("word", changes=said):
        assert isinstance(one, dict)
        assert one["loss"] == 1.0 and one["tokens"] == 2**52


def test_L51_another_fingerprint_is_a_fault_on_every_rank(run: Run) -> None:
    for rank, one in enumerate(run("word", changes={"2": {"fingerprint": 0xABCD}})):
        assert isinstance(one, dict)
        told = one["fault"]
        assert told.startswith(
            f"rank {rank}, step 21: ranks 0, 1, 2, 3 did not run the same collectives in the same "
            "order, so no update was made (fingerprints rank 0: 00000007, rank 1: 00000007, "
            "rank 2: 0000abcd, rank 3: 00000007)"
        )
        assert 'communicate.check = "collective"' in told  # what to do next


def test_other_positions_in_the_data_are_a_fault_on_every_rank(run: Run) -> None:
    for rank, one in enumerate(run("word", changes={"3": {"position": 672}})):
        assert one == {
            "fault": f"rank {rank}, step 21: ranks stand at different places of the data, so no "
            "update was made (rank 0: 640, rank 1: 640, rank 2: 640, rank 3: 672)"
        }


def test_L51_swapped_sums_are_found_before_any_update() -> None:
    """The two same-shape sums that no library notices: swapped on one rank, the step ends here."""
    faults: dict[int, str] = {}

    def work(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=64)
        mesh = fake_mesh(GRID, rank, world=world, ring=ring)
        ring.set_step(3)
        for name in ("a", "b") if rank else ("b", "a"):
            mesh.group("reduce").all_reduce(torch.ones(1), tag=f"gradient {name}").wait()
        try:
            agree(mesh, Word(finite=True, stop=False, has_next=True, guard=0, position=0,
                             fingerprint=ring.fingerprint, squares=0.0, loss=0.0,
                             tokens=0))  # fmt: skip
        except Fault as fault:
            faults[rank] = str(fault)

    run_threads(4, work)
    assert set(faults) == {0, 1, 2, 3}
    assert all("did not run the same collectives" in one for one in faults.values())
