"""Charts as SVG text: lines, stacked bars, bars with a spread.  Axes start at zero and carry their units; colours are
Okabe and Ito's, which colour-blind readers can tell apart.  Every picture has a title, a legend and the machine as
its caption.
"""

import dataclasses
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
WIDTH, HEIGHT = 760, 300  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 40, 54
CAPTION = 26
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-size:15px;font-weight:bold}.c{fill:#666}"
    ".g{stroke:#ddd}.a{stroke:#444}.e{text-anchor:end}.m{text-anchor:middle}"
)


@dataclasses.dataclass(frozen=True)
class Series:
    """A named line of (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """`x_label`, `y_label` carry the units."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [round(step * at, 10) for at in range(math.ceil(top / step - 1e-9) + 1)]


class _Canvas:
    """One SVG document under construction; y grows downwards."""

    def __init__(self, height: int) -> None:
        self.height = height
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", turned: bool = False) -> None:
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{turn}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "a", more: str = "") -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"{more}/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {at} fill="{colour}"/>')

    def path(self, points: Sequence[tuple[float, float]], colour: str, dots: bool) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points if dots else ():
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')

    def legend(self, names: Sequence[str], top: float) -> None:
        for at, name in enumerate(names):
            y = top + 18 * at
            self.box(WIDTH - RIGHT + 14, y, 12, 12, COLOURS[at % len(COLOURS)])
            self.text(WIDTH - RIGHT + 32, y + 10, name)

    def close(self, caption: str) -> str:
        self.text(LEFT, self.height - 9, caption, "c")
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="#fff"/>'
        return "\n".join([head, ground, *self._parts, "</svg>", ""])


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The plotting area of one chart and its scales."""

    top: float
    x_top: float
    y_top: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.x_top

    def y(self, value: float) -> float:
        return self.top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.y_top

    def draw(self, canvas: _Canvas, chart: Chart, y_ticks: Sequence[float]) -> None:
        canvas.text(LEFT, self.top + 22, chart.title, "t")
        canvas.text((LEFT + WIDTH - RIGHT) / 2, self.top + HEIGHT - 14, chart.x_label, "m")
        canvas.text(20, self.top + (TOP + HEIGHT - BOTTOM) / 2, chart.y_label, "m", turned=True)
        for value in y_ticks:
            canvas.line(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), "g" if value else "a")
            canvas.text(LEFT - 8, self.y(value) + 4, f"{value:g}", "e")
        canvas.line(LEFT, self.y(0), LEFT, self.y(self.y_top))


def lines(charts: Sequence[Chart], caption: str, *, every_x: bool = False) -> str:
    """Charts one below the other.  `every_x`: mark each measured x, with dots, instead of round numbers."""
    canvas = _Canvas(HEIGHT * len(charts) + CAPTION)
    for number, chart in enumerate(charts):
        points = [point for series in chart.series for point in series.points]
        x_ticks = sorted({x for x, _ in points}) if every_x else ticks(max((x for x, _ in points), default=1.0))
        y_ticks = ticks(max((y for _, y in points), default=1.0))
        frame = _Frame(HEIGHT * number, max([*x_ticks, 1e-9]), y_ticks[-1])
        frame.draw(canvas, chart, y_ticks)
        for value in x_ticks:
            canvas.line(frame.x(value), frame.y(0), frame.x(value), frame.y(0) + 5)
            canvas.text(frame.x(value), frame.y(0) + 19, f"{value:g}", "m")
        for at, series in enumerate(chart.series):
            placed = [(frame.x(x), frame.y(y)) for x, y in series.points]
            canvas.path(placed, COLOURS[at % len(COLOURS)], every_x)
        canvas.legend([series.name for series in chart.series], frame.top + TOP)
    return canvas.close(caption)


def stacked(
    title: str,
    x_label: str,
    y_label: str,
    parts: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float]]],
    caption: str,
) -> str:
    """A bar for each row (name, a value for each part), the parts on top of each other."""
    canvas = _Canvas(HEIGHT + CAPTION)
    y_ticks = ticks(max((sum(values) for _, values in rows), default=1.0))
    frame = _Frame(0, 1.0, y_ticks[-1])
    frame.draw(canvas, Chart(title, x_label, y_label, ()), y_ticks)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(rows))
    for at, (name, values) in enumerate(rows):
        below = 0.0
        for part, value in enumerate(values):
            low, high = frame.y(below), frame.y(below + value)
            canvas.box(LEFT + step * (at + 0.2), high, step * 0.6, low - high, COLOURS[part % len(COLOURS)])
            below += value
        canvas.text(LEFT + step * (at + 0.5), frame.y(0) + 19, name, "m")
        canvas.text(
            LEFT + step * (at + 0.5), frame.y(below) - 5, f"{below:.1f}" if below < 100 else f"{below:.0f}", "m"
        )
    canvas.legend(parts, TOP)
    return canvas.close(caption)


def bars(title: str, label: str, rows: Sequence[tuple[str, float, float, float, Sequence[float]]], caption: str) -> str:
    """A horizontal bar for each row: name, value, least, largest, marks."""
    left, height = 190, 26
    canvas = _Canvas(TOP + height * len(rows) + BOTTOM + CAPTION)
    x_ticks = ticks(max([1.0, *(max(row[1], row[3], *row[4]) for row in rows)]))
    bottom = TOP + height * len(rows)

    def x(value: float) -> float:
        return left + (WIDTH - left - 40) * value / x_ticks[-1]

    canvas.text(20, 22, title, "t")
    for value in x_ticks:
        canvas.line(x(value), TOP, x(value), bottom, "a" if value in (0, 1) else "g")
        canvas.text(x(value), bottom + 16, f"{value:g}", "m")
    for at, (name, value, least, largest, marks) in enumerate(rows):
        middle = TOP + height * (at + 0.5)
        canvas.text(left - 8, middle + 4, name, "e")
        canvas.box(x(0), middle - 8, x(value) - x(0), 16, COLOURS[0])
        canvas.line(x(least), middle, x(largest), middle, "a", ' stroke-width="3"')
        for mark, colour in zip(marks, (COLOURS[1], COLOURS[2]), strict=False):
            canvas.line(x(mark), middle - 11, x(mark), middle + 11, "", f' stroke="{colour}" stroke-width="3"')
        canvas.text(x(max(value, largest, *marks)) + 6, middle + 4, f"{value:.2f}")
    canvas.text((left + WIDTH - 40) / 2, bottom + 38, label, "m")
    return canvas.close(caption)
