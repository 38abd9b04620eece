"""Networks on a chip: topologies, closed forms, and a simulator flit by flit."""

from .simulate import Network, Traffic, measure, saturation
from .topology import Topology, hierarchical, mesh, ring

__all__ = [
    "Network",
    "Topology",
    "Traffic",
    "hierarchical",
    "measure",
    "mesh",
    "ring",
    "saturation",
]
