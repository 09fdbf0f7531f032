"""Where a result comes from: digests of what went in, versions, hardware and seeds.

Enough to see whether two runs can be compared and what to restore to repeat one, and nothing that
tells about the person or the network: no host, user or path names, and of the environment only
the variables on a list, with values that look like secrets masked. Rejected: a dump of the
environment minus known secrets, because the unknown secret is the one that leaks.

Nothing here imports torch: its version is read from the package's metadata.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

#: packages whose versions can change a number
PACKAGES = ("reparto", "torch", "numpy", "safetensors", "tokenizers", "pydantic")

#: variables that can change a number or a speed, and nothing else
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "KMP_AFFINITY",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
    "WORLD_SIZE",
)

_SOURCE_SUFFIXES = frozenset({".py", ".toml", ".typed"})

_SECRET = re.compile(
    r"""
      ://[^/\s]*:[^/\s]*@                            # a password in an address
    | \b(?:hf|gh[a-z]|github_pat|glpat|xox[a-z])[_-] # access tokens by their prefix
    | \b(?:sk|pk|rk)[-_] | \bAKIA | \beyJ            # API keys, cloud keys, signed tokens
    | -----BEGIN                                     # a private key
    | (?=[A-Za-z+/=_-]*[0-9])[A-Za-z0-9+/=_-]{24,}   # or simply long, dense and with digits
    """,
    re.VERBOSE,
)


def collect(
    *,
    digests: Mapping[str, str | None],
    seeds: Mapping[str, int],
    environment: Mapping[str, str],
    accelerators: Sequence[str] = (),
    time_s: float,
) -> dict[str, object]:
    """The content of `provenance.json`: JSON values only.

    digests       SHA-256 in hex of `data`, `tokenizer`, `config`, `initial_weights`, ...; None for
                  what a run does not have. The digest of the code is added here.
    seeds         every seed of the run, by what it seeds
    environment   normally `os.environ`; only variables of `VARIABLES` are taken
    accelerators  device names as the driver gives them
    time_s        seconds since 1970
    """
    for name, digest in digests.items():
        if digest is not None and not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"digest of {name} is {digest!r}, not 64 hex digits of SHA-256")
    return {
        "format": 1,
        "time_s": time_s,
        "digests": {**digests, "code": code_digest(Path(__file__).parents[1])},
        "versions": versions(PACKAGES),
        "hardware": {**hardware(), "accelerators": list(accelerators)},
        "environment": allowed_environment(environment),
        "seeds": dict(seeds),
    }


def file_digest(path: Path) -> str:
    """SHA-256 in hex of a file's bytes, read a mebibyte at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest(folder: Path) -> str:
    """SHA-256 in hex over the source files under `folder`: relative name, size and bytes of each,
    in the order of their names; compiled files and caches are left out."""
    whole = hashlib.sha256()
    files = [
        path
        for path in folder.rglob("*")
        if path.suffix in _SOURCE_SUFFIXES and path.is_file() and "__pycache__" not in path.parts
    ]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in files):
        content = path.read_bytes()
        whole.update(f"{name}\n{len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Python's version and that of each package; None for one that is not installed."""
    found: dict[str, str | None] = {
        "python": f"{platform.python_implementation()} {platform.python_version()}"
    }
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware() -> dict[str, str | int | None]:
    """The machine as far as it bears on speed and rounding; no names of it."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(_text_of(Path("/proc/cpuinfo"))) or platform.processor() or None,
        "cores_usable": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def cpu_model(cpuinfo: str) -> str:
    """The first `model name` of a /proc/cpuinfo text, or an empty string."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else ""


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The listed variables that are set, each value masked if it looks like a secret."""
    return {name: mask(environment[name]) for name in VARIABLES if name in environment}


def mask(value: str) -> str:
    """`value`, or only its length if it looks like a secret."""
    return f"<masked, {len(value)} characters>" if _SECRET.search(value) else value


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
