"""Greedy answers of the default model are those of transformers in fp32, which reads the same file by its own means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the executor's package does, but torch is loaded here first

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.core.models.locate import locate
from octavo.executors.cpu.executor import CpuExecutor
from tests.executors.conftest import load
from tests.executors.driver import Driver

NEW = 24
NEAR = 1e-3
"""Two logits that are closer than this may come in either order."""

CHATS: list[list[str]] = [
    ["What is 2+2?"],
    ["Hi"],
    ["Name three colours."],
    ["Why is the sky blue? Answer in one sentence."],
    ["Write a haiku about autumn."],
    ["Write a Python function that reverses a string."],
    ["What does this print?\n\nfor i in range(3):\n    print(i * i)"],
    ["Explain what a hash table is to a child."],
    ["Translate to French: The cat sleeps on the chair."],
    ["¿Cuál es la capital de España?"],
    ["Was ist der Unterschied zwischen Äpfeln und Birnen?"],
    ["日本の首都はどこですか。"],
    ["Расскажи о Москве."],
    ["My name is Ada.", "Nice to meet you, Ada!", "What is my name?"],
    ["Give me a number.", "Seven.", "Double it.", "Fourteen.", "And once more?"],
    ["I am sad.", "I am sorry to hear that. What happened?", "My dog ran away."],
]
TEXTS = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. " * 20 + "Then",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    " ".join(f"Line {i}: the value of item {i} is {i * i % 97}." for i in range(25)) + " Line 25:",
]


class Case(NamedTuple):
    name: str
    ids: list[int]


@pytest.fixture(scope="module")
def executor() -> CpuExecutor:
    return load("default", 2, tokens=2048)


@pytest.fixture(scope="module")
def path() -> Path:
    found = locate("default").path
    assert found is not None
    return found


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """transformers' own reading of the file, short of `from_pretrained`, which wants the accelerate package for it."""
    read_file: Any = load_gguf_checkpoint
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig(**read_file(str(path))["config"]))
    read = read_file(str(path), return_tensors=True, model_to_load=skeleton)
    model: Any = LlamaForCausalLM(skeleton.config)
    model.float().eval()
    left = model.load_state_dict(read["tensors"], strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys in ([], ["lm_head.weight"])  # tied to the embedding
    return model


@pytest.fixture(scope="module")
def cases(path: Path) -> list[Case]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    out = []
    for turns in CHATS:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        out.append(Case(turns[-1][:30], tokenizer(text, add_special_tokens=False).input_ids))
    return out + [Case(text[:30], tokenizer(text, add_special_tokens=False).input_ids) for text in TEXTS]


def first_difference(reference: Any, ids: list[int], output: list[int]) -> tuple[int, float] | None:
    """Where greedy decoding by the reference leaves `output` first, and how far apart its two best logits are there,
    infinite if ours is not one of them. One forward pass over all tells it: up to there the prefixes are the same."""
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + output[:-1]]), logits_to_keep=len(output)).logits[0]
    differ = (logits.argmax(-1) != torch.tensor(output)).nonzero()
    if not len(differ):
        return None
    at = int(differ[0])
    values, best = logits[at].topk(2)
    return at, float(values[0] - values[1]) if output[at] in best.tolist() else float("inf")


def test_greedy_answers_are_those_of_transformers(executor: CpuExecutor, reference: Any, cases: list[Case]) -> None:
    """All prompts are served together. At most one in twenty may differ, and only at a near tie."""
    driver = Driver(executor)
    sequences = []
    for start in range(0, len(cases), 8):
        some = [driver.open(case.ids) for case in cases[start : start + 8]]
        while live := [s for s in some if len(s.output) < NEW]:
            driver.advance(live, chunk=256)
        for sequence in some:
            driver.release(sequence)
            driver.free += sequence.table
        sequences += some
    differences = 0
    for case, sequence in zip(cases, sequences, strict=True):
        if (found := first_difference(reference, case.ids, sequence.output)) is not None:
            at, gap = found
            print(f"{case.name!r} differs at output {at}: the reference's best two logits are {gap:.2e} apart")
            assert gap <= NEAR
            differences += 1
    assert len(cases) >= 20
    assert differences * 20 <= len(cases)
