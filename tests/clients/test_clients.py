"""The real clients against a gateway with our own workers: what each of them relies on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, TOOL_MODEL, Cluster

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.clients
HI: Any = [{"role": "user", "content": "Say hello."}]
WHO: Any = [{"role": "system", "content": "You are kind."}, *HI]


def oai(cluster: Cluster, key: str = "", retries: int = 0) -> Any:
    """The openai package's client."""
    return openai.OpenAI(
        base_url=cluster.url + "/v1", api_key=key or cluster.key, max_retries=retries, timeout=30
    )


def ant(cluster: Cluster, key: str = "", retries: int = 0) -> Any:
    """The anthropic package's client."""
    return anthropic.Anthropic(
        base_url=cluster.url, api_key=key or cluster.key, max_retries=retries, timeout=30
    )


# openai


def test_openai_chat(cluster: Cluster) -> None:
    """Whole and streamed, the same text; usage with what was reused."""
    ask: Any = {"model": MODEL, "messages": WHO, "max_tokens": 20, "temperature": 0}
    whole = oai(cluster).chat.completions.create(**ask)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    chunks = list(
        oai(cluster).chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **ask
        )
    )
    text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert text == whole.choices[0].message.content
    assert text
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_choices_and_logprobs(cluster: Cluster) -> None:
    """n, logprobs and logit_bias in the package's types; a stop string; several prompts."""
    client = oai(cluster)
    chat = client.chat.completions.create(
        model=MODEL, messages=HI, n=2, max_tokens=5, logprobs=True, top_logprobs=2, seed=1
    )
    assert [it.index for it in chat.choices] == [0, 1]
    assert chat.choices[0].message.content != chat.choices[1].message.content
    for choice in chat.choices:
        assert len(choice.logprobs.content) == 5
        assert all(len(it.top_logprobs) == 2 for it in choice.logprobs.content)
    biased = client.completions.create(
        model=MODEL, prompt="once", logit_bias={"4000": 100}, max_tokens=3, logprobs=1
    )
    assert len(set(biased.choices[0].logprobs.tokens)) == 1
    two = client.completions.create(model=MODEL, prompt=["once", "twice"], max_tokens=3)
    assert [it.index for it in two.choices] == [0, 1]
    text = two.choices[0].text
    cut = client.completions.create(
        model=MODEL, prompt="once", max_tokens=3, temperature=0, stop=[" "]
    )
    assert cut.choices[0].finish_reason in ("stop", "length")
    assert text is not None


def test_openai_responses(cluster: Cluster) -> None:
    """Whole, streamed by the package's own accumulator, and a conversation of several turns."""
    client = oai(cluster)
    ask: Any = {"model": MODEL, "instructions": "Be kind.", "max_output_tokens": 9}
    whole = client.responses.create(input="Say hello.", temperature=0, **ask)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 9
    with client.responses.stream(input="Say hello.", temperature=0, **ask) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    turns = [*HI, *whole.output, {"role": "user", "content": "Again."}]
    again = client.responses.create(input=turns, **ask)
    assert again.output_text


def test_openai_errors(cluster: Cluster) -> None:
    """Each kind of error is the package's exception for it, and names the field."""
    with pytest.raises(openai.AuthenticationError):
        oai(cluster, "ms-wrong").chat.completions.create(model=MODEL, messages=HI)
    with pytest.raises(openai.NotFoundError):
        oai(cluster).chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as caught:
        oai(cluster).chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        oai(cluster).responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_openai_comes_back_after_429(cluster: Cluster) -> None:
    """Without retries it raises; with them it waits as Retry-After says, and is served."""
    ask: Any = {"model": MODEL, "messages": HI, "max_tokens": 2_000}
    held = oai(cluster, cluster.busy_key).chat.completions.create(stream=True, **ask)
    try:
        next(iter(held))
        with pytest.raises(openai.RateLimitError) as caught:
            oai(cluster, cluster.busy_key).chat.completions.create(model=MODEL, messages=HI)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        held.close()
    later = oai(cluster, cluster.busy_key, retries=8)
    assert later.chat.completions.create(model=MODEL, messages=HI, max_tokens=3).choices


# anthropic


def test_anthropic_messages(cluster: Cluster) -> None:
    """Whole, streamed by the package's own accumulator, and the count of a prompt's tokens."""
    client = ant(cluster)
    ask: Any = {"model": MODEL, "system": "Be kind.", "messages": HI, "max_tokens": 9}
    ask["extra_body"] = {"temperature": 0}  # the package has no argument for it any more
    whole = client.messages.create(**ask)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 9
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    usage = final.usage
    counted = client.messages.count_tokens(model=MODEL, system="Be kind.", messages=HI)
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    turns = [*HI, {"role": "assistant", "content": whole.content}, *HI]
    assert client.messages.create(model=MODEL, messages=turns, max_tokens=3).content


def test_anthropic_errors(cluster: Cluster) -> None:
    """Each kind of error is the package's exception for it; 429 is waited for."""
    with pytest.raises(anthropic.AuthenticationError):
        ant(cluster, "ms-wrong").messages.create(model=MODEL, messages=HI, max_tokens=3)
    with pytest.raises(anthropic.NotFoundError):
        ant(cluster).messages.create(model="other", messages=HI, max_tokens=3)
    tool: Any = {"name": "f", "input_schema": {"type": "object"}}
    with pytest.raises(anthropic.BadRequestError, match="no place for tools"):
        ant(cluster).messages.create(model=MODEL, messages=HI, max_tokens=3, tools=[tool])
    with ant(cluster, cluster.busy_key).messages.stream(
        model=MODEL, messages=HI, max_tokens=2_000
    ) as held:
        next(iter(held))
        with pytest.raises(anthropic.RateLimitError):
            ant(cluster, cluster.busy_key).messages.create(model=MODEL, messages=HI, max_tokens=3)
    later = ant(cluster, cluster.busy_key, retries=8)
    assert later.messages.create(model=MODEL, messages=HI, max_tokens=3).content


