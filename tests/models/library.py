"""Which decoders of the transformers library are served, and by whom: `python -m tests.models.library [--write]`.

A small random checkpoint of every type that the library has for causal language models is given to the executors
`native` (exact mode) and `transformers`. One that serves it answers a prompt in chunks, then another that begins with
the same blocks, in company; log-probabilities must be those of the library in fp32, with its own attention. Windows and
the like are shorter than the prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.core.config.schema import Config, ExecutorConfig, KvConfig, ModelConfig
from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.executors.native.executor import NativeExecutor
from octavo.executors.transformers.executor import TransformersExecutor
from tests.executors.driver import Driver, Sequence
from tests.executors.tiny import VOCAB, save

RESULTS = Path(__file__).parents[1] / "results" / "transformers.md"
PROMPT, ANSWER, SAME = 70, 4, 48
"""Tokens of a prompt and of its answer, and how many both prompts begin with."""
LARGEST_ERROR = 1e-3

_LAYERS, _WINDOW, _MOST, _PATIENCE = 4, 24, 20_000_000, 60
"""`_MOST`: parameters of a small one; `_PATIENCE`: seconds for one type."""
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "decoder_ffn_dim"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 40),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size", "attention_chunk_size"), _WINDOW),
    **dict.fromkeys(("index_topk", "original_max_position_embeddings"), _WINDOW),
    **{f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "sep", "decoder_start"))},
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_chunk_size", "chunk_size"), 8),
    "mamba_d_ssm": 64,
    "mamba_d_head": "auto",
    "hidden_size_per_layer_input": 16,
    "intermediate_size_mlp": 80,
    "word_embed_proj_dim": 64,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
    "n_shared_experts": 1,
}  # fmt: skip
_OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "original_max_position_embeddings": 256},
}
"""What a type needs beside those."""


def small(kind: str) -> PreTrainedConfig:
    """A config of this type with few numbers in it; its other values are the type's own."""
    made = CONFIG_MAPPING[kind]
    config: PreTrainedConfig = made(**(_smaller(made().to_dict()) | _OTHERS.get(kind, {})))
    with torch.device("meta"):
        made_of: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if (count := sum(parameter.numel() for parameter in made_of.parameters())) > _MOST:
        raise ValueError(f"it has {count} parameters")
    return config


def _smaller(there: dict[str, Any]) -> dict[str, Any]:
    """Of a config, and of those within it, the keys to change."""
    changes = {key: value for key, value in _SIZES.items() if key in there}
    changes |= {key: there[key] | _smaller(there[key]) for key in there if key.endswith("_config") and there[key]}
    if there.get("kv_lora_rank") and "num_key_value_heads" in there:  # of latents every head has its own keys
        changes["num_key_value_heads"] = there["num_key_value_heads"] and 4
    if "per_layer_config" in there:
        changes["per_layer_config"] = None
    layers = next((there[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in there), None)
    for key, given in there.items():
        if isinstance(given, list) and len(given) == layers:
            rare = sorted(range(layers), key=lambda i: (given[:i].count(given[i]), i))[:_LAYERS]  # of each kind one
            changes[key] = [given[i] for i in sorted(rare)]
    return changes


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What the library says while it makes and reads models."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    return model


def error_of(executor: Any, model: PreTrainedModel) -> float:
    """The largest difference of a log-probability."""
    generator = torch.Generator().manual_seed(7)
    first = torch.randint(VOCAB, (PROMPT,), generator=generator).tolist()
    second = first[:SAME] + torch.randint(VOCAB, (PROMPT - SAME,), generator=generator).tolist()
    greedy = Sampling(temperature=0.0, logprobs=5)
    driver = Driver(executor)
    one = driver.open(first, sampling=greedy)
    driver.finish(one, ANSWER, 13)
    two, three = (driver.open(ids, sampling=greedy, warm=one) for ids in (second, second[::-1]))
    while min(len(two.output), len(three.output)) < ANSWER:
        driver.advance([two, three], 9)
    return max(_off(sequence, model) for sequence in (one, two, three))


def _off(sequence: Sequence, model: PreTrainedModel) -> float:
    if sequence.failure:
        return float("inf")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([sequence.ids]), use_cache=False).logits[0].log_softmax(-1)
    rows = [(entry, expected[sequence.prompt_len - 1 + i]) for i, entry in enumerate(sequence.logprobs) if entry]
    return max(
        abs(value - float(row[token]))
        for entry, row in rows
        for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
    )


