"""`octavo chat`: a conversation in the terminal, over the client library.

With a terminal it is a loop of questions and streamed answers; without one it takes all of its input as one
question, prints the answer and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from octavo.core.cli import ConfigFile, Run, Sets
from octavo.core.client.blocking import BlockingClient, join_or_start
from octavo.core.client.llm import parameters
from octavo.core.client.stream import ClientError, RequestFailed
from octavo.core.messages import Chat, Params

FAILED = 1
INTERRUPTED = 130

Turn = dict[str, Any]


def command(
    model: str | None = None,
    *,
    config: ConfigFile = None,
    set_: Sets = None,
    run: Run = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.2,
    seed: int | None = None,
) -> int:
    """Chat in the terminal: with a running daemon, or one that is started for it and stopped after.

    Ctrl-C interrupts an answer; /new begins anew; /exit, Ctrl-D or Ctrl-C at the prompt end the chat.

    Parameters
    ----------
    model
        start a daemon with this model; like --config and --set, this means that no running one is joined
    system
        what the model is told before all else
    temperature
        0 always takes the likeliest token; small models ramble at the API's default of 1
    """
    given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    params = parameters(**{name: value for name, value in given.items() if value is not None})
    opening: list[Turn] = [] if system is None else [{"role": "system", "content": system}]
    try:
        with join_or_start(model, config, set_, run) as client:
            if sys.stdin.isatty():
                return _converse(client, params, opening)
            return _answer_one(client, params, opening)
    except (ClientError, FileNotFoundError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _answer_one(client: BlockingClient, params: Params, opening: list[Turn]) -> int:
    question = sys.stdin.read().strip()
    if not question:
        print("octavo: nothing to answer: the standard input is empty", file=sys.stderr)
        return FAILED
    _say(_text(client, [*opening, {"role": "user", "content": question}], params))
    return 0


def _converse(client: BlockingClient, params: Params, opening: list[Turn]) -> int:
    import readline  # noqa: F401 - gives `input` its line editing

    print(f"{client.facts.model_id}, {client.facts.context} tokens of context. /new begins anew, /exit ends.")
    turns = list(opening)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        match question:
            case "":
                continue
            case "/exit":
                return 0
            case "/new":
                turns = list(opening)
                continue
        asked = [*turns, {"role": "user", "content": question}]
        try:
            answer = _say(_text(client, asked, params))
        except ClientError as error:
            # The conversation stays as it was before the question.
            print(f"octavo: {error}", file=sys.stderr)
            continue
        turns = [*asked, {"role": "assistant", "content": answer}]


def _text(client: BlockingClient, turns: list[Turn], params: Params) -> Iterator[str]:
    """The answer's text, piece by piece; leaving cancels the rest."""
    with closing(client.pieces(Chat(turns), params)) as pieces:
        for piece in pieces:
            if piece.finish not in (None, "stop", "length"):
                raise RequestFailed(piece.finish, piece.reason)
            yield piece.text


def _say(texts: Iterator[str]) -> str:
    """Print as it comes; what was said, also when it was interrupted."""
    said = ""
    try:
        for text in texts:
            said += text
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" …", end="")
    finally:
        print(flush=True)
    return said
