"""The chart of the README and of the page of figures: rates of ingot and of other tools, as
benchmarks/results holds them. `python -m pages.chart` writes it; a test sees that it is current.
"""

from __future__ import annotations

from html import escape

from pages.tables import ROOT, comparisons, middle

FILE = ROOT / "docs" / "images" / "peers.svg"
SHOWN = {
    "from JSONL to columns, 200 MB": (
        "Text to training data, 200 MB of JSONL",
        {
            "ingot ingest + prepare": "ingot",
            "tokenizers": "tokenizers",
            "datasets.map": "datasets.map",
            "gigatoken, keeping nothing": "gigatoken, encoding alone",
        },
    ),
    "random rows of 1,024 tokens, batches of 64": (
        "Random rows of 1,024 tokens",
        {"ingot, best_fit": "ingot", "megatron-core": "megatron-core"},
    ),
    "cleaning 100 MB": (
        "Exact duplicates out of 100 MB",
        {"exact": "ingot", "exact, in plain Python": "plain Python"},
    ),
}
"""Title of a comparison -> title of its part of the chart, and whom it shows under which name."""
WIDTH, LEFT, BAR, ROW, HEAD = 720, 190, 400, 22, 34
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}"
    ".ours{fill:#d9542b}.other{fill:#8a949e}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.other{fill:#6e7781}}"
)


def chart() -> str:
    """The SVG; bars are medians over rounds, on one scale within each part."""
    found = {each["title"]: each for each in comparisons()}
    y, parts = 0, []
    for title, (heading, names) in SHOWN.items():
        each = found[title]
        rates = {
            names[result["name"]]: middle(result["rates"])
            for result in each["results"]
            if result["name"] in names
        }
        most, unit = max(rates.values()), each["unit"]
        y += HEAD
        parts.append(f'<text class="title" x="8" y="{y - 10}">{escape(heading)}</text>')
        for name, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
            width = max(2, round(rate / most * BAR))
            kind = "ours" if name == "ingot" else "other"
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
                f'<rect class="{kind}" x="{LEFT}" y="{y + 2}" width="{width}" height="16" rx="2"/>'
                f'<text x="{LEFT + width + 6}" y="{y + 14}">{rate:,.0f} {unit}/s</text>'
            )
            y += ROW
    machine = next(iter(found.values()))["machine"]
    y += 24
    parts.append(
        f'<text x="8" y="{y}">{escape(machine["device"])}, {machine["date"]}, medians of turns;'
        " benchmarks/results</text>"
    )
    height = y + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img"><title>Rates beside other tools</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(chart(), encoding="utf-8")
