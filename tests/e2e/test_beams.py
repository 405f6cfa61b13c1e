"""Beam search over HTTP and all processes gives the beams of transformers' own, for a small random model in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from tests.e2e.test_no_template import save_tokenizer
from tests.executors.tiny import VOCAB, save_tiny
from tests.processes.daemon import daemon

PROMPT = [(i * 37 + 5) % VOCAB for i in range(41)]
ENDS = [7, 30, 52]
"""Of likely tokens: in most steps some of the candidates end, in some steps most do."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, httpx.Client, list[str]]]:
    """The model, who serves it, and its tokens' texts: all but the last three differ."""
    folder = tmp_path_factory.mktemp("beams")
    model = save_tiny(folder)
    save_tokenizer(Path(folder))
    with daemon("executor.mode=exact", "kv.block_size=4", gateway=True, model=str(folder)) as running:
        running.wait_ready()
        with httpx.Client(base_url=running.info().address or "", timeout=60) as client:
            letters = [client.post("/detokenize", json={"tokens": [i]}).json()["prompt"] for i in range(VOCAB)]
            assert len(set(letters)) > VOCAB - 3
            yield model, client, letters


def theirs(model: PreTrainedModel, n: int, new: int, ends: list[int], **how: Any) -> list[list[int]]:
    prompt = torch.tensor([PROMPT])
    generated: Any = model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_return_sequences=n,
        max_new_tokens=new,
        eos_token_id=ends or None,
        pad_token_id=VOCAB - 1,
        **how,
    )
    return [ids[len(PROMPT) :] for ids in generated.tolist()]


def cut(ids: list[int], ends: list[int]) -> list[int]:
    """Without what pads it."""
    end = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: end + 1]


@pytest.mark.parametrize("ends", [[], ENDS])
@pytest.mark.parametrize(
    ("width", "penalty", "stopping"),
    [(1, 1.0, False), (3, 1.0, False), (3, 0.0, True), (4, 1.0, "never"), (8, 2.0, False), (5, -0.5, "never")],
)
def test_beams_are_those_of_transformers(
    served: tuple[PreTrainedModel, httpx.Client, list[str]],
    width: int,
    penalty: float,
    stopping: bool | str,
    ends: list[int],
) -> None:
    model, client, letters = served
    n = min(width, 3)
    how: dict[str, Any] = {} if width == 1 else {"length_penalty": penalty, "early_stopping": stopping}
    expected = [cut(ids, ends) for ids in theirs(model, n, 14, ends, num_beams=width, **how)]
    body = {
        "prompt": PROMPT,
        "use_beam_search": True,
        "n": n,
        "beam_width": width,
        "length_penalty": penalty,
        "early_stopping": stopping,
        "stop_token_ids": ends,
        "max_tokens": 14,
        "logprobs": 0,
    }
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [[letters[i] for i in ids] for ids in expected]
    assert [choice["finish_reason"] for choice in choices] == [
        "stop" if ids[-1] in ends else "length" for ids in expected
    ]
