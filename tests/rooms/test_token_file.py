"""The cluster's token of commands: MOONSERVE_TOKEN, or the file of this user."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonserve.cli.token import TOKEN, member_token, own_token, token_file, token_for
from moonserve.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TOKEN, raising=False)


def test_all_processes_of_a_user_draw_one_token() -> None:
    """Also if they start at one time; nobody else may read it, and no line contains it."""
    lines: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: own_token(lines.append), range(16)))
    assert len(set(tokens)) == 1
    assert len(tokens[0]) >= 43
    assert token_file().stat().st_mode & 0o777 == 0o600
    assert token_file().parent.stat().st_mode & 0o777 == 0o700
    assert [*token_file().parent.iterdir()] == [token_file()]
    assert all(str(token_file()) in line and tokens[0] not in line for line in lines)


def test_the_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn then, and it is sent to every URL that the user names."""
    monkeypatch.setenv(TOKEN, "mine")
    assert own_token(print) == "mine"
    assert token_for("http://10.0.0.1:8000") == "mine"
    assert not token_file().exists()


def test_a_short_token_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used, and its user learns that it may be guessed; the token itself is not shown."""
    lines: list[str] = []
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    own_token(lines.append)
    assert lines == []
    monkeypatch.setenv(TOKEN, "hunter2")
    assert own_token(lines.append) == "hunter2"
    [line] = lines
    assert "only 7 characters" in line
    assert "hunter2" not in line


def test_the_drawn_token_stays_on_this_machine() -> None:
    """Commands send it to loopback only, and draw none; a member of another cluster needs its
    own."""
    assert token_for("http://127.0.0.1:8000") == ""
    assert not token_file().exists()
    token = own_token(lambda line: None)
    for here in ("http://127.0.0.1:8000", "localhost:80", "http://[::1]:1", "127.9.9.9"):
        assert token_for(here) == token
    for there in ("http://10.0.0.1:8000", "http://gw:8000", "https://localhost.evil.example"):
        assert token_for(there) == ""
        with pytest.raises(ConfigError, match="which is on another machine"):
            member_token(lambda line: None, "127.0.0.1", there)
    with pytest.raises(ConfigError, match=r"bound to 0\.0\.0\.0, so other machines call it"):
        member_token(lambda line: None, "0.0.0.0")
    assert member_token(lambda line: None, "127.0.0.1", "http://127.0.0.1:8000") == token


def test_a_file_that_others_may_read_is_refused() -> None:
    """As ssh refuses a key. An empty one is refused too."""
    own_token(lambda line: None)
    token_file().chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        own_token(lambda line: None)
    token_file().chmod(0o600)
    token_file().write_text("\n")
    with pytest.raises(ConfigError, match="has no token in it"):
        own_token(lambda line: None)


def test_without_a_place_for_the_file_a_process_draws_its_own(tmp_path: Path) -> None:
    """It says so, since no command will find it."""
    (tmp_path / "state").write_text("a file")
    lines: list[str] = []
    assert own_token(lines.append) != own_token(lines.append)
    assert all("cannot be written" in line for line in lines)
