"""HTTPS, with a certificate that is for tests alone; and what is said when it cannot be spoken."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest

from octavo.core.config.schema import Config, ServerConfig
from octavo.plugins.openai.app import CANNOT_BIND, run, without_tls
from tests.gateway.conftest import FakeEngine, serving

HERE = Path(__file__).with_name("tls")
CERTIFICATE, KEY = str(HERE / "certificate.pem"), str(HERE / "key.pem")
SERVER = ServerConfig(tls_certificate=CERTIFICATE, tls_key=KEY)


def test_answers_whole_and_streamed() -> None:
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.load_verify_locations(CERTIFICATE)
    engine = FakeEngine()
    with serving(engine, Config(server=SERVER)) as (url, _), httpx.Client(verify=trust) as http:
        url = url.replace("http://", "https://")
        body = {"prompt": "hi"}
        whole = http.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
        lines = http.post(f"{url}/v1/completions", json={**body, "stream": True}).text.splitlines()
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
        assert "".join(pieces) == whole == engine.answer
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https://", "http://"))


@pytest.mark.parametrize(
    ("certificate", "key", "told"),
    [(CERTIFICATE, None, "both"), (None, KEY, "both"), (KEY, KEY, "TLS"), (CERTIFICATE, "/nowhere.pem", "TLS")],
)
def test_what_cannot_be_used_stops_the_start(
    certificate: str | None, key: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_tls(SERVER) is None
    with pytest.raises(SystemExit) as raised:
        run(Config(server=ServerConfig(tls_certificate=certificate, tls_key=key)), tmp_path, 1)
    assert raised.value.code == CANNOT_BIND
    assert told in capsys.readouterr().err
