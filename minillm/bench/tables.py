"""The README's results, generated from the recorded files."""

import json
from pathlib import Path

from minillm.bench import BENCHMARKS
from minillm.folders import data_folder

MARKERS = (
    "<!-- results, written by python -m minillm.bench --readme -->",
    "<!-- end of results -->",
)


def results_table(folder: Path) -> str:
    """The results as a Markdown table, in the order of the benchmarks."""
    lines = [
        "| benchmark | hardware | result | of the bound | as fast as |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in BENCHMARKS:
        for path in sorted(folder.glob(f"{name}.*.json")):
            document = json.loads(path.read_text())
            label = document["hardware"]["label"]
            for row in document["rows"]:
                share = f"{row['of_bound']:.0%}" if "of_bound" in row else "–"
                ratios = [f"{ratio:.2f} × {peer}" for peer, ratio in row.get("against", {}).items()]
                gaps = [f"{peer}: {reason}" for peer, reason in row.get("gaps", {}).items()]
                peers = ", ".join(ratios + gaps) or "–"
                value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
                result = f"{value} {row['unit']}"
                lines.append(f"| {row['what']} | {label} | {result} | {share} | {peers} |")
    return "\n".join(lines)


def update_readme(readme: Path) -> None:
    """Put the current `results_table` between the README's two markers."""
    before, rest = readme.read_text(encoding="utf-8").split(MARKERS[0])
    after = rest.split(MARKERS[1])[1]
    table = results_table(data_folder())
    readme.write_text(f"{before}{MARKERS[0]}\n{table}\n{MARKERS[1]}{after}", encoding="utf-8")
