"""Our token ids beside llama.cpp's own, on the same GGUF. Opt-in: needs the xllamacpp wheel."""

import json
import random
import urllib.request
from collections.abc import Callable

import pytest

from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.peer]

Tokenize = Callable[[str, bool], list[int]]

_ENGLISH = (
    "It's a truth universally acknowledged, that a single man in possession of a good fortune, must"
    " be in want of a wife. They've said so; we'll see, I'm sure he'd agree — won't you?\n\n"
)
_CODE = (
    'def f(x: int = 0x1F) -> str:\n\t"""Doc."""\n    return f"{x:>08.3f}" if x != -1e-9 else None'
    "  # done\r\n\r\n#include <stdio.h>\nint main(void) { return a[i]->b++ << 3; }\n"
)
TEXTS = {
    "english": _ENGLISH * 60,
    "code": _CODE * 40,
    "digits": " ".join(str(n * n * n) for n in range(1500)) + " 3.14159 1,000,000 ٣٤٥ ⅷ² ½",
    "chinese": "月之暗面的分离式推理架构以键值缓存为中心。请用中文回答，谢谢！「你好」、世界…" * 40,
    "emoji": "👩‍👩‍👧‍👦 🇩🇪🏳️‍🌈 👍🏽 e\u0301 \u200b\ufeff ✨🤖🫠 ㎏ ﷽ 𝔘𝔫𝔦 " * 40,
    "whitespace": "a \t b  c   d\n\n\n e\r\nf\r\r g\u00a0h\u3000i \n  \t\n x    \x0b\x0c end  "
    * 40,
    "special": (
        "<|im_start|>system\nHi<|im_end|>\n<|im_start|>user\n1<|endoftext|> <|im_ <jupyter_code>"
    )
    * 40,
    "scripts": "Привет, мир! Γειά σου. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดี こんにちは 안녕"
    * 40,
}


@pytest.fixture(scope="module")
def peer() -> Tokenize:
    """llama.cpp's tokenizer: (text, special) to ids, over its server's /tokenize."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(resolve(DEFAULT_MODEL).path)
    params.n_ctx, params.warmup, params.port, params.verbosity = 256, False, 0, 0
    server = xllamacpp.Server(params)

    def tokenize(text: str, special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": special})
        url = f"{server.listening_address}/tokenize"
        request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            ids: list[int] = json.load(reply)["tokens"]
        return ids

    return tokenize


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ours, of the same file."""
    return load_tokenizer(resolve(DEFAULT_MODEL).path)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_ids_equal_llama_cpp(
    name: str, special: bool, tokenizer: Tokenizer, peer: Tokenize
) -> None:
    """Every text has llama.cpp's token ids, with special tokens recognised and without."""
    assert tokenizer.encode(TEXTS[name], special=special) == peer(TEXTS[name], special)


def test_random_text_equals_llama_cpp(tokenizer: Tokenizer, peer: Tokenize) -> None:
    """So has text of characters drawn from all planes, with much white space and many digits."""
    draw = random.Random(1)
    common = " \n\t\r.,'0123456789abcXYZéß中文字🙂"
    for _ in range(40):
        chars = [
            draw.choice(common) if draw.random() < 0.8 else chr(draw.randrange(1, 0xD800))
            for _ in range(800)
        ]
        text = "".join(chars)
        assert tokenizer.encode(text) == peer(text, True)
