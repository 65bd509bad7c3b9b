"""The documents say what is there: commands, flags, make targets, help texts and linked files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from moonserve.cli import cli
from moonserve.cli.docs import fixed_width, render

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page: str) -> Iterator[list[str]]:
    """Every moonserve or make command in a page's shell blocks, and in its `inline code`."""
    blocks = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", page, re.DOTALL)
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:moonserve|make) [^`]+)`", prose)
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0] in ("moonserve", "make"):
            yield words


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    if words[0] == "make":
        unknown = [w for w in words[1:] if "=" not in w and w not in TARGETS]
        return f"the Makefile has no target {unknown[0]}" if unknown else None
    command: click.Command = cli
    context = fixed_width(cli, "moonserve", None)
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-"):
            below = command.get_command(context, word)
            if below is None:
                return f"{command.name or 'moonserve'} has no command {word}"
            command = below
        elif word.startswith("--"):
            known = {name for param in command.get_params(context) for name in param.opts}
            if word.partition("=")[0] not in known:
                return f"{command.name} has no flag {word}"
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda p: p.name)
def test_every_command_in_the_documents_exists(page: Path) -> None:
    """A reader can type every command and flag that a document shows."""
    wrong = {
        shlex.join(words): text
        for words in commands(page.read_text())
        if (text := complaint(words))
    }
    assert not wrong


@pytest.mark.parametrize(
    "line",
    ["moonserve upp", "moonserve up --prefil 2", "moonserve model push", "make chekc", "make up x"],
)
def test_a_wrong_command_is_found(line: str) -> None:
    """The check above can fail."""
    (words,) = commands(f"```sh\n$ {line}\n```")
    assert complaint(words)


def test_commands_are_found_in_blocks_and_in_prose() -> None:
    """Prompts, comments, continued lines, variables and inline code are all read."""
    page = (
        "Type `moonserve doctor`.\n```bash\n$ moonserve up \\\n  --decode 2 # two\n"
        "MOONSERVE_PORT=1 moonserve up\ncurl http://x\n```\n```text\nmoonserve nonsense\n```"
    )
    assert [" ".join(words) for words in commands(page)] == [
        "moonserve up --decode 2",
        "moonserve up",
        "moonserve doctor",
    ]
    assert all(complaint(words) is None for words in commands(page))


def missing(page: Path, text: str) -> list[str]:
    """The relative links in a page's text, code left out, that lead to no file or folder."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(<?([^)>\s]+)", prose)
    links += re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?([^>\s]+)", prose, re.MULTILINE)
    links += re.findall(r"""\b(?:src|href)=["']([^"']+)""", prose)
    local = [link for link in links if not re.match(r"[a-z][a-z0-9+.-]*:|//|#", link)]
    return [link for link in local if not (page.parent / unquote(link.partition("#")[0])).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda p: p.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    """No document links to a page that is not there."""
    assert missing(page, page.read_text()) == []


def test_a_link_to_nowhere_is_found() -> None:
    """Links of every form are checked; addresses, anchors and code are not."""
    text = (
        "[a](docs/none.md) [b](README.md#x) [c](#y) [d](https://h/none.md) [![e](none.png)](docs)\n"
        "`[f](code.md)` <img src='none.svg'>\n[ref]: none.txt 'title'\n[g]: mailto:a@b\n"
        "```md\n[h](block.md)\n```\n"
    )
    found = ["docs/none.md", "none.png", "none.txt", "none.svg"]
    assert missing(ROOT / "README.md", text) == found


def test_cli_page_equals_the_program() -> None:
    """docs/cli.md is the program's own help; `make docs` writes it."""
    assert (ROOT / "docs" / "cli.md").read_text() == render(), "run: make docs"
