"""A network on a chip, flit by flit: virtual channels, credits, allocators, all routers at once.

A flit that comes into a router waits for a virtual channel of the next one (its packet's first flit
asks, the last gives it back), then for the switch, and is there `hop` cycles after it came. Both
allocators take turns. Invariant: a flit moves only where there is a credit for it, so no buffer
overflows; flits of a packet stay in order; the same seed gives the same cycles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserError
from .topology import Topology

FAR = np.iinfo(np.int64).max // 2


@dataclass(frozen=True)
class Network:
    """A Topology with its routers' sizes."""

    topology: Topology
    channels: int = 8  # virtual, of each port
    depth: int = 8  # flits of each
    hop: int = 4  # cycles of a router and its link
    inject: int = 2  # cycles at the source

    def __post_init__(self) -> None:
        least = 2 if self.topology.seam.any() else 1
        for name, low, high in (
            ("channels", least, 64),
            ("depth", 1, 256),
            ("hop", 3, 64),
            ("inject", 0, 64),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(
                    f"bad {name} of a network",
                    op="noc",
                    expected=f"{low} to {high}",
                    got=value,
                    hint=f"{name} = {min(max(value, low), high)} would fit",
                )


@dataclass(frozen=True)
class Traffic:
    """What a run measured."""

    rate: float  # flits a cycle and terminal that were offered
    latency: float  # cycles from when a packet was made until its last flit left; nan: none did
    accepted: float  # flits a cycle and terminal that left
    packets: int


class _Run:
    """The state of one simulation: arrays over (node, port, virtual channel)."""

    def __init__(self, network: Network, rate: float, cycles: int, length: int, seed: int) -> None:
        top = network.topology
        self.network, self.topology, self.length = network, top, length
        n, p, v, d = top.nodes, top.ports, network.channels, network.depth
        self.shape = (n, p, v)
        # a flit is (destination, when made, when it may move, is last); buffers are rings
        self.flits = np.zeros((4, n, p, v, d), np.int64)
        self.first = np.zeros((n, p, v), np.int64)
        self.held = np.zeros((n, p, v), np.int64)
        self.room = np.full((n, p, v), d, np.int64)  # credits, as the sender counts them
        self.taken = np.zeros((n, p, v), bool)  # a packet on its way owns the channel
        self.out = np.full((n, p, v), -1, np.int64)  # the channel got at the next router
        self.upper = np.zeros((n, p, v), bool)  # the packet has crossed a seam
        self.turn_in, self.turn_out = np.zeros((n, p), np.int64), np.zeros((n, p), np.int64)
        self.moving: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.credits: deque[tuple[int, np.ndarray]] = deque()
        self._make_packets(rate, cycles, seed)
        self.done: list[tuple[np.ndarray, np.ndarray]] = []
        self.left = 0

    def _make_packets(self, rate: float, cycles: int, seed: int) -> None:
        """Bernoulli sources: when each terminal makes packets, and where they go."""
        random = np.random.default_rng(seed)
        count = len(self.topology.terminals)
        made = random.random((cycles, count)) < rate / self.length
        most = int(made.sum(0).max()) if made.any() else 0
        self.born = np.full((count, most + 1), FAR, np.int64)
        for terminal in range(count):
            times = np.flatnonzero(made[:, terminal])
            self.born[terminal, : len(times)] = times
        self.target = self.topology.terminals[random.integers(0, count, self.born.shape)]
        self.next, self.sent = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.entry = np.full(count, -1, np.int64)  # the channel of the packet being sent

    def step(self, now: int) -> None:
        """One cycle."""
        self._arrive(now)
        self._inject(now)
        self._take_channels(now)
        self._cross(now)

    def _arrive(self, now: int) -> None:
        while self.moving and self.moving[0][0] <= now:
            _, where, flits = self.moving.popleft()
            self._put(where, flits, now)
        while self.credits and self.credits[0][0] <= now:
            _, where = self.credits.popleft()
            self.room[tuple(where)] += 1

    def _put(self, where: np.ndarray, flits: np.ndarray, now: int) -> None:
        at = tuple(where)
        tail = (self.first[at] + self.held[at]) % self.network.depth
        flits[2] = now
        self.flits[(slice(None), *at, tail)] = flits
        self.held[at] += 1

    def _inject(self, now: int) -> None:
        """A flit of each terminal that has one, into its router's port 0."""
        count = np.arange(len(self.next))
        born = self.born[count, self.next]
        nodes = self.topology.terminals
        ready = born + self.network.inject <= now
        fresh = ready & (self.entry < 0)
        usable = ~self.taken[nodes, 0] & (self.room[nodes, 0] > 0)
        if self.topology.seam.any():
            usable[:, self.network.channels // 2 :] = False
        rotated = (np.arange(self.network.channels) - now) % self.network.channels
        choice = np.where(usable, rotated, FAR).argmin(1)
        fresh &= usable.any(1)
        self.entry[fresh] = choice[fresh]
        self.taken[nodes[fresh], 0, choice[fresh]] = True
        go = ready & (self.entry >= 0)
        go[go] = self.room[nodes[go], 0, self.entry[go]] > 0
        if not go.any():
            return
        where = np.stack([nodes[go], np.zeros(int(go.sum()), int), self.entry[go]])
        self.sent[go] += 1
        last = self.sent[go] == self.length
        flits = np.stack([self.target[count, self.next][go], born[go], born[go], last])
        self.room[tuple(where)] -= 1
        self._put(where, flits, now)
        ended = np.flatnonzero(go)[last]
        self.taken[nodes[ended], 0, self.entry[ended]] = False
        self.next[ended] += 1
        self.sent[ended], self.entry[ended] = 0, -1

    def _fronts(self) -> np.ndarray:
        """(4, nodes, ports, channels): the first flit of every buffer."""
        return np.take_along_axis(self.flits, self.first[None, ..., None], axis=4)[..., 0]

    def _take_channels(self, now: int) -> None:
        """Packets at the front that have none get a virtual channel of the next router."""
        front = self._fronts()
        asks = (self.held > 0) & (self.out < 0) & (front[2] + 1 <= now)
        node, port, lane = np.nonzero(asks)
        if not len(node):
            return
        to = self.topology.route[node, front[0][node, port, lane]]
        home = to == 0
        self.out[node[home], port[home], lane[home]] = 0  # the terminal takes all
        node, port, lane, to = node[~home], port[~home], lane[~home], to[~home]
        there = self.topology.link[node, to]
        upper = self.upper[node, port, lane] | self.topology.seam[node, to]
        key = ((there[:, 0] * self.shape[1] + there[:, 1]) * 2 + upper).astype(np.int64)
        order = np.lexsort(((port * self.shape[2] + lane + now) % (self.shape[1] * 64), key))
        node, port, lane, key, there = (
            node[order],
            port[order],
            lane[order],
            key[order],
            there[order],
        )
        upper = upper[order]
        free = self._free(there, upper, now)
        start = np.r_[True, key[1:] != key[:-1]]
        rank = np.arange(len(key)) - np.maximum.accumulate(np.where(start, np.arange(len(key)), 0))
        got = rank < (free < FAR).sum(1)
        choice = free.argsort(1, kind="stable")[
            np.arange(len(key)), np.minimum(rank, self.shape[2] - 1)
        ]
        self.out[node[got], port[got], lane[got]] = choice[got]
        self.taken[there[got, 0], there[got, 1], choice[got]] = True
        self.upper[there[got, 0], there[got, 1], choice[got]] = upper[got]

    def _free(self, there: np.ndarray, upper: np.ndarray, now: int) -> np.ndarray:
        """(asks, channels) a rank of each free channel of the next router, FAR where taken."""
        v = self.shape[2]
        free = ~self.taken[there[:, 0], there[:, 1]]
        if self.topology.seam.any():
            free &= (np.arange(v) >= v // 2)[None] == upper[:, None]
        return np.where(free, (np.arange(v) - now) % v, FAR)

    def _cross(self, now: int) -> None:
        """The switch: each input port offers one flit, each output port takes one."""
        n, p, v = self.shape
        front = self._fronts()
        ready = (self.held > 0) & (self.out >= 0) & (front[2] + 2 <= now)
        to = self.topology.route[np.arange(n)[:, None, None], front[0]]
        there = self.topology.link[np.arange(n)[:, None, None], to]
        credit = self.room[there[..., 0], there[..., 1], np.maximum(self.out, 0)] > 0
        ready &= credit | (to == 0)
        rank = np.where(ready, (np.arange(v) - self.turn_in[..., None]) % v, FAR)
        lane = rank.argmin(2)  # (n, p): what each input port offers
        offered = ready.any(2)
        wants = np.take_along_axis(to, lane[..., None], axis=2)[..., 0]
        asks = offered[:, :, None] & (wants[:, :, None] == np.arange(p))  # (n, input, output)
        order = (np.arange(p)[None, :, None] - self.turn_out[:, None, :]) % p
        winner = np.where(asks, order, FAR).argmin(1)  # (n, output)
        node, exits = np.nonzero(asks.any(1))
        if len(node):
            self._send(node, winner[node, exits], lane, exits, front, now)

    def _send(
        self,
        node: np.ndarray,
        port: np.ndarray,
        lane: np.ndarray,
        exits: np.ndarray,
        front: np.ndarray,
        now: int,
    ) -> None:
        _, p, v = self.shape
        lane = lane[node, port]
        self.turn_in[node, port] = (lane + 1) % v
        self.turn_out[node, exits] = (port + 1) % p
        flits = front[:, node, port, lane]
        channel = self.out[node, port, lane]
        self.first[node, port, lane] = (self.first[node, port, lane] + 1) % self.network.depth
        self.held[node, port, lane] -= 1
        last = flits[3] > 0
        self.out[node[last], port[last], lane[last]] = -1
        self.credits.append((now + 2, np.stack([node, port, lane])))
        away = exits > 0
        there = self.topology.link[node[away], exits[away]]
        where = np.stack([there[:, 0], there[:, 1], channel[away]])
        self.room[tuple(where)] -= 1
        ended = where[:, last[away]]
        self.taken[tuple(ended)] = False
        self.moving.append((now + self.network.hop - 2, where, flits[:, away].copy()))
        self.left += int((~away).sum())
        gone = ~away & last
        if gone.any():
            self.done.append((flits[1, gone], np.full(int(gone.sum()), now + self.network.hop - 2)))


def measure(
    network: Network,
    rate: float,
    *,
    cycles: int = 2000,
    warm: int = 500,
    length: int = 1,
    seed: int = 0,
) -> Traffic:
    """Run uniform traffic of `rate` flits a cycle and terminal; packets made while warm count not.

    A packet has `length` flits. Packets made in the measured cycles are followed until they leave,
    or for as many cycles again.
    """
    if not 0 < rate <= 1 or length < 1 or not 0 <= warm < cycles:
        raise UserError(
            "bad traffic",
            op="noc",
            expected="rate above 0 to 1, length >= 1, 0 <= warm < cycles",
            got=f"rate {rate}, length {length}, warm {warm}, cycles {cycles}",
        )
    run = _Run(network, rate, cycles, length, seed)
    before = 0
    for now in range(2 * cycles):
        if now == warm:
            before = run.left
        if now == cycles:
            accepted = (run.left - before) / (cycles - warm) / len(network.topology.terminals)
        run.step(now)
        if now > cycles and not run.held.any() and not run.moving:
            break
    if not run.done:
        return Traffic(rate, float("nan"), accepted, 0)
    born = np.concatenate([b for b, _ in run.done])
    ends = np.concatenate([e for _, e in run.done])
    counted = (born >= warm) & (born < cycles)
    latency = float((ends - born)[counted].mean()) if counted.any() else float("nan")
    return Traffic(rate, latency, accepted, int(counted.sum()))


def saturation(
    network: Network, *, times: float = 3.0, step: float = 0.005, cycles: int = 4000, seed: int = 0
) -> float:
    """The lowest rate, within `step`, whose latency is over `times` that of an idle network."""
    bound = times * network.topology.zero_load(network.hop, network.inject)
    low, high = 0.0, min(1.0, 1.2 * network.topology.capacity())
    while high - low > step:
        middle = (low + high) / 2
        found = measure(network, middle, cycles=cycles, warm=cycles // 4, seed=seed)
        if found.latency <= bound:
            low = middle
        else:
            high = middle
    return high


__all__ = ["Network", "Traffic", "measure", "saturation"]
