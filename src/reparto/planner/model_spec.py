"""The sizes of a decoder that a prediction needs, dense or with experts, from any description.

The run's own `ModelConfig` describes what we can train; a planner is asked about every model that
others publish. `ModelSpec` is the union of what matters for time and bytes: grouped heads, gated
or plain feed-forward, experts beside or instead of dense layers, low-rank (latent) attention,
sliding windows. What it leaves out (kinds of positions, norms, biases) moves predictions by less
than one percent.

Names of `config.json` differ by family, so each size has a list of known names; a missing one is an
error that names the file and the field, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path

from reparto.config.cluster import read_toml
from reparto.config.model import PRESETS, ModelConfig, preset
from reparto.errors import UserError, nearest_word


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes of one decoder. All widths are elements a token of the whole model."""

    name: str
    "for people"
    layers: int
    "decoder layers"
    hidden: int
    "width of the residual stream"
    heads: int
    "query heads of a layer"
    kv_heads: int
    "key and value heads of a layer"
    head_dim: int
    "elements of one query head"
    ffn: int
    "inner width of a dense feed-forward part"
    vocab: int
    "rows of the embedding table, in tokens"
    gated: bool = True
    "gate and up matrices (SwiGLU) rather than one"
    tied: bool = False
    "whether the output head is the embedding table"
    experts: int = 0
    "routed experts of a layer; 0: dense"
    active_experts: int = 0
    "routed experts that one token passes"
    expert_ffn: int = 0
    "inner width of one routed expert"
    shared_ffn: int = 0
    "inner width of the experts that every token passes"
    dense_layers: int = 0
    "layers without experts, in a model that has them"
    q_rank: int = 0
    "latent attention: width of the compressed query; 0: queries are not compressed"
    kv_rank: int = 0
    "latent attention: width of the compressed keys and values; 0: ordinary attention"
    rope_dim: int = 0
    "latent attention: the part of `head_dim` that carries positions, shared by all heads"
    v_head_dim: int = 0
    "elements of one value head; 0: as `head_dim`"
    window: int = 0
    "tokens a windowed layer looks back; 0: all"
    window_share: float = 1.0
    "share of the layers that are windowed"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
            _range(self.name, name, getattr(self, name), 1, 10_000_000)
        for name in ("ffn", "experts", "active_experts", "expert_ffn", "shared_ffn", "window"):
            _range(self.name, name, getattr(self, name), 0, 1 << 31)
        if self.ffn == 0 and self.dense_layers_count:
            raise UserError("is 0", where=f"{self.name}.ffn", legal="a width of 1 or more")
        if self.heads % self.kv_heads:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(
                f"{self.kv_heads} does not divide heads = {self.heads}",
                where=f"{self.name}.kv_heads",
                legal=", ".join(map(str, legal)),
                nearest=str(min(legal, key=lambda n: abs(n - self.kv_heads))),
            )
        if self.experts and not 0 < self.active_experts <= self.experts:
            raise UserError(
                f"{self.active_experts} active of {self.experts} experts",
                where=f"{self.name}.active_experts",
                legal=f"1 to {self.experts}",
            )
        if self.experts and not self.expert_ffn:
            raise UserError("is missing", where=f"{self.name}.expert_ffn", legal="1 or more")

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.v_head_dim or self.head_dim

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def dense_layers_count(self) -> int:
        """Layers with a dense feed-forward part."""
        return self.layers - self.moe_layers

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's attention matrices."""
        h, a = self.hidden, self.heads
        out = a * self.value_dim * h
        if not self.kv_rank:
            keys = self.kv_heads * (self.head_dim + self.value_dim)
            return h * (a * self.head_dim + keys) + out
        plain = self.head_dim - self.rope_dim
        query = (h + a * self.head_dim) * self.q_rank if self.q_rank else h * a * self.head_dim
        keys = h * (self.kv_rank + self.rope_dim) + self.kv_rank * a * (plain + self.value_dim)
        return query + keys + out

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def expert_parameters(self) -> int:
        """Elements of one routed expert."""
        return self.ffn_matrices * self.hidden * self.expert_ffn

    def layer_parameters(self, moe: bool) -> int:
        """Elements of one layer, experts included."""
        shared = self.attention_parameters + 2 * self.hidden
        if not moe:
            return shared + self.ffn_matrices * self.hidden * self.ffn
        return (
            shared
            + self.experts * (self.expert_parameters + self.hidden)
            + self.ffn_matrices * self.hidden * self.shared_ffn
        )

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding table; the head has as many again unless tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of the whole model, tied ones once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return (
            ends
            + self.dense_layers_count * self.layer_parameters(False)
            + self.moe_layers * self.layer_parameters(True)
        )

    @property
    def active_parameters(self) -> int:
        """Elements that one token meets, the embedding table left out (it is looked up)."""
        idle = (self.experts - self.active_experts) * self.expert_parameters * self.moe_layers
        looked_up = 0 if self.tied else self.embedding_parameters
        return self.parameters - idle - looked_up

    def attention_span(self, sequence_length: int) -> float:
        """Mean tokens a query looks at, causal: half the sequence, or less behind a window."""
        whole = sequence_length / 2
        if not self.window or self.window >= sequence_length:
            return whole
        seen = self.window - self.window * self.window / (2 * sequence_length)
        return self.window_share * seen + (1 - self.window_share) * whole

    def model_flops(self, tokens: float, sequence_length: int, *, causal: bool = True) -> float:
        """Operations of forward and backward without recompute: 6 N tokens + attention.

        Source: Narayanan 2021, eq. 3, in the general form; attention halved when causal.
        """
        span = self.attention_span(sequence_length) * (1 if causal else 2)
        widths = self.heads * (self.head_dim + self.value_dim)
        return tokens * (6 * self.active_parameters + 6 * self.layers * span * widths)

    @classmethod
    def of(cls, config: ModelConfig, *, name: str = "model") -> ModelSpec:
        """From the model that a run trains."""
        return cls(
            name=name,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
            gated=True,
            tied=config.tie_word_embeddings,
            experts=config.num_experts,
            active_experts=config.num_experts_per_tok if config.num_experts else 0,
            expert_ffn=config.expert_size if config.num_experts else 0,
            shared_ffn=config.n_shared_experts * config.expert_size if config.num_experts else 0,
            dense_layers=config.num_hidden_layers - len(config.expert_layers)
            if config.num_experts
            else 0,
        )


