"""Line and bar charts as inline SVG, without any dependency.

Role: the drawings of the HTML page (`leto_sim.plot`) and of the documentation. Every mark carries a <title>,
so that a browser shows the value; colours are CSS classes s0..s7 set by the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["STYLE", "bar_chart", "line_chart", "standalone"]

STYLE = """
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:#334}svg .axis{stroke:#889;stroke-width:1}svg .grid{stroke:#dde;stroke-width:1}
svg .s0{stroke:#1b6ca8;fill:#1b6ca8}svg .s1{stroke:#d1495b;fill:#d1495b}svg .s2{stroke:#2e8b57;fill:#2e8b57}
svg .s3{stroke:#8f6bb3;fill:#8f6bb3}svg .s4{stroke:#c77f1a;fill:#c77f1a}svg .s5{stroke:#4b5563;fill:#4b5563}
svg .s6{stroke:#0f9aa8;fill:#0f9aa8}svg .s7{stroke:#a3507a;fill:#a3507a}
svg polyline{fill:none!important;stroke-width:2.5}svg .dash{stroke-dasharray:6 4}
@media (prefers-color-scheme:dark){svg text{fill:#ccd}svg .grid{stroke:#334}svg .axis{stroke:#778}}
"""
"""CSS that the charts expect; `standalone` embeds it."""

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 170, 34, 50

Point = tuple[float, float]


def standalone(svg: str) -> str:
    """Return a chart as a file of its own: with its style and a white background."""
    head, _, body = svg.partition(">")
    return f'{head} style="background:#fff">\n<style>{STYLE}</style>{body}\n'


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    dashed: Sequence[str] = (),
    dots: Sequence[str] = (),
) -> str:
    """Return an SVG of named lines; a point with a NaN breaks the line.

    Series named in ``dashed`` are dashed, those in ``dots`` have no line; ``a (b)`` has the colour of ``a
    (c)``.
    """
    points = [p for line in series.values() for p in line if math.isfinite(p[1])]
    if not points:
        note = f'<text x="8" y="24">{escape(title)}: no data</text>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 40">{note}</svg>'
    xs = [p[0] for p in points]
    x_scale = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT, log_x)
    y_scale = _y_scale([p[1] for p in points])
    out = _frame(title, x_label, y_label, y_scale)
    for tick in x_scale.ticks():
        out.append(
            f'<text x="{x_scale(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    styles = _styles(series)
    for name, line in series.items():
        style = styles[name] + (" dash" if name in dashed else "")
        run: list[str] = []
        for x, y in [*line, (math.nan, math.nan)]:
            if math.isfinite(y):
                run.append(f"{x_scale(x):.1f},{y_scale(y):.1f}")
                out.append(
                    f'<circle class="{style}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3">'
                    f"<title>{escape(name)}: {x:g} → {y:.2f}</title></circle>"
                )
            elif run:
                if name not in dots:
                    out.append(f'<polyline class="{style}" points="{" ".join(run)}"/>')
                run = []
    return "\n".join([*out, *_legend(styles, dashed, dots), "</svg>"])


def bar_chart(
    groups: Mapping[str, Mapping[str, float]], *, title: str, y_label: str, y_from: float | None = None
) -> str:
    """Return an SVG of grouped bars: group name -> series name -> value."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    styles = {name: f"s{i % 8}" for i, name in enumerate(names)}
    values = [v for group in groups.values() for v in group.values() if math.isfinite(v)]
    y_scale = _y_scale(values if y_from is None else [*values, y_from])
    out = _frame(title, "", y_label, y_scale)
    slot = (_WIDTH - _LEFT - _RIGHT) / max(1, len(groups))
    bar = slot * 0.8 / max(1, len(names))
    floor = _HEIGHT - _BOTTOM
    for g, (group, row) in enumerate(groups.items()):
        left = _LEFT + g * slot + slot * 0.1
        out.append(
            f'<text x="{left + slot * 0.4:.1f}" y="{floor + 18}" text-anchor="middle">{escape(group)}</text>'
        )
        for i, name in enumerate(names):
            value = row.get(name, math.nan)
            if not math.isfinite(value):
                continue
            y = y_scale(value)
            out.append(
                f'<rect class="{styles[name]}" x="{left + i * bar:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" '
                f'height="{max(0.0, floor - y):.1f}">'
                f"<title>{escape(group)}, {escape(name)}: {value:.2f}</title></rect>"
            )
    return "\n".join([*out, *_legend(styles), "</svg>"])


class _Scale:
    """Maps a value to a pixel, linearly or by logarithm."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.log = log and low > 0
        self.low, self.high = low, high if high > low else low + (abs(low) or 1.0)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            wanted = [d * 10.0**e for e in range(-3, 10) for d in (1, 2, 5)]
            found = [t for t in wanted if self.low * 0.999 <= t <= self.high * 1.001]
            return found if len(found) >= 2 else [self.low, self.high]
        raw = (self.high - self.low) / 6
        size = 10 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(k * step, 10) for k in range(first, last + 1)]


def _y_scale(values: Sequence[float]) -> _Scale:
    low, high = min(values), max(values)
    pad = max((high - low) * 0.06, 0.1)
    return _Scale(max(0.0, low - pad) if low >= 0 else low - pad, high + pad, _HEIGHT - _BOTTOM, _TOP)


def _frame(title: str, x_label: str, y_label: str, y_scale: _Scale) -> list[str]:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<text x="{_LEFT}" y="20" font-weight="600" font-size="14">{escape(title)}</text>',
    ]
    for tick in y_scale.ticks():
        y = y_scale(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    out.append(f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>')
    out.append(
        f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    out.append(
        f'<text transform="translate(16 {(_TOP + floor) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return out


def _styles(names: Iterable[str]) -> dict[str, str]:
    """Colour class by name: what stands before `` (`` decides."""
    heads = list(dict.fromkeys(name.split(" (")[0] for name in names))
    return {name: f"s{heads.index(name.split(' (')[0]) % 8}" for name in names}


def _legend(styles: Mapping[str, str], dashed: Sequence[str] = (), dots: Sequence[str] = ()) -> list[str]:
    x = _WIDTH - _RIGHT + 10
    out = []
    for i, (name, style) in enumerate(styles.items()):
        y = _TOP + 10 + 18 * i
        if name in dots:
            out.append(f'<circle class="{style}" cx="{x + 10}" cy="{y - 4}" r="3"/>')
        else:
            line = style + (" dash" if name in dashed else "")
            out.append(f'<polyline class="{line}" points="{x},{y - 4} {x + 20},{y - 4}"/>')
        out.append(f'<text x="{x + 26}" y="{y}">{escape(name)}</text>')
    return out
