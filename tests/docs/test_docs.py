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
from tests.support.metric_names import frozen

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page: str) -> Iterator[list[str]]:
    """Every moonserve or make command in a page's shell blocks, and in its `inline code`."""
    blocks = re.findall(r"```(?:sh|bash|shell|console)\b[^\n]*\n(.*?)```", page, re.DOTALL)
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:moonserve|make) [^`]+)`", prose)
    for line in lines:
        if not re.match(r"(\$ )?([A-Z_]+=\S* )*(moonserve|make)\b", line):
            continue
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


def page_id(page: Path) -> str:
    """A page's path from the root."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
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


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The fragments that a page's headings give, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def missing(page: Path, text: str) -> list[str]:
    """The relative links in a page's text, without code, that lead to no file or heading."""
    words = re.sub(r"`[^`\n]*`", "", prose(text))
    links = re.findall(r"\]\(<?([^)>\s]+)", words)
    links += re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?([^>\s]+)", words, re.MULTILINE)
    links += re.findall(r"""\b(?:src|href)=["']([^"']+)""", words)
    wrong = []
    for link in links:
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / unquote(name) if name else page
        known = not fragment or (
            target.suffix == ".md"
            and target.exists()
            and fragment in anchors(target.read_text() if name else text)
        )
        if not (known and target.exists()):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    """No document links to a page or a heading that is not there."""
    assert missing(page, page.read_text()) == []


def test_a_link_to_nowhere_is_found() -> None:
    """Links of every form are checked, headings too; addresses and code are not."""
    text = (
        "# The y\n[a](docs/none.md) [b](README.md#none) [c](#the-y) [d](https://h/none.md)\n"
        "[![e](none.png)](docs) `[f](code.md)` <img src='none.svg'> [g](#z)\n"
        "[ref]: none.txt 'title'\n[h]: mailto:a@b\n```md\n[i](block.md)\n```\n"
    )
    found = ["docs/none.md", "README.md#none", "none.png", "#z", "none.txt", "none.svg"]
    assert missing(ROOT / "README.md", text) == found


def test_every_decision_has_a_number_of_its_own() -> None:
    """Texts name a decision by its number, so file names and headings agree on it."""
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert numbers == list(range(1, len(pages) + 1))
    for number, page in zip(numbers, pages, strict=True):
        assert page.read_text().startswith(f"# {number}. "), page.name


def test_every_page_is_in_the_table_of_contents() -> None:
    """docs/README.md links each page, but for decision records and figures of the papers."""
    folder = ROOT / "docs"
    table = (folder / "README.md").read_text()
    pages = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    listed = {page for page in pages if not page.startswith(("adr/", "paper/")) or "README" in page}
    assert not sorted(page for page in listed - {"README.md"} if f"({page})" not in table)


def strangers(text: str) -> list[str]:
    """The paths of modules, tests and documents that a page names and that do not exist."""
    rooms = "core|live|sim|show|cli|src|tests|bench|docs"
    named = re.findall(rf"(?<![\w/.-])(?:{rooms})/[\w./-]*\w", text)
    roots = (ROOT, ROOT / "src" / "moonserve")
    return sorted(
        {
            name
            for name in named
            if not any((root / f"{name}{end}").exists() for root in roots for end in ("", ".py"))
        }
    )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=page_id
)
def test_every_module_that_a_document_names_exists(page: Path) -> None:
    """A reader finds `core/kv/keys.py`, `live/worker` or `tests/dst` where a document says."""
    assert strangers(page.read_text()) == []


def test_a_module_that_moved_is_found() -> None:
    """The check above can fail; paths of other projects are let alone."""
    text = "`core/none` core/kv/keys.py, `live/worker`; lib/core/none.rs and `tests/none.py`."
    assert strangers(text) == ["core/none", "tests/none.py"]


def test_every_metric_of_the_product_is_in_the_documents() -> None:
    """docs/reference/metrics.md has every name that is frozen."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = set(re.findall(r"`([a-z_:]+)[`{]", page))
    assert not sorted(frozen().keys() - named)


def test_every_document_that_the_code_names_exists() -> None:
    """A docstring or a help text names a page of docs/ that is there."""
    files = [ROOT / "Makefile"]
    files += [path for room in ("src", "tests") for path in (ROOT / room).rglob("*.py")]
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path != Path(__file__)
        for name in re.findall(r"(?<![\w/])docs/[\w./-]+\.md", path.read_text())
        if not (ROOT / name).exists()
    }
    assert not wrong


def test_every_metric_that_the_documents_name_exists() -> None:
    """A name such as moonserve_instance_up is frozen."""
    named = {
        name
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"\bmoonserve[_:][a-z][a-z_]*[a-z]\b(?!_?[…*{])", page.read_text())
    }
    suffixes = r"_(?:bucket|sum|count)$"
    assert not sorted(name for name in named if re.sub(suffixes, "", name) not in frozen())


def test_cli_page_equals_the_program() -> None:
    """docs/reference/cli.md is the program's own help; `make docs` writes it."""
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == render(), "run: make docs"
