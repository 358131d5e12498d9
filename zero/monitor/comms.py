"""Messages between ranks, by operation or by unit: number, bytes and time (`comms_logger`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from zero.config.monitor_sections import CommsLogger
from zero.log import logger
from zero.monitor.module_calls import Stamp, ended, seconds
from zero.watchdog.rank_status import Collective
from zero.watchdog.watchdog import Events

# DeepSpeed's names of operations, as in `prof_ops`, and ours.
_NAMES = {
    "all_gather": ("gather", "replica gather"),
    "all_gather_into_tensor": ("gather", "replica gather"),
    "reduce_scatter": ("reduce",),
    "reduce_scatter_tensor": ("reduce",),
    "all_reduce": ("reduce", "replica gather"),
}


@dataclass
class Traffic:
    """The collectives of one operation, or of one unit, of this rank so far.

    sent:     bytes that left the rank in them;
    seconds:  from the begin of each until a wait for it ended, at its end or later: this includes
              overlap, so `bus` is a lower bound;
    exposed:  the part of that in which the rank stood still.
    """

    count: int = 0
    sent: int = 0
    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s, as in nccl-tests (doc/PERFORMANCE.md): the load of one link of a rank.

        There all-gather and reduce-scatter of S bytes over n ranks have S / t x (n - 1) / n, and a broadcast S / t:
        with the bytes that leave a rank, `sent` / t. An all-reduce, 2 (n - 1) / n, is the sum of two of these here.
        """
        return self.sent / self.seconds if self.seconds else 0.0


class CommsLog:
    """Records the collectives of one engine's rank from now on, and writes a table of them."""

    def __init__(self, section: CommsLogger, events: Events) -> None:
        self._all, self._verbose = section.prof_all, section.verbose
        self._names = {name for each in section.prof_ops for name in _NAMES.get(each, (each,))}
        self._traffic: dict[tuple[str, str], Traffic] = {}
        self._waits: deque[tuple[Collective, Stamp, Stamp, Stamp]] = deque()  # not counted yet
        self._last: dict[tuple[str, str], tuple[int, Stamp]] = {}  # number and end, as one may be waited for in parts
        self.close = events.subscribe(waited=self._waited)

    def traffic(self, by_unit: bool = False) -> dict[str, Traffic]:
        """The collectives waited for so far, by operation or by unit ("" for those of no unit)."""
        self._count()
        sums: dict[str, Traffic] = {}
        for (operation, unit), each in self._traffic.items():
            one = sums.setdefault(unit if by_unit else operation, Traffic())
            for name, value in vars(each).items():
                setattr(one, name, getattr(one, name) + value)
        return sums

    def _waited(self, collective: Collective, begun: Stamp, start: Stamp, end: Stamp) -> None:
        if self._all or collective.direction in self._names:
            self._waits.append((collective, begun, start, end))
            if len(self._waits) > 100:
                self._count(only_ended=True)

    def _count(self, only_ended: bool = False) -> None:
        while self._waits:
            if not ended(self._waits[0][3]):
                if only_ended:
                    return
                self._waits[0][3].synchronize()
            collective, begun, start, end = self._waits.popleft()
            key = collective.direction, collective.unit
            one = self._traffic.setdefault(key, Traffic())
            number, before = self._last.get(key, (0, begun))
            if number != collective.number:
                one.count, one.sent, before = one.count + 1, one.sent + collective.sent, begun
            took, stood = seconds(before, end), seconds(start, end)
            one.seconds, one.exposed = one.seconds + took, one.exposed + stood
            self._last[key] = collective.number, end
            if self._verbose:
                text = "%s | %d bytes sent | %.3f ms, of which %.3f waited"
                logger.info(text, collective, collective.sent, 1e3 * took, 1e3 * stood)


def table(traffic: Mapping[str, Traffic], what: str) -> str:
    """The collectives of this rank in lines, the longest first; `what` is the heading of the names."""
    rows = [f"{what:<28} {'count':>8} {'MB sent':>10} {'ms':>10} {'waited ms':>10} {'bus GB/s':>9}"]
    for name, each in sorted(traffic.items(), key=lambda item: -item[1].seconds):
        times = f"{1e3 * each.seconds:>10,.1f} {1e3 * each.exposed:>10,.1f}"
        rows.append(f"{name or '-':<28} {each.count:>8,} {each.sent / 1e6:>10,.2f} {times} {each.bus / 1e9:>9.3g}")
    return "\n".join(rows)
