"""Draw a demo run as an SVG: `python scripts/plot_demo.py runs/demo docs/demo.svg`."""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 44, 200, 40
INK, GREEN, GREY = "#24292f", "#1a7f37", "#8c959f"


def main(run: Path, to: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((run / "results.json").read_text())
    curve = [(line["step"], line["accept"]) for line in lines if line.get("accept") is not None]
    evaluations = [(line["step"], line["evaluation"]) for line in lines if "evaluation" in line]
    to.write_text(draw(curve, evaluations, results))


def draw(curve: list[tuple[int, float]], evaluations: list[tuple[int, dict]], results: dict) -> str:
    last = curve[-1][0]
    top = max(4.0, *(value for _, value in curve))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - 1) / (top - 1))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">Tokens per pass of the target, while the drafter '
        "trains</text>",
    ]
    for value in range(1, int(top) + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#d0d7de"/>'
        )
        parts.append(f'<text x="{LEFT - 10}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for step in range(0, last + 1, max(1, last // 4)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{GREY}" stroke-width="1.5"/>')
    decoded = " ".join(f"{x(step):.1f},{y(e['accept_length']):.1f}" for step, e in evaluations)
    parts.append(f'<polyline points="{decoded}" fill="none" stroke="{GREEN}" stroke-dasharray="4 4"/>')
    for step, found in evaluations:
        at = x(step), y(found["accept_length"])
        parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="5" fill="{GREEN}"/>')
        parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1] - 10:.1f}" text-anchor="middle" fill="{GREEN}" font-weight="bold">'
            f"{found['accept_length']:.2f}</text>"
        )
    notes = [(GREEN, "decoded, held-out prompts"), (GREY, "training blocks"), (INK, ""), (INK, "by family, decoded:")]
    notes += [(INK, f"{tag} {value:.2f}") for tag, value in results["accept_length_by_tag"].items()]
    for number, (colour, text) in enumerate(notes):
        parts.append(
            f'<text x="{WIDTH - RIGHT + 24}" y="{TOP + 16 + 18 * number}" fill="{colour}">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


main(Path(sys.argv[1]), Path(sys.argv[2]))
