"""The supervisor, over `python -c` children."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moonserve.live.process import supervise
from moonserve.live.process.supervise import Child, GaveUp, Restarts, Supervisor

OBEDIENT = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(60)"
)
FAST = Restarts(backoff_s=0.01)


def child(name: str, code: str, **kwargs: object) -> Child:
    """A child that runs `code`."""
    return Child(name, (sys.executable, "-c", code), dict(os.environ), **kwargs)  # type: ignore[arg-type]


async def until(true: Callable[[], bool], deadline_s: float = 10) -> None:
    """Poll until the condition holds; a deadline fails the test."""
    async with asyncio.timeout(deadline_s):
        while not true():
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process ended (a zombie has)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"


def test_stop_goes_rank_by_rank() -> None:
    """A child of a higher rank is asked to stop only after the lower ranks are gone."""
    say = (
        "import signal, sys, time\n"
        "def bye(*_):\n"
        "    print('asked', flush=True); time.sleep(0.2); print('bye', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(60)"
    )
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        boss = Supervisor(
            [child("late", say, rank=1), child("early", say)], lambda *line: told.append(line)
        )
        running = asyncio.create_task(boss.run())
        await until(lambda: {("late", "up"), ("early", "up")} <= set(told))
        await boss.stop()
        await asyncio.wait_for(running, 5)
        assert boss.pids == {}

    asyncio.run(scene())
    assert told.index(("early", "bye")) < told.index(("late", "asked"))


def test_stubborn_child_is_killed_after_its_grace() -> None:
    """A child that outlives its grace gets SIGKILL, and the supervisor reports it."""
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        boss = Supervisor([child("mule", STUBBORN, grace_s=0.1)], lambda *line: told.append(line))
        running = asyncio.create_task(boss.run())
        await until(lambda: ("mule", "up") in told)
        await asyncio.wait_for(boss.stop(), 5)
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    assert any("killed" in line for _, line in told)


def test_a_child_may_ask_for_another_signal_than_sigterm() -> None:
    """A front learns by it that the others at its port end, too."""
    say = (
        "import signal, sys, time\n"
        "def bye(*_):\n"
        "    print('bye', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGUSR1, bye); print('up', flush=True); time.sleep(60)"
    )
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        front = child("front", say, stop_signal=supervise.ALL_END)
        boss = Supervisor([front], lambda *line: told.append(line))
        running = asyncio.create_task(boss.run())
        await until(lambda: ("front", "up") in told)
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    assert ("front", "bye") in told


def test_kill_cuts_a_stop_short() -> None:
    """A kill ends a stop that still waits for a child."""
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        boss = Supervisor([child("mule", STUBBORN, grace_s=600)], lambda *line: told.append(line))
        running = asyncio.create_task(boss.run())
        await until(lambda: ("mule", "up") in told)
        stopping = asyncio.create_task(boss.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        boss.kill()
        await asyncio.wait_for(running, 5)
        await stopping

    asyncio.run(scene())


def test_dead_child_is_started_again() -> None:
    """The supervisor reports an unexpected death and starts the child again."""
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        boss = Supervisor([child("w", OBEDIENT)], lambda *line: told.append(line), FAST)
        running = asyncio.create_task(boss.run())
        await until(lambda: ("w", "up") in told)
        first = boss.pids["w"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: told.count(("w", "up")) == 2)
        assert boss.pids["w"] != first
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    assert any("KILLED BY SIGKILL" in line for _, line in told)


def test_a_child_that_beat_and_hangs_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child whose loop stands still is killed; one that beats or never beat is not."""
    monkeypatch.setattr(supervise, "_BEAT_S", 0.05)
    program = (
        "import asyncio, time\nfrom moonserve.live.process import supervise\n"
        "supervise._BEAT_S = 0.05\n"
        "async def main():\n"
        "    supervise.beat(); print('up', flush=True); await asyncio.sleep(0.2); {}\n"
        "asyncio.run(main())"
    )
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        children = [
            child("hung", program.format("time.sleep(60)"), silence_s=0.5),
            child("busy", program.format("await asyncio.sleep(60)"), silence_s=0.5),
            child("other", OBEDIENT, silence_s=0.5),
        ]
        boss = Supervisor(children, lambda *line: told.append(line), FAST)
        running = asyncio.create_task(boss.run())
        await until(lambda: {("busy", "up"), ("other", "up")} <= set(told))
        kept = {name: boss.pids[name] for name in ("busy", "other")}
        await until(lambda: told.count(("hung", "up")) == 2)
        assert kept.items() <= boss.pids.items()
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    said = [line for name, line in told if name == "hung"]
    assert said[1:3] == [
        "hangs: no sign of life for 0.5 s: killed",
        "WAS KILLED BY SIGKILL; starting it again in 0.01 s",
    ]


def test_gives_up_and_stops_the_others() -> None:
    """A child that dies too often at the start ends all, with an error that names it and why."""
    told: list[tuple[str, str]] = []
    pids: list[int] = []

    async def scene() -> None:
        boss = Supervisor(
            [child("ok", OBEDIENT), child("bad", "raise SystemExit(3)")],
            lambda *line: told.append(line),
            FAST,
        )
        running = asyncio.create_task(boss.run())
        await until(lambda: "ok" in boss.pids)
        pids.append(boss.pids["ok"])
        with pytest.raises(GaveUp, match=r"bad died with exit code 3, 5 times in a row"):
            await asyncio.wait_for(running, 20)

    asyncio.run(scene())
    assert gone(pids[0])
    assert sum("starting it again" in line for _, line in told) == 4


