"""The error of a model's files. The rooms that read them raise it: model, text and engine."""

from __future__ import annotations

from moonserve.core.errors import ConfigError


class BadModel(ConfigError):
    """A model's files are missing, damaged or not supported; the setting to change is `model`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")
