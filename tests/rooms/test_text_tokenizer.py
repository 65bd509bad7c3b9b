"""Tokens of real and toy vocabularies; text that comes back byte for byte."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders

from moonserve.core.errors import BadRequest, ConfigError
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer
from moonserve.live.text.vocab import vocabulary_of_gguf

# What llama.cpp gives for SmolLM2 (test_text_peer compares many more).
FROZEN = {
    "Hello, world!": [19556, 28, 905, 17],
    "  I'm 42 years\r\n\told": [216, 339, 5248, 216, 36, 34, 929, 2738, 197, 793],
    "x = 1234.5 # 一二": [104, 446, 216, 33, 34, 35, 36, 30, 37, 907, 216, 22924, 16736, 230],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "é\u0301\u00a0ﷺ 𝔘": [2756, 151, 219, 15442, 186, 132, 135, 216, 23159, 238, 242],
    "": [],
}


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    """The real model's tokenizer."""
    return load_tokenizer(resolve(DEFAULT_MODEL).path)


@pytest.mark.model
@pytest.mark.parametrize("text", FROZEN)
def test_frozen_ids(smollm: Tokenizer, text: str) -> None:
    """SmolLM2's ids are llama.cpp's, and decode to the same text."""
    assert smollm.encode(text) == FROZEN[text]
    assert smollm.decode(FROZEN[text], skip_special=False) == text


@pytest.mark.model
def test_what_the_model_says_of_itself(smollm: Tokenizer) -> None:
    """BOS, EOS and sizes come from the metadata; no BOS is added where the model wants none."""
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_ids) == (49152, 1, (2,))
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.encode("Hi", add_bos=True) == smollm.encode("Hi")


@pytest.mark.model
def test_special_tokens_as_text(smollm: Tokenizer) -> None:
    """With special=False a special token's text is only text; as a token it has no bytes."""
    assert smollm.encode("<|im_end|>", special=False) == [44, 108, 306, 79, 486, 108, 46]
    assert smollm.encode("<|im_end|>") == [2]
    assert smollm.token_bytes(2) == b""
    assert smollm.token_bytes(2) == smollm.token_bytes(10**6) == b""
    assert smollm.decode([44, 2, 46]) == "<>"


@pytest.mark.model
def test_a_folder_and_a_gguf_of_one_model_agree(smollm: Tokenizer, tmp_path: Path) -> None:
    """The same vocabulary as tokenizer.json gives the same ids, and the library's own decoding."""
    inner = vocabulary_of_gguf(open_gguf(resolve(DEFAULT_MODEL).path).metadata).inner
    inner.decoder = decoders.ByteLevel()
    write_folder(tmp_path, json.loads(inner.to_str()))
    folder = load_tokenizer(tmp_path)
    for text in FROZEN:
        ids = folder.encode(text)
        assert ids == smollm.encode(text)
        assert folder.decode(ids) == smollm.decode(ids) == inner.decode(ids)
    assert folder.decode(range(300, 600)) == inner.decode(list(range(300, 600)))
    assert (folder.bos_token, folder.eos_token, folder.eos_ids) == ("<|im_start|>", "", (2,))


@pytest.mark.model
def test_a_lone_surrogate_is_the_clients_error(smollm: Tokenizer) -> None:
    """Text that has no UTF-8 is refused, not a traceback."""
    with pytest.raises(BadRequest, match="surrogate"):
        smollm.encode("a\ud800")


def test_the_longest_token_bounds_what_fits() -> None:
    """No token stands for more bytes: special ones count, and what a normaliser may shorten."""
    ends = ["<|a very long special token|>", "\u4e00"]
    metadata = toy_bytes("gpt-2")
    tokens, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    assert Tokenizer(vocabulary_of_gguf(metadata), ()).longest_token_bytes == 9
    metadata |= {
        "tokenizer.ggml.tokens": tokens + ends,
        "tokenizer.ggml.token_type": [*types, 3, 4],
    }
    tokenizer = Tokenizer(vocabulary_of_gguf(metadata), ())
    assert tokenizer.longest_token_bytes == len(ends[0])
    assert len(tokenizer.encode(ends[0] * 3)) == 3
    nfc = Tokenizer(vocabulary_of_gguf(toy_bytes("qwen2")), ())
    assert nfc.encode("\u212a") == nfc.encode("K")  # three bytes, one token of one byte
    assert nfc.longest_token_bytes == 4 * 9