def _range(owner: str, name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(
            f"{value!r} is no plausible size",
            where=f"{owner}.{name}",
            legal=f"a whole number from {low} to {high}",
        )


# --- from files ----------------------------------------------------------------------------------


def model_names() -> list[str]:
    """Models of the package and presets of our own."""
    folder = resources.files("reparto.planner") / "data" / "models"
    found = [item.name.removesuffix(".toml") for item in folder.iterdir()]
    return sorted(found) + list(PRESETS)


def load_model(text: str, *, where: str = "--model") -> ModelSpec:
    """A named model, one of our presets, a TOML file or a Hugging Face `config.json`."""
    path = Path(text)
    if path.suffix == ".json":
        return spec_from_hf(_read_json(path, where), name=path.parent.name or "model", where=text)
    if path.suffix == ".toml":
        return spec_from(read_toml(path, where=where), name=path.stem, where=text)
    if text in PRESETS:
        return ModelSpec.of(preset(text), name=text)
    names = model_names()
    key = text.lower().replace("_", "-")
    if key not in names:
        raise UserError(
            f"no model is called {text!r}",
            where=where,
            legal=", ".join(names) + ", a .toml file, a config.json",
            nearest=nearest_word(key, names) or "llama-3-8b",
        )
    folder = resources.files("reparto.planner") / "data" / "models"
    with resources.as_file(folder / f"{key}.toml") as file:
        return spec_from(read_toml(file, where=where), name=key, where=f"model {key}")


def spec_from(values: Mapping[str, object], *, name: str, where: str) -> ModelSpec:
    """From a table whose keys are the fields of `ModelSpec`; kv_heads, head_dim default."""
    known = {field.name for field in fields(ModelSpec)}
    for key in values:
        if key not in known:
            raise UserError(
                f"unknown key `{key}`",
                where=where,
                legal=", ".join(sorted(known)),
                nearest=nearest_word(key, known),
            )
    found = {"name": name, **values}
    heads, hidden = found.get("heads"), found.get("hidden")
    found.setdefault("kv_heads", heads)
    if "head_dim" not in found and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        found["head_dim"] = hidden // heads
    found.setdefault("ffn", 0)
    for key in ("layers", "hidden", "heads", "vocab"):
        if key not in found:
            raise UserError("is missing", where=f"{where}.{key}", legal="a whole number")
    for key, value in found.items():
        wanted = str(ModelSpec.__dataclass_fields__[key].type)
        kinds: dict[str, tuple[type, ...]] = {
            "int": (int,),
            "float": (int, float),
            "bool": (bool,),
            "str": (str,),
        }
        if not isinstance(value, kinds[wanted]) or (wanted != "bool" and isinstance(value, bool)):
            raise UserError(f"{value!r} is not allowed", where=f"{where}.{key}", legal=wanted)
    return ModelSpec(**found)  # type: ignore[arg-type]  # every value was just checked


def _read_json(path: Path, where: str) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=where) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}", where=where) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object", where=where, legal="a config.json")
    return found


