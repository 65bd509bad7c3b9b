"""Python runs this at its start if the folder is in PYTHONPATH: the extra `engine` is not there."""

import sys

for package in ("torch", "safetensors"):
    sys.modules[package] = None  # type: ignore[assignment] # so that imports fail