@pytest.mark.model
def test_encoding_lets_other_threads_run(smollm: Tokenizer) -> None:
    """While a long text is encoded, other threads get their turns: the event loop's among them."""
    turns, done = 0, threading.Event()

    def encode() -> None:
        smollm.encode("a b " * 150_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    # An encoder that holds the GIL gives it up before and after its work, and so a turn or two.
    assert turns > 10


def write_folder(folder: Path, tokenizer: dict[str, Any]) -> None:
    """A Hugging Face folder as far as a tokenizer is concerned."""
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 99}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": {"content": "<|im_start|>"}, "eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def toy_spm(**changes: object) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary that knows "▁ab" and has bytes for the rest."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "ab", "▁ab"]
    scores = [0.0] * 259 + [-6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 6
    made = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    made |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes}
    return {"tokenizer.ggml." + key: value for key, value in made.items()}


def test_sentencepiece_spaces_bytes_and_bos() -> None:
    """A space stands before the text and goes again; unknown characters are bytes; BOS on ask."""
    tokenizer = Tokenizer(vocabulary_of_gguf(toy_spm()), (2,))
    assert tokenizer.encode("ab ab", add_bos=True) == [1, 264, 264]
    assert tokenizer.decode([1, 264, 264]) == "ab ab"
    assert tokenizer.encode("é") == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("é  a")) == "é  a"
    assert tokenizer.encode("ab</s>") == [264, 2]
    bare = Tokenizer(vocabulary_of_gguf(toy_spm(add_space_prefix=False, add_bos_token=False)), ())
    assert bare.encode("ab", add_bos=True) == [263]
    assert bare.decode([264]) == " ab"


def toy_bytes(pre: str, **changes: object) -> dict[str, object]:
    """Metadata of a byte-level vocabulary: ASCII letters, "12", "123" and one added word."""
    letters = [chr(code) for code in range(0x21, 0x7F)] + [
        "Ġ",
        "Ċ",
        "č",
        "Ã",
        "©",
        "Ì",
        "ģ",
        "ģ" * 9,
    ]
    tokens = [*letters, "12", "123", "<end>", "<word>"]
    types = [1] * (len(letters) + 2) + [3, 4]
    made = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types}
    made |= {"merges": ["1 2"], "bos_token_id": tokens.index("<end>"), **changes}
    return {"tokenizer.ggml." + key: value for key, value in made.items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "Ċ"]),
        ("gpt-2", ["a", "Ġ", "12", "3", "4", "Ċ"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "Ċ"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "Ċ"]),
    ],
)
def test_pre_tokenizers_split_numbers_their_way(pre: str, pieces: list[str]) -> None:
    """Digits stand alone, in runs or in threes, as the model's pre-tokenizer says."""
    metadata = toy_bytes(pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokenizer = Tokenizer(vocabulary_of_gguf(metadata), ())
    assert [tokens[id] for id in tokenizer.encode("a 1234\n")] == pieces


def test_llama3_adds_bos_by_default() -> None:
    """llama-bpe models want BOS though old files do not say so; gpt-2 ones do not."""
    with_bos = Tokenizer(vocabulary_of_gguf(toy_bytes("llama-bpe")), ())
    assert with_bos.encode("a", add_bos=True)[0] == with_bos.bos_id
    assert len(Tokenizer(vocabulary_of_gguf(toy_bytes("gpt-2")), ()).encode("a", add_bos=True)) == 1


def test_user_defined_tokens_are_text() -> None:
    """A user-defined token is always recognised, and unlike a control token it has its text."""
    tokenizer = Tokenizer(vocabulary_of_gguf(toy_bytes("gpt-2")), ())
    ids = tokenizer.encode("a<word>", special=False)
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "a<word>"


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "model"),
        (toy_spm(model="bert"), "Hugging Face folder"),
        (toy_bytes("tekken"), "Hugging Face folder"),
        (toy_bytes("gpt-2", merges=["1 zz"]), "merge"),
        (toy_bytes("gpt-2", token_type=[1]), "token_type"),
        (toy_bytes("gpt-2", eos_token_id=10**6), "eos token"),
        (toy_bytes("gpt-2", tokens="x"), "tokens"),
        (toy_spm(scores=[]), "scores"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, object], says: str) -> None:
    """Metadata that is damaged or of an unknown kind is a ConfigError that says which part."""
    with pytest.raises(ConfigError, match=says):
        vocabulary_of_gguf(metadata)


def test_bad_folders(tmp_path: Path) -> None:
    """A folder without a usable tokenizer.json says what it needs."""
    with pytest.raises(ConfigError, match=r"needs tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nope"}}')
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path)
    inner = Inner.from_str(vocabulary_of_gguf(toy_bytes("gpt-2")).inner.to_str())
    huge = json.loads(inner.to_str())
    huge["model"]["vocab"]["far"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(huge))
    with pytest.raises(ConfigError, match="id 4000000000"):
        load_tokenizer(tmp_path)
    inner.decoder = decoders.WordPiece()
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(tmp_path)
