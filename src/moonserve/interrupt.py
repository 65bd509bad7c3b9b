"""Ends the program quietly if its user interrupts it while it is still imported.

The package calls `quiet_while_importing` before it imports anything else, and the command line
calls `importing_ended`. Between both, SIGINT ends the process with the code of an interrupted
program, without a traceback. A process that only imports the package keeps its own handler.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The exit code of a program that SIGINT ended, as shells have it."""
_RAISE = signal.default_int_handler
"""Python's own handler."""


def quiet_while_importing() -> None:
    """Change the handler of SIGINT, if this process is the program and has Python's own handler.

    While `python -m moonserve` imports the package, the program's name is "-m".
    """
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name in ("-m", "moonserve") and signal.getsignal(signal.SIGINT) is _RAISE:
        signal.signal(signal.SIGINT, _end)


def importing_ended() -> None:
    """From now on SIGINT raises KeyboardInterrupt, if `quiet_while_importing` has changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _RAISE)


def _end(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
