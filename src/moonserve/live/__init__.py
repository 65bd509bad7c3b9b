"""The doing half: asyncio at the edges around core's decisions.

May import core; never sim or show. Torch lives in live/engine and nowhere else.
"""