class Judged(NamedTuple):
    """Of an executor that serves it, how far it is off; of one that does not, why."""

    served: dict[str, float]
    refused: dict[str, str]


def judge(kind: str, folder: Path) -> Judged | str:
    """Or why there is no small one."""
    try:
        with silence():
            made = AutoModelForCausalLM.from_config(small(kind), dtype=torch.float32)  # type: ignore[no-untyped-call]
            save(made, folder)
            model = reference(folder)
            model(input_ids=torch.ones(1, 3, dtype=torch.int64), use_cache=False)
    except Exception as error:  # noqa: BLE001 - the library's own: every type has its own needs
        return _line(error)
    judged = Judged({}, {})
    config = Config(
        model=ModelConfig(path=str(folder)),
        kv=KvConfig(tokens=1024, block_size=8),
        executor=ExecutorConfig(mode="exact", threads=1),
    )
    for name, kind_of in (("native", NativeExecutor), ("transformers", TransformersExecutor)):
        try:
            with silence():
                judged.served[name] = error_of(kind_of.load(config), model)
        except ModelError as error:
            judged.refused[name] = _line(error).replace(str(folder), "it")
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            judged.refused[name] = f"**fails**: {type(error).__name__}: {_line(error)}"
    return judged


def report(rows: dict[str, Judged | str]) -> str:
    judged = {kind: row for kind, row in rows.items() if isinstance(row, Judged)}
    served = {kind: row for kind, row in judged.items() if row.served}
    refused = {kind: row for kind, row in judged.items() if not row.served}
    apart = {kind: row for kind, row in rows.items() if not isinstance(row, Judged)}
    counted = (
        f"transformers {transformers.__version__}: of {len(rows)} types {len(served)} are served, {len(refused)} are "
        f"not, and of {len(apart)} the script has no small one. Code that comes with a model is never run."
    )
    lines = [
        "# Decoders of the transformers library", "", (__doc__ or "").strip(), "",
        counted, "",
        "## Served", "", "Largest difference of a log-probability; – is not known to that executor.", "",
        "| type | native | transformers |", "|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| `{kind}` | {_off_of(row, 'native')} | {_off_of(row, 'transformers')} |" for kind, row in served.items()
    ]
    lines += ["", "## Refused", "", "Types that `native` does not know, and what `transformers` says.", ""]
    lines += [
        "| type | why |",
        "|---|---|",
        *(f"| `{kind}` | {row.refused['transformers']} |" for kind, row in refused.items()),
    ]
    lines += ["", "## Not tried", "", "| type | why no small one was made |", "|---|---|"]
    lines += [f"| `{kind}` | {row} |" for kind, row in apart.items()]
    return "\n".join(lines) + "\n"


def _off_of(row: Judged, executor: str) -> str:
    if (off := row.served.get(executor)) is not None:
        return f"{off:.0e}" if off <= LARGEST_ERROR else f"**{off:.0e}**"
    return "–" if "types that are known are" in row.refused[executor] else f"no: {row.refused[executor]}"


def _enough(*_: object) -> None:
    raise TimeoutError(f"not done in {_PATIENCE} s")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].replace("|", "/")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("kinds", nargs="*", help="model types; without any, all of them")
    options.add_argument("--write", action="store_true", help=f"to {RESULTS.name}")
    given = options.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _enough)
    rows: dict[str, Judged | str] = {}
    for kind in given.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        torch.manual_seed(0)
        signal.alarm(_PATIENCE)
        with tempfile.TemporaryDirectory(prefix="octavo-library-") as folder:
            rows[kind] = judge(kind, Path(folder))
        signal.alarm(0)
        print(kind, rows[kind], flush=True)
    text = report(rows)
    if given.write:
        RESULTS.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
