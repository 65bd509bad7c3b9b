"""Writes the model in a GGUF file as a Hugging Face folder, for engines that need one.

`moonserve model export` uses it. It writes weights as float32 or bfloat16: quantised weights keep
their values, in a larger form. It never writes into a folder that is not empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import decoders

from moonserve.core.errors import ConfigError
from moonserve.live.engine.weights import GgufSource
from moonserve.live.model.config import ModelConfig, config_of_gguf
from moonserve.live.model.errors import BadModel
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.template import template_of_gguf
from moonserve.live.text.vocab import Vocabulary, vocabulary_of_gguf

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def export_folder(
    path: Path, folder: Path, dtype: str, progress: Callable[[str], None] = lambda stage: None
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into the new `folder`.

    model.safetensors gets its name last, when all files are complete. Raises ConfigError: no GGUF
    file, a folder that is not empty, an unknown dtype, or rotary factors without a field in
    config.json.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; use one of {', '.join(_DTYPES)}", "dtype")
    if path.is_dir():
        raise BadModel(f"{path} is a Hugging Face folder already; use it as it is")
    file = open_gguf(path)
    config = config_of_gguf(file)
    if "rope_freqs.weight" in file.tensors:
        raise BadModel(
            f"{path} scales its rotary embedding by a tensor, which config.json cannot express; use"
            " the model's Hugging Face folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder", "folder")
        progress("tokenizer")
        _write_tokenizer(path, config, folder)
        progress("weights")
        source = GgufSource(file, config)
        tensors = {it: source.tensor(it).to(_DTYPES[dtype]).contiguous() for it in names(config)}
        staged = folder / "model.safetensors.part"
        save_file(tensors, staged, metadata={"format": "pt"})
        _write_json(folder / "config.json", hf_config(config, dtype))
        staged.rename(folder / "model.safetensors")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}", "folder") from error


def names(config: ModelConfig) -> Iterator[str]:
    """Yield Hugging Face's names of all tensors of a model."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tie_embeddings:
        yield "lm_head.weight"
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight"
        yield at + "post_attention_layernorm.weight"
        for part in "qkv":
            yield f"{at}self_attn.{part}_proj.weight"
            if config.qkv_bias:
                yield f"{at}self_attn.{part}_proj.bias"
        yield at + "self_attn.o_proj.weight"
        for part in ("gate", "up", "down"):
            yield f"{at}mlp.{part}_proj.weight"


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, with transformers' field names."""
    return {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_len,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": dtype,
    }


def _write_tokenizer(path: Path, config: ModelConfig, folder: Path) -> None:
    vocabulary = vocabulary_of_gguf(open_gguf(path).metadata)
    inner = vocabulary.inner
    inner.decoder = _decoder(vocabulary)
    inner.save(str(folder / "tokenizer.json"))
    pieces = vocabulary.pieces
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_len,
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.bos_id is not None:
        settings["bos_token"] = pieces[vocabulary.bos_id]
    if vocabulary.eos_id is not None:
        settings["eos_token"] = pieces[vocabulary.eos_id]
    source = template_of_gguf(path)
    if source is not None:
        settings["chat_template"] = source
    _write_json(folder / "tokenizer_config.json", settings)


def _decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    """Return the decoder from pieces to text; moonserve's own tokenizer does not use it."""
    if vocabulary.alphabet == "bytes":
        return decoders.ByteLevel()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
