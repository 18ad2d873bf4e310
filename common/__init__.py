"""Helpers that scripts share. A script imports this first: other imports take seconds, in which signals may come."""

import os
import signal
import sys
from pathlib import Path


def _end(number: int, frame) -> None:
    name = signal.Signals(number).name
    os.write(2, f"stopped by {name}: no training was under way\n".encode())
    os._exit(128 + number)


_script = Path(sys.argv[0]).resolve()
if _script.is_file() and _script.parent == Path(__file__).resolve().parent.parent:  # not in tests, nor `python -m`
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _end)  # until Run answers them
