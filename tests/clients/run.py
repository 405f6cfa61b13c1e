"""The acceptance suite: clients that people have, unchanged, against a daemon with the default model.

    .venv/bin/python tests/clients/run.py [--venvs FOLDER] [NAME ...]

Makes two environments from `requirements-*.txt` (3 GB, once), starts a daemon, runs each client, and writes versions
and results to tests/results/clients.md. Takes 15 minutes on two cores. Exits with 1 if a client failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from octavo.core.models.locate import locate
from octavo.core.rundir import read
from octavo.core.tokenizer.convert import converted_tokenizer

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "clients.md"
MODEL = "SmolLM2-135M-Instruct"
NEAR = 1e-3
LIMIT_S = 900.0
READY_S = 300.0

TASKS = ("smoke_mc", "smoke_ppl", "smoke_gen")
"""What the evaluation harness runs: log-likelihoods of choices, of whole texts, and greedy texts."""


class Failed(Exception):
    """A client did not get what it needs."""


class Place(NamedTuple):
    """Where things are for one run."""

    url: str
    venvs: Path
    work: Path

    def program(self, venv: str, name: str) -> str:
        return str(self.venvs / venv / "bin" / name)

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """What it prints. Raises `Failed`."""
        quiet = {
            "OMP_NUM_THREADS": "1",
            "OCTAVO_URL": self.url,
            "OCTAVO_MODEL": MODEL,
            "HF_HOME": str(self.work / "hf"),
        }
        done = subprocess.run(
            command,
            cwd=cwd or self.work,
            env={**os.environ, **quiet, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise Failed("\n".join(done.stdout.splitlines()[-25:]))
        return done.stdout

    @property
    def tokenizer(self) -> str:
        return str(self.reference / "tokenizer")

    @property
    def reference(self) -> Path:
        """The model and its tokenizer as folders; made when first asked for."""
        out = self.venvs / "reference"
        if not out.exists():
            path = locate("default").path
            assert path is not None
            script = str(HERE / "reference_model.py")
            self.run(self.program("eval", "python"), script, str(path), str(converted_tokenizer(path)), str(out))
        return out


class Client(NamedTuple):
    package: str
    venv: str
    run: Callable[[Place], str]
    what: str


def sdk(package: str, what: str) -> Client:
    """A client that has a script in `with_sdk`, which fails if anything is not as it should be."""
    script = HERE / "with_sdk" / f"{package.removesuffix('-slim').replace('-', '_')}_script.py"

    def run(place: Place) -> str:
        place.run(place.program("sdk", "python"), str(script))
        return "all of it"

    return Client(package, "sdk", run, what)


def guidellm(place: Place) -> str:
    place.run(
        *(place.program("eval", "guidellm"), "run", "--backend", f"kind=openai_http,target={place.url}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=10"),
        *("--tokenizer", f"kind=hf_auto,model={place.tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", "kind=json,path=guidellm.json", "--disable-console-interactive"),
        HF_HUB_OFFLINE="1",
    )
    requests = json.loads((place.work / "guidellm.json").read_text())["benchmarks"][0]["requests"]
    good, bad = len(requests["successful"]), len(requests["errored"])
    if good != 10 or bad:
        raise Failed(f"{good} requests succeeded, {bad} failed")
    outputs = {one["output_metrics"]["text_tokens"] for one in requests["successful"]}
    if outputs != {16}:
        raise Failed(f"it asked for 16 tokens and counted {outputs}")
    return "10 of 10 requests, 16 tokens each"


def aiperf(place: Place) -> str:
    place.run(
        *(place.program("eval", "aiperf"), "profile", "--model", MODEL, "--url", place.url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", place.tokenizer, "--isl", "64", "--osl", "16", "--concurrency", "2"),
        *("--request-count", "10", "--random-seed", "1", "--ui", "none", "--artifact-dir", str(place.work / "aiperf")),
        *("--extra-inputs", "ignore_eos:true"),
    )
    found = json.loads(next((place.work / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    if (good := found["request_count"]["avg"]) != 10:
        raise Failed(f"{good} of 10 requests")
    return "10 of 10 requests"


def lm_eval(place: Place) -> str:
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    program = (place.program("eval", "lm-eval"), "run", "--include_path", ".", "--log_samples")
    ours = f"model={MODEL},base_url={place.url}/v1/completions,tokenizer={place.tokenizer}"
    for out, model, args in (
        ("ours", "local-completions", f"{ours},tokenizer_backend=huggingface,num_concurrent=2"),
        ("direct", "hf", f"pretrained={place.reference / 'model'},dtype=float32"),
    ):
        where = ("--output_path", str(place.work / out), "--device", "cpu")
        place.run(
            *program, "--model", model, "--model_args", args, "--tasks", *TASKS, *where, cwd=HERE / "tasks", **offline
        )
    chat = f"model={MODEL},base_url={place.url}/v1/chat/completions"
    how = ("--tasks", "smoke_gen", "--apply_chat_template", "--output_path", str(place.work / "chat"))
    place.run(*program, "--model", "local-chat-completions", "--model_args", chat, *how, cwd=HERE / "tasks", **offline)
    worst = compared(place.work / "ours", place.work / "direct")
    return f"log-likelihoods and perplexities within {worst:.1e} of transformers run directly, greedy texts equal"


def compared(ours: Path, direct: Path) -> float:
    """How far apart the furthest log-likelihoods are, relative beyond 1. Raises `Failed`."""
    worst = 0.0
    for task in TASKS:
        mine, theirs = answers(ours, task), answers(direct, task)
        if mine.keys() != theirs.keys() or not mine:
            raise Failed(f"{task}: other documents: {len(mine)} and {len(theirs)}")
        for document, answer in mine.items():
            for a, b in zip(numbers(answer), numbers(theirs[document]), strict=True):
                if isinstance(a, float) and isinstance(b, float):
                    worst = max(worst, abs(a - b) / max(1.0, abs(b)))
                elif a != b:
                    raise Failed(f"{task}, document {document}: {a!r} here, {b!r} directly")
    if worst > NEAR:
        raise Failed(f"a log-likelihood is off by {worst}, more than {NEAR}")
    return worst


def answers(folder: Path, task: str) -> dict[int, Any]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return {sample["doc_id"]: sample["resps"] for sample in samples}


def numbers(value: Any) -> Iterator[float | str]:
    """What is in nested lists; numbers may be written as text."""
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, bool) or value in ("True", "False"):
        yield str(value)
    else:
        try:
            yield float(value)
        except ValueError:
            yield str(value)


def schemathesis(place: Place) -> str:
    """Against a daemon of its own, on the ghost: what matters here is the API, and thousands of answers."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder, served(Path(folder), "ghost") as url:
        (place.work / "openapi.json").write_bytes(httpx.get(f"{url}/openapi.json").content)
        program = (place.program("sdk", "schemathesis"), "--config-file", str(HERE / "schemathesis.toml"))
        out = place.run(*program, "run", "openapi.json", "--url", url, "-n", "20", "--seed", "1")
    found: list[str] = re.findall(r"\d+ generated.*", out)
    return found[-1]


