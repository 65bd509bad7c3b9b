"""Model configuration: read from both forms, and refused by name where it cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from moonserve.core.errors import ConfigError
from moonserve.live.model.config import load_config, weights_revision
from tests.support.tiny import tiny_metadata, write_folder, write_gguf, write_gguf_model


def test_both_forms_agree(tmp_path: Path) -> None:
    """The same model's GGUF metadata and config.json give one configuration."""
    folder = load_config(write_folder(tmp_path / "hf"))
    gguf = load_config(write_gguf_model(tmp_path / "m.gguf"))
    assert msgspec.structs.replace(gguf, norm_eps=folder.norm_eps) == folder
    assert gguf.norm_eps == pytest.approx(folder.norm_eps)


def test_generation_config_wins(tmp_path: Path) -> None:
    """End tokens come from generation_config.json where it has them, one or several."""
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    assert load_config(folder).eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text("{}")
    assert load_config(folder).eos_token_ids == (99,)


LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "heads"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 1 << 40}, "head_dim"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": [1]}}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope base"),
        ({"rope_scaling": LLAMA3 | {"factor": 10**400}}, "rope scaling"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "scaling"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 2**70}}, "scaling"),
    ],
)
def test_refusals_name_the_setting(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    """What the engine cannot compute is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        load_config(write_folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.rope.scaling.type": "linear"}, "linear"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.embedding_length": "x"}, "embedding_length"),
        ({"llama.rope.dimension_count": 8}, "rotary embedding of a part"),
        ({"llama.block_count": 2.0}, "block_count is 2.0, not a whole number"),
        ({"llama.rope.freq_base": float("nan")}, "rope base"),
        ({"llama.attention.key_length": 2**31}, "head_dim"),
    ],
)
def test_gguf_refusals(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    """The same for GGUF metadata."""
    with pytest.raises(ConfigError, match=named):
        load_config(write_gguf(tmp_path / "m.gguf", tiny_metadata() | changes, {}))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    """No config.json, or one that is not JSON, is a ConfigError."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_revision_follows_the_bytes(tmp_path: Path) -> None:
    """Equal files have equal revisions; one changed weight byte or setting, another."""
    one, two = write_folder(tmp_path / "a"), write_folder(tmp_path / "b")
    assert weights_revision(one) == weights_revision(two)
    config = (two / "config.json").read_text()
    (two / "config.json").write_text(config.replace("10000.0", "20000.0"))
    assert weights_revision(one) != weights_revision(two)
    (two / "config.json").write_text(config)
    weights = bytearray((two / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (two / "model.safetensors").write_bytes(weights)
    assert weights_revision(one) != weights_revision(two)


def test_revision_of_large_files_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the limit, header, size and the last bytes still decide."""
    monkeypatch.setattr("moonserve.live.model.config._WHOLE_HASH_BYTES", 100)
    path = tmp_path / "m.gguf"
    seen = set()
    for body in (b"a" * 1000, b"a" * 1001, b"b" + b"a" * 999, b"a" * 999 + b"b"):
        path.write_bytes(body)
        seen.add(weights_revision(path))
    assert len(seen) == 4
