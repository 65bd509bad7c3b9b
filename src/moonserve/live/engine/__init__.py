"""Engines: run passes over paged KV blocks. torch lives here and nowhere else.

Importing this package loads no torch (the fake engine works without it); it only tells OpenMP,
before torch can load, that waiting threads sleep: spinning ones cost a contended machine 30x.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
