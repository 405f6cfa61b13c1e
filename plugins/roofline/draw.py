"""The roofline as a picture: an SVG that needs nothing else, and as text.

Both axes are logarithmic: operations per byte, and operations per second. The slope is the memory's bandwidth, the flat
part the processors' peak; they meet at the ridge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from statistics import median

from octavo.plugins.roofline.bound import BOUNDS, KINDS, StepPoint
from octavo.plugins.roofline.machine import Machine

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 46, 52
COLOURS = {"prefill": "#2a6fdb", "decode": "#d9622b", "mixed": "#7a4fbf"}
SHOWN_POINTS = 900
"""More would only lie on each other."""


def table(steps: Sequence[StepPoint], machine: Machine) -> list[str]:
    """Lines of text."""
    out = [
        machine.told,
        "",
        f"{'':8} {'steps':>6} {'FLOP/byte':>10} {'GFLOP/s':>9} {'GB/s':>7} {'of roof':>8}   bound by",
    ]
    for kind in KINDS:
        mine = [step for step in steps if step.kind == kind]
        if mine:
            bounds = Counter(step.bound for step in mine)
            shares = ", ".join(f"{bound} {bounds[bound] / len(mine):.0%}" for bound in BOUNDS if bounds[bound])
            rate = median(step.attained for step in mine) / 1e9
            traffic = median(step.bytes / step.took_ns for step in mine)
            roof = median(step.roof_ns / step.took_ns for step in mine)
            intensity = median(step.intensity for step in mine)
            out.append(
                f"{kind:8} {len(mine):>6} {intensity:>10.2f} {rate:>9.2f} {traffic:>7.2f} {roof:>8.0%}   {shares}"
            )
    return out


def svg(steps: Sequence[StepPoint], machine: Machine, title: str) -> str:
    """The picture. `steps` must not be empty."""
    return _Picture(steps, machine).draw(title)


class _Picture:
    def __init__(self, steps: Sequence[StepPoint], machine: Machine) -> None:
        every = max(1, len(steps) // SHOWN_POINTS)
        self._steps = steps[::every]
        self._machine = machine
        xs = [step.intensity for step in self._steps] + [machine.ridge]
        ys = [step.attained for step in self._steps] + [machine.flops]
        self._x0, self._x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 0.3)
        self._y0, self._y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def _x(self, intensity: float) -> float:
        return LEFT + (math.log10(intensity) - self._x0) / (self._x1 - self._x0) * (WIDTH - LEFT - RIGHT)

    def _y(self, rate: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(rate) - self._y0) / (self._y1 - self._y0) * (HEIGHT - TOP - BOTTOM)

    def draw(self, title: str) -> str:
        machine = self._machine
        out = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
                f'font-family="system-ui, sans-serif" font-size="12">'
            ),
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="24" font-size="15" fill="#222">{escape(title)}</text>',
            *self._grid(),
            *self._roof(),
        ]
        for kind in KINDS:
            mine = [step for step in self._steps if step.kind == kind]
            if mine:
                out.append(f'<g fill="{COLOURS[kind]}" fill-opacity="0.45">')
                out += [
                    f'<circle cx="{self._x(s.intensity):.1f}" cy="{self._y(s.attained):.1f}" r="3">'
                    f"<title>step {s.step}: {kind}, bound by {s.bound}, {s.took_ns / 1e6:.2f} ms</title></circle>"
                    for s in mine
                ]
                out.append("</g>")
        at = LEFT + 12.0
        for kind in KINDS:
            count = sum(step.kind == kind for step in self._steps)
            out.append(f'<circle cx="{at}" cy="{TOP + 14}" r="5" fill="{COLOURS[kind]}"/>')
            out.append(f'<text x="{at + 10}" y="{TOP + 18}" fill="#222">{kind} ({count})</text>')
            at += 120
        ridge = f"ridge {machine.ridge:.1f} FLOP/byte"
        out.append(f'<text x="{self._x(machine.ridge):.1f}" y="{self._y(machine.flops) - 8:.1f}" '
                   f'text-anchor="middle" fill="#222">{ridge}</text>')  # fmt: skip
        return "\n".join([*out, "</svg>\n"])

    def _grid(self) -> list[str]:
        out = ['<g stroke="#ddd" fill="#555" stroke-width="1">']
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        for power in range(self._x0, self._x1 + 1):
            x = self._x(10.0**power)
            out.append(f'<path d="M{x:.1f} {TOP}V{bottom}"/>')
            out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" stroke="none">{10.0**power:g}</text>')
        for power in range(self._y0, self._y1 + 1):
            y = self._y(10.0**power)
            out.append(f'<path d="M{LEFT} {y:.1f}H{right}"/>')
            label = f"{10.0 ** (power - 9):g}"
            out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" stroke="none">{label}</text>')
        middle = (LEFT + right) / 2
        out.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle" stroke="none">FLOP per byte</text>')
        out.append(
            f'<text transform="translate(18 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle" '
            'stroke="none">GFLOP/s</text></g>'
        )
        return out

    def _roof(self) -> list[str]:
        machine = self._machine
        left = max(10.0**self._x0, 10.0**self._y0 / machine.bytes)
        path = (
            f"M{self._x(left):.1f} {self._y(left * machine.bytes):.1f}"
            f"L{self._x(machine.ridge):.1f} {self._y(machine.flops):.1f}H{WIDTH - RIGHT}"
        )
        return [
            f'<path d="{path}" fill="none" stroke="#222" stroke-width="2"/>',
            (
                f'<text x="{WIDTH - RIGHT - 4}" y="{self._y(machine.flops) + 16:.1f}" text-anchor="end" fill="#222">'
                f"{machine.flops / 1e9:.0f} GFLOP/s, {machine.bytes / 1e9:.1f} GB/s</text>"
            ),
        ]
