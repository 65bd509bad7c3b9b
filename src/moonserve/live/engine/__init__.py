"""Engines: they run passes over paged KV blocks. No other room imports torch.

The import of this package does not load torch, because the fake engine works without it. It only
sets, before torch loads, that OpenMP's waiting threads sleep. Spinning threads slow a contended
machine down 30 times.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
