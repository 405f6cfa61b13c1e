"""A model folder without a chat template (case H21): chat says how to give one, completions work."""

from __future__ import annotations

from pathlib import Path

import httpx
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.executors.tiny import VOCAB, save_tiny
from tests.processes.daemon import daemon


def save_tokenizer(folder: Path) -> None:
    """Bytes of text as far as the vocabulary goes, no template beside it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_h21_without_a_template_chat_is_refused_and_completions_work(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    save_tokenizer(tmp_path)
    with daemon(gateway=True, model=str(tmp_path)) as served:
        served.wait_ready()
        with httpx.Client(base_url=served.info().address or "", timeout=60) as client:
            asked = {"messages": [{"role": "user", "content": "hello"}]}
            refused = client.post("/v1/chat/completions", json=asked)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "messages")
            assert "chat_template.jinja" in error["message"]
            done = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5, "temperature": 0})
            assert done.status_code == 200, done.text
            assert done.json()["usage"]["completion_tokens"] == 5
