"""Accelerators and clusters by name: `h100x512`, a TOML file, or what `probe` measured.

A cluster file either names its accelerator (`accelerator = "h100"`) or carries the table itself,
so a user's unknown device needs one file and no code.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from reparto.config.cluster import (
    Accelerator,
    Cluster,
    accelerator_from,
    cluster_from,
    cluster_of,
    read_toml,
)
from reparto.errors import UserError, nearest_word

_COUNTED = re.compile(r"(.+?)[x×:*](\d+)")


def accelerators() -> dict[str, Accelerator]:
    """Every accelerator of the package, by name."""
    folder = resources.files("reparto.planner") / "data" / "accelerators"
    found: dict[str, Accelerator] = {}
    for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
        with resources.as_file(item) as file:
            device = accelerator_from(read_toml(file, where=item.name), where=item.name)
        found[device.name] = device
    return found


def find_accelerator(text: str, *, where: str = "accelerator") -> Accelerator:
    """An accelerator by name or alias, in any case."""
    known = accelerators()
    wanted = _plain(text)
    for device in known.values():
        if wanted in (_plain(word) for word in (device.name, *device.aliases)):
            return device
    names = [word for device in known.values() for word in (device.name, *device.aliases)]
    raise UserError(
        f"no accelerator is called {text!r}",
        where=where,
        legal=", ".join(known) + ", or a .toml file",
        nearest=nearest_word(text.lower(), [name.lower() for name in names]) or "h100",
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def load_cluster(text: str, *, where: str = "--cluster") -> Cluster:
    """`<accelerator>x<count>`, a named cluster of the package, or a TOML file."""
    path = Path(text)
    if path.suffix == ".toml":
        return _from_file(path, where)
    folder = resources.files("reparto.planner") / "data" / "clusters"
    named = {item.name.removesuffix(".toml"): item for item in folder.iterdir()}
    if text in named:
        with resources.as_file(named[text]) as file:
            return _from_file(file, where)
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        raise UserError(
            f"{text!r} is no cluster",
            where=where,
            legal="<accelerator>x<count> (h100x512), a .toml file, " + ", ".join(sorted(named)),
            nearest=f"{nearest_word(text, [*named, 'h100', 'a100']) or 'h100'}x8",
        )
    count = int(counted[2])
    if not 1 <= count <= 1_000_000:
        raise UserError(f"{count} accelerators", where=where, legal="1 to 1000000")
    return cluster_of(find_accelerator(counted[1], where=where), count)


def _from_file(path: Path, where: str) -> Cluster:
    values = read_toml(path, where=where)
    device = values.get("accelerator")
    if isinstance(device, str):
        if device.endswith(".toml"):
            file = path.parent / device
            found = accelerator_from(read_toml(file, where=where), where=str(file))
        else:
            found = find_accelerator(device, where=f"{path}.accelerator")
        values["accelerator"] = found.model_dump()
    if "tiers" not in values and isinstance(values.get("accelerator"), dict):
        inner = values["accelerator"]
        assert isinstance(inner, dict)
        count = values.get("count")
        if isinstance(count, int) and count > 0:
            values["tiers"] = [
                tier.model_dump()
                for tier in cluster_of(accelerator_from(inner, where=str(path)), count).tiers
            ]
    values.setdefault("name", path.stem)
    return cluster_from(values, where=str(path))
