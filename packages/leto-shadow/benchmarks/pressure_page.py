"""The page and the picture of a run of `memory_pressure.py`, in the manner of the paper's figure 13."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["render"]

GIB = 1 << 30
MIB = 1 << 20
WIDTH, LEFT, RIGHT = 900, 64, 16
MEMORY, LEVELS = (16, 300), (336, 120)  # top, height
COLOURS = {"active": "#1f5fa8", "total": "#c2571a", "level": "#2f7d4f", "grid": "#d9d9d9", "kill": "#8a1c1c"}


def _steps(points: list[list[Any]], end: float) -> list[tuple[float, float]]:
    """A step function as a line."""
    line: list[tuple[float, float]] = []
    for index, (t, value, *_) in enumerate(points):
        until = points[index + 1][0] if index + 1 < len(points) else end
        line += [(t, value), (until, value)]
    return line


def svg(result: dict[str, Any]) -> str:
    """Memory of the active trainer and of all processes over time, and the level of the shadow below it."""
    idle = result["memory"][0][1]  # what the driver keeps for itself, before any process
    samples = [[t, total - idle, active] for t, total, active in result["memory"]]
    start, end = result["recoveries"][0]["t"] - 8.0, samples[-1][0]
    shown = [one for one in samples if one[0] >= start]
    device = max(one[1] for one in shown)
    low = min((one[2] for one in shown if one[2] > device / 2), default=0) - GIB // 2
    high = device + GIB // 4

    def x(t: float) -> float:
        return LEFT + (max(t, start) - start) / (end - start) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        top, height = MEMORY
        return top + height - (max(value, low) - low) / (high - low) * height

    def level_y(level: float) -> float:
        top, height = LEVELS
        return top + height - level / 3 * height

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="500" viewBox="0 0 {WIDTH} 500" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>GPU memory and level of the shadow under memory pressure</title>",
        f'<rect width="{WIDTH}" height="500" fill="#ffffff"/>',
    ]

    def text(at_x: float, at_y: float, what: str, anchor: str = "middle", colour: str = "#333333") -> None:
        out.append(
            f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{colour}">{what}</text>'
        )

    def line(points: list[tuple[float, float]], colour: str, width: float = 1.5, dash: str = "") -> None:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
        )

    for tick in range(int(low // GIB) + 1, int(high // GIB) + 1, 2):
        line([(LEFT, y(tick * GIB)), (WIDTH - RIGHT, y(tick * GIB))], COLOURS["grid"], 1)
        text(LEFT - 6, y(tick * GIB) + 4, str(tick), "end")
    for level in (1, 2, 3):
        line([(LEFT, level_y(level)), (WIDTH - RIGHT, level_y(level))], COLOURS["grid"], 1)
        text(LEFT - 6, level_y(level) + 4, f"L{level}", "end")
    line([(x(one[0]), y(one[1])) for one in shown], COLOURS["total"])
    part: list[tuple[float, float]] = []
    for t, _, active in [*shown, [end, 0, 0]]:
        if active > low:
            part.append((x(t), y(active)))
        elif part:  # nobody trains: a gap
            line(part, COLOURS["active"])
            part = []
    line([(x(t), level_y(v)) for t, v in _steps(result["levels"], end) if t >= start], COLOURS["level"], 2)
    for one in result["recoveries"]:
        at = x(one["t"])
        line([(at, MEMORY[0]), (at, LEVELS[0] + LEVELS[1])], COLOURS["kill"], 1, "4 3")
        text(at + 4, MEMORY[0] + 12, f"{one['recovered_s']:.2f} s", "start", COLOURS["kill"])
    for one in result["reclaims"]:
        text(x(one["t"]), LEVELS[0] - 6, "reclaim", "middle", COLOURS["level"])
    bottom = LEVELS[0] + LEVELS[1]
    for tick in range(0, int(end - start) + 1, 10):
        text(x(start + tick), bottom + 18, str(tick))
    text(
        WIDTH / 2,
        bottom + 36,
        "seconds; dashed: SIGKILL of the active trainer, with the time until it trains again",
    )
    text(LEFT + 8, MEMORY[0] + 14, "GiB: active trainer", "start", COLOURS["active"])
    text(LEFT + 8, MEMORY[0] + 30, "GiB: with its shadow", "start", COLOURS["total"])
    return "\n".join([*out, "</svg>"]) + "\n"


def page(result: dict[str, Any], name: str) -> str:
    """The Markdown page."""
    held = {int(level): value for level, value in result["footprint_bytes"].items()}
    software = ", ".join(f"{key} {value}" for key, value in result.get("software", {}).items())
    rows = [
        f"| {one['phase']} | L{one['level']} | {one['recovered_s']:.2f} "
        f"| {one['breakdown'].get('prepare', 0.0):.2f} | {one['next_iteration_s']:.2f} | {one['source']} |"
        for one in result["recoveries"]
    ]
    taken = [
        f"| L{one['level']} | {one['request_bytes'] / MIB:.0f} | {one['bytes'] / MIB:.0f} "
        f"| {one['free_bytes'] / MIB:.0f} | {one['waited_s'] * 1000:.0f} |"
        for one in result["reclaims"]
    ]
    allowed = [f"| {one[0]:.1f} | L{one[1]} | {one[2]} |" for one in result["allowed"]]
    return TEMPLATE.format(
        device=result["device"],
        software=f" ({software})" if software else "",
        name=name,
        iterations=result["iterations"],
        failures=result["allocation_failures"],
        lost=result["iterations_lost"],
        l2=held.get(2, 0) // MIB,
        l3=held.get(3, 0) // MIB,
        rows="\n".join(rows),
        taken="\n".join(taken),
        allowed="\n".join(allowed),
    )


TEMPLATE = """# Shadows under memory pressure (figure 13)

