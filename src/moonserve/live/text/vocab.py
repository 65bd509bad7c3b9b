"""Vocabularies: the bytes of each token, and `tokenizers` objects built from GGUF metadata.

live/text/tokenizer and the export of models use it. There are two families. Byte-level BPE (GPT-2,
Llama 3, Qwen 2, SmolLM) writes bytes in a printable alphabet. SentencePiece BPE (Llama 2, Mistral)
writes text with "▁" for the space and <0xNN> for other bytes. The metadata keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; text is split as in llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from moonserve.core.errors import ConfigError
from moonserve.live.model.errors import BadModel

Alphabet = Literal["bytes", "spm"]

_GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a byte that is not printable Latin-1 is a character from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if chr(byte) not in table]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()


def piece_bytes(piece: str, alphabet: Alphabet) -> bytes:
    """Return the bytes of a vocabulary entry that is not an added token."""
    if alphabet == "bytes":
        try:
            return bytes([_BYTE_OF[char] for char in piece])
        except KeyError:  # an entry outside the alphabet means its own text
            return piece.encode()
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


class Vocabulary(msgspec.Struct):
    """A checked vocabulary, and the `tokenizers` object made from it."""

    inner: Tokenizer
    pieces: list[str]
    added: dict[int, bool]
    """Tokens whose own text is recognised in a prompt; True for special (control) tokens."""
    alphabet: Alphabet
    adds_space: bool
    """Whether encoding adds a space before the text, which decoding removes."""
    bos_id: int | None
    eos_id: int | None


class _Metadata(msgspec.Struct, rename=lambda name: "tokenizer.ggml." + name):
    """The keys that are read, with their types; msgspec checks them."""

    model: str
    tokens: list[str]
    pre: str = "default"
    token_type: list[int] = []
    merges: list[str] = []
    scores: list[float] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool = False
    add_space_prefix: bool = True


def vocabulary_of_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """Build the tokenizer that the metadata describe; its ids equal llama.cpp's.

    Raises ConfigError for an unknown tokenizer model or pre-tokenizer.
    """
    try:
        meta = msgspec.convert(metadata, _Metadata)
    except msgspec.ValidationError as error:
        raise BadModel(f"GGUF tokenizer metadata: {error}; download it again") from None
    size = len(meta.tokens)
    for name, values in (("token_type", meta.token_type), ("scores", meta.scores)):
        if values and len(values) != size:
            raise _damaged(f"{len(values)} tokenizer.ggml.{name} for {size} tokens")
    for name in ("bos", "eos", "unknown"):
        id = getattr(meta, f"{name}_token_id")
        if id is not None and not 0 <= id < size:
            raise _damaged(f"{name} token {id} of {size} tokens")
    if meta.model == "gpt2":
        inner = _byte_level(meta)
    elif meta.model == "llama":
        inner = _sentencepiece(meta)
    else:
        raise BadModel(
            f"GGUF tokenizer {meta.model!r} is not supported (gpt2 and llama are); use the model's"
            " Hugging Face folder"
        )
    special = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    added = {i: special[kind] for i, kind in enumerate(meta.token_type) if kind in special}
    inner.add_tokens(
        [AddedToken(meta.tokens[i], normalized=False, special=kind) for i, kind in added.items()]
    )
    _add_ends(inner, meta)
    spm = meta.model == "llama"
    return Vocabulary(
        inner=inner,
        pieces=meta.tokens,
        added=added,
        alphabet="spm" if spm else "bytes",
        adds_space=spm and meta.add_space_prefix,
        bos_id=meta.bos_token_id,
        eos_id=meta.eos_token_id,
    )


def _byte_level(meta: _Metadata) -> Tokenizer:
    split = _SPLITS.get(meta.pre)
    if split is None:
        raise BadModel(
            f"GGUF pre-tokenizer {meta.pre!r} is not supported ({', '.join(_SPLITS)} are); use the"
            " model's Hugging Face folder"
        )
    vocab = {piece: id for id, piece in enumerate(meta.tokens)}
    merges: list[tuple[str, str]] = []
    for merge in meta.merges:
        left, space, right = merge.partition(" ")
        if not space or left + right not in vocab or left not in vocab or right not in vocab:
            raise _damaged(f"merge {merge!r} is not in the vocabulary")
        merges.append((left, right))
    llama3 = meta.pre in _LLAMA3_NAMES
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=llama3))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if meta.pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split is _QWEN2:
        inner.normalizer = normalizers.NFC()  # as the model was trained; llama.cpp omits it
    return inner


def _sentencepiece(meta: _Metadata) -> Tokenizer:
    """Build SentencePiece BPE, which joins the pair with the best score: merges by that score."""
    if not meta.scores:
        raise _damaged("no tokenizer.ggml.scores")
    vocab = {piece: id for id, piece in enumerate(meta.tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for id, piece in enumerate(meta.tokens):
        for at in range(1, len(piece)):
            left = piece[:at]
            right = piece[at:]
            if left in vocab and right in vocab:
                ranked.append((-meta.scores[id], vocab[left], vocab[right], left, right))
    ranked.sort()
    unknown = meta.tokens[meta.unknown_token_id] if meta.unknown_token_id is not None else None
    inner = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if meta.add_space_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
    inner.normalizer = normalizers.Sequence(spaces)
    return inner


def _add_ends(inner: Tokenizer, meta: _Metadata) -> None:
    """Let encode(add_special_tokens=True) add BOS and EOS if the model needs them."""
    wants_bos = meta.add_bos_token
    if wants_bos is None:  # llama.cpp's defaults
        wants_bos = meta.model == "llama" or meta.pre in _LLAMA3_NAMES
    before = [meta.bos_token_id] if wants_bos and meta.bos_token_id is not None else []
    after = [meta.eos_token_id] if meta.add_eos_token and meta.eos_token_id is not None else []
    if not before and not after:
        return
    # The template uses placeholders, because a token's text may contain the template's syntax.
    ends = [("BOS", id) for id in before] + [("EOS", id) for id in after]
    inner.post_processor = processors.TemplateProcessing(
        single=["BOS"] * len(before) + ["$A"] + ["EOS"] * len(after),
        special_tokens=[
            {"id": name, "ids": [id], "tokens": [meta.tokens[id]]} for name, id in ends
        ],
    )


def _damaged(what: str) -> ConfigError:
    return BadModel(f"GGUF tokenizer metadata is damaged: {what}; download it again")
