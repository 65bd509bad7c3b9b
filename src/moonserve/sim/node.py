"""One simulated instance: it does things in the order of the live runner, in made-up time.

Batch, blocks and costs come from core; the times of passes and loads are made up. sim.cluster makes
the calls and receives their progress. A run of equal passes is computed in one go.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from moonserve.core.engine.batch import (
    Batch,
    Chunk,
    Counted,
    DecodeStep,
    Pass,
    PassResult,
    Progress,
)
from moonserve.core.engine.blocks import SharedBlocks
from moonserve.core.request import Finish, Sampling, Stopping
from moonserve.core.schedule.cost import Cost, pass_sample
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import Micros, RequestId, Tokens
from moonserve.sim.call import Call
from moonserve.sim.clock import VirtualClock

_GREEDY = Sampling(temperature=0.0)


class Node:
    """One instance. It calls `tell` with the Progress of each call, and `begin` when a call
    starts."""

    def __init__(
        self,
        info: InstanceInfo,
        cost: Cost,
        clock: VirtualClock,
        tell: Callable[[Node, Call, Progress], None],
        begin: Callable[[Node, Call], None],
        ahead: int,
        wake_us: Callable[[], Micros] = lambda: 0,
    ) -> None:
        """wake_us: returns how much longer a pass takes that begins now, see Profile.wake_us."""
        self.info = info
        self.name = str(info.id)
        self.cost = cost
        self._clock = clock
        self._tell = tell
        self._begin = begin
        self._ahead = ahead
        self._wake_us = wake_us
        self._pool = SharedBlocks(info.kv_blocks)
        self._batch = Batch(
            self._pool,
            block_size=info.namespace.block_size,
            chunk_tokens=info.chunk_tokens,
            max_seqs=info.max_seqs,
        )
        self._intake: deque[Call] = deque()
        self._loading: dict[RequestId, int] = {}
        """Blocks that loading calls will take; a part owns its blocks, and stays in here."""
        self._parts: deque[Call] = deque()
        """Parts whose first piece has arrived; the next passes are theirs."""
        self._blocks: dict[RequestId, Sequence[int]] = {}
        """The blocks of parts."""
        self._full = False
        """True while the first call of the intake finds no room and no call has left since."""
        self._calls: dict[RequestId, Call] = {}
        self._streaks: dict[RequestId, list[int]] = {}
        """The last span of each call that gets a token in every pass; its end is not known yet."""
        self._plan = 0
        """A number that grows when what was scheduled is no longer valid."""
        self._pass: tuple[Pass | DecodeStep, Micros] | None = None
        self._steady: list[int] | None = None
        """[passes to go, passes gone, requests, context tokens] of a run of equal passes."""
        self._turn_us: Micros = 0
        """When the last pass ended."""
        self._end_us: Micros = 0
        """When the current pass ends."""
        self._pace = 1.0
        self.ends: array[int] = array("Q")
        """When each pass ended, from the first one on."""
        self.busy_us: Micros = 0
        self.stirred = False
        """True if something happened here that `settle` has not looked at."""
        self.slow = 1.0
        self.dead = False

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._intake) + len(self._loading) + self._batch.waiting

    @property
    def running(self) -> int:
        """Calls that take part in passes."""
        return self._batch.running

    @property
    def computes(self) -> bool:
        """Whether it is in a pass, or in a run of them."""
        return self._pass is not None or self._steady is not None

    @property
    def preemptions(self) -> int:
        """How often the instance ran out of blocks."""
        return self._batch.preemptions

    @property
    def pass_us(self) -> Micros:
        """The time that the current pass takes, if it need not wait."""
        assert self._pass is not None
        return self._pass[1]

    def busy_by_us(self) -> Micros:
        """Engine time until now, including the current pass."""
        if self._steady is not None:
            self._run_to(self._clock.now_us)
        elif self._pass is None:
            return self.busy_us
        return self.busy_us + self._clock.now_us - self._turn_us

    def accept(self, call: Call) -> None:
        """Take a call in; it begins when `settle` finds room.

        Raises BadRequest and takes nothing if its tokens can never fit here, as a worker does.
        """
        self._batch.check_fits(call.prompt, call.most)
        self._calls[call.request] = call
        self._intake.append(call)
        self.stirred = True

    def cancel(self, request: RequestId) -> bool:
        """Drop a call, wherever it is. Returns whether there was one."""
        if request not in self._calls:
            return False
        self._break_run()
        call = self._calls.pop(request)
        self._end_streak(request)
        self._full = False
        self.stirred = True
        self._loading.pop(request, None)
        if call in self._intake:
            self._intake.remove(call)
        if call.part is None:
            self._batch.cancel(request)
        else:
            self._drop(call)
        return True

    def let_go(self, call: Call) -> None:
        """Release a part: the next stage has all that it needs."""
        if self._calls.get(call.request) is call and not self.dead:
            del self._calls[call.request], self._loading[call.request]
            self._pool.free(self._blocks.pop(call.request))
            self._full = False
            self.stirred = True

    def _drop(self, call: Call) -> None:
        """Drop a part that is not wanted any more; its pass stops."""
        if self._computes(call):
            self.busy_us = self.busy_by_us()
            call.busy_us += self._clock.now_us - self._turn_us
            self._pass = None
            self._plan += 1
        if call in self._parts:
            self._parts.remove(call)
        self._pool.free(self._blocks.pop(call.request, ()))

    def _computes(self, part: Call) -> bool:
        """Whether the current pass is this part's."""
        work = None if self._pass is None else self._pass[0]
        return isinstance(work, Pass) and work.chunks[0].request == part.request

    def came(self, call: Call) -> None:
        """The last piece that a part waited for has arrived: compute what depends on it."""
        assert call.part is not None
        call.part.whole = True
        if self._calls.get(call.request) is call and self._computes(call):
            end_us = self._clock.now_us + self.pass_us // call.part.pieces
            self._end_at(max(self._turn_us + self.pass_us, end_us))

    def slow_down(self, factor: float) -> None:
        """From the next pass on, passes take `factor` times as long as on a healthy machine."""
        self._break_run()
        self.slow = factor

    def pace(self, factor: float) -> None:
        """From now on, passes take `factor` times as long as alone on the machine, and so does the
        rest of the current one."""
        self._break_run()
        ratio = factor / self._pace
        self._pace = factor
        if self._pass is not None:
            left_us = round((self._end_us - self._clock.now_us) * ratio)
            self._end_at(self._clock.now_us + left_us)

    def kill(self) -> list[Call]:
        """Die: report nothing from now on. Returns the calls that were here."""
        self._break_run()  # tokens that were generated before now stay generated
        self.busy_us = self.busy_by_us()
        if self._pass is not None:
            self._charge(self._pass[0], self._clock.now_us - self._turn_us)
        self._pass = None
        self.dead = True
        self._plan += 1
        self._end_streaks()
        calls = list(self._calls.values())
        self._calls = {}
        return calls

    def settle(self) -> bool:
        """Everything of this instant has arrived: admit calls and begin a pass. Returns whether it
        did any."""
        self.stirred = False
        if self.dead:
            return False
        did = self._admit()
        if self._pass is None and self._steady is None:
            did |= self._next()
        return did

    # Into the batch.

    def _admit(self) -> bool:
        did = False
        if self._intake and not self._full:
            self._break_run()  # the room is what the finished passes have left
        if self._pass is not None and self.info.connector != "embedded":
            return False  # between passes such an engine looks for calls, and what it has of them
        while self._intake and not self._full:
            if not self._has_room(self._intake[0]):
                self._full = True
                break
            call = self._intake.popleft()
            need = self._batch.blocks_for(call.known) - len(self._pool.shared(call.keys))
            if call.part is not None:
                self._blocks[call.request] = self._pool.allocate(need) or ()
            self._loading[call.request] = need if call.part is None else 0
            call.load(partial(self._loaded, call))
            did = True
        return did

    def _has_room(self, call: Call) -> bool:
        promised = sum(self._loading.values())
        most = self.info.max_seqs + self._ahead
        new = call.known - self._batch.block_size * len(self._pool.shared(call.keys))
        return self._batch.has_room(new, len(self._loading), promised, most)

    def _loaded(self, call: Call, cached: Tokens) -> None:
        if self._calls.get(call.request) is not call:
            return  # it was cancelled meanwhile, or the node is dead
        if call.part is not None:
            call.cached, self.stirred = cached, True
            self._break_run()
            self._parts.append(call)
            return
        del self._loading[call.request]
        self._full = False  # the call may hold fewer blocks than it was promised
        self.stirred = True
        self._break_run()
        call.cached = min(cached, call.known - 1)  # logits need one token that is computed here
        blocks = self._blocks_with(call)
        if blocks is None:  # decodes beside it took the promised blocks: compute instead of loading
            call.cached, blocks = 0, ()
        self._batch.add(
            call.request,
            Counted(call.known),
            prompt_len=call.prompt,
            computed=call.cached,
            blocks=blocks,
            sampling=_GREEDY,
            stopping=Stopping(max_tokens=call.most),
        )

    def _blocks_with(self, call: Call) -> tuple[int, ...] | None:
        """Blocks for what a call has cached: those of other requests, as far as they have the same
        keys, then new ones. None: too few are free."""
        keys = call.keys[: call.cached // self._batch.block_size]
        shared = self._pool.shared(keys)
        new = self._pool.allocate(self._batch.blocks_for(call.cached) - len(shared))
        if new is None:
            return None
        self._pool.hold(shared)
        blocks = (*shared, *new)
        self._pool.name(keys, blocks[: len(keys)])
        return blocks

    def _share(self, call: Call, step: Progress) -> None:
        """Others may hold the full blocks of the prompt that this call has computed."""
        size = self._batch.block_size
        if step.computed_before // size < len(call.keys) and step.finish is None:
            held = self._batch.held(call.request)
            assert held is not None
            full = min(step.computed_after // size, len(call.keys))
            self._pool.name(call.keys[:full], held[1][:full])

    # Passes.

    def _next(self) -> bool:
        """Begin the next pass, or a run of equal passes."""
        now_us = self._clock.now_us
        self._turn_us = now_us
        if self._parts:
            call = self._parts.popleft()
            tokens = range(call.known - call.cached)
            self._end_streaks()
            self._launch(Pass((Chunk(call.request, tokens, call.cached, (), None),)))
            return True
        passes = self._batch.steady()
        if passes > 1:
            seqs = self._batch.running
            self._steady = [passes, 0, seqs, self._batch.context]
            self._look_again()
            return True
        return self._launch_next()

    def _launch_next(self) -> bool:
        """Start the pass that begins at `_turn_us`. Returns whether there is one."""
        step = self._batch.plan_step()
        if step is not None:
            elapsed_us = self._took(self.cost.decode_step_us(step.seqs, step.context))
            self._start(step, elapsed_us, step.joined)
            return True
        self._end_streaks()
        work = self._batch.plan()
        if work is not None:
            self._launch(work)
        return work is not None

    def _launch(self, work: Pass) -> None:
        part = self._calls[work.chunks[0].request].part
        cost_us = self.cost.pass_of_us(pass_sample(work, 0))
        elapsed_us = self._took((part and part.work_us) or cost_us)
        self._start(work, elapsed_us, [chunk.request for chunk in work.chunks])

    def _start(
        self, work: Pass | DecodeStep, elapsed_us: Micros, requests: Sequence[RequestId]
    ) -> None:
        """A pass begins at `_turn_us`, and perhaps with it some of these requests."""
        elapsed_us += self._wake_us()
        self._pass = (work, elapsed_us)
        for request in requests:
            call = self._calls[request]
            if call.began_us is None:
                call.began_us = self._turn_us
                self._begin(self, call)
        self._end_at(self._turn_us + elapsed_us)

    def _end_at(self, us: Micros) -> None:
        """The current pass ends then, and not when it was said before."""
        self._end_us = us
        self._plan += 1
        self._clock.at(us, partial(self._ended, self._plan))

    def _ended(self, plan: int) -> None:
        if plan != self._plan or self._pass is None:
            return
        work, elapsed_us = self._pass[0], self._clock.now_us - self._turn_us
        if isinstance(work, DecodeStep):
            self._ended_step(work, elapsed_us)
            return
        call = self._calls.get(work.chunks[0].request)
        part = None if call is None else call.part
        if part is not None and not part.whole:
            return  # `came` continues from here
        self._pass = None
        self.stirred = True
        self.busy_us += elapsed_us
        number = len(self.ends)
        self.ends.append(self._clock.now_us)
        self._charge(work, elapsed_us)
        if part is not None and call is not None:
            step = Progress(call.request, 0, call.cached, call.known, Finish("length"))
            self._tell(self, call, step)
            return
        sampled = dict.fromkeys([c.request for c in work.chunks if c.sampling is not None], 0)
        steps = self._batch.apply(work, PassResult(sampled, elapsed_us))
        if len(steps) < len(work.chunks):  # a call that was cancelled meanwhile leaves only now
            self._full = False
        for step in steps:
            call = self._calls[step.request]
            call.computed_us += elapsed_us
            self._share(call, step)
            if step.token is not None:
                self._gave(call, number)[1] = number + 1
            if step.finish is not None:
                del self._calls[step.request]
                self._full = False
            self._tell(self, call, step)

    def _ended_step(self, step: DecodeStep, elapsed_us: Micros) -> None:
        """Every call got one token; only those that end are told."""
        self._pass = None
        self.stirred = True
        self.busy_us += elapsed_us
        self._begin_streaks(len(self.ends), step.seqs)
        self.ends.append(self._clock.now_us)
        self._charge(step, elapsed_us)
        ended = self._batch.apply_step(step)
        if self._batch.running < step.seqs:  # a call that was cancelled meanwhile leaves only now
            self._full = False
        for last in ended:
            self._end_streak(last.request)
            self._tell(self, self._calls.pop(last.request), last)

    def _charge(self, work: Pass | DecodeStep, elapsed_us: Micros) -> None:
        """Share a pass's time among its calls by the tokens that each computed, if they may
        prefill."""
        if self.info.role == "decode":
            return
        if isinstance(work, DecodeStep):
            shares = dict.fromkeys(self._batch.members(), 1)
        else:
            shares = {chunk.request: len(chunk.tokens) for chunk in work.chunks}
        tokens = sum(shares.values())
        for request, count in shares.items():
            call = self._calls.get(request)
            if call is not None:  # None: it was cancelled meanwhile
                call.busy_us += elapsed_us * count // tokens

    def _gave(self, call: Call, number: int) -> list[int]:
        """The span of this call that pass `number`, which gave it a token, goes on or begins."""
        if not call.spans or call.spans[-1][1] != number:
            call.spans.append([number, number])
        return call.spans[-1]

    def _begin_streaks(self, number: int, seqs: int) -> None:
        """From pass `number` on, every running call gets a token in each pass; they are `seqs`."""
        if len(self._streaks) == seqs:
            return
        for request in self._batch.wanted():
            if request not in self._streaks:
                self._streaks[request] = self._gave(self._calls[request], number)

    def _end_streak(self, request: RequestId) -> None:
        """The call gets no more tokens by the passes to come."""
        span = self._streaks.pop(request, None)
        if span is not None:
            span[1] = len(self.ends)

    def _end_streaks(self) -> None:
        """The next pass may give no token to some."""
        for span in self._streaks.values():
            span[1] = len(self.ends)
        self._streaks.clear()

    # Runs of equal passes.

    def _look_again(self) -> None:
        """Check again at the earliest time at which the run can end: steps only grow longer."""
        assert self._steady is not None
        left, _, seqs, context = self._steady
        step_us = self._took(self.cost.decode_step_us(seqs, context))
        self._plan += 1
        self._clock.at(self._turn_us + left * step_us, partial(self._looked, self._plan))

    def _looked(self, plan: int) -> None:
        if plan != self._plan or self._steady is None:
            return
        self._run_to(self._clock.now_us)
        if self._steady[0]:
            self._look_again()
        else:
            self._end_run()

    def _run_to(self, now_us: Micros) -> None:
        """Count the steps of the run that ended by now."""
        assert self._steady is not None
        left, gone, seqs, context = self._steady
        turn_us = self._turn_us
        base, per_seq, per_context = self.cost.step_us
        fixed = base + per_seq * seqs  # as Cost.decode_step_us adds
        slow = self.slow * self._pace
        ends: list[Micros] = []
        for held in range(context, context + left * seqs, seqs):
            step_us = round(fixed + per_context * held)
            end_us = turn_us + (step_us if slow == 1.0 else self._took(step_us))
            if end_us > now_us:
                break
            ends.append(end_us)
            turn_us = end_us
        self.ends.extend(ends)
        self.busy_us += turn_us - self._turn_us
        self._turn_us = turn_us
        ended = len(ends)
        self._steady = [left - ended, gone + ended, seqs, context + ended * seqs]

    def _end_run(self) -> None:
        """Tell the batch how many passes have ended."""
        assert self._steady is not None
        gone = self._steady[1]
        self._steady = None
        self.stirred = True
        if not gone:
            return
        self._begin_streaks(len(self.ends) - gone, self._batch.running)
        self._batch.skip(gone)

    def _break_run(self) -> None:
        """A call comes or goes: the passes are not equal any more."""
        if self._steady is None:
            return
        self._run_to(self._clock.now_us)
        in_flight = self._turn_us < self._clock.now_us
        self._end_run()
        if in_flight:  # the current pass goes on without the new call
            begun = self._launch_next()
            assert begun

    def _took(self, us: Micros) -> Micros:
        slow = self.slow * self._pace
        return us if slow == 1.0 else round(us * slow)
