"""`moonserve ask`: one question to a running gateway, and how its answer came about.

The command uses the gateway's HTTP API only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from time import monotonic
from typing import Any

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import print_json
from moonserve.core.errors import ConfigError, EngineFailed


class ShownDecision(msgspec.Struct):
    """What GET /api/decisions/<id> returns, as far as `ask` shows it."""

    prefill: str
    decode: str
    reused_tokens: int = 0
    holder: str | None = None
    predicted_ttft_ms: float | None = None
    page: str | None = None


class Answer(msgspec.Struct):
    """One answer, and how it came about."""

    text: str = ""
    request_id: str | None = None
    finish_reason: str | None = None
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    """Mean time between tokens after the first."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    decision: dict[str, Any] | None = None


@click.command()
@click.argument("prompt")
@url_option("The gateway.")
@click.option("--model", metavar="NAME", help="Default: the first the gateway serves.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def ask(
    prompt: str,
    url: str,
    model: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    as_json: bool,
) -> None:
    """Stream an answer to PROMPT ("-" reads it from stdin) from a running gateway.

    Then print how long the first token took (TTFT), the mean time between tokens (TBT), how many
    prompt tokens were reused, and what the Conductor decided.
    """
    if not temperature >= 0:  # NaN passes every range check
        raise ConfigError("must be a number of 0 or more", "temperature")
    prompt = _text(prompt)
    said = [{"role": "system", "content": system}] if system is not None else []
    body = {
        "messages": [*said, {"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    client = Client(url)
    answer = Answer()
    for piece in stream(client, {"model": model or client.first_model(), **body}, answer):
        if not as_json:
            click.echo(piece, nl=False)
    if answer.request_id is not None:
        with contextlib.suppress(EngineFailed):  # the gateway has forgotten the request
            answer.decision = client.decision(answer.request_id)
    if as_json:
        print_json(answer)
        return
    click.echo()
    sys.stdout.flush()
    for line in story(answer, url.rstrip("/")):
        click.echo(click.style(line, dim=True), err=True)


def _text(prompt: str) -> str:
    """The prompt, or for "-" the text of stdin. Raises ConfigError if it is not UTF-8."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()  # the shell's argument may hold bytes that are not text
    except UnicodeError as err:
        raise ConfigError("is not UTF-8 text", "prompt") from err
    return prompt


def story(answer: Answer, url: str) -> Iterator[str]:
    """Describe in up to three lines how the answer came about. url: of the gateway."""
    times = [
        f"{name} {value:.0f} ms"
        for name, value in (("TTFT", answer.ttft_ms), ("TBT", answer.tbt_ms))
        if value is not None
    ]
    counts = [
        f"{answer.completion_tokens:,} tokens",
        f"reused {answer.cached_tokens:,} of {answer.prompt_tokens:,} prompt tokens",
    ]
    yield ", ".join(times + counts)
    if answer.decision is None:
        return
    try:
        decision = msgspec.convert(answer.decision, ShownDecision)
    except msgspec.ValidationError:  # a newer gateway may use another form
        return
    # A request that was resumed was placed with the tokens that it had got; they are no prompt.
    planned = min(decision.reused_tokens, answer.prompt_tokens)
    reused = f"expected to reuse {planned:,} of {answer.prompt_tokens:,} tokens"
    if decision.reused_tokens and decision.holder:
        reused += f", from {decision.holder}"
    line = f"prefill {decision.prefill} ({reused}) → decode {decision.decode}"
    if decision.predicted_ttft_ms is not None:
        line += f", predicted TTFT {decision.predicted_ttft_ms:.0f} ms"
    yield line
    if decision.page is not None:
        yield f"see this request on the page: {url}{decision.page}"


def stream(client: Client, body: dict[str, Any], answer: Answer) -> Iterator[str]:
    """Send a chat request; yield its text as it comes, and fill `answer` in."""
    began = monotonic()
    first = last = None
    with client.events("/v1/chat/completions", body) as (answer.request_id, events):
        for event in events:
            if usage := event.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                answer.prompt_tokens = usage["prompt_tokens"]
                answer.completion_tokens = usage["completion_tokens"]
                answer.cached_tokens = details.get("cached_tokens") or 0
            for choice in event.get("choices", ()):
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                if text := choice.get("delta", {}).get("content"):
                    last = monotonic()
                    first = first or last
                    answer.text += text
                    yield text
    if first is not None and last is not None:
        answer.ttft_ms = round(1e3 * (first - began), 3)
        if answer.completion_tokens > 1:
            answer.tbt_ms = round(1e3 * (last - first) / (answer.completion_tokens - 1), 3)
