"""Our engine beside transformers' LlamaForCausalLM, on the same dequantised weights in float32.

Opt-in: needs the model in the cache and `pip install transformers`. Shows its table with -s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="peer test: pip install transformers")
torch = pytest.importorskip("torch")

from moonserve.core.engine.batch import Chunk, Pass  # noqa: E402
from moonserve.core.errors import ConfigError  # noqa: E402
from moonserve.core.request import Sampling  # noqa: E402
from moonserve.core.units import RequestId  # noqa: E402
from moonserve.live.engine.inputs import build_inputs  # noqa: E402
from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference  # noqa: E402
from moonserve.live.engine.weights import GgufSource  # noqa: E402
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve  # noqa: E402
from moonserve.live.model.config import load_config  # noqa: E402
from moonserve.live.model.gguf import open_gguf  # noqa: E402
from moonserve.live.text.tokenizer import load_tokenizer  # noqa: E402
from tests.e2e.prompts import PROMPTS  # noqa: E402

pytestmark = [pytest.mark.peer, pytest.mark.model, pytest.mark.slow]

NEW_TOKENS = 32
Greedy = Callable[[list[int]], tuple[list[int], "torch.Tensor"]]


@pytest.fixture(scope="module")
def path() -> Path:
    """The shipped model's file."""
    try:
        return resolve(DEFAULT_MODEL).path
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def engine(path: Path) -> TorchEngine:
    """Our engine, float32."""
    return TorchEngine.load(path, dtype="float32", num_blocks=128)


@pytest.fixture(scope="module")
def peer(path: Path) -> Greedy:
    """A function from a prompt to transformers' greedy tokens and last prompt logits."""
    config = load_config(path)
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
    )
    model = transformers.LlamaForCausalLM(settings).eval().float()
    source = GgufSource(open_gguf(path), config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    lost = model.load_state_dict({name: source.tensor(name) for name in names}, strict=False)
    assert set(lost.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    assert model.model.rotary_emb.inv_freq[1] == pytest.approx(config.rope_theta ** (-2 / 64))

    @torch.inference_mode()
    def greedy(prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        first = output.logits[0, -1]
        tokens = [int(first.argmax())]
        while len(tokens) < NEW_TOKENS:
            output = model(
                torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
            )
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens, first

    return greedy


@pytest.mark.parametrize(("name", "text"), PROMPTS, ids=[name for name, _ in PROMPTS])
def test_equal_to_transformers(
    path: Path, engine: TorchEngine, peer: Greedy, name: str, text: str
) -> None:
    """32 greedy tokens equal transformers', and the first logits agree to float32 noise."""
    prompt = load_tokenizer(path).encode(text)
    wanted, logits = peer(prompt)
    assert greedy_reference(engine, prompt, NEW_TOKENS) == wanted
    blocks = tuple(range(-(-len(prompt) // engine.shape.block_size)))
    chunk = Chunk(RequestId("r"), tuple(prompt), 0, blocks, Sampling(temperature=0.0))
    with torch.inference_mode():
        mine = engine._model.forward(build_inputs(Pass((chunk,)).chunks, engine._model.layout))[0]
    apart = float((mine - logits).abs().max())
    print(f"\n{name}: {len(prompt)} tokens, logits differ by {apart:.1e}")
    assert apart < 1e-3


def test_the_long_prompt_is_long(path: Path) -> None:
    """The set holds twenty prompts, one of about 3,000 tokens or more."""
    tokenizer = load_tokenizer(path)
    assert len(PROMPTS) == 20
    assert 3_000 <= max(len(tokenizer.encode(text)) for _, text in PROMPTS) <= 4_000
