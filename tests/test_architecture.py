"""The house's law, read from the source: arrows between rooms, forbidden calls, frozen surface.

Everything is found by walking syntax trees, imports inside functions included, so a rule cannot be
got round by importing late. Each checker is itself tried on sources that break it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import typer

import reparto
from reparto.config.plan import DEFAULT_CHUNKS, Plan, ScheduleName
from reparto.errors import CheckFailed, Fault, PeerLost, RepartoError, UserError
from reparto.schedule.rules import NAMES, default_chunks

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "reparto"

# --- the table of rooms --------------------------------------------------------------------------

#: rooms that stand on each other: a room imports itself and lower levels
LEVELS = {
    "errors": 0,
    "units": 0,
    "trace": 0,
    "config": 0,
    "partition": 1,
    "schedule": 1,
    "comm": 2,
    "model": 3,
    "data": 3,
    "parallel": 4,
    "checkpoint": 5,
    "train": 6,
    "recover": 7,
}

#: neighbours on one level that may be imported all the same, and why
SAME_LEVEL = {
    ("config", "errors"),  # a bad value is told in the house's words
    ("config", "units"),
    ("partition", "schedule"),  # whether a plan is legal includes its schedule's chunks
}

L0 = {room for room, level in LEVELS.items() if level == 0}
L1 = {room for room, level in LEVELS.items() if level <= 1}

#: rooms beside the levels: what each may import besides itself
SIDE = {
    "planner": L1,
    "evidence": L0,
    "diagnose": L0 | {"planner", "evidence"},
    "report": L0 | {"evidence", "diagnose"},
    "bench": {*LEVELS, "planner", "evidence", "diagnose", "report"},
}

#: the top: they wire rooms together, and nothing imports them (`api` is the same for Python users)
TOP = {"cli", "api"}

#: narrower than the levels: what a room says of itself in its first line
NEVER = {
    "model": {
        "reparto.comm",
        "reparto.config.plan",
        "reparto.config.run",
        "reparto.partition.grid",
    },
    "data": {"reparto.comm", "reparto.model", "reparto.partition.grid"},
    "checkpoint": {"reparto.comm", "reparto.parallel", "reparto.model", "reparto.data"},
}

STRATEGIES = {"data", "zero", "tensor", "expert", "context", "pipeline"}
#: what a strategy may import of its own room: files that are no strategy
SHARED = {"gradients", "flat"}
#: second files of one strategy, split off for length: nobody else's
PARTS = {"tensor": {"vocab_loss"}}

#: rooms and files that work without torch
TORCH_FREE = ("errors", "units", "trace", "config", "partition", "schedule", "planner", "evidence",
              "recover.detect", "recover.decide", "recover.worker", "cli.main")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module."""

    importer: str
    target: str
    line: int
    late: bool
    "inside a function, or for type checkers only"

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@cache
def modules() -> Mapping[str, Path]:
    """Module name -> file, of the whole package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def import_nodes(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """(import statement, whether it waits for a call or is for type checkers only)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, late
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            waits = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from import_nodes(child, late or waits or typing_only)


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a module, wherever it stands; `from a import b` is a.b where that is one."""
    for node, late in import_nodes(tree):
        targets: set[str] = set()
        if isinstance(node, ast.Import):
            targets = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute here"
            base = node.module or ""
            full = {f"{base}.{alias.name}" for alias in node.names}
            targets = {name if name in modules() else base for name in full}
        for target in sorted(targets):
            yield Import(importer=module, target=target, line=node.lineno, late=late)


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(one for module in modules() for one in imports_of(module, tree_of(module)))


def room(module: str) -> str:
    """`reparto.comm.mesh` -> `comm`; the package itself and its main belong to the top."""
    parts = module.split(".")
    return "cli" if parts[1:] in ([], ["__main__"]) else parts[1]


def inner_imports() -> Iterator[Import]:
    """Imports within the package, but for the lazy ones of `reparto/__init__.py`."""
    for one in all_imports():
        if one.target.split(".")[0] == "reparto" and one.importer != "reparto":
            yield one


def told(violations: Iterable[object]) -> list[str]:
    return [str(one) for one in violations]


def may_import(importer: str, target: str) -> bool:
    """Whether the room `importer` may import the room `target`."""
    if importer == target:
        return True
    if importer in TOP:
        return target not in TOP
    if importer in SIDE:
        return target in SIDE[importer]
    if target not in LEVELS:
        return False  # no numbered level imports a side room or the top
    return LEVELS[target] < LEVELS[importer] or (importer, target) in SAME_LEVEL


# --- arrows --------------------------------------------------------------------------------------


def test_every_file_stands_in_a_room_of_the_table() -> None:
    known = {*LEVELS, *SIDE, *TOP}
    assert {room(module) for module in modules()} <= known


def test_arrows_point_down_only() -> None:
    assert told(
        one for one in inner_imports() if not may_import(room(one.importer), room(one.target))
    ) == []  # fmt: skip


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("comm", "partition", True), ("partition", "comm", False), ("train", "recover", False),
        ("train", "evidence", False), ("recover", "planner", False), ("planner", "partition", True),
        ("planner", "comm", False), ("evidence", "config", True), ("evidence", "partition", False),
        ("partition", "schedule", True), ("schedule", "partition", False), ("model", "data", False),
        ("trace", "errors", False), ("report", "planner", False), ("bench", "train", True),
        ("bench", "cli", False), ("cli", "bench", True), ("api", "cli", False),
        ("checkpoint", "train", False), ("parallel", "cli", False),
    ],
)  # fmt: skip
def test_the_table_itself(importer: str, target: str, allowed: bool) -> None:
    assert may_import(importer, target) == allowed


def test_rooms_keep_the_narrower_promises_they_make() -> None:
    assert told(
        one
        for one in inner_imports()
        for never in NEVER.get(room(one.importer), ())
        if one.target == never or one.target.startswith(f"{never}.")
    ) == []  # fmt: skip
    pure = {"reparto.recover.detect", "reparto.recover.decide"}
    assert told(
        one
        for one in inner_imports()
        if one.importer in pure and room(one.target) not in L0
    ) == []  # fmt: skip


def strategy_violation(importer: str, target: str) -> bool:
    """Whether a file of `parallel/` imports one that it may not."""
    own, other = importer.rpartition(".")[2], target.rpartition(".")[2]
    if target == "reparto.parallel" or own == "compose" or own == other:
        return False
    if own in STRATEGIES:
        return other not in SHARED | PARTS.get(own, set())
    return other in STRATEGIES or other == "compose"


def test_strategies_never_import_each_other_and_compose_sees_them_all() -> None:
    inside = [
        one for one in inner_imports() if room(one.importer) == room(one.target) == "parallel"
    ]
    assert told(one for one in inside if strategy_violation(one.importer, one.target)) == []
    assert strategy_violation("reparto.parallel.zero", "reparto.parallel.data")
    assert strategy_violation("reparto.parallel.flat", "reparto.parallel.zero")
    assert strategy_violation("reparto.parallel.zero", "reparto.parallel.vocab_loss")
    assert not strategy_violation("reparto.parallel.zero", "reparto.parallel.gradients")
    seen = {one.target.rpartition(".")[2] for one in inside if one.importer.endswith(".compose")}
    there = {module.rpartition(".")[2] for module in modules() if room(module) == "parallel"}
    assert {"data", "zero"} <= seen & there


def test_only_the_package_itself_imports_lazily_by_name() -> None:
    """A module named by a string escapes every check here, so it may be done where it is seen."""
    lazy = {
        module
        for module in modules()
        for node in ast.walk(tree_of(module))
        if getattr(node, "attr", getattr(node, "id", "")) in ("import_module", "__import__")
    }
    # data/huggingface.py: two optional packages, imported when a run asks for them
    assert lazy <= {"reparto", "reparto.data.huggingface"}


# --- torch ---------------------------------------------------------------------------------------

#: the one file besides comm/ that may: TorchElastic starts the workers, over a store that is a file
ELASTIC = "reparto.recover.supervise"


def test_torch_distributed_is_called_in_comm_alone() -> None:
    callers = {
        one.importer
        for one in all_imports()
        if one.target.startswith("torch.distributed")
        and room(one.importer) not in ("comm", "bench")
    }
    assert callers <= {ELASTIC}
    attributes = [
        f"{module}:{node.lineno}"
        for module in modules()
        if room(module) not in ("comm", "bench")
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and ast.unparse(node) == "torch.distributed"
    ]
    assert attributes == []


def test_the_supervisor_uses_the_elastic_agent_and_a_file_store_and_nothing_else() -> None:
    tree = tree_of(ELASTIC)
    targets = {one.target for one in imports_of(ELASTIC, tree) if one.target.startswith("torch")}
    assert all(
        target == "torch.distributed" or target.startswith("torch.distributed.elastic.")
        for target in targets
    )
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist"
    }
    assert used <= {"FileStore", "PrefixStore"}


def torch_free(module: str) -> bool:
    inner = module.removeprefix("reparto.")
    return any(inner == one or inner.startswith(f"{one}.") for one in TORCH_FREE)


def test_rooms_without_torch_name_it_nowhere() -> None:
    heavy = ("torch", "safetensors.torch")
    assert told(
        one
        for one in all_imports()
        if torch_free(one.importer)
        and any(one.target == name or one.target.startswith(f"{name}.") for name in heavy)
    ) == []  # fmt: skip


def test_rooms_without_torch_reach_it_through_nobody() -> None:
    """Follows imports that happen on import; those inside functions are the caller's business."""
    direct: dict[str, set[str]] = {}
    for one in all_imports():
        if not one.late:
            direct.setdefault(one.importer, set()).add(one.target)
    for module in modules():
        if not torch_free(module):
            continue
        reached, waiting = {module}, [module]
        while waiting:
            fresh = direct.get(waiting.pop(), set()) - reached
            reached |= fresh
            waiting += [one for one in fresh if one in modules()]
        assert not any(one.split(".")[0] == "torch" for one in reached), module


