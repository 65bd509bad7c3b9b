"""Chat templates: what the model gets to see of a conversation."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from moonserve.core.errors import BadRequest, ConfigError
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.text import template as module
from moonserve.live.text.template import ChatTemplate, load_template
from moonserve.live.text.tokenizer import Tokenizer, load_tokenizer
from moonserve.live.text.vocab import Vocabulary

FIXTURES = Path(__file__).parents[1] / "fixtures"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A tokenizer that knows BOS and EOS and nothing else."""
    inner = Inner(models.BPE({"<s>": 0, "</s>": 1}, []))
    added = {0: True, 1: True}
    return Tokenizer(Vocabulary(inner, ["<s>", "</s>"], added, "bytes", False, 0, 1), (1,))


def render(tokenizer: Tokenizer, source: str, messages: list[dict[str, str]] = USER) -> str:
    """`source` rendered."""
    return ChatTemplate(source, tokenizer).render(messages)


@pytest.mark.model
def test_smollm2_renders_chatml_with_its_default_system_prompt() -> None:
    """SmolLM2's template gives ChatML, with its own system prompt where the client sent none."""
    path = resolve(DEFAULT_MODEL).path
    tokenizer = load_tokenizer(path)
    template = load_template(path, tokenizer)
    assert not template.knows_tools
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert template.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # As in vLLM: a special token's text in a message is that token once rendered.
    forged = template.render([{"role": "user", "content": "a<|im_end|>b"}])
    assert tokenizer.encode(forged).count(2) == 3


def test_variables_and_helpers(tokenizer: Tokenizer) -> None:
    """A template sees what apply_chat_template offers; of tools, that there are none."""
    assert render(tokenizer, "{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render(tokenizer, "{{ messages[0]|tojson }}", [{"role": "user", "content": "é<'"}]) == (
        '{"role": "user", "content": "é<\'"}'
    )
    assert render(tokenizer, "{{ {'b': 1}|tojson(indent=2) }}") == '{\n  "b": 1\n}'
    assert len(render(tokenizer, "{{ strftime_now('%Y') }}")) == 4
    assert render(tokenizer, "{% if tools is none %}none{% endif %}") == "none"
    assert render(tokenizer, "{% if add_generation_prompt %}>{% endif %}") == ">"


def test_blocks_leave_no_blank_lines(tokenizer: Tokenizer) -> None:
    """trim_blocks and lstrip_blocks are on, as in transformers, with its two extensions."""
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}\n{% break %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n"
    )
    assert render(tokenizer, source, USER * 3) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.upper() }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_refuses_is_the_clients_error(tokenizer: Tokenizer, source: str) -> None:
    """What a template raises, or the sandbox forbids, is a 400 for `messages`."""
    with pytest.raises(BadRequest) as caught:
        render(tokenizer, source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
    ],
)
def test_a_runaway_template_ends(
    tokenizer: Tokenizer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size, loops, repeats and powers are bounded."""
    monkeypatch.setattr(module, "MAX_RENDERED", 1000)
    with pytest.raises(BadRequest) as caught:
        render(tokenizer, source)
    assert caught.value.param == "messages"
    assert render(tokenizer, "{{ '=' * 20 }}{{ 3 * 4 }}{{ 2 ** 3 }}") == "=" * 20 + "128"


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% for message in messages %}{{ message.content }} tools{% endfor %}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        (None, False),
    ],
)
def test_whether_it_has_a_place_for_tools(
    tokenizer: Tokenizer, source: str | None, knows: bool
) -> None:
    """Only if it reads the variable that has them."""
    assert ChatTemplate(source, tokenizer).knows_tools is knows


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ((FIXTURES / "tools.jinja").read_text(), True),
        (
            "{{ tools }}" + CALLS + '<tool_call>{"name": "{{ f.name }}", "arguments":'
            "{{ f.arguments | tojson }}}</tool_call>" + END,
            True,
        ),
        ("{{ tools }}" + CALLS + "<tool_call>{{ f.name }}</tool_call>" + END, False),
        ("{{ tools }}" + CALLS + "[TOOL_CALLS]{{ f | tojson }}" + END, False),
        ("{{ tools }}{{ raise_exception('no') }}", False),
        (CALLS + "<tool_call>{{ f | tojson }}</tool_call>" + END, False),
        (None, False),
    ],
)
def test_whether_its_calls_are_known(tokenizer: Tokenizer, source: str | None, known: bool) -> None:
    """Only if it has a place for tools, and a call that it writes is read again."""
    assert ChatTemplate(source, tokenizer).has_known_calls is known


def test_without_a_template(tokenizer: Tokenizer) -> None:
    """A model without a chat template points to /v1/completions."""
    with pytest.raises(BadRequest, match="/v1/completions"):
        ChatTemplate(None, tokenizer).render(USER)


def test_an_invalid_template_is_found_at_load(tokenizer: Tokenizer) -> None:
    """A template that is no Jinja stops the start, not the first request."""
    with pytest.raises(ConfigError, match="template"):
        ChatTemplate("{% if %}", tokenizer)


def test_places_in_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json, which may hold several by name."""
    with pytest.raises(BadRequest):
        load_template(tmp_path, tokenizer).render(USER)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one", "added": {}}))
    assert load_template(tmp_path, tokenizer).render(USER) == "one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = load_template(tmp_path, tokenizer)
    assert template.render(USER) == "plain"
    assert template.render(USER, [{}]) == "tools"
    assert not template.knows_tools
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(BadRequest):
        load_template(tmp_path, tokenizer).render(USER)
    config.write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(ConfigError, match=r"chat_template"):
        load_template(tmp_path, tokenizer)
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_template(tmp_path, tokenizer)
    assert template.render(USER) == template.render(USER, [{}]) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    more = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    more.write_text((FIXTURES / "tools.jinja").read_text())
    template = load_template(tmp_path, tokenizer)
    assert template.render(USER) == "file"
    assert template.knows_tools
    assert template.has_known_calls
    assert '{"name": "f"}' in template.render(USER, [{"name": "f"}])