# tools, which fake engines call where they must


CITIES = {"city": {"enum": ["Oslo", "Rome"]}}
SCHEMA: Any = {
    "type": "object", "properties": CITIES, "required": ["city"], "additionalProperties": False,
}  # fmt: skip


def test_openai_tools(tool_cluster: Cluster) -> None:
    """A chat and a Response call a function, whole and streamed, and get its result."""
    client = oai(tool_cluster)
    function = {"name": "weather", "parameters": SCHEMA}
    turns: Any = [*HI]
    ask: Any = {"model": TOOL_MODEL, "tools": [{"type": "function", "function": function}]}
    whole = client.chat.completions.create(messages=turns, tool_choice="required", **ask)
    with client.chat.completions.stream(messages=turns, tool_choice="required", **ask) as stream:
        final = stream.get_final_completion()
    for choice in (whole.choices[0], final.choices[0]):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in CITIES["city"]["enum"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*HI, final.choices[0].message, {**result}]
    after = client.chat.completions.create(messages=turns, max_tokens=5, **ask)
    assert after.choices[0].message.content

    ask["tools"] = [{"type": "function", **function}]
    response = client.responses.create(input="Hi.", tool_choice="required", **ask)
    with client.responses.stream(input="Hi.", tool_choice="required", **ask) as stream:
        streamed = stream.get_final_response()
    for it in (response, streamed):
        (item,) = it.output
        assert (item.type, item.name) == ("function_call", "weather")
        assert json.loads(item.arguments)["city"] in CITIES["city"]["enum"]
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
    turns = [*HI, *streamed.output, output]
    assert client.responses.create(input=turns, max_output_tokens=5, **ask).output_text


def test_anthropic_tools(tool_cluster: Cluster) -> None:
    """A Message uses a tool, whole and streamed, and gets its result."""
    client = ant(tool_cluster)
    ask: Any = {
        "model": TOOL_MODEL,
        "max_tokens": 200,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    whole = client.messages.create(messages=HI, tool_choice={"type": "any"}, **ask)
    with client.messages.stream(messages=HI, tool_choice={"type": "any"}, **ask) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        (used,) = message.content
        assert (message.stop_reason, used.type, used.name) == ("tool_use", "tool_use", "weather")
        assert used.input["city"] in CITIES["city"]["enum"]
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain"}
    turns: Any = [
        *HI,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(messages=turns, **{**ask, "max_tokens": 5})
    assert after.content[0].text


# what others build on them


def test_litellm(cluster: Cluster) -> None:
    """Chat whole and streamed, Responses, and Messages, by the names of their providers."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm = pytest.importorskip("litellm")
    to: Any = {"api_base": cluster.url + "/v1", "api_key": cluster.key}
    name = f"openai/{MODEL}"
    whole = litellm.completion(model=name, messages=HI, max_tokens=5, **to)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 5
    chunks = list(litellm.completion(model=name, messages=HI, max_tokens=5, stream=True, **to))
    assert "".join(it.choices[0].delta.content or "" for it in chunks)
    # litellm raises a smaller limit to 16, the least that OpenAI's own service takes.
    response = litellm.responses(model=name, input="Say hello.", max_output_tokens=20, **to)
    assert response.usage.output_tokens == 20
    message = litellm.completion(
        model=f"anthropic/{MODEL}",
        messages=HI,
        max_tokens=5,
        api_base=cluster.url,
        api_key=cluster.key,
    )
    assert message.choices[0].message.content
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(model=name, messages=HI, **{**to, "api_key": "ms-wrong"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(model=name, messages=HI, temperature=9, **to)


def test_langchain(cluster: Cluster) -> None:
    """Invoke and stream, by chat and by Responses."""
    langchain = pytest.importorskip("langchain_openai")
    for by_responses in (False, True):
        chat = langchain.ChatOpenAI(
            model=MODEL,
            base_url=cluster.url + "/v1",
            api_key=cluster.key,
            max_tokens=6,
            max_retries=0,
            use_responses_api=by_responses,
        )
        said = chat.invoke([("system", "Be kind."), ("human", "Say hello.")])
        assert said.text
        assert said.usage_metadata["output_tokens"] == 6
        assert "".join(it.text for it in chat.stream("Say hello."))


def test_llm(cluster: Cluster, tmp_path: Path) -> None:
    """Simon Willison's llm, with a model of its extra-openai-models.yaml."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {MODEL}\n  api_base: {cluster.url}/v1\n"
        "  api_key_name: here\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"here": cluster.key}))
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        words = ["-m", "llm", "-m", "here", "Say hello.", "-o", "max_tokens", "5", *more]
        done = subprocess.run(
            [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


@pytest.mark.parametrize("kind", ["chat", "responses", "messages", "completions"])
def test_aiperf(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """A measured load of streams, without an error."""
    pytest.importorskip("aiperf")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL),
            *("--url", cluster.url, "--endpoint-type", kind, "--streaming"),
            *("--api-key", cluster.key, "--tokenizer", "builtin"),
            *("--request-count", "20", "--concurrency", "4", "--ui", "none"),
            *("--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "10"),
            *("--artifact-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(found.read_text())
    assert report["request_count"]["avg"] == 20
    assert not report.get("error_request_count", {}).get("avg")