CLIENTS = {
    "openai": sdk("openai", "chat, `.stream`, `.parse`, tools, completions, responses"),
    "litellm": sdk("litellm", "`openai/`, `hosted_vllm/`, `text-completion-openai/`"),
    "langchain": sdk("langchain-openai", "invoke, stream, batch, tools, structured output"),
    "instructor": sdk("instructor", "tools, JSON schema, partial"),
    "pydantic-ai": sdk("pydantic-ai-slim", "text, stream, typed output; chat and responses"),
    "agents": sdk("openai-agents", "tool loop, whole and streamed; responses and chat"),
    "lm-eval": Client("lm-eval", "eval", lm_eval, "loglikelihood, rolling, generate; completions and chat"),
    "guidellm": Client("guidellm", "eval", guidellm, "concurrent streams"),
    "aiperf": Client("aiperf", "eval", aiperf, "concurrent streams"),
    "schemathesis": Client("schemathesis", "sdk", schemathesis, "every operation of `/openapi.json`"),
}


@contextmanager
def served(work: Path, model: str = "default") -> Iterator[str]:
    """The address of a daemon that computes in fp32; the ghost's context is short, for those who set no limit."""
    sets = [f"run_dir={work / 'run'}", "server.port=0", "executor.mode=exact"]
    sets += ["model.context=512"] if model == "ghost" else []
    command = [sys.executable, "-m", "octavo", "serve", model, *(word for one in sets for word in ("--set", one))]
    with (work / "daemon.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + READY_S
        while (info := read(work / "run")) is None or info.address is None or not ready(info.address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((work / "daemon.log").read_text())
            time.sleep(0.2)
        yield info.address
        if "Traceback" in (text := (work / "daemon.log").read_text()):
            raise SystemExit(f"the daemon's log has a traceback:\n{text[-4000:]}")
    finally:
        process.terminate()
        process.wait(60)


def ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def environments(venvs: Path, names: set[str]) -> None:
    for name in names:
        pip = [str(venvs / name / "bin" / "python"), "-m", "pip", "install", "-q", "-r"]
        if not Path(pip[0]).exists():
            subprocess.run([sys.executable, "-m", "venv", str(venvs / name)], check=True)
            subprocess.run([*pip, str(HERE / f"requirements-{name}.txt")], check=True)


def version(place: Place, client: Client) -> str:
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    return place.run(place.program(client.venv, "python"), "-c", code).split()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "octavo-clients")
    given = parser.parse_args()
    chosen = {name: CLIENTS[name] for name in given.names or CLIENTS}
    environments(given.venvs, {client.venv for client in chosen.values()})
    rows, good = [], True
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as folder, served(Path(folder)) as url:
        place = Place(url, given.venvs, Path(folder))
        for name, client in chosen.items():
            begun = time.monotonic()
            try:
                found = client.run(place)
            except (Failed, subprocess.TimeoutExpired) as error:
                print(f"{name}: {error}", file=sys.stderr)
                found, good = f"**failed**: {str(error).splitlines()[-1][:200]}", False
            print(f"{name}: {found} ({time.monotonic() - begun:.0f} s)", flush=True)
            rows.append(f"| {name} | {version(place, client)} | {client.what} | {found} |")
        executor = re.findall(r"executor: (.*)", (Path(folder) / "daemon.log").read_text())[-1]
    write(rows, executor)
    return 0 if good else 1


def write(rows: list[str], executor: str) -> None:
    """The table, with these rows in place of former ones."""
    former = RESULT.read_text().splitlines() if RESULT.exists() else []
    by_name = {row.split("|")[1].strip(): row for row in [*former, *rows] if row.startswith("| ")}
    head = "# Clients against a served model\n\nWritten by `tests/clients/run.py`, which says what each one does.\n"
    about = f"Model {MODEL}, executor {executor}, {time.strftime('%Y-%m-%d', time.gmtime())}.\n"
    table = "\n".join(
        [
            "| client | version | what | result |",
            "|---|---|---|---|",
            *(by_name[name] for name in CLIENTS if name in by_name),
        ]
    )
    RESULT.write_text(f"{head}\n{about}\n{table}\n")


if __name__ == "__main__":
    sys.exit(main())
