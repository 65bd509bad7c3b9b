"""Laws of what is learned from calls, whatever order they come and end in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonserve.core.schedule.observed import CallWatch, ObservedCall, Part

PARTS: tuple[Part, ...] = ("prefill", "decode", "whole")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "answer", "token", "end", "end", "others", "take")),
        st.integers(0, 2),
        st.integers(0, 20_000),
        st.sampled_from(PARTS),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
def test_samples_are_of_work_that_was_done(steps: list[tuple[str, int, int, Part, bool]]) -> None:
    """Every sample has a time above zero and work, no more prompt tokens than were sent, no more
    decodes than were out; a claim is judged once; nothing is kept of calls that are over."""
    watch, now_us, out = CallWatch(256), 0, dict[int, ObservedCall]()
    sent = asked = waiting = 0
    passes, hits = [], []
    for what, number, wait_us, part, said in steps:
        now_us += wait_us
        call = out.get(number)
        if what == "begin" and call is None:
            out[number] = call = ObservedCall(part, 1_000, 512, streams=said)
            watch.began(now_us, call)
            sent, asked = sent + 1_000 * (part != "decode"), asked + (part != "decode")
        elif what == "answer" and call is not None:
            watch.answered(now_us, call, 512 if said else None)
        elif what == "token" and call is not None:
            call.count += 1 + wait_us // 1_000
        elif what == "end" and call is not None:
            watch.ended(now_us, out.pop(number), 256 if said else None)
        elif what == "others":
            waiting = number % 2
            watch.others(now_us, waiting, number, 100 * number)
        elif what == "take":
            found = watch.take(now_us)
            passes, hits = [*passes, *found[0]], [*hits, *found[1]]
    for call in out.values():
        watch.ended(now_us + 1, call)
        watch.ended(now_us + 1, call)
    found = watch.take(now_us + 1)
    passes, hits = [*passes, *found[0]], [*hits, *found[1]]
    assert all(it.elapsed_us >= 0 for it in passes)
    assert all(it.prefill_new or it.decode_seqs for it in passes)
    assert sum(it.prefill_new for it in passes) <= sent
    assert all(min(it.decode_context, it.decode_seqs) >= 0 for it in passes)
    assert len(hits) <= asked
    assert not {**watch._prefilling, **watch._decoding, **watch._hidden}
    assert (watch._context, watch._blind) == (0, 0)