def loaded_after(imports: Iterable[str]) -> set[str]:
    """Top-level packages in a fresh interpreter after these imports."""
    program = "\n".join([*(f"import {name}" for name in imports), "import sys",
                         "print(*{name.split('.')[0] for name in sys.modules})"])  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


def test_importing_the_rooms_without_torch_loads_no_torch() -> None:
    free = [module for module in modules() if torch_free(module)]
    assert len(free) > 40
    assert "torch" not in loaded_after(free)


def test_the_command_line_starts_without_torch_and_pydantic() -> None:
    loaded = loaded_after(["reparto.cli.main"])
    assert not loaded & {"torch", "pydantic", "numpy", "rich.progress"}
    assert not loaded_after(["reparto"]) & {"torch", "pydantic", "numpy", "typer"}


def test_what_is_imported_on_import_is_a_declared_dependency() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", one)[0].replace("-", "_") for one in declared} | {"reparto"}
    assert told(
        one
        for one in all_imports()
        if not one.late
        and room(one.importer) != "bench"
        and one.target.split(".")[0] not in {*names, *sys.stdlib_module_names}
    ) == []  # fmt: skip


# --- what is forbidden ---------------------------------------------------------------------------

#: modules that run what they read, or reach for other machines
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve",
                     "joblib", "jsonpickle", "yaml", "torch.distributed.rpc"}  # fmt: skip
