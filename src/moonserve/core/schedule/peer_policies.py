"""Placement rules that other routers publish, as scores: baselines to compare with.

Each is a function like those of core.schedule.policies, which alone uses them. Its docstring names
where the rule was read and what is approximated here. For all of them: they see prefixes and load
exactly and at once, while real routers' views lag, and that favours them; none fetches a prefix
from elsewhere; they compare only the instances that have room. Quote this beside their figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nextafter

from moonserve.core.schedule.estimate import Options
from moonserve.core.schedule.policy_state import HISTORY_US, PolicyState
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import Micros, Tokens

SGLANG_CACHE_THRESHOLD = 0.3
SGLANG_BALANCE_ABS, SGLANG_BALANCE_REL = 64, 1.5

LLMD_PREFIX, LLMD_QUEUE = 2.0, 1.0
LLMD_PREFIX_TOKENS: Tokens = 4_096
"""256 blocks of 64 characters, at our own guess of four characters a token."""

PREBLE_WINDOW_US: Micros = HISTORY_US
PREBLE_HIGH_LOAD = 15
PREBLE_SETTLED = 50
"""Requests before loads are compared."""


def sglang_cache_aware(options: Options, state: PolicyState) -> Sequence[float]:
    """Fewest requests while counts are far apart, else the longest prefix if it is long enough.

    SGLang's cache_aware, from policies/cache_aware.rs of sgl-router (@026f853) and
    sgl-model-gateway (@053b63f). Far apart: max - min > 64 and max > 1.5 * min. Long enough: more
    than 0.3 of the prompt. These are its launcher's defaults (router_args.py @05e589a); the bare
    Rust struct has 0.5, 32 and 1.1. Where no prefix is long enough we take the fewest requests, as
    the gateway's code means to (its own comment, and sgl-router, say the smallest tree).

    Approximated: what an instance holds stands for the router's tree of what it sent there;
    tokens for characters; the first for whichever of equal holders its tree names.
    """
    counts = [_requests(view) for view in options.views]
    low = min(counts)
    high = max(counts)
    apart = high - low > SGLANG_BALANCE_ABS and high > SGLANG_BALANCE_REL * low
    cached = max(options.local) * options.block_size / options.ask.length
    if apart or cached <= SGLANG_CACHE_THRESHOLD:
        return counts
    return [-local for local in options.local]


def dynamo_overlap(options: Options, state: PolicyState) -> Sequence[float]:
    """Blocks left to prefill there with this prompt among them, plus blocks active there.

    Dynamo's KV router, from lib/kv-router/src/scheduling/selector.rs (@01690d4) at the defaults of
    its documentation (1.3): credit 1 for a block cached on the device, prefill scale 1, no decay,
    temperature 0, that is the least cost, any of equals. Tokens under way count as all undone
    until their prefill ends. Its cost is never below zero here: at least one token is computed.

    Active blocks are those of prompts in prefill, as in a prefill pool of its own, and where an
    instance decodes as well, of all that decodes or will. Approximated: a block that several
    requests share counts for each; all of an instance's own prefix counts as on the device (host
    state is worth 0.75 there); its queue in front of busy workers is left out.
    """
    size = options.block_size
    length = options.ask.length
    scores = []
    for local, view in zip(options.local, options.views, strict=True):
        prefill = (view.promised_tokens + length) / size - local
        active = max(view.prompt_tokens, view.context) / size + options.prompt_blocks
        scores.append(prefill + active)
    return _any_of_equals(scores, state)


def llmd_scorers(options: Options, state: PolicyState) -> Sequence[float]:
    """2 * share of the prompt cached + 1 * how short the queue is, from 0 (longest) to 1.

    llm-d's sample for prefill and decode apart (deploy/config/pd-epp-config.yaml @0bb9fa8), with
    the scorers of the Gateway API Inference Extension (multi/prefix/plugin.go @00913f9: at most
    256 blocks of 64 characters; scorer/queue.go and picker/max_score_picker.go @02308be: any of
    equals). Queues count waiting requests only: one that runs does not count.

    Approximated: what an instance holds stands for the plugin's own record of what it sent there;
    256 blocks are 4,096 tokens; one prompt runs at a time, the others wait.
    """
    total = min(options.ask.length, LLMD_PREFIX_TOKENS)
    waiting = [max(0, view.prefills - 1) for view in options.views]
    longest = max(waiting)
    spread = max(waiting) - min(waiting)
    scores = []
    for local, waits in zip(options.local, waiting, strict=True):
        prefix = min(local * options.block_size, LLMD_PREFIX_TOKENS) / total
        queue = (longest - waits) / spread if spread else 1.0
        scores.append(-(LLMD_PREFIX * prefix + LLMD_QUEUE * queue))
    return _any_of_equals(scores, state)


def preble_e2(options: Options, state: PolicyState) -> Sequence[float]:
    """E2: exploit the longest prefix where it is more than the rest of the prompt, else explore.

    Preble, from multi_node/global_scheduler_with_time.py (@0c962c4). Exploit: the least loaded of
    those with the longest prefix. Explore: the least loaded of all. Load is the prefill time given
    to an instance in the last 3 minutes, done or not, plus this prompt's own there (that last term
    is the paper's, from state, arXiv 2407.00023; the code has 0).

    Where the most loaded has 15 times the work of the least (the code's constant), and 50 requests
    came before, a request that would exploit the most loaded goes to the least. That is how we
    remember the paper's rebalancing; the copy of the code that we read moves prefixes instead, in
    a call that is commented out. Approximated: load is counted by instance, not by prefix; what
    eviction will cost, decode time and copies of hot prefixes are left out.
    """
    since_us = options.now_us - PREBLE_WINDOW_US
    recent = [
        [work_us for at_us, work_us in state.history.get(view.info.id, ()) if at_us >= since_us]
        for view in options.views
    ]
    work = [sum(past) for past in recent]
    load = [done + own for done, own in zip(work, options.compute_us, strict=True)]
    longest = max(options.local)
    if 2 * longest * options.block_size <= options.ask.length:
        return load
    far = 1 + max(load)
    exploit = [
        own if local == longest else own + far
        for own, local in zip(load, options.local, strict=True)
    ]
    chosen = min(range(len(exploit)), key=exploit.__getitem__)
    settled = sum(len(past) for past in recent) >= PREBLE_SETTLED
    if settled and work[chosen] == max(work) >= PREBLE_HIGH_LOAD * min(work):
        return work
    return exploit


def _requests(view: InstanceView) -> int:
    """Requests of an instance; its decodes include those that it prefills itself."""
    return max(view.prefills, view.decodes)


def _any_of_equals(scores: list[float], state: PolicyState) -> list[float]:
    """If there is a generator, draw one of the lowest scores and make it slightly lower."""
    if state.rng is not None:
        low = min(scores)
        lowest = [row for row, score in enumerate(scores) if score == low]
        if len(lowest) > 1:
            scores[state.rng.choice(lowest)] = nextafter(low, float("-inf"))
    return scores
