"""Topologies of networks on a chip: routers, their links, and a table of routes.

Port 0 of a router is its own terminal; other ports lead to neighbours. Invariant: every route ends
at its destination, and cannot deadlock: meshes go along one axis and then the other, rings change
to a second class of virtual channels where they cross their seam, trees go up and then down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...core.errors import UserError

MOST_ROUTERS = 1024  # routers: the table of routes has their square


@dataclass(frozen=True)
class Topology:
    """Routers and routes: `link[node, port]` is (node, port) there, or -1 for none.

    `route[node, destination]` is the port to leave by. `seam[node, port]` marks links beyond which
    a flit takes virtual channels of the second class. `terminals` send and receive; the others
    only pass on.
    """

    name: str
    link: np.ndarray  # (nodes, ports, 2)
    route: np.ndarray  # (nodes, nodes)
    seam: np.ndarray  # (nodes, ports)
    terminals: np.ndarray  # (terminals,) nodes

    @property
    def nodes(self) -> int:
        """Routers."""
        return len(self.link)

    @property
    def ports(self) -> int:
        """Ports of the widest router, its terminal among them."""
        return self.link.shape[1]

    def hops(self) -> np.ndarray:
        """(terminals, terminals) links on the way from one to the other."""
        return self._followed()[0]

    def _followed(self) -> tuple[np.ndarray, np.ndarray]:
        """Hops of every pair, and how many routes use each link (nodes, ports)."""
        count = len(self.terminals)
        target = np.tile(self.terminals, count)
        at = np.repeat(self.terminals, count)
        hops = np.zeros(count * count, int)
        used = np.zeros((self.nodes, self.ports))
        for _ in range(2 * self.nodes):
            moving = at != target
            if not moving.any():
                return hops.reshape(count, count), used
            port = self.route[at[moving], target[moving]]
            np.add.at(used, (at[moving], port), 1)
            at[moving] = self.link[at[moving], port, 0]
            hops[moving] += 1
        raise UserError(f"routes of {self.name} go in circles", op="noc")

    def zero_load(self, hop: int = 4, inject: int = 2) -> float:
        """Cycles of a flit alone, mean over all pairs: `hop` a router, `inject` at the source."""
        return hop * (float(self.hops().mean()) + 1) + inject

    def capacity(self) -> float:
        """Flits a cycle and terminal at which the busiest link is full, under uniform traffic."""
        busiest = self._followed()[1].max() / len(self.terminals)
        return 1.0 / busiest if busiest else 1.0


def mesh(columns: int, rows: int = 1) -> Topology:
    """A grid; flits go along the columns first, then along the rows."""
    _sized("mesh", columns, rows)
    nodes = columns * rows
    x, y = np.arange(nodes) % columns, np.arange(nodes) // columns
    link = np.full((nodes, 5, 2), -1)
    for port, (dx, dy, back) in enumerate(((1, 0, 2), (-1, 0, 1), (0, 1, 4), (0, -1, 3)), 1):
        there = (x + dx >= 0) & (x + dx < columns) & (y + dy >= 0) & (y + dy < rows)
        link[there, port, 0] = (x + dx + columns * (y + dy))[there]
        link[there, port, 1] = back
    along, down = x[None] - x[:, None], y[None] - y[:, None]
    route = np.where(along > 0, 1, np.where(along < 0, 2, 0))
    route = np.where(along == 0, np.where(down > 0, 3, np.where(down < 0, 4, 0)), route)
    seam = np.zeros((nodes, 5), bool)
    return Topology(f"mesh {columns}x{rows}", link, route, seam, np.arange(nodes))


def ring(nodes: int) -> Topology:
    """A circle; flits take the shorter way round."""
    _sized("ring", nodes, 1)
    link = np.full((nodes, 3, 2), -1)
    here = np.arange(nodes)
    if nodes > 1:
        link[:, 1] = np.stack([(here + 1) % nodes, np.full(nodes, 2)], axis=1)
        link[:, 2] = np.stack([(here - 1) % nodes, np.full(nodes, 1)], axis=1)
    ahead = (here[None] - here[:, None]) % nodes
    route = np.where(ahead == 0, 0, np.where(ahead <= nodes / 2, 1, 2))
    seam = np.zeros((nodes, 3), bool)
    seam[-1, 1] = seam[0, 2] = True
    return Topology(f"ring {nodes}", link, route, seam, here)


def hierarchical(columns: int, rows: int, leaves: int) -> Topology:
    """A mesh of hubs, each with terminals of its own around it."""
    _sized("hierarchical", columns * rows, leaves + 1)
    inner = mesh(columns, rows)
    hubs = inner.nodes
    nodes = hubs * (1 + leaves)
    link = np.full((nodes, max(5 + leaves, 2), 2), -1)
    link[:hubs, :5] = inner.link
    home = np.concatenate([np.arange(hubs), np.repeat(np.arange(hubs), leaves)])
    number = np.concatenate([np.full(hubs, -1), np.tile(np.arange(leaves), hubs)])
    leaf = np.arange(hubs, nodes)
    link[leaf, 1] = np.stack([home[leaf], 5 + number[leaf]], axis=1)
    link[home[leaf], 5 + number[leaf]] = np.stack([leaf, np.ones_like(leaf)], axis=1)
    route = np.ones((nodes, nodes), int)  # a leaf goes up
    route[np.arange(nodes), np.arange(nodes)] = 0
    down = 5 + np.maximum(number, -5)
    for hub in range(hubs):
        route[hub] = np.where(home == hub, np.where(number < 0, 0, down), inner.route[hub][home])
    seam = np.zeros(link.shape[:2], bool)
    name = f"hierarchical {columns}x{rows} of {leaves}"
    return Topology(name, link, route, seam, leaf)


def _sized(name: str, first: int, second: int) -> None:
    if first < 1 or second < 1 or first * second > MOST_ROUTERS:
        raise UserError(
            f"bad size of {name}",
            op="noc",
            expected=f"1 to {MOST_ROUTERS} routers",
            got=f"{first} x {second}",
            hint=f"at most {math.isqrt(MOST_ROUTERS)} x {math.isqrt(MOST_ROUTERS)} would fit",
        )


__all__ = ["Topology", "hierarchical", "mesh", "ring"]