#: dotted calls, by their last two parts
FORBIDDEN_CALLS = {"torch.load", "torch.save", "torch.hub", "yaml.load", "os.system", "os.popen",
                   "subprocess.getoutput", "subprocess.getstatusoutput", "pickle.loads",
                   "shutil.unpack_archive"}  # fmt: skip
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
#: switches that must never be on
FORBIDDEN_SWITCHES = {"shell", "allow_pickle", "trust_remote_code"}


def forbidden_in(tree: ast.Module) -> Iterator[str]:
    """`line: what` of everything forbidden; texts that only document are let through."""
    documents = {
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    for node in ast.walk(tree):
        for what in _forbidden(node, documents):
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def _forbidden(node: ast.AST, documents: set[ast.expr]) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        base = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = [*base, *(".".join([*base, alias.name]) for alias in node.names)]
        for name in names:
            if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_MODULES:
                yield f"import of {name}"
            if re.search(r"\w_object", name):
                yield name
            if ".".join(name.split(".")[-2:]) in FORBIDDEN_CALLS:
                yield name
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else None
        owner = node.value.id if isinstance(node.value, ast.Name) else owner
        if f"{owner}.{node.attr}" in FORBIDDEN_CALLS:
            yield f"{owner}.{node.attr}"
        if node.attr in ("rpc", "extractall"):
            yield node.attr
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if re.search(r"\w_object", name):
        yield name  # all_gather_object and its kin pickle what they carry
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_BUILTINS:
            yield f"{node.func.id}()"
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in FORBIDDEN_SWITCHES and not off:
                yield f"{keyword.arg}={ast.unparse(keyword.value)}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents:
        if "0.0.0.0" in node.value:
            yield "an address that everybody reaches"
        if "trust_remote_code" in node.value:
            yield "trust_remote_code"
    if isinstance(node, ast.Global):
        yield f"global {', '.join(node.names)}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_nothing_forbidden(module: str) -> None:
    assert list(forbidden_in(tree_of(module))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle as cp",
        "import marshal, shelve",
        "import torch\ntorch.load('x')",
        "import torch as t\nfrom torch import save",
        "loader = torch.load",
        "import torch.distributed.rpc",
        "from torch.distributed import rpc",
        "dist.rpc.init_rpc('x')",
        "dist.all_gather_object(out, one)",
        "from torch.distributed import broadcast_object_list",
        "eval('1')",
        "exec(code)",
        "compile(text, 'f', 'exec')",
        "import yaml",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "os.system('ls')",
        "tar.extractall()",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "host = '0.0.0.0'",
        "def f(host: str = 'tcp://0.0.0.0:1'): ...",
        "def f():\n    global state\n    state = 1",
    ],
)
def test_the_checker_finds_what_is_forbidden(source: str) -> None:
    assert list(forbidden_in(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        '"""Never torch.load; nothing listens on 0.0.0.0; no pickle."""',
        'class A:\n    host: str = "127.0.0.1"\n    "never 0.0.0.0"',
        "model.eval()",
        "torch.compile(block)",
        "subprocess.run(['ls'], shell=False)",
        "re.compile('x')",
        "def _object(line): ...\n_object('x')",
        "np.load(path, allow_pickle=False)",
        "json.load(file)",
        "tensors.save(path)",
    ],
)
def test_the_checker_lets_the_rest_through(source: str) -> None:
    assert list(forbidden_in(ast.parse(source))) == []


