"""What was measured, as tables: medians with their spread, and ratios of neighbours in time. Pure but for asking the
peers' programs for their versions."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from tests.peers.servers import NAMES, Places
from tests.peers.workloads import MORE_IS_BETTER, WORKLOADS

OURS = NAMES[0]

Record: TypeAlias = dict[str, Any]
"""One workload of one turn: `peer`, `round`, `workload`, `load` of the machine before, `idle` (shares of a core by
server), `pairs` (figures by server) and `errors` (by server)."""


def versions(places: Places) -> dict[str, str]:
    """Of everybody, as the programs themselves say."""
    found = {OURS: metadata.version("octavo")}
    asks = {
        "llama.cpp": [str(places.llama / "llama-server"), "--version"],
        "vLLM": _version(places.venvs / "vllm", "vllm"),
        "OpenVINO": _version(places.venvs / "openvino", "openvino-genai"),
        "transformers": _version(places.venvs / "vllm", "transformers"),
    }
    for name, command in asks.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        if done.returncode == 0 and lines:
            found[name] = next((line for line in lines if line.startswith("version")), lines[-1])
    return found


def _version(venv: Path, package: str) -> list[str]:
    code = f"from importlib import metadata; print(metadata.version({package!r}))"
    return [str(venv / "bin" / "python"), "-c", code]


def machine() -> str:
    """With what of its instructions kernels differ by."""
    words = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        words.setdefault(name.strip(), value.strip())
    flags = [one for one in ("avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if one in words.get("flags", "")]
    return f"{words.get('model name', platform.machine())}, {os.cpu_count()} cores, {' '.join(flags) or 'no AVX-512'}"


def report(data: dict[str, Any], how: str) -> str:
    taken: list[Record] = data["turns"]
    title, rest = how.strip().split("\n", 1)
    lines = ["# Speed beside peers", "", title, "", rest.strip().split("\n\n", 1)[1], "", data["machine"] + ".", ""]
    lines += ["; ".join(f"{name}: {words}" for name, words in data["versions"].items()) + ".", ""]
    lines += [f"Load of the machine before a turn: {_spread([one['load'] for one in taken])}.", ""]
    peers = list(dict.fromkeys(one["peer"] for one in taken))
    idle = [f"{name} {most:.3f}" for name in [OURS, *peers] if (most := _most_idle(taken, name)) is not None]
    lines += [f"Most of a core that was taken while nobody asked: {', '.join(idle)}.", ""]
    for workload in WORKLOADS:
        lines += [f"## {workload}", ""]
        here = [one for one in taken if one["workload"] == workload]
        for figure in dict.fromkeys(f for one in here for pair in one["pairs"] for of in pair.values() for f in of):
            lines += _table(here, peers, figure)
    failed = {
        f"- {name}, {one['workload']}: {(why.splitlines() or ['nothing was said'])[-1]}"
        for one in taken
        for name, why in one["errors"].items()
    }
    return "\n".join([*lines, *(["## What did not work", "", *sorted(failed)] if failed else [])]).rstrip() + "\n"


def _most_idle(taken: list[Record], name: str) -> float | None:
    return max((one["idle"][name] for one in taken if name in one["idle"]), default=None)


def _table(taken: list[Record], peers: list[str], figure: str) -> list[str]:
    better = "more" if figure in MORE_IS_BETTER else "less"
    lines = [
        f"| {figure}, {better} is better | median (least to most) | Octavo beside it | Octavo / it, pair by pair | n |",
        "|---|---|---|---|---|",
    ]
    for peer in peers:
        pairs = [pair for one in taken if one["peer"] == peer for pair in one["pairs"]]
        if not pairs:
            continue
        theirs, ours = [pair[peer][figure] for pair in pairs], [pair[OURS][figure] for pair in pairs]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
        ratio = _spread(ratios) if ratios else ""
        lines.append(f"| {peer} | {_spread(theirs)} | {_spread(ours)} | {ratio} | {len(pairs)} |")
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:.3g}" if len(values) < 2 else f"{middle:.3g} ({min(values):.3g} to {max(values):.3g})"
