"""The base of frozen structs in modules that may be compiled.

The compiler (mypyc) ignores the options of a class, so `class X(msgspec.Struct, frozen=True)` in a
compiled module would be a struct that can be changed. A struct inherits the options of its base:
this module always stays Python, so what derives from Frozen is frozen in both forms of core.
"""

from __future__ import annotations

import msgspec


class Frozen(msgspec.Struct, frozen=True):
    """A struct that nobody can change, and that has a hash."""
