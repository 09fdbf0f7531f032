"""What must be equal on every rank before the first step, compared; differences are named.

A digest crosses first. Only where digests differ do the details follow, so the usual case costs two
collectives of 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from reparto.api.probe import as_bytes
from reparto.comm.mesh import Mesh

Facts = Mapping[str, str]

#: differences that are listed; a module made of other random numbers differs in every tensor
_MOST_LINES = 20


def tensor_facts(model: nn.Module) -> dict[str, str]:
    """Name -> kind, shape, type and digest of every parameter and buffer."""
    found = {}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, one in named:
            digest = "" if one.is_meta else _digest(one)
            trained = ", trained" if one.requires_grad else ""
            found[f"{kind} {name}"] = f"{list(one.shape)} {one.dtype}{trained} {digest}"
    return found


def buffer_facts(model: nn.Module) -> dict[str, str]:
    """Name -> digest of every buffer."""
    return {name: _digest(one) for name, one in model.named_buffers()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()[:16]


def compare(mesh: Mesh, facts: Facts, *, tag: str, differ: Callable[[str], Exception]) -> None:
    """Raise `differ(text)` on every rank if facts are not equal on all; text lists who has what."""
    text = json.dumps(dict(facts), sort_keys=True)
    digests = mesh.world.exchange(hashlib.sha256(text.encode()).digest(), tag=tag)
    if len(set(digests)) == 1:
        return
    rows = [json.loads(row) for row in mesh.world.exchange(text.encode(), tag=f"{tag} details")]
    names = dict.fromkeys(name for row in rows for name in row)
    lines = []
    for name in names:
        values = [row.get(name, "nothing") for row in rows]
        if len(set(values)) > 1:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            lines.append(f"    {name}: {told}")
    raise differ(
        "\n".join([*lines[:20], *([f"    and {len(lines) - 20} more"] * (len(lines) > 20))])
    )