One {device}{software}, a job of one rank started by `leto run --backend cuda`, an MoE-like load whose
demand swings, one SIGKILL in each of five phases. By `packages/leto-shadow/benchmarks/memory_pressure.py`;
every number is in the JSON file beside this page.

![memory and level over time]({name}.svg)

In {iterations} iterations and five failures **no allocation failed** ({failures} out-of-memory errors),
{lost} finished iterations were lost, and every recovery happened in place. The times include what the load
does before it trains: it fills the device and runs two short iterations to measure its own demand.

## Recoveries

| demand | shadow at | kill to training, s | of it late initialisation, s | to next iteration, s | source |
| --- | --- | --- | --- | --- | --- |
{rows}

## Reclaims

Each happened inside one `cudaMalloc` of the active trainer, at the moment PyTorch would have raised its
error.

| shadow was at | request, MiB | given back, MiB | free afterwards, MiB | the allocation took, ms |
| --- | --- | --- | --- | --- |
{taken}

## Levels

Measured footprint of this load's shadow: {l2} MiB at L2, {l3} MiB at L3 (NCCL's default buffers for four
communicators, and what one forward and backward of the real shapes left in the cache).

| second | level allowed | why |
| --- | --- | --- |
{allowed}

What this run does not show: several ranks (L3 is then a property of the world: one reclaim takes all
shadows to L2), and an optimizer protected by leto-rmu (the load keeps its weights and its counter in
retained pages, and updates them without a transaction). The fourth failure still meets a shadow at L1: the
controller raises a shadow after a calm generation was observed, not before.

The five failures follow the phases of the load: each comes when the phase has begun and the shadow stands
where it may, without a seed or a schedule. What a higher level saves rests on one or two recoveries for each
level here, of one rank without peers: single measurements without a spread.
"""


def render(result: dict[str, Any], out: Path, name: str) -> None:
    """Write NAME.md, NAME.svg and NAME.json into ``out``."""
    (out / f"{name}.md").write_text(page(result, name))
    (out / f"{name}.svg").write_text(svg(result))
    (out / f"{name}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
