"""The configuration of a model, read from its own files: a GGUF file or a Hugging Face folder.

The engine uses the shapes, the gateway the context length and end tokens, the worker the KV
namespace. It never imports torch and never contacts a model hub. If the engine cannot compute a
model exactly, a ConfigError refuses it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE
from moonserve.core.units import Tokens
from moonserve.live.model.errors import BadModel
from moonserve.live.model.gguf import Gguf, open_gguf

T = TypeVar("T")

Family = Literal["llama", "qwen2"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2")

_WHOLE_HASH_BYTES = 1 << 30
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 16
_MAX_COUNT = 1 << 24
_MAX_NUMBER = 1e12
"""Far beyond any model: larger numbers come from a damaged file."""


class RopeScaling(msgspec.Struct, frozen=True):
    """Llama 3's frequency scaling, the only kind that the engine computes."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: Tokens


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a llama-like decoder. Counts are positive; heads is a multiple of kv_heads."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    vocab_size: int
    max_len: Tokens
    tie_embeddings: bool
    qkv_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def check(self, path: Path) -> ModelConfig:
        """Return self. Raises ConfigError if the numbers do not fit together."""
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"):
            if not 0 < getattr(self, name) <= _MAX_COUNT:
                raise BadModel(
                    f"{path}: {name} is {getattr(self, name)}, but must be from 1 to {_MAX_COUNT}"
                )
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise BadModel(
                f"{path}: {self.heads} heads over {self.kv_heads} KV heads of {self.head_dim}"
                " cannot be grouped; is the file damaged?"
            )
        numbers = [self.vocab_size, self.max_len, self.rope_theta, self.norm_eps]
        if self.rope_scaling is not None:
            numbers += msgspec.structs.astuple(self.rope_scaling)
        if not all(0 < number < _MAX_NUMBER for number in numbers):  # nan is not, either
            raise BadModel(
                f"{path}: the vocabulary's size, the context length, the rope base and scaling, and"
                " the norm's epsilon must be larger than 0, and no number that a file cannot mean"
            )
        return self


def load_config(path: Path) -> ModelConfig:
    """Read the configuration of a .gguf file, or of a folder with config.json and no weights."""
    if path.is_dir():
        return _from_folder(path)
    return config_of_gguf(open_gguf(path))


