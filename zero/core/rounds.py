"""Steps in which ranks run different numbers of micro-batches, under one sequence of collectives.

Where gradients are reduced after each micro-batch, and where parameters are resharded, a micro-batch is a sequence of
collectives that all ranks must enter. Number k of each rank that has one is round k. Before a round the ranks learn who
runs it: from `begin_step`, or by one small exchange. A rank that has run all of its own takes part from its `step()`,
with its shards and with zeros: the first rank that runs the round tells it of each unit that it begins to gather or to
reduce. So no rank waits for one that has nothing left to run, and no gradient depends on who waits.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence

from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.p2p import Passage, receive_ints, send_ints
from zero.core.prefetcher import ParamPrefetcher
from zero.core.reducer import Reducer
from zero.core.unit import Unit
from zero.core.weak import while_alive
from zero.watchdog.hang_report import difference_text


class Verb(enum.IntEnum):
    """The kinds of message from a rank that runs a round to those that do not; each carries a number.

    GATHER, REDUCE: it begins to, the unit of that index. SUM: all reductions have begun, and it waits for their sums.
    END: of the round; so many numbers follow, the order of uses that it has learnt. FAILED: by an exception; so many
    bytes of its text follow.
    """

    GATHER = 0
    REDUCE = 1
    SUM = 2
    END = 3
    FAILED = 4


class Place(enum.IntEnum):
    """Where a rank takes part in an exchange of the rounds."""

    BEGIN = 0
    ROUND = 1
    LEAVES = 2
    END = 3

    def text(self, number: int) -> str:
        """Where that is, with the next round's number, for messages."""
        if self is Place.END:
            return "at step(), after all of its micro-batches"
        what = ("at begin_step(), before", "at", "at step(), after a forward without its backward, of")
        return f"{what[self]} micro-batch {number + 1}"


EXCHANGE = "exchange of who runs the next micro-batch of the step"