# --- one fact, one place -------------------------------------------------------------------------


def test_the_plan_and_the_schedules_agree_on_names_and_chunks() -> None:
    """config/ may not import schedule/, so what both say is held together here."""
    assert set(get_args(ScheduleName)) == set(NAMES)
    for name in NAMES:
        assert DEFAULT_CHUNKS.get(name, 1) == default_chunks(name)
        assert Plan.parse(f"pipeline=2,schedule={name}").num_chunks == default_chunks(name)


def test_exit_statuses_are_frozen() -> None:
    assert {kind: kind.exit_code for kind in (UserError, CheckFailed, Fault, PeerLost)} == {
        UserError: 2, CheckFailed: 3, Fault: 4, PeerLost: 4,
    }  # fmt: skip
    assert all(issubclass(kind, RepartoError) for kind in (UserError, CheckFailed, Fault))


# --- the frozen surface --------------------------------------------------------------------------

#: names that `import reparto` promises
PUBLIC = {"CheckFailed", "Fault", "ModelConfig", "Parallel", "Plan", "Run", "Session",
          "Synchronize", "Trainer", "UserError", "launch"}  # fmt: skip

#: verb -> its arguments, then its options; a verb without any is not built yet
VERBS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (
        ("run_file",),
        ("--accept-change", "--json", "--node-rank", "--nodes", "--plan", "--rendezvous",
         "--resume", "--run-dir", "--set", "--steps", "--stop-after"),
    ),
    "verify": (
        ("run_file",),
        ("--against", "--json", "--plan", "--precision", "--set", "--steps", "--transport"),
    ),
    "plan": (
        (),
        ("--batch-size", "--cluster", "--forbid", "--json", "--model", "--objective", "--precision",
         "--rank", "--sequence-length", "--set", "--show", "--svg", "--tokens", "--validate",
         "--what-if"),
    ),
    "schedule draw": (("name",), ("--chunks", "--json", "--microbatches", "--stages", "--svg")),
    "checkpoint list": (("path",), ("--json",)),
    "checkpoint check": (("path",), ("--json",)),
    "checkpoint convert": (("path", "to"), ("--json", "--plan", "--step")),
    "checkpoint export": (("path", "to"), ("--dtype", "--json", "--step")),
    "checkpoint import": (("source", "run_dir"), ("--json", "--set")),
    "generate": (
        ("run", "text"),
        ("--json", "--seed", "--step", "--temperature", "--tokens", "--top-k", "--top-p"),
    ),
    "probe": ((), ()),
    "bench": (("name",), ("--json", "--model", "--rounds")),
    "drill": ((), ()),
    "diagnose": ((), ()),
    "compare": ((), ()),
    "ledger": ((), ()),
    "approve": ((), ()),
    "claim": ((), ()),
    "report": ((), ()),
}  # fmt: skip


def commands(group: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(path, command) of every verb; typer may bring its own click, so types are not asked."""
    inner: Mapping[str, object] = getattr(group, "commands", {})
    if not inner:
        yield path, group
    for name, one in inner.items():
        yield from commands(one, f"{path} {name}".strip())


def parameters(command: object, kind: str) -> list[str]:
    """Names of a command's arguments, or option words of its options."""
    found = []
    for one in getattr(command, "params", ()):
        if one.param_type_name == kind:
            found += [one.name] if kind == "argument" else one.opts
    return found


def test_the_verbs_and_their_options_are_frozen() -> None:
    from reparto.cli.main import app

    found = {
        name: (tuple(parameters(one, "argument")), tuple(sorted(parameters(one, "option"))))
        for name, one in commands(typer.main.get_command(app))
    }
    assert found == dict(VERBS)


def test_the_names_of_the_package_are_frozen_and_there() -> None:
    assert set(reparto.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(reparto, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        reparto.nothing  # noqa: B018
