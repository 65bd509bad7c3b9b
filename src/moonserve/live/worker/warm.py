"""Warm-up: a few passes before a worker joins, so that its first answers are neither slow nor a
surprise to the Conductor, which learns the worker's costs from them.

Called by the worker process before the runner exists; the pool is nobody's yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.request import Sampling
from moonserve.core.schedule.cost import pass_sample
from moonserve.core.schedule.facts import PassSample, Role
from moonserve.core.units import Micros, RequestId, Tokens
from moonserve.live.ports import Engine, EngineShape

_AGAIN = 2
"""How often a pass is measured again that others' work, or start, seems to have delayed."""
_SUSPECT = 2
"""So many times as long as its like is suspect."""
_SHORT: Tokens = 48
_DECODES = (1, 1, 4, 4)
"""Batch sizes of the decode passes."""


async def warm_up(engine: Engine, role: Role, chunk_tokens: Tokens) -> list[PassSample]:
    """Run passes of the kinds this role will see; what each took, the very first left out.

    What looks delayed is run again, and the shorter time counts: an instance that is believed to be
    slow gets no work that would show that it is not.
    """
    passes = list(_passes(engine.shape, role, chunk_tokens))
    took = [(await engine.run(work)).elapsed_us for work in passes]
    passes, took = passes[1:], took[1:]
    for _ in range(_AGAIN):
        for at in _suspects(passes, took):
            took[at] = min(took[at], (await engine.run(passes[at])).elapsed_us)
    return [pass_sample(work, us) for work, us in zip(passes, took, strict=True)]


def _suspects(passes: Sequence[Pass], took: Sequence[Micros]) -> list[int]:
    """The passes that took far longer than the quickest of their kind, by their indices.

    Prefills compare by the token, decode passes as they are.
    """
    each: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for at, (work, us) in enumerate(zip(passes, took, strict=True)):
        tokens = sum(len(chunk.tokens) for chunk in work.chunks)
        prefill = tokens > len(work.chunks)
        each[prefill].append((us / tokens if prefill else us, at))
    return sorted(
        at for kind in each.values() for slow, at in kind if slow > _SUSPECT * min(kind)[0]
    )


def _passes(shape: EngineShape, role: Role, chunk_tokens: Tokens) -> Iterator[Pass]:
    """Prefills of growing length and a second chunk; decodes of two batch sizes.

    One is longer than a chunk, as a part of a prompt may be: from chunks of one length alone, what
    attention costs inside of them cannot be told from what it costs to what was there before.
    """
    rooms = max(_DECODES)
    short = min(_SHORT, shape.max_len // 2, shape.num_blocks // rooms * shape.block_size - 1)
    if short < 1 or len(_DECODES) > shape.num_blocks:
        return
    yield Pass(tuple(_chunk(shape, room, 0, short) for room in range(rooms)))
    if role != "decode":
        longest = min(shape.max_len, shape.num_blocks * shape.block_size)
        for length in (short, chunk_tokens // 2, chunk_tokens, 3 * chunk_tokens):
            if length <= longest:
                yield Pass((_chunk(shape, 0, 0, length),))
        if 2 * chunk_tokens <= longest:
            yield Pass((_chunk(shape, 0, chunk_tokens, chunk_tokens),))
    if role != "prefill":
        for room in range(rooms):
            yield Pass((_chunk(shape, room, 0, short),))
        for count in _DECODES:
            yield Pass(tuple(_chunk(shape, room, short, 1) for room in range(count)))


def _chunk(shape: EngineShape, room: int, start: Tokens, length: Tokens) -> Chunk:
    """Some tokens of the room-th imagined request, which has its own part of the pool."""
    size = shape.block_size
    rooms = max(_DECODES)
    first = shape.num_blocks // rooms * room
    blocks = tuple(range(first, first + -(-(start + length) // size)))
    tokens = tuple((7 + start + i) % shape.vocab_size for i in range(length))
    return Chunk(RequestId(f"warm-up-{room}"), tokens, start, blocks, Sampling(temperature=0.0))
