"""Runs in a process of its own: every verb on every hostile folder, under an audit hook.

Called as `python checkpoint_hostile_run.py FOLDER`; FOLDER holds one sub-folder a case. Prints one
JSON object: case -> what each verb ended with, and what the interpreter did meanwhile that no
checkpoint may make it do.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from reparto.checkpoint.catalog import check, list_checkpoints
from reparto.checkpoint.export import HuggingFaceFolder, export, import_huggingface
from reparto.checkpoint.load import find_latest, open_checkpoint
from reparto.checkpoint.rewrite import by_rows, convert
from reparto.errors import RepartoError

KEY = bytes(range(32))
FORBIDDEN = ("exec", "compile", "import", "pickle.find_class", "socket.connect", "socket.bind",
             "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
             "ctypes.dlopen", "marshal.loads", "os.symlink", "os.link")  # fmt: skip


def verbs(case: Path, out: Path) -> dict[str, Callable[[], object]]:
    root, step = case / "checkpoints", case / "checkpoints" / "step-8"

    def load() -> None:
        checkpoint = find_latest(root, key=KEY).checkpoint
        for name in checkpoint.manifest.tensors:
            checkpoint.read(name)

    def unproven() -> None:
        """As on a machine without the run's key."""
        checkpoint = open_checkpoint(step, None)
        for name in checkpoint.manifest.tensors:
            checkpoint.read(name)

    def take_in() -> None:
        source = HuggingFaceFolder(step)
        import_huggingface(
            source, out / "imported", run="r", key=KEY, shapes=source.shapes, tied={}
        )

    return {
        "load": load,
        "unproven": unproven,
        "list": lambda: list_checkpoints(root, KEY),
        "check": lambda: check(root, KEY),
        "check one": lambda: check(step, None),
        "convert": lambda: convert(
            open_checkpoint(step, KEY), out / "converted", key=KEY, cut=by_rows(2), plan=""
        ),
        "export": lambda: export(open_checkpoint(step, KEY), out / "exported", config={}),
        "import": take_in,
    }


def main(folder: Path) -> None:
    watching: list[str] = []
    seen: list[str] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        if not watching:
            return
        if event == "open":
            path = args[0]
            if isinstance(path, int):
                return
            real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
            if not any(real.startswith(place) for place in watching):
                seen.append(f"open {real}")
        elif event in FORBIDDEN:
            seen.append(f"{event} {args!r:.100}")

    sys.addaudithook(hook)
    result: dict[str, dict[str, object]] = {}
    for case in sorted(folder.iterdir()):  # "00-good" warms up lazy imports, unwatched
        with tempfile.TemporaryDirectory() as out:
            ended: dict[str, object] = {}
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if case.name != "00-good":
                watching += [str(case.resolve()) + "/", os.path.realpath(out)]
            for name, verb in verbs(case, Path(out)).items():
                try:
                    verb()
                    ended[name] = "ok"
                except RepartoError as error:
                    ended[name] = f"{error.exit_code}: {error}"
                except BaseException as error:
                    ended[name] = f"UNDEFINED {type(error).__name__}: {error}"
            watching.clear()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            result[case.name] = {"ended": ended, "seen": list(seen), "grown_kib": grown}
            seen.clear()
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
