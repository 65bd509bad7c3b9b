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

CACHE_THRESHOLD = 0.3
BALANCE_ABS, BALANCE_REL = 64, 1.5
"""The launchers' defaults of SGLang's router and of vLLM's, which began as a copy of it."""

LLMD_PREFIX, LLMD_QUEUE = 2.0, 1.0
LLMD_PREFIX_TOKENS: Tokens = 4_096
"""256 blocks of 64 characters, at our own guess of four characters a token."""

PREBLE_WINDOW_US: Micros = HISTORY_US
PREBLE_HIGH_LOAD = 15
PREBLE_SETTLED = 50
"""Requests before loads are compared."""

AIBRIX_CACHED_MS = (0.005, 1.0)
AIBRIX_COMPUTED_MS = (0.001, 1.5, 5.0)
AIBRIX_USUAL_TOKENS: Tokens = 512
"""The prompt whose time stands for the mean prefill of an instance that has measured none."""

LLMD_STICKY, LLMD_STICKY_IN_TIER = 0.99, 0.80
"""Cached shares of a prompt from which on an instance is sticky: of all, and of one tier."""
LLMD_PENALTY_US: Micros = 5_000_000
LLMD_EXPLORES = 0.01

LOADAWARE_BETA = 1.0
"""Full hits that a load of twice the fleet's mean costs."""


def sglang_cache_aware(options: Options, state: PolicyState) -> Sequence[float]:
    """Fewest requests while counts are far apart, else the longest prefix if it is long enough.

    SGLang's cache_aware, from policies/cache_aware.rs of sgl-router (@026f853) and
    sgl-model-gateway (@053b63f). Far apart: max - min > 64 and max > 1.5 * min. Long enough: more
    than 0.3 of the prompt. These are its launcher's defaults (router_args.py @05e589a); the bare
    Rust struct has 0.5, 32 and 1.1. Where no prefix is long enough we take the fewest requests, as
    the gateway does since PR #14650 (sgl-router took the smallest tree).

    Approximated: what an instance holds stands for the router's tree of what it sent there;
    tokens for characters; the first for whichever of equal holders its tree names.
    """
    return _longest_or_fewest(options)


def vllm_cache_aware(options: Options, state: PolicyState) -> Sequence[float]:
    """Fewest requests while counts are far apart, else the longest prefix if it is long enough.

    vLLM's router, cache_aware, from src/policies/cache_aware.rs (@16917f4) at the defaults of its
    launcher (src/main.rs @03e9af5, py_src/vllm_router/router_args.py @1700eef): 0.3, 64 and 1.5.
    It is the rule of SGLang's router, with the fewest requests where no prefix is long enough. So
    both have the same score here; they are two names, since either may change.

    Left out: affinity by a session's header, which traces do not have. Approximated as for
    SGLang's; of equal counts its code takes the first worker, and the Conductor's ties are better.
    """
    return _longest_or_fewest(options)


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


def aibrix_conductor(options: Options, state: PolicyState) -> Sequence[float]:
    """Estimated TTFT in ms: requests * mean prefill + use of the prefix + prefill of the rest.

    AIBrix's score policy `conductor` for prefill pods (PR #2387, after FAST'25 section 4), from
    pkg/plugins/gateway/algorithms/pd/prefill_scorer.go as of 2026-09 with its default
    coefficients: 0.005 * cached + 1, and 0.001 * rest ** 1.5 + 5, each 0 where there are no such
    tokens. An instance without a measured prefill counts as one that takes 512 tokens at a time.

    Approximated: the mean prefill is that of the work given in the last 3 minutes, while AIBrix
    reads the engine's histogram since its start. It has no transfer from other instances either.
    """
    cached_ms, cached_base_ms = AIBRIX_CACHED_MS
    scores = []
    for local, view in zip(options.local, options.views, strict=True):
        cached = local * options.block_size
        past = state.history.get(view.info.id, ())
        mean_ms = _aibrix_computed_ms(AIBRIX_USUAL_TOKENS)
        if past:
            mean_ms = sum(work_us for _, work_us in past) / len(past) / 1e3
        prefix_ms = cached_ms * cached + cached_base_ms if cached else 0.0
        rest_ms = _aibrix_computed_ms(options.ask.length - cached)
        scores.append(view.prefills * mean_ms + prefix_ms + rest_ms)
    return scores


def _aibrix_computed_ms(tokens: Tokens) -> float:
    scale_ms, power, base_ms = AIBRIX_COMPUTED_MS
    computed: float = scale_ms * tokens**power + base_ms
    return computed


