"""The chat page in a real browser: what is typed is answered, and the figures are shown. With `--browser chromium`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.core.config.schema import Config
from octavo.plugins.openai import routes
from tests.gateway.conftest import FakeEngine, serving

TYPED = """<script>
about().then(() => { $("text").value = "hello <b>there</b>"; $("ask").requestSubmit(); });
</script></html>"""


def test_the_page_answers(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    browser = pytestconfig.getoption("--browser")
    if not browser:
        pytest.skip("only with --browser PROGRAM")
    typed = tmp_path / "page.html"
    typed.write_text(routes.PAGE.read_text().replace("</html>", TYPED))
    monkeypatch.setattr(routes, "PAGE", typed)
    engine = FakeEngine()
    engine.answer = "héllo <i>👍</i>"
    picture = root / "tests" / "results" / "pictures" / "chat.png"
    with serving(engine, Config()) as (url, _):
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100, "check": True}
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,500", "--virtual-time-budget=20000"]
        dom = subprocess.run([browser, *quiet, "--dump-dom", url], **options).stdout
        subprocess.run([browser, *quiet, f"--screenshot={picture}", url], **options)
    assert '<p class="turn user">hello &lt;b&gt;there&lt;/b&gt;</p>' in dom
    assert '<p class="turn assistant">héllo &lt;i&gt;👍&lt;/i&gt;</p>' in dom, "what a model writes is text"
    assert "first token after" in dom
    assert "4 of 18 from the cache" in dom
    assert "octavo trace show" in dom
    assert picture.stat().st_size > 5000