def config_of_gguf(file: Gguf) -> ModelConfig:
    """Return the configuration in an open GGUF file's metadata."""
    meta = file.metadata
    path = file.path
    arch = meta.get("general.architecture")
    if arch not in FAMILIES:
        raise BadModel(f"{path} has architecture {arch!r}; use a model of one of {FAMILIES}")
    family: Family = "qwen2" if arch == "qwen2" else "llama"

    def number(key: str, default: float | None = None) -> float:
        value = meta.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadModel(f"{path}: metadata {arch}.{key} is {value!r}, not a number")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = number(key, default)
        if not isinstance(value, int):
            raise BadModel(f"{path}: metadata {arch}.{key} is {value!r}, not a whole number")
        return value

    hidden = count("embedding_length")
    heads = count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads if heads else 0)
    if count("rope.dimension_count", head_dim) != head_dim:
        raise BadModel(f"{path}: rotary embedding of a part of each head is not supported")
    if number("expert_count", 0):
        raise BadModel(f"{path}: mixture-of-experts models are not supported")
    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        raise BadModel(f"{path}: rope scaling {scaling!r} is not supported")
    tokens = meta.get("tokenizer.ggml.tokens")
    return ModelConfig(
        family=family,
        layers=count("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=count("feed_forward_length"),
        rope_theta=number("rope.freq_base", 10_000.0),
        rope_scaling=None,  # a GGUF file has Llama 3's factors in a tensor, which the engine reads
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        vocab_size=count("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
        max_len=count("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        bos_token_id=_token(meta, "bos"),
        eos_token_ids=_distinct(_token(meta, "eos"), _token(meta, "eot")),
    ).check(path)


def _token(meta: Mapping[str, object], name: str) -> int | None:
    value = meta.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def _distinct(*ids: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(id for id in ids if id is not None))


class _HfConfig(msgspec.Struct):
    """The fields of config.json that are read; msgspec checks their types."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None


class _HfGeneration(msgspec.Struct):
    """The field of generation_config.json that is read."""

    eos_token_id: int | list[int] | None = None


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a model's folder. Raises BadModel."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise BadModel(f"cannot read {path}: {error}") from error


def _from_folder(folder: Path) -> ModelConfig:
    raw = read_json(folder / "config.json", _HfConfig)
    if raw.model_type not in FAMILIES:
        raise BadModel(f"{folder} is a {raw.model_type!r} model; use a model of one of {FAMILIES}")
    family: Family = "qwen2" if raw.model_type == "qwen2" else "llama"
    refused = {
        "use_sliding_window": raw.use_sliding_window,
        "mlp_bias": raw.mlp_bias,
        "attention_bias": raw.attention_bias and family == "llama",
        "hidden_act": raw.hidden_act != "silu",
    }
    for name, wrong in refused.items():
        if wrong:
            value = getattr(raw, name)
            raise BadModel(f"{folder}/config.json: {name}={value!r} is not supported")
    eos = raw.eos_token_id
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation, _HfGeneration).eos_token_id or eos
    rope = raw.rope_parameters or {}
    theta = raw.rope_theta or rope.get("rope_theta") or 10_000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise BadModel(f"{folder}/config.json: rope_theta is {theta!r}, not a number")
    heads = raw.num_attention_heads
    return ModelConfig(
        family=family,
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        heads=heads,
        kv_heads=raw.num_key_value_heads or heads,
        head_dim=raw.head_dim or (raw.hidden_size // heads if heads else 0),
        intermediate=raw.intermediate_size,
        rope_theta=theta,
        rope_scaling=_scaling(raw.rope_scaling or rope, folder),
        norm_eps=raw.rms_norm_eps,
        vocab_size=raw.vocab_size,
        max_len=raw.max_position_embeddings,
        tie_embeddings=raw.tie_word_embeddings,
        qkv_bias=family == "qwen2",
        bos_token_id=next(iter(_ids(raw.bos_token_id)), None),
        eos_token_ids=_ids(eos),
    ).check(folder)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return _distinct(*(value if isinstance(value, list) else [value]))


def _scaling(raw: dict[str, Any], folder: Path) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadModel(f"{folder}/config.json: partial rotary embedding is not supported")
    if kind == "default":
        return None
    if kind != "llama3":
        raise BadModel(
            f"{folder}/config.json: rope scaling {kind!r} is not supported; only llama3 is"
        )
    try:
        return RopeScaling(
            factor=float(raw["factor"]),
            low_freq_factor=float(raw["low_freq_factor"]),
            high_freq_factor=float(raw["high_freq_factor"]),
            original_max_len=int(raw["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadModel(f"{folder}/config.json: rope scaling lacks {error}") from error


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights, in a fixed order. ConfigError: a folder has none."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadModel(f"{path} has no .safetensors file; save the model in that format")
    return files


def weights_revision(path: Path) -> str:
    """Return 16 hex digits that name the weights and configuration, equal on every machine.

    Up to 1 GiB every byte is hashed (SHA-256, about 0.2 s per 100 MB). Above it, to start quickly,
    only each file's size, its first MiB (the header) and 16 evenly spaced MiB are. Two fine-tuned
    models that differ only outside these samples get the same name.
    """
    files = weight_files(path)
    digest = sha256()
    try:
        if path.is_dir():
            digest.update((path / "config.json").read_bytes())
        sizes = [file.stat().st_size for file in files]
        for file, size in zip(files, sizes, strict=True):
            digest.update(size.to_bytes(8, "little"))
            with file.open("rb") as stream:
                if sum(sizes) <= _WHOLE_HASH_BYTES:
                    digest.update(file_digest(stream, "sha256").digest())
                    continue
                for sample in range(_SAMPLES + 1):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
                    digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise BadModel(f"cannot read the weights: {error}") from error
    return digest.hexdigest()[:16]
