"""Pictures of a report. Only this folder imports matplotlib, at the first picture."""

from longreach.records.report.plots.heat_maps import MapPanel, Scale, maps
from longreach.records.report.plots.layer_curves import LayerPanel, layer_curves
from longreach.records.report.plots.lines import CurvePanel, Series, curves
from longreach.records.report.plots.scatter import Point, PointPanel, points
from longreach.records.report.plots.style import check_installed

__all__ = [
    "CurvePanel",
    "LayerPanel",
    "MapPanel",
    "Point",
    "PointPanel",
    "Scale",
    "Series",
    "check_installed",
    "curves",
    "layer_curves",
    "maps",
    "points",
]
