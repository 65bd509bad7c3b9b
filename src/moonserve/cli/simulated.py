"""The options that say what is simulated, for the commands `simulate` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import click

from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.residency import PredictorName
from moonserve.core.schedule.tuning import Admission
from moonserve.core.store.evict import EVICTIONS

_Command = TypeVar("_Command", bound=Callable[..., object])
_COUNT = click.IntRange(min=0)
_SOME = click.IntRange(min=1)
_MODE = click.Choice(get_args(Admission))

_KINDS: Mapping[str, dict[str, Any]] = {
    "prefill": {"type": _COUNT},
    "decode": {"type": _COUNT},
    "mixed": {"type": _COUNT, "default": 0},
    "policy": {"type": click.Choice(list(POLICIES)), "default": "kvcache_centric"},
    "threshold": {"default": 1.0},
    "spread-bytes": {"default": "8GiB"},
    "ttft-slo": {"default": "30s"},
    "tbt-slo": {"default": "200ms"},
    "admission": {"type": _MODE, "default": "none"},
    "admission-low": {"type": _MODE},
    "admission-high": {"type": _MODE},
    "predictor": {"type": click.Choice(get_args(PredictorName)), "default": "survival"},
    "cpp": {"type": _SOME, "default": 1},
    "profile": {"default": "a800-loaded"},
    "cache-blocks": {"default": "5859"},
    "eviction": {"type": click.Choice(list(EVICTIONS)), "default": "lru"},
    "pool": {"type": click.Choice(["local", "global"]), "default": "local"},
    "keep-output": {"is_flag": True},
    "prefill-seqs": {"type": _SOME, "default": 1},
    "chunk-tokens": {"type": _SOME},
    "first-token": {"type": click.Choice(["prefill", "decode"]), "default": "prefill"},
    "no-overlap": {"is_flag": True},
    "racks": {"type": _COUNT, "default": 0},
    "seed": {"default": 0},
    "fault": {"multiple": True},
}
_HELP = {
    "--prefill N": "Prefill instances.  [default: 8]",
    "--decode N": "Decode instances.  [default: 8]",
    "--mixed N": "Instances that do both, instead.",
    "--policy NAME": f"Placement policy: {', '.join(POLICIES)}.",
    "--threshold RATIO": "Fetch a prefix that is this many times as long as the local one "
    "(Algorithm 1).",
    "--spread-bytes SIZE": "Copy hot prefixes to idle instances, at most this much at a time; "
    "0: none.",
    "--ttft-slo TIME": "Goal for the first token.",
    "--tbt-slo TIME": "Goal between tokens.",
    "--admission": "Refuse requests that are predicted to miss a goal. ttft: by the predicted "
    "TTFT; early: also by decode's load now; predictive: by its load when prefill will have ended.",
    "--admission-low": "The same for requests of a priority below 0.",
    "--admission-high": "The same for requests of a priority above 0.",
    "--predictor": "How predictive admission estimates the lengths of outputs.",
    "--cpp N": "Most prefill instances that share a prompt for which one alone would be late.",
    "--profile NAME": f"What instances cost and hold: {', '.join(PROFILES)}, or a file.",
    "--cache-blocks N": "KV blocks that each prefill instance's cache holds, or infinite.",
    "--eviction": "Order of eviction.",
    "--pool": "One cache for each instance, or one for all of them.",
    "--keep-output": "Decode instances keep KV for the next turns.",
    "--prefill-seqs N": "Prompts that a prefill instance computes at a time.",
    "--chunk-tokens N": "Most tokens of one pass (chunked prefill).  [default: no limit]",
    "--first-token": "Which instance streams the first token; decode makes it again, as behind "
    "vLLM.",
    "--no-overlap": "KV moves only after its prefill has ended.",
    "--racks N": "Number of racks, in which instances stand in turn; 0: unknown.",
    "--seed N": "Seed for policies that draw at random.",
    "--fault WHAT": "A fault at a time: kill:p003@600s, join:p003@660s, or "
    "slow:d001@600sx2 for twice as slow. May be given again.",
}
"""Flag and the name of its value -> help text."""


def simulated(*names: str, **defaults: object) -> Callable[[_Command], _Command]:
    """Give a command these options, or all of them; `defaults`: those that differ, by option."""

    def decorate(command: _Command) -> _Command:
        for shown, text in reversed(_HELP.items()):
            flag, _, value = shown.partition(" ")
            name = flag[2:]
            if names and name not in names:
                continue
            kind = _KINDS[name] | ({"default": defaults[name]} if name in defaults else {})
            option = click.option(flag, metavar=value or None, help=text, show_default=True, **kind)
            command = option(command)
        return command

    return decorate
