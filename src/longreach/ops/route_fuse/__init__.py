"""One decode step of FastMKA's mixture: running mean, router and mix in one kernel."""

from longreach.ops.route_fuse.api import IMPLEMENTATIONS, RouterLayer, route_fuse

__all__ = ["IMPLEMENTATIONS", "RouterLayer", "route_fuse"]
