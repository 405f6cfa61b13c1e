"""The executor `transformers`: families that Octavo does not know run as the library runs them, and exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    DogeConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    OPTConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.transformers.executor import TransformersExecutor
from tests.executors.driver import DECODE, Driver, Sequence
from tests.executors.tiny import VOCAB, save

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "windows and soft caps": lambda: Gemma2Config(**SMALL, head_dim=8, sliding_window=9),
    "Conv1D and learned positions": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
    "scaled logits, parallel blocks": lambda: CohereConfig(**SMALL),
    "partial rotation": lambda: StableLmConfig(**SMALL),
    "chunks, experts": lambda: Llama4TextConfig(
        **SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=20,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "sinks, windows": lambda: GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=20, rope_parameters=None,
    ),
    "a decoder within": lambda: OPTConfig(
        **(SMALL | {"bos_token_id": 1, "pad_token_id": 0}), ffn_dim=48, word_embed_proj_dim=32,
    ),
    "latent attention, experts": lambda: DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=8,
        moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


@cache
def folder_of(family: str) -> Path:
    folder = Path(mkdtemp(prefix="octavo-family-"))
    save(AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32), folder)  # type: ignore[no-untyped-call]
    return folder


@cache
def executor_of(family: str, block_size: int = 16) -> TransformersExecutor:
    return load(folder_of(family), block_size)


def load(folder: Path, block_size: int = 16) -> TransformersExecutor:
    model, kv = ModelConfig(path=str(folder)), KvConfig(tokens=2048, block_size=block_size)
    return TransformersExecutor.load(Config(model=model, kv=kv, executor=ExecutorConfig(threads=1)))


def prompt(seed: int, n: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(n)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_the_librarys(family: str) -> None:
    library = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager")
    library.train(False)
    ids = prompt(1, 30)
    expected = list(ids)
    with torch.inference_mode():
        for _ in range(6):
            logits = library(input_ids=torch.tensor([expected])).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > 1e-3, "the test's own model leaves the answer to rounding"
            expected.append(int(logits.argmax()))
    driver = Driver(executor_of(family))
    assert driver.finish(driver.open(ids), 6, chunk=7) == expected[30:]


@pytest.mark.parametrize("family", FAMILIES)
def test_company_chunks_blocks_and_warm_starts_change_no_bit(family: str) -> None:
    samplings = [Sampling(temperature=0.9 * (i % 2), seed=i, logprobs=2) for i in range(3)]
    prompts = [prompt(i // 2, 25 + i) for i in range(3)]

    def alone(i: int) -> Sequence:
        driver = Driver(executor_of(family))
        sequence = driver.open(prompts[i], sampling=samplings[i])
        driver.finish(sequence, 4)
        return sequence

    expected = [alone(i) for i in range(3)]
    driver = Driver(executor_of(family, 3), seed=5)
    first = driver.open(prompts[0], sampling=samplings[0])
    driver.step((first, 11))
    driver.step((first, first.left))
    others = [driver.open(prompts[i], sampling=samplings[i], warm=first) for i in (1, 2)]
    while any(len(s.output) < 4 for s in (first, *others)):
        driver.step(*(_piece(s) for s in (first, *others) if len(s.output) < 4))
    for own, together in zip(expected, (first, *others), strict=True):
        assert together.output[:4] == own.output[:4]
        assert together.logprobs[:4] == own.logprobs[:4], "equal to the last bit"


def test_the_context_ends_where_the_library_looks_at_places_in_a_step(tmp_path: Path) -> None:
    """Llama 4 scales queries by their place among those computed together, from `floor_scale` on."""
    config = Llama4TextConfig(
        **SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, no_rope_layers=[1, 0], floor_scale=20
    )
    save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)  # type: ignore[no-untyped-call]
    assert load(tmp_path).facts.context == 19


def _piece(sequence: Sequence) -> tuple[Sequence, int]:
    return (sequence, DECODE) if sequence.left == 1 and sequence.output else (sequence, min(6, sequence.left))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCAB), "bloom model"),
        (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCAB), "mamba model"),
        (BertConfig(**SMALL | {"pad_token_id": 0}), "layer 0 of this bert model lets tokens see later ones"),
        (DogeConfig(**SMALL), "layer 0 of this doge model attends by a mask of its own making"),
    ],
)  # fmt: skip
def test_who_keeps_attention_to_itself_is_refused_by_name(tmp_path: Path, config: PreTrainedConfig, why: str) -> None:
    save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=why):
        load(tmp_path)


def test_what_the_library_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ModelError, match="cannot be loaded by transformers") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
