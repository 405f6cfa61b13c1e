"""The same requests to Octavo and to vLLM: what differs, and whether it is meant to.

    python -m tests.peers.api --octavo URL [--vllm URL] [--exact]

Both serve the default model (README.md says how to start them). vLLM's answers are kept in vllm.json beside this file,
and only those that are not there are asked for: without vLLM, a run compares with what it said. With `--exact`, both
compute in fp32, and greedy texts, counts and log-probabilities are compared too. Writes tests/results/peers_api.md;
exits with 1 if a difference is not in `cases.ALLOWED`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import ExitStack
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from tests.peers.cases import ALLOWED, CASES, Case
from tests.peers.shapes import Allowed, Answer, Difference, answers_apart, values_apart

RESULT = Path(__file__).resolve().parents[1] / "results" / "peers_api.md"
RECORDED = Path(__file__).with_name("vllm.json")
PATIENCE_S = 60.0
NEAR = 2e-3
"""How far log-probabilities of the same fp32 weights may be apart."""


def ask(client: httpx.Client, case: Case) -> Answer:
    try:
        if case.body is None:
            response = client.get(case.path)
        elif isinstance(case.body, str):
            response = client.post(case.path, content=case.body, headers={"content-type": "application/json"})
        else:
            response = client.post(case.path, json=case.body)
    except httpx.TimeoutException:
        return Answer(0, "no answer", None, [], False)
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        data = [line[len("data: ") :] for line in response.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(item) for item in data if item != "[DONE]"]
        return Answer(response.status_code, kind, None, chunks, bool(data) and data[-1] == "[DONE]")
    try:
        body = response.json()
    except ValueError:
        body = None
    return Answer(response.status_code, kind, body, [], False)


class Recorded:
    """vLLM's answers, from a file and from itself."""

    def __init__(self, path: Path, client: httpx.Client | None) -> None:
        self._path = path
        self._client = client
        self._kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def answer(self, case: Case) -> Answer | None:
        """None if nobody knows."""
        key = json.dumps([case.path, case.body], sort_keys=True)
        if key not in self._kept and self._client is not None:
            found = ask(self._client, case)
            if found.status:
                self._keep(key, found._asdict())
        return Answer(**self._kept[key]) if key in self._kept else None

    @property
    def version(self) -> str:
        if self._client is not None:
            self._keep("version", self._client.get("/version").json()["version"])
        return str(self._kept["version"])

    @property
    def metrics(self) -> dict[str, str]:
        if self._client is not None:
            self._keep("metrics", metric_names(self._client))
        found: dict[str, str] = self._kept["metrics"]
        return found

    def _keep(self, key: str, value: Any) -> None:
        self._kept[key] = value
        self._path.write_text(json.dumps(self._kept, indent=0, sort_keys=True, ensure_ascii=False) + "\n")


def compared(case: Case, ours: Answer, theirs: Answer, exact: bool) -> list[Difference]:
    found = answers_apart(case.name, ours, theirs)
    if exact and case.values and ours.status == theirs.status == HTTPStatus.OK:
        found += values_apart(case.name, ours, theirs, NEAR)
    return found


def metric_names(client: httpx.Client, query: str = "") -> dict[str, str]:
    """`vllm:` families and their types."""
    text = client.get(f"/metrics{query}").text
    return dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)", text, re.MULTILINE))


def metrics_apart(octavo: httpx.Client, theirs: dict[str, str]) -> list[Difference]:
    ours = metric_names(octavo, "?names=vllm")
    return [
        Difference("metrics", name, ours.get(name, "absent"), theirs.get(name, "absent"))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def reason(difference: Difference) -> Allowed | None:
    return next((allowed for allowed in ALLOWED if allowed.covers(difference)), None)


def report(versions: str, counts: tuple[int, int], found: list[Difference], same: list[str], unknown: list[str]) -> str:
    assert __doc__ is not None
    meant = [(one, allowed) for one in found if (allowed := reason(one)) is not None]
    faults = [one for one in found if reason(one) is None]
    lines = ["# The API beside vLLM's", "", versions, ""]
    asked, valued = counts
    lines.append(
        f"{asked} requests to both: {len(faults)} differences are not meant, {len(meant)} are, {len(same)} answers are "
        "the same in every field."
    )
    if valued:
        lines.append(
            f"In {valued} of them greedy texts, finishes, counts and log-probabilities (within {NEAR}) were compared "
            "as well, both in fp32."
        )
    lines += ["", "## Not meant", ""] + (_table(faults) if faults else ["None."])
    lines += ["", "## Meant, and why", ""]
    for why in dict.fromkeys(allowed.why for allowed in ALLOWED):
        covered = [one for one, allowed in meant if allowed.why == why]
        if covered:
            lines += [f"- {why}"]
            places = sorted({one.path for one in covered})
            cases = sorted({one.case for one in covered})
            shown = ", ".join(f"`{place}`" for place in places[:6]) + (" …" if len(places) > 6 else "")
            lines += [f"  ({shown}; {cases[0] if len(cases) == 1 else f'{len(cases)} cases'})"]
    if unknown:
        lines += ["", "## Not compared", "", f"vLLM's answer is not known: {'; '.join(unknown)}."]
    lines += ["", "## The same in every field", "", "; ".join(same) + "."]
    return "\n".join(lines) + "\n"


def _table(differences: list[Difference]) -> list[str]:
    lines = ["| case | where | Octavo | vLLM |", "|---|---|---|---|"]
    return lines + [f"| {d.case} | `{d.path}` | {_short(d.ours)} | {_short(d.theirs)} |" for d in differences]


def _short(text: str) -> str:
    return (text if len(text) <= 120 else f"{text[:117]}...").replace("|", "\\|").replace("\n", "\\n")


def version_of(client: httpx.Client) -> str:
    body: Any = client.get("/version").json()
    return str(body["version"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--octavo", required=True)
    options.add_argument("--vllm")
    options.add_argument("--exact", action="store_true", help="both compute in fp32")
    options.add_argument(
        "--grammars", action="store_true", help="also what vLLM holds to a grammar: its engine may hang"
    )
    options.add_argument("--only", default="", help="cases whose name has this")
    options.add_argument("--show", action="store_true", help="both answers, of each case")
    given = options.parse_args()
    found: list[Difference] = []
    same: list[str] = []
    unknown: list[str] = []
    asked = valued = 0
    with ExitStack() as stack:
        octavo = stack.enter_context(httpx.Client(base_url=given.octavo, timeout=PATIENCE_S))
        vllm = stack.enter_context(httpx.Client(base_url=given.vllm, timeout=PATIENCE_S)) if given.vllm else None
        recorded = Recorded(RECORDED, vllm)
        versions = f"Octavo {metadata.version('octavo')} beside vLLM {recorded.version}."
        for case in CASES:
            if given.only not in case.name:
                continue
            theirs = recorded.answer(case) if given.grammars or not case.grammar else None
            if theirs is None:
                unknown.append(case.name)
                continue
            asked += 1
            print(case.name, file=sys.stderr, flush=True)
            ours = ask(octavo, case)
            differences = compared(case, ours, theirs, given.exact)
            valued += given.exact and case.values and ours.status == theirs.status == HTTPStatus.OK
            found += differences
            same += [case.name] if not differences else []
            if given.show:
                print(f"── {case.name}\n   octavo {ours}\n   vllm   {theirs}")
        found += metrics_apart(octavo, recorded.metrics)
    text = report(versions, (asked, valued), found, same, unknown)
    print(text)
    if not given.only:
        RESULT.write_text(text)
    sys.exit(any(reason(one) is None for one in found))


if __name__ == "__main__":
    main()
