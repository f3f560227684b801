"""The recorded results as tables: some rows for README.md, all of them for figures/RESULTS.md."""

import json
from pathlib import Path
from typing import Any

from minillm.bench import RECORDED
from minillm.tools.folders import data_folder

MARKERS = (
    "<!-- results, written by python -m minillm.bench --readme -->",
    "<!-- end of results -->",
)
HIGHLIGHT_MARKERS = (
    "<!-- highlights, written by python -m minillm.bench --readme -->",
    "<!-- end of highlights -->",
)


def _documents(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.*.json"))]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def results_table(folder: Path) -> str:
    """All results as a Markdown table, in the order of the benchmarks."""
    lines = [
        "| benchmark | hardware | recorded | result | of the bound | as fast as |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in RECORDED:
        for document in _documents(folder, name):
            label, date = document["hardware"]["label"], document["date"]
            for row in document["rows"]:
                share = f"{row['of_bound']:.0%}" if "of_bound" in row else "–"
                ratios = [f"{ratio:.2f} × {peer}" for peer, ratio in row.get("against", {}).items()]
                gaps = [f"{peer}: {reason}" for peer, reason in row.get("gaps", {}).items()]
                peers = ", ".join(ratios + gaps) or "–"
                result = f"{_number(row['value'])} {row['unit']}"
                columns = row["what"], label, date, result, share, peers
                lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def highlights(folder: Path) -> str:
    """Some results in plain words, as a Markdown table: a column for each CPU that has them all."""
    documents = {
        name: {document["hardware"]["label"]: document for document in _documents(folder, name)}
        for name in ("decode", "quantize", "prefill", "serve")
    }
    complete = set.intersection(*(set(found) for found in documents.values()))
    cpus = sorted(label for label in complete if label.startswith("cpu"))
    names = [f"{documents['decode'][cpu]['hardware']['name']} (`{cpu}`)" for cpu in cpus]
    head = "on a CPU ([all results](figures/RESULTS.md))"
    lines = [f"| {head} | {' | '.join(names)} |", "| --- |" + " --- |" * len(cpus)]
    for name, part, words, shown in (
        ("decode", "decode", "one user", _speed),
        ("decode", "prepacked", "one user, weights prepacked", _speed),
        ("quantize", "decode, int4", "one user, weights in 4 bits", _speed),
        ("prefill", "prefill", "reading a prompt of 512 tokens", _speed),
        ("prefill", "prepacked", "reading it, weights prepacked", _speed),
        (
            "serve",
            "serve 16 requests at once, answers of many",
            "16 requests at once, prompts included",
            _speed,
        ),
        ("serve", "TTFT", "a prompt whose first 512 tokens are known", _first_token),
        ("serve", "empty slots", "cache memory handed out and not used", _share),
    ):
        columns = [
            shown(next(row for row in documents[name][cpu]["rows"] if part in row["what"]))
            for cpu in cpus
        ]
        lines.append(f"| {words} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _speed(row: dict[str, Any]) -> str:
    """Tokens per second, the share of the bound, and the ratios to some peers."""
    parts = [f"{_number(row['value'])} {row['unit']}"]
    if "of_bound" in row:
        parts.append(f"{row['of_bound']:.0%} of the bound")
    parts += [
        f"{ratio:.1f} × {peer}"
        for peer, ratio in row.get("against", {}).items()
        if peer in ("transformers", "one at a time", "float32", "prepacked float32")
    ]
    return ", ".join(parts)


def _first_token(row: dict[str, Any]) -> str:
    return f"the first token comes after {row['value']:.0f}% of the time"


def _share(row: dict[str, Any]) -> str:
    return f"{row['value']:.1f}%"


def update_tables(project: Path) -> None:
    """Replace the text between the markers of both files in the folder `project`."""
    for name, markers, table in (
        ("README.md", HIGHLIGHT_MARKERS, highlights),
        ("figures/RESULTS.md", MARKERS, results_table),
    ):
        path = project / name
        before, rest = path.read_text(encoding="utf-8").split(markers[0])
        after = rest.split(markers[1])[1]
        text = f"{before}{markers[0]}\n{table(data_folder())}\n{markers[1]}{after}"
        path.write_text(text, encoding="utf-8")