class Rounds:
    """The rounds of the running step. Without `follows` it only counts this rank's own micro-batches.

    world: the ranks that hold the same units; follows: whether rounds are sequences of collectives, so that ranks
    without a micro-batch must take part; alike: why all run equally many, and what to do; None where they need not.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        world: Axis,
        prefetcher: ParamPrefetcher,
        reducer: Reducer,
        follows: bool,
        alike: str | None = None,
    ) -> None:
        self._units, self._world = units, world
        self._prefetcher, self._reducer = prefetcher, reducer
        self._follows, self._alike = (follows or alike is not None) and world.size > 1, alike
        self._counts: list[int] | None = None  # of micro-batches of each rank in this step
        self._round = 0  # that runs, or comes next
        self._open = False  # this rank runs one
        self._followers: list[int] = []  # the places of ranks that do what this one does
        self._sent: list[Passage] = []  # on their way
        self._unsubscribe: Callable[[], None] | None = None  # from events
        prefetcher.on_forward = reducer.on_begin = while_alive(self.enter)  # weak, as we hold both
        reducer.on_finish = while_alive(self._finishing)
        reducer.on_flush.append(while_alive(self._ended))

    def begin_step(self, micro_batches: int) -> list[int]:
        """Say how many micro-batches this rank runs in the step that begins; collective. Returns those of all ranks."""
        wrong = None
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 0:
            wrong = ValueError(f"begin_step(micro_batches={micro_batches!r}): wanted an integer of at least 0")
        elif self._round or self._open:
            wrong = RuntimeError("begin_step() after a micro-batch of the step; call it before the first forward")
        if wrong and self._followers:
            self._leave(str(wrong))
            raise wrong
        counts = self._agreed(Place.BEGIN, wrong or micro_batches)
        self._compare(counts)
        self._counts = counts
        return counts

    def enter(self) -> None:
        """A forward that builds a graph, or a backward, begins: the first thing of a round, or not."""
        if self._open:
            return
        mine = self._world.rank
        if self._counts is not None and self._counts[mine] <= self._round:
            raise RuntimeError(
                f"micro-batch {self._round + 1} of a step of which begin_step(micro_batches={self._counts[mine]}) was "
                f"said on rank {self._world.global_rank}; call step() before it, or say how many there are"
            )
        active = self._active(Place.ROUND, True)
        self._open = True
        if self._follows and (followers := self._followers_in(active)):
            self._followers = followers
            self._unsubscribe = self._world.watchdog.events.subscribe(self._span)

    def join(self) -> None:
        """This rank's `step()` has come: take part in the rounds that other ranks still run; collective."""
        mine = self._world.rank
        if self._counts is not None and self._round < self._counts[mine]:
            raise RuntimeError(
                f"step() after {self._round} of {self._counts[mine]} micro-batches that begin_step() was told of on "
                f"rank {self._world.global_rank}; other ranks wait for the rest"
            )
        if self._open and self._followers:
            raise RuntimeError(f"step() without the backward of micro-batch {self._round + 1}, whose forward has run")
        place = Place.LEAVES if self._open else Place.ROUND
        while self._follows and any(active := self._active(place, False)):
            self._follow(active.index(True))
        if self._counts is not None and self._world.size > 1:
            self._agreed(Place.END, 0)  # no rank that has run more than it said goes on with the next step

    def reset(self) -> None:
        """The step is over, or begins anew after an exception, which those that follow this rank are told of."""
        if self._follows and self._counts is not None and not self._open:
            self._followers = self._followers_in(self._active(Place.ROUND, True))
        if self._followers:
            self._leave(self._world.watchdog.status.error or "an exception")
        self._close()
        self._counts, self._round = None, 0

    def _leave(self, error: str) -> None:
        """Tell those that follow this rank that its round does not end."""
        with contextlib.suppress(RuntimeError):  # the other ranks are gone
            self._send(Verb.FAILED, list(error.encode()))
            for each in self._sent:  # whatever this rank does then, perhaps it ends
                each.wait()
        self._close()

    def _followers_in(self, active: list[bool]) -> list[int]:
        """The places of those that have no micro-batch in a round, where this rank is the first that has one."""
        leads = any(active) and active.index(True) == self._world.rank
        return [place for place, runs in enumerate(active) if not runs] if leads else []

    def _active(self, place: Place, mine: bool) -> list[bool]:
        """Which ranks run the round that comes; collective, unless they have said."""
        if self._counts is not None:
            return [count > self._round for count in self._counts]
        if not self._follows:
            return [mine] * self._world.size
        runs = self._agreed(place, int(mine))
        self._compare([self._round + each for each in runs])
        return [each > 0 for each in runs]

    def _compare(self, counts: list[int]) -> None:
        if self._alike is not None and len({*counts}) > 1:
            raise RuntimeError(
                f"ranks {list(self._world.ranks)} run {counts} micro-batches of this step, as far as known: "
                f"{self._alike}"
            )

    def _agreed(self, place: Place, number: int | Exception) -> list[int]:
        """The numbers of all ranks; RuntimeError on all where they are not at one place of one step. Collective."""
        mine = number if isinstance(number, Exception) else [place, self._round * (place is not Place.END), number]
        rows = agree(mine, self._world, "begin_step()" if place is Place.BEGIN else "", name=EXCHANGE)
        if len({(at, done) for at, done, _ in rows}) > 1:
            there = difference_text([Place(at).text(done) for at, done, _ in rows], "", self._world.ranks)
            raise RuntimeError(f"the ranks are not in one step, perhaps after an exception on some: {there}")
        return [each for *_, each in rows]

    @contextlib.contextmanager
    def _span(self, verb: str, name: str) -> Iterator[None]:
        """Tell the others of what begins here. Units that stay full are sent by their update, and on all ranks."""
        if verb in ("gather", "reduce"):
            unit = next(unit for unit in self._units if unit.plan.name == name)
            if verb == "reduce" or not unit.stays_full:
                self._send(Verb.GATHER if verb == "gather" else Verb.REDUCE, (), unit.index)
        yield

    def _send(self, verb: Verb, more: Sequence[int], number: int | None = None) -> None:
        for numbers in filter(len, ([verb, len(more) if number is None else number], more)):
            self._sent.append(send_ints(numbers, self._followers, self._world))

    def _finishing(self) -> None:
        """All reductions of a backward have begun."""
        if self._followers:
            self._send(Verb.SUM, ())

    def _ended(self) -> None:
        """A backward has ended, perhaps that of a round."""
        if not self._open:
            return
        if self._followers:
            self._send(Verb.END, self._prefetcher.forecast.order)
        self._close()
        self._next()

    def _close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._unsubscribe, self._open, self._followers = None, False, []
        self._sent = [each for each in self._sent if not each.done]

    def _next(self) -> None:
        self._round += 1
        self._reducer.end_micro_batch(False)

    def _follow(self, leader: int) -> None:
        """Do what the rank at this place does in its round, of which we have no micro-batch."""
        who = f"rank {self._world.ranks[leader]} of its micro-batch {self._round + 1}, after all of this rank's own"
        receive = functools.partial(receive_ints, place=leader, axis=self._world, what=f"next word from {who}")
        while True:
            verb, number = receive(2)
            if verb == Verb.GATHER:
                unit = self._units[number]
                unit.gather()
                unit.wait()
                unit.release(keep_if_referenced=False)
            elif verb == Verb.REDUCE:
                self._reducer.follow()
            elif verb == Verb.SUM:
                self._reducer.end(followed=True)
            elif verb == Verb.END:
                self._prefetcher.forecast.learn(receive(number))
                self._next()
                return
            else:
                text = bytes(receive(number)).decode()
                raise RuntimeError(
                    f"rank {self._world.ranks[leader]} ended its micro-batch {self._round + 1} of this step with {text}"
                )
