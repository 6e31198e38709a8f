"""One decode step of FastMKA's mixture: the router's first layer; running mean, second layer and mix in one kernel."""

from longreach.ops.route_fuse.api import FIRST_LAYER, IMPLEMENTATIONS, RouterLayer, first_layer, route_fuse

__all__ = ["FIRST_LAYER", "IMPLEMENTATIONS", "RouterLayer", "first_layer", "route_fuse"]