_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "experts_per_token", "moe_topk"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_UNGATED = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "gpt_bigcode", "phi"}
    | {"starcoder2", "nemotron"}
)


def spec_from_hf(config: Mapping[str, object], *, name: str, where: str) -> ModelSpec:
    """From a Hugging Face `config.json`; a missing size raises with the names it may have."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    found: dict[str, int] = {}
    for ours, theirs in _NAMES.items():
        for key in theirs:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                found[ours] = value
                break
            if value is not None:
                raise UserError(f"{value!r} is no size", where=f"{where}.{key}", legal="a number")
    kind = str(config.get("model_type", ""))
    for key in ("layers", "hidden", "heads", "vocab"):
        if key not in found:
            raise UserError("is missing", where=f"{where}", legal=" or ".join(_NAMES[key]))
    if "ffn" not in found:
        if kind not in _UNGATED:
            raise UserError("is missing", where=where, legal=" or ".join(_NAMES["ffn"]))
        found["ffn"] = 4 * found["hidden"]
    found.setdefault("kv_heads", found["heads"])
    if config.get("multi_query") is True:
        found["kv_heads"] = 1
    experts = found.get("experts", 0) > 1
    if experts:
        found.setdefault("expert_ffn", found["ffn"])
        shared = config.get("n_shared_experts")
        if isinstance(shared, int) and "shared_ffn" not in found:
            found["shared_ffn"] = shared * found["expert_ffn"]
        only = config.get("mlp_only_layers")
        if isinstance(only, list):
            found["dense_layers"] = len(only)
    else:
        for key in ("experts", "active_experts", "expert_ffn", "shared_ffn", "dense_layers"):
            found.pop(key, None)
    if found.get("kv_rank"):
        plain = config.get("qk_nope_head_dim")
        if not isinstance(plain, int):
            raise UserError("is missing", where=where, legal="qk_nope_head_dim")
        found["head_dim"] = plain + found.get("rope_dim", 0)
        found["kv_heads"] = found["heads"]
    else:
        for key in ("q_rank", "rope_dim", "v_head_dim"):
            found.pop(key, None)
    if found["heads"] > 0:
        found.setdefault("head_dim", found["hidden"] // found["heads"])
    window = config.get("sliding_window")
    if isinstance(window, int) and config.get("use_sliding_window", True):
        kinds = config.get("layer_types")
        share = 1.0
        if isinstance(kinds, list) and kinds:
            share = sum(kind == "sliding_attention" for kind in kinds) / len(kinds)
        windowed = {"window": window, "window_share": share}
    else:
        windowed = {}
    spec = ModelSpec(
        name=name,
        gated=kind not in _UNGATED,
        tied=bool(config.get("tie_word_embeddings", kind in _UNGATED)),
        **found,
    )
    return replace(spec, **windowed)  # type: ignore[arg-type]  # an int and a float
