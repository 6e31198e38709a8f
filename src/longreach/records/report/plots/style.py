"""Common style of all pictures: colours safe for colour-blind readers, fonts, names, PNG output."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from longreach.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
DENSE = "#000000"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, 2008, without yellow
MARKERS = "osD^vPX<>*hp"
DASHES = ("-", "--", "-.", ":")
LONGEST = 44
DRAWABLE = 0x530  # the font that comes with matplotlib has Latin, Greek and Cyrillic
RC = {
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def check_installed() -> None:
    """Raise Unsupported, with the package to install, if matplotlib is missing."""
    try:
        found = find_spec("matplotlib") is not None
    except ValueError:  # a module without a spec
        found = False
    if not found:
        raise Unsupported("a report is drawn with matplotlib, not installed here; pip install 'longreach[report]'")


@contextmanager
def style() -> Iterator[None]:
    """Within this block matplotlib's defaults and ours apply instead of the user's settings."""
    from matplotlib import style as styles

    with styles.context(["default", RC]):
        yield


def figure(width: float, height: float) -> Figure:
    """An empty picture; width and height in inches. It belongs to no window and no global list."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(made)
    return made


def png(made: Figure) -> bytes:
    """The picture; the same bytes for the same picture."""
    stream = io.BytesIO()
    made.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def look(number: int, dense: bool) -> dict[str, Any]:
    """Colour, marker and dashes of method `number` (from 0, dense included). The first 24 are distinct."""
    if dense:
        return {"color": DENSE, "marker": "*", "linestyle": "-"}
    place = number - 1 if number else 0
    rounds = place // len(COLORS)
    return {
        "color": COLORS[place % len(COLORS)],
        "marker": MARKERS[(place + rounds) % (len(MARKERS) - 3)],
        "linestyle": DASHES[rounds % len(DASHES)],
    }


def name(text: str, most: int = LONGEST) -> str:
    """A name on one line that the font can draw, shortened if it is long."""
    line = "".join(c if c.isprintable() and ord(c) < DRAWABLE else "?" for c in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 2]}.."


def legend(made: Figure, handles: list[Any], names: list[str], wide: bool = False) -> None:
    """One for the whole picture, below it; in columns as its names allow."""
    longest = max(map(len, names))
    room = int(made.get_figwidth() * 72 / (5.2 * (longest + 6)))
    made.legend(handles, names, loc="outside lower left", ncols=max(1, min(len(names), room)))