def test_no_restart_where_none_can_help() -> None:
    """A child whose exit code means a wrong setting is not started again."""
    told: list[str] = []

    async def scene() -> None:
        boss = Supervisor([child("w", "raise SystemExit(2)")], lambda _, line: told.append(line))
        with pytest.raises(GaveUp, match="w died with exit code 2; a restart cannot help"):
            await asyncio.wait_for(boss.run(), 10)

    asyncio.run(scene())
    assert not told


READY_FIRST = (
    "import os, socket, sys, time\nfrom pathlib import Path\n"
    "beats = socket.socket(fileno=os.dup(0))\n"
    "if not Path({mark!r}).exists():\n"
    "    Path({mark!r}).touch(); beats.send(b'.'); print('up', flush=True)\n"
    "sys.exit({code})"
)
"""A child that is ready at its first start only, and always ends with this code."""


@pytest.mark.parametrize("code", [1, 2, 3])
def test_deaths_of_a_child_that_was_ready_never_end_the_others(tmp_path: Path, code: int) -> None:
    """A child that has been ready may die as often as it does, with any exit code."""
    told: list[tuple[str, str]] = []

    async def scene() -> None:
        bad = READY_FIRST.format(mark=str(tmp_path / "mark"), code=code)
        children = [child("ok", OBEDIENT), child("bad", bad)]
        rules = Restarts(backoff_s=0.01, longest_s=0.04, limit=3)
        boss = Supervisor(children, lambda *line: told.append(line), rules)
        running = asyncio.create_task(boss.run())
        await until(lambda: sum("starting it again" in line for _, line in told) >= 7)
        assert "ok" in boss.pids
        assert not running.done()
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    pauses = [line.rpartition(" in ")[2] for _, line in told if "starting it again" in line]
    assert pauses[:7] == ["0.01 s", "0.02 s", *["0.04 s"] * 5]


def test_pauses_begin_anew_for_a_child_that_ran_well() -> None:
    """A death after a long life is followed by the shortest pause."""
    told: list[str] = []

    async def scene() -> None:
        rules = Restarts(backoff_s=0.01, healthy_s=0.0)
        boss = Supervisor(
            [child("w", "raise SystemExit(3)")], lambda _, line: told.append(line), rules
        )
        running = asyncio.create_task(boss.run())
        await until(lambda: len(told) >= 6)
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    assert set(told) == {"DIED WITH EXIT CODE 3; starting it again in 0.01 s"}


def test_a_child_that_ends_well_has_not_died() -> None:
    """It was stopped from outside, after a drain for example; it starts again all the same."""
    told: list[str] = []

    async def scene() -> None:
        rules = Restarts(backoff_s=0.01, healthy_s=0.0)
        boss = Supervisor([child("w", "pass")], lambda _, line: told.append(line), rules)
        running = asyncio.create_task(boss.run())
        await until(lambda: len(told) >= 1)
        await boss.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(scene())
    assert set(told) == {"ENDED WITH EXIT CODE 0; starting it again in 0.01 s"}


def test_cancelled_run_leaves_no_child() -> None:
    """Cancelling run ends the children too."""

    async def scene() -> int:
        boss = Supervisor([child("w", OBEDIENT)], lambda *_: None)
        running = asyncio.create_task(boss.run())
        await until(lambda: "w" in boss.pids)
        pid = boss.pids["w"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pid

    assert gone(asyncio.run(scene()))


def test_very_long_lines_are_passed_on_in_pieces() -> None:
    """A line without end neither stops the pump nor grows without bound."""
    told: list[str] = []

    async def scene() -> None:
        code = "print('x' * 200_000); print('end', flush=True); import time; time.sleep(60)"
        boss = Supervisor([child("w", code)], lambda _, line: told.append(line))
        running = asyncio.create_task(boss.run())
        await until(lambda: "end" in told)
        await boss.stop()
        await running

    asyncio.run(scene())
    assert sum(len(line) for line in told) == 200_003
    assert max(map(len, told)) < 100_000


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at /proc")
def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the supervisor also ends its children."""
    pid_file = tmp_path / "pid"
    grandchild = (
        "import os, time\nfrom moonserve.live.process.supervise import die_with_parent\n"
        f"die_with_parent(); open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    boss_code = (
        "import asyncio, os, sys\nfrom moonserve.live.process.supervise import Child, Supervisor\n"
        f"c = Child('w', (sys.executable, '-c', {grandchild!r}), dict(os.environ))\n"
        "async def main(): await Supervisor([c], print).run()\n"
        "asyncio.run(main())"
    )
    boss = subprocess.Popen([sys.executable, "-c", boss_code])
    try:
        _wait(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
        assert not gone(pid)
    finally:
        boss.kill()
        boss.wait()
    _wait(lambda: gone(pid))


def _wait(true: Callable[[], bool], deadline_s: float = 10) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
