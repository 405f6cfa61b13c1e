"""What the client lets nobody ask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.client.client import Client
from octavo.core.client.session import Peers
from octavo.core.client.stream import RequestRefused
from octavo.core.messages import Chat, Params

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def sent() -> list[bytes]:
    return []


@pytest.fixture
def client(tmp_path: Path, sent: list[bytes]) -> Client:
    """Of a daemon whose links are up and of which nothing else is there."""

    def send(_role: object, body: bytes) -> bool:
        sent.append(body)
        return True

    station: Any = SimpleNamespace(
        mailbox=SimpleNamespace(endpoint="ipc://c"),
        links=SimpleNamespace(live=lambda _role: SimpleNamespace(generation=1)),
        send=send,
    )
    link: Any = None
    return Client(link, station, "c", tmp_path)


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(2**64, id="a number of 65 bits"),
        pytest.param("\ud800", id="half a character"),
        pytest.param(nested(2000), id="nested"),
    ],
)
async def test_what_no_message_can_carry_is_refused_at_once_and_nothing_of_it_stays(
    client: Client, sent: list[bytes], attack: Any
) -> None:
    call = {"function": {"name": "f", "arguments": {"a": attack}}}
    chat = Chat([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(RequestRefused, match="cannot be carried"):
        await client.generate(chat, Params())
    with pytest.raises(RequestRefused, match="cannot be carried"):
        await client.tokenize(chat)
    with pytest.raises(RequestRefused, match="cannot be carried"):
        await client.detokenize([2**64])
    assert not sent
    assert not client._streams
    assert not client._answers
    assert len(client._session.connect(Peers(2, 2))) == 1, "after a restart it has only itself to introduce"
