"""One tokenizer for both kinds of model file, exact to the byte.

The gateway uses it, from text to ids and back. It knows the bytes of every token, so that text can
be cut anywhere. It reads the model's own files, and contacts no model hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from moonserve.core.errors import BadRequest
from moonserve.live.model.config import config_of_gguf, load_config, read_json
from moonserve.live.model.errors import BadModel
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.vocab import Alphabet, Vocabulary, piece_bytes, vocabulary_of_gguf

_MAX_ID = 1 << 24
"""Larger than in any model: a larger id comes from a damaged file."""


class Tokenizer:
    """Text to ids and ids to bytes. It is immutable, and threads may share it.

    eos_ids: every id that ends a generation. bos_token, eos_token: their text, for chat templates.
    strips_space: whether a text's first token has a space that does not belong to the text.
    longest_token_bytes: the most UTF-8 bytes of text in one token, so that a text longer than n
    times this has more than n tokens. (It does not count white space that the special tokens of
    some folders absorb.)
    """

    def __init__(self, vocabulary: Vocabulary, eos_ids: tuple[int, ...]) -> None:
        self._inner = vocabulary.inner
        self._special = frozenset(id for id, special in vocabulary.added.items() if special)
        self._pieces = vocabulary.pieces
        self._bytes = [
            piece.encode() if id in vocabulary.added else piece_bytes(piece, vocabulary.alphabet)
            for id, piece in enumerate(vocabulary.pieces)
        ]
        # A normaliser may shorten the text first: NFKC makes one byte from four (U+1D400).
        shrinks = 1 if vocabulary.inner.normalizer is None else 4
        self.longest_token_bytes = shrinks * max(map(len, self._bytes), default=0)
        self.strips_space = vocabulary.adds_space
        self.bos_id = vocabulary.bos_id
        self.eos_ids = eos_ids
        self.bos_token = "" if vocabulary.bos_id is None else self._pieces[vocabulary.bos_id]
        self.eos_token = "" if vocabulary.eos_id is None else self._pieces[vocabulary.eos_id]

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token; the model's own table may have padding after them."""
        return len(self._pieces)

    def encode(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Return the ids of `text`.

        special: text such as <|im_end|> becomes that special token, else the tokens of its letters.
        add_bos: add BOS, and other tokens that the model's files ask for; a rendered chat template
        has them already. Raises BadRequest if `text` is not valid Unicode.
        """
        inner = self._inner if special else self._plain
        try:
            # Only this method releases the GIL, and it computes no offsets, which are not needed.
            # `encode` of a long text would stop every other thread.
            return inner.encode_batch_fast([text], add_special_tokens=add_bos)[0].ids
        except TypeError:  # the error of the Rust library for a str without a UTF-8 form
            raise BadRequest(
                "the text has an unpaired UTF-16 surrogate; send valid Unicode"
            ) from None

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text; threads would race for a flag on one object."""
        plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
        plain.encode_special_tokens = True
        return plain

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; b"" for special tokens and for ids of padding."""
        if id in self._special or id >= len(self._bytes):
            return b""
        return self._bytes[id]

    def spelled(self, id: int) -> bytes:
        """Return the bytes of a token, also of a special one; b"" for ids of padding."""
        return self._bytes[id] if id < len(self._bytes) else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        skip_special: leave special tokens out; otherwise their names are in the text.
        """
        size = len(self._bytes)
        if skip_special:
            raw = b"".join(self.token_bytes(id) for id in ids)
        else:
            raw = b"".join(self._bytes[id] for id in ids if id < size)
        if self.strips_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a .gguf file or a Hugging Face folder (tokenizer.json)."""
    if path.is_dir():
        return Tokenizer(_vocabulary_of_folder(path), load_config(path).eos_token_ids)
    file = open_gguf(path)
    return Tokenizer(vocabulary_of_gguf(file.metadata), config_of_gguf(file).eos_token_ids)


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    """The parts of tokenizer.json that `tokenizers` does not give access to."""

    model: dict[str, Any]
    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


class _TokenizerConfig(msgspec.Struct):
    """The parts of tokenizer_config.json that are read; a token is its text or {"content": …}."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None


def _vocabulary_of_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadModel(
            f"cannot read {path}: {error}; a model folder needs tokenizer.json (save it from"
            " transformers' fast tokenizer)"
        ) from error
    try:
        parts = msgspec.json.decode(raw, type=_TokenizerJson)
        inner = tokenizers.Tokenizer.from_str(raw.decode())
    except Exception as error:
        raise BadModel(f"cannot read {path}: {error}") from error
    # A file may ask for both; moonserve never cuts or pads a prompt.
    inner.no_truncation()
    inner.no_padding()
    ids = inner.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest > _MAX_ID:
        raise BadModel(f"{path}: a token has the id {largest}; is the file damaged?")
    pieces = [""] * (largest + 1)
    for piece, id in ids.items():
        pieces[id] = piece
    alphabet, adds_space = _alphabet(parts, path)
    names = _token_names(folder)
    return Vocabulary(
        inner=inner,
        pieces=pieces,
        added={token.id: token.special for token in parts.added_tokens},
        alphabet=alphabet,
        adds_space=adds_space,
        bos_id=ids.get(names[0]) if names[0] else None,
        eos_id=ids.get(names[1]) if names[1] else None,
    )


def _alphabet(parts: _TokenizerJson, path: Path) -> tuple[Alphabet, bool]:
    """Return the alphabet of the pieces, and whether decoding drops a leading space."""
    decoder = parts.decoder or {}
    steps: list[dict[str, Any]] = decoder.get("decoders") or [decoder]
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return "bytes", False
    if "Metaspace" in kinds:
        scheme = kinds["Metaspace"].get("prepend_scheme", "always")
        return "spm", scheme != "never"
    if "ByteFallback" in kinds:
        return "spm", kinds.get("Strip", {}).get("start", 0) > 0
    raise BadModel(
        f"{path}: decoder {decoder.get('type')!r} of a {parts.model.get('type')!r} tokenizer is not"
        " supported; use a model with a byte-level or a SentencePiece tokenizer"
    )


def _token_names(folder: Path) -> tuple[str, str]:
    """Return the text of BOS and EOS; "" if the folder names none."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return "", ""
    config = read_json(path, _TokenizerConfig)
    return _content(config.bos_token), _content(config.eos_token)


def _content(token: str | dict[str, Any] | None) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token or ""
