"""Scopes: what a request needs by its path, and what an API key may do."""

from __future__ import annotations

from typing import Literal, TypeAlias

Scope: TypeAlias = Literal["infer", "metrics", "admin"]
"""Use models (/v1/…, /score and tokenizers), read /metrics, or everything else."""
_MODEL_PATHS = ("/score", "/tokenize", "/detokenize")
_OPEN_PATHS = frozenset({"/", "/openapi.json", "/health", "/ready", "/api/health"})
_PAGE = ("/ui", "/ui/")
"""The page for operators: files without secrets. What it shows needs the scope admin."""


def scope_of(path: str) -> Scope | None:
    """Return what a request for this path needs; None: nothing."""
    if path.startswith("/v1/") or path in _MODEL_PATHS:
        return "infer"
    if path in _OPEN_PATHS or path == _PAGE[0] or path.startswith(_PAGE[1]):
        return None
    return "metrics" if path == "/metrics" else "admin"