def llmd_latency(options: Options, state: PolicyState) -> Sequence[float]:
    """Of the instances predicted to be in time, one drawn, likelier the less time it spares.

    llm-d's latency scorer (pkg/epp/framework/plugins/scheduling/scorer/latency/plugin.go of
    llm-d-router @2b0e757), with the filters before it (prefixcacheaffinity @066c20e,
    sloheadroomtier @45c3854) and the weighted random picker, at the values of its guide:

    1. Sticky instances, with 0.99 of the prompt cached, come alone, if there are any and the
       soonest of them is not later than the soonest of all by more than 5 s.
    2. Those in time (headroom: the objective less predicted TTFT, not below 0) come alone, if
       there are any. Then step 1 again, from 0.80 on.
    3. If none is in time, the idle ones come alone, if there are any.
    4. The weight falls from 101 where |headroom| is least to 2 where it is most.
    In 1 of 100 requests each filter is left out, or takes those that are late.

    Without an objective all are late by their whole TTFT. TBT plays no part for prefill there
    either. Approximated: TTFT is the Conductor's exact estimate from the instance's own prefix;
    llm-d trains a model on what it measured.
    """
    goal_us = options.ask.slo.slo.ttft_us or 0
    ttft_us = options.ttft_us
    rows = _sticky(range(len(ttft_us)), options, ttft_us, LLMD_STICKY, state)
    early = [row for row in rows if ttft_us[row] <= goal_us]
    late = [row for row in rows if ttft_us[row] > goal_us]
    rows = late if early and late and _explores(state) else early or late
    rows = _sticky(rows, options, ttft_us, LLMD_STICKY_IN_TIER, state)
    if ttft_us[rows[0]] > goal_us:
        rows = [row for row in rows if not options.views[row].prefills] or rows
    spare_us = {row: abs(goal_us - ttft_us[row]) for row in rows}
    least_us = min(spare_us.values())
    range_us = max(spare_us.values()) - least_us
    scores = [0.0] * len(ttft_us)
    for row in rows:
        share = (spare_us[row] - least_us) / range_us if range_us else 0.5
        scores[row] = -(int(99 * (1 - share)) + 2)
    if state.rng is not None:
        drawn = state.rng.choices(rows, [-scores[row] for row in rows])[0]
        scores[drawn] = nextafter(min(scores), float("-inf"))
    return scores


def _sticky(
    rows: Sequence[int],
    options: Options,
    ttft_us: Sequence[Micros],
    share: float,
    state: PolicyState,
) -> Sequence[int]:
    """The rows with this share of the prompt cached; all rows, if none has it or that is late.

    The block that holds the last token does not count: it is always computed.
    """
    blocks = max(1, (options.ask.length - 1) // options.block_size)
    sticky = [row for row in rows if options.local[row] >= share * blocks]
    if not sticky or _explores(state):
        return rows
    late_us = min(ttft_us[row] for row in sticky) - min(ttft_us[row] for row in rows)
    return rows if late_us > LLMD_PENALTY_US else sticky


def _explores(state: PolicyState) -> bool:
    return state.rng is not None and state.rng.random() < LLMD_EXPLORES


def production_stack_loadaware(options: Options, state: PolicyState) -> Sequence[float]:
    """Share of the prompt cached - (requests - their mean) / max(1, their mean); highest wins.

    The vLLM production stack's `loadaware` (PR #1035, src/vllm_router/routers/routing_logic.py as
    of 2026-08) at its default beta of 1. If no instance holds any of the prompt, it routes by the
    session or the lowest rate of requests; here the same score does that, by the fewest requests.

    Approximated: its controller looks prefixes up in the engines' cache (LMCache); of equal
    scores it takes the first address, and the Conductor's ties are better.
    """
    counts = [_requests(view) for view in options.views]
    mean = sum(counts) / len(counts)
    scores = []
    for local, count in zip(options.local, counts, strict=True):
        cached = local * options.block_size / options.ask.length
        scores.append(LOADAWARE_BETA * (count - mean) / max(1.0, mean) - cached)
    return scores


def _longest_or_fewest(options: Options) -> Sequence[float]:
    """Fewest requests if counts are far apart or no prefix is long enough, else the longest."""
    counts = [_requests(view) for view in options.views]
    low = min(counts)
    high = max(counts)
    apart = high - low > BALANCE_ABS and high > BALANCE_REL * low
    cached = max(options.local) * options.block_size / options.ask.length
    if apart or cached <= CACHE_THRESHOLD:
        return counts
    return [-local for local in options.local]


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
