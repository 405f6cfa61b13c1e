"""Every family on the CUDA executor's forward pass, with the emulator for a GPU, against transformers in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from octavo.core.messages import Sampling
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import locate
from octavo.executors.cuda import decoder as decoder_
from octavo.executors.cuda.batch import build
from octavo.executors.cuda.decoder import Decoder
from octavo.executors.cuda.emulated import again
from octavo.executors.cuda.executor import CudaExecutor
from octavo.executors.cuda.expansion import Expansion
from octavo.executors.cuda.experts import reads_back
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import Replay
from octavo.executors.cuda.latent import LatentAttention
from octavo.executors.drafting.contract import Host
from octavo.executors.drafting.drafting import Drafting
from octavo.executors.loading.files import in_fp32
from octavo.executors.loading.from_folder import from_folder
from octavo.executors.residents import Span
from octavo.kernels.cuda.pool import LatentLayout
from octavo.plugins.memory.calculator import need
from octavo.plugins.memory.shape import read_shape
from tests.executors.tiny import VOCAB
from tests.kernels.conftest import Maker
from tests.kernels.test_executor import Bytes, Kv, Mode, config
from tests.native.families import FAMILIES, save_family
from tests.speculation.drafters import Bush
from tests.speculation.replica import Replica, asked

IDS = [(i * 37 + 5) % VOCAB for i in range(52)]
SIZES = {
    "hidden_size": 128, "n_embd": 128, "num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 1, "head_dim": 64,
    "kv_lora_rank": 64,
}  # fmt: skip
"""Heads of 64, for which the emulator has its kernels."""
LATENT = {"num_key_value_heads": 2}
"""Of models whose heads share latents, as transformers writes it."""
ROUNDING = 2.5
"""How many times as far from transformers in fp32 as transformers itself in fp16."""


def sizes_of(name: str) -> dict[str, int]:
    if name.endswith("no power of two"):
        return SIZES | {"hidden_size": 192, "n_head": 3}
    return SIZES | (LATENT if name.startswith("deepseek") else {})


def spans(first: int, last: int, table: list[int]) -> list[Span]:
    return [Span(IDS[first:last], first, table)]


def contents_in_fp8(model: torch.nn.Module) -> None:
    """Have it round what the executor keeps in fp8: contents of latents, without their norm's weights."""
    unit = LatentLayout(1, 16, FP8["kv_lora_rank"], 16, torch.float16, fp8=True).unit

    def rounded(norm: torch.nn.Module, _: object, out: torch.Tensor) -> torch.Tensor:
        weights = norm.get_parameter("weight") * unit
        return (out / weights).to(torch.float8_e4m3fn).to(out.dtype) * weights

    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.register_forward_hook(rounded)


FP8 = {"kv_lora_rank": 128}
"""Of latents, for which the emulator has kernels with contents in fp8."""


@pytest.mark.parametrize(
    ("name", "kv"),
    [*((name, torch.float16) for name in FAMILIES), ("deepseek_v2", torch.float8_e4m3fn)],
    ids=lambda of: of if isinstance(of, str) else str(of).rpartition(".")[2],
)
def test_logits_are_those_of_transformers(name: str, kv: torch.dtype, tmp_path: Path, resident_kernels: Maker) -> None:
    fp8 = kv == torch.float8_e4m3fn
    model = save_family(name, tmp_path, **(sizes_of(name) | (FP8 if fp8 else {})))
    if fp8:
        contents_in_fp8(model)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
        rounded = torch.nn.Module.to(model, torch.float16)(torch.tensor([IDS])).logits[0].float()
    loaded, table = in_fp32(from_folder(tmp_path)), [5, 1, 3, 0]

    def apart(made: torch.Tensor) -> float:
        """Of experts chosen by groups the mean says little: one choice that falls otherwise changes a token."""
        rows = (made - expected).square().mean(dim=-1)
        grouped = loaded.spec.experts is not None and loaded.spec.experts.groups > 0
        return float((rows.median() if grouped else rows.mean()).sqrt())

    theirs = apart(rounded)
    for exact in (False, True)[: 1 + (loaded.spec.experts is not None)]:  # experts are computed in two ways
        decoder = Decoder(loaded, resident_kernels(exact), torch.float16, 16, exact=exact, kv=kv)
        decoder.allocate(6)
        forward = Forward(decoder, again)
        with torch.inference_mode():
            passes = [(0, 33), (33, 50), *((i, i + 1) for i in range(50, len(IDS)))]  # chunks, then recorded decodes
            made = [(forward.run(build(spans(first, last, table), 16)), last - first) for first, last in passes[:2]]
            logits = [forward.logits(one, list(range(n))).clone() for one, n in made]
            logits += [forward.logits(forward.run(build(spans(a, b, table), 16)), [0]).clone() for a, b in passes[2:]]
        error = apart(torch.cat(logits))
        print(f"{name}{', exact' if exact else ''}: off by {error:.1e}, transformers in fp16 by {theirs:.1e}")
        assert error < ROUNDING * theirs


def test_experts_are_launched_where_their_products_wait_for_the_host(
    tmp_path: Path, resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's do but in bf16 on GPUs of two generations: a recording of them would fail, and with it the start."""
    cuda, found = torch.device("cuda", 0), {}
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        found[major] = (reads_back(cuda, torch.bfloat16), reads_back(cuda, torch.float16))
    assert found == {8: (True, True), 9: (False, True), 10: (False, True), 12: (True, True)}
    save_family("qwen3_moe", tmp_path, **SIZES)
    recorded: list[bool] = []

    def recorder(work: Callable[[], None]) -> Replay:
        recorded.append(True)
        return work

    cases: list[tuple[bool, Mode, bool]] = [(True, "fast", False), (True, "exact", True), (False, "fast", True)]
    for waits, mode, recording in cases:
        monkeypatch.setattr(decoder_, "reads_back", lambda *_, waits=waits: waits)
        recorded.clear()
        settings = config(tmp_path, mode=mode)
        made = CudaExecutor.on(resident_kernels(0), settings, torch.float16, Bytes(), recorder)
        with torch.inference_mode():
            assert made.forward.run(build(spans(4, 5, [0]), 16)).finite.all()
        assert bool(recorded) is recording, (waits, mode)


@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_moe", "gpt_neox", "bloom", "deepseek_v2, queries of low rank, groups of experts"]
)
def test_in_exact_mode_company_and_chunks_change_no_bit(name: str, tmp_path: Path, resident_kernels: Maker) -> None:
    save_family(name, tmp_path, **sizes_of(name))
    loaded = in_fp32(from_folder(tmp_path))

    def computed(passes: list[list[Span]], rows: list[int]) -> torch.Tensor:
        decoder = Decoder(loaded, resident_kernels(0), torch.float16, 16, exact=True)
        decoder.allocate(8)
        forward = Forward(decoder)
        with torch.inference_mode():
            made = [forward.run(build(each, 16)) for each in passes]
            return forward.logits(made[-1], rows)

    alone = computed([spans(0, 40, [0, 1, 2])], [39])
    other = Span(IDS[10:40], 0, [3, 4])
    crowd = computed([spans(0, 17, [7, 5, 6]), [other, *spans(17, 40, [7, 5, 6])]], [52])
    assert torch.equal(alone, crowd)


@pytest.mark.parametrize(
    ("sizes", "kv", "word"),
    [
        ({"kv_lora_rank": 48}, "auto", "latents of 48 . 16, only of multiples of 64 and of 16"),
        ({"kv_lora_rank": 64, "moe_intermediate_size": 44}, "auto", "widths that are no multiples of 8, as 44"),
        ({"kv_lora_rank": 64}, "fp8", "latent KV is 64 . 16 numbers, .*float8_e4m3fn .* need multiples of 128"),
    ],
)
def test_latents_that_kernels_cannot_have_are_refused(
    tmp_path: Path, resident_kernels: Maker, sizes: dict[str, int], kv: Kv, word: str
) -> None:
    save_family("deepseek_v2", tmp_path, **(SIZES | LATENT | sizes))
    with pytest.raises(ModelError, match=word):
        CudaExecutor.on(resident_kernels(0), config(tmp_path, kv=kv), torch.float16, Bytes())


def test_a_crowd_with_slopes_says_what_each_says_alone(tmp_path: Path, resident_kernels: Maker) -> None:
    save_family("mpt, capped", tmp_path)
    requests = [asked(i, IDS[: 40 - 3 * i], tokens=9, n=1 + i % 2) for i in range(3)]

    def run(tokens: int, **how: Any) -> Replica:
        executor = CudaExecutor.on(
            resident_kernels(1), config(tmp_path, tokens=tokens, mode="exact"), torch.float16, Bytes(), again
        )
        replica = Replica(executor, policy="off", **how)
        replica.run(requests)
        return replica

    assert run(128, slots=4, budget=15, crash_at=6).said == run(1024, slots=1, depth=1, caching=False).said


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_crowd_over_latents_says_what_each_says_alone(kv: Kv, tmp_path: Path, resident_kernels: Maker) -> None:
    """Under the production scheduler and KV-manager, steps that begin ahead, choices that fork, a pool too small with
    places in host memory beside it."""
    save_family("deepseek_v2", tmp_path, **(sizes_of("deepseek_v2") | FP8))
    requests = [asked(i, IDS[: 20 + i], tokens=9, n=1 + i % 2) for i in range(3)]

    def run(tokens: int, **how: Any) -> Replica:
        settings = config(tmp_path, tokens=tokens, mode="exact", kv=kv, host_tokens=0 if tokens > 96 else 256)
        executor = CudaExecutor.on(resident_kernels(1), settings, torch.float16, Bytes(), again)
        replica = Replica(executor, policy="off", **how)
        replica.run(requests)
        assert executor.stats["kv_saturated"] == 0
        return replica

    assert run(96, slots=4, budget=15, crash_at=6).said == run(1024, slots=1, depth=1, caching=False).said


def test_what_latents_in_fp8_take_is_what_is_told(tmp_path: Path, resident_kernels: Maker) -> None:
    """What is rotated stays in 16 bits: 16 of 144 numbers here."""
    save_family("deepseek_v2", tmp_path, **(sizes_of("deepseek_v2") | FP8))
    shape, found = read_shape(locate(str(tmp_path))), []
    kinds: list[tuple[Kv, str]] = [("auto", "fp16"), ("fp8", "fp8")]
    for kv, dtype in kinds:
        facts = CudaExecutor.on(resident_kernels(0), config(tmp_path, kv=kv), torch.float16, Bytes()).facts
        assert need(shape, context=48, concurrency=1, dtype=dtype).kv == 3 * facts.block_bytes
        found.append(facts.block_bytes)
    assert found[1] / found[0] == (128 + 2 * 16) / (2 * 144)


EXPANDED = {"qk_nope_head_dim": 16, "v_head_dim": 16}
"""Heads so much smaller than latents that to expand them pays behind prefixes, too."""


@pytest.mark.parametrize(("name", "fp8"), [("deepseek_v2", False), ("deepseek_v3", False), ("deepseek_v2", True)])
def test_long_chunks_are_expanded(name: str, fp8: bool, tmp_path: Path, resident_kernels: Maker) -> None:
    """Beside decodes and behind a prefix that is cached: logits as near to transformers in fp32 as otherwise."""
    model = save_family(name, tmp_path, **(sizes_of(name) | EXPANDED | (FP8 if fp8 else {})))
    if fp8:
        contents_in_fp8(model)
    ids = [(i * 61 + i * i) % VOCAB for i in range(210)]
    with torch.inference_mode():
        whole, other = (model(torch.tensor([some])).logits[0] for some in (ids, IDS))
        rounded = torch.nn.Module.to(model, torch.float16)(torch.tensor([ids])).logits[0].float()
    loaded, table = in_fp32(from_folder(tmp_path)), [*range(4, 18)]
    theirs = float((rounded - whole).square().mean(dim=-1).median().sqrt())
    for order in (0, 1):
        kv = torch.float8_e4m3fn if fp8 else torch.float16
        decoder = Decoder(loaded, resident_kernels(order), torch.float16, 16, exact=False, kv=kv)
        decoder.allocate(18)
        forward = Forward(decoder, again)
        waves: list[int] = []
        expand = decoder.expansion
        assert expand is not None
        made: list[torch.Tensor] = []
        with torch.inference_mode():
            for first, last, beside in ((0, 90, (0, 51)), (90, 180, (51, 52)), (180, 210, None)):
                each = [Span(ids[first:last], first, table)]
                if beside:
                    each.insert(0, Span(IDS[slice(*beside)], beside[0], [0, 1, 2, 3]))
                batch = build(each, 16)
                divided, rest = expand.divide(batch, 40)
                waves.append(0 if divided is None else len(divided.waves))
                assert (0 if rest is None else len(rest.ids)) == len(batch.ids) - (last - first) * waves[-1]
                made.append(forward.logits(forward.run(batch), list(range(len(batch.ids)))).clone())
        assert waves == [1, 1, 0]
        errors = torch.cat((made[0][51:], made[1][1:], made[2])) - whole
        assert float(errors.square().mean(dim=-1).median().sqrt()) < ROUNDING * theirs
        beside_them = torch.cat((made[0][:51], made[1][:1])) - other
        assert float(beside_them.square().mean(dim=-1).median().sqrt()) < ROUNDING * theirs


def test_a_crowd_whose_prompts_are_expanded_says_what_it_does_absorbed(
    tmp_path: Path, resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the production scheduler and KV-manager: chunks behind shared prefixes, beside decodes."""
    save_family("deepseek_v2", tmp_path, **(sizes_of("deepseek_v2") | EXPANDED))
    long = [(i * 61 + i * i) % VOCAB for i in range(170)]
    requests = [asked(0, IDS[:20], tokens=12), asked(1, long, tokens=6), asked(2, [*long[:144], *IDS], tokens=6, n=2)]
    expanded: list[int] = []

    def run(mode: Mode) -> Replica:
        settings = config(tmp_path, mode=mode)
        settings = replace(settings, scheduler=replace(settings.scheduler, chunk_budget=80))
        made = CudaExecutor.on(resident_kernels(1), settings, torch.float16, Bytes(), again)
        if (found := made.forward.decoder.expansion) is not None:
            attend = found.attention

            def counted(*given: Any) -> torch.Tensor:
                expanded.append(len(given[0]))
                return attend(*given)

            monkeypatch.setattr(found, "attention", counted)
        replica = Replica(made, policy="off", budget=80)
        replica.run(requests)
        return replica

    want = run("exact").said
    assert not expanded
    assert run("fast").said == want
    assert len(expanded) >= 8


def test_memory_to_expand_is_taken_for_what_can_come(tmp_path: Path, resident_kernels: Maker) -> None:
    """None where chunks are too short; else for contexts as long as they may be, in whole tiles."""
    save_family("deepseek_v2", tmp_path, **(sizes_of("deepseek_v2") | EXPANDED))
    settings, found = config(tmp_path), []
    for chunk, context in ((64, 200), (80, 200), (80, 70)):
        how = {
            "scheduler": replace(settings.scheduler, chunk_budget=chunk),
            "model": replace(settings.model, context=context),
        }
        made = CudaExecutor.on(resident_kernels(0), replace(settings, **how), torch.float16, Bytes())
        expansion = made.forward.decoder.expansion
        found.append(0 if expansion is None else expansion.longest)
    assert found == [0, 208, 80]


def test_the_worst_step_is_expanded_and_absorbed(
    tmp_path: Path, resident_kernels: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a chunk that is expanded takes is less than what as many tokens of short ones do."""
    save_family("deepseek_v2", tmp_path, **(sizes_of("deepseek_v2") | EXPANDED))
    absorbed, expanded = LatentAttention._absorbed, Expansion.attention
    ran: list[tuple[str, int]] = []

    def short(self: LatentAttention, *given: Any) -> torch.Tensor:
        ran.append(("absorbed", len(given[0])))
        return absorbed(self, *given)

    def long(self: Expansion, *given: Any) -> torch.Tensor:
        ran.append(("expanded", len(given[0])))
        return expanded(self, *given)

    monkeypatch.setattr(LatentAttention, "_absorbed", short)
    monkeypatch.setattr(Expansion, "attention", long)
    settings = config(tmp_path, mode="fast")
    settings = replace(settings, scheduler=replace(settings.scheduler, chunk_budget=300, max_sequences=3))
    CudaExecutor.on(resident_kernels(1), settings, torch.float16, Bytes(run=True), None)
    once = [("absorbed", 303), ("absorbed", 3), ("expanded", 300)]
    assert list(dict.fromkeys(ran)) == once
    assert ran.index(once[0], ran.index(once[2])) > ran.index(once[2])  # and again, beside what came of it


@pytest.mark.parametrize("name", ["deepseek_v2", "gemma3", "bloom"])
def test_trees_of_guesses_change_nothing(name: str, tmp_path: Path, resident_kernels: Maker) -> None:
    """Over latents, within windows, with slopes: what was right stays in the cells of its positions, and its
    log-probabilities with it, to the bit in texts so short."""
    save_family(name, tmp_path, **(sizes_of(name) | ({"sliding_window": 64} if name == "gemma3" else {})))
    settings = config(tmp_path, mode="exact")
    sampling = Sampling(temperature=0.7, seed=3, logprobs=2)
    requests = [asked(0, IDS[:18], tokens=12), asked(1, IDS[:19], tokens=9, sampling=sampling)]

    def run(answers: dict[tuple[tuple[int, ...], int], list[int]] | None = None) -> Replica:
        made = CudaExecutor.on(resident_kernels(1), settings, torch.float16, Bytes(), again)
        given: dict[str, Any] = {}
        if answers is not None:
            given = {"options": {"tokens": 12}}
            bush = Bush(Host(settings, made.facts), Bush.Options(answers=answers))
            made = CudaExecutor(made.forward, made.facts, None, Drafting(bush, VOCAB, trees=True))
        replica = Replica(made, policy="off" if answers is None else "fixed", **given)
        replica.run(requests)
        return replica

    want = run()
    got = run({(tuple(request.ids.tolist()), 0): want.said[request.handle, 0] for request in requests})
    assert got.said == want.said
    assert got.accepted > 6
    told = [[entry.top_logprobs for entry in replica.logprobs[1, 0] if entry] for replica in (got, want)]
    assert told[0] == told[1]
    assert len(told[0]) == 9


@pytest.mark.parametrize(
    ("name", "mode", "window", "trees"),
    [("gemma3", "fast", 64, True), ("gemma3", "fast", 48, False), ("gemma3", "exact", 64, False),
     ("bloom", "fast", 0, True), ("deepseek_v2", "exact", 0, False)],
)  # fmt: skip
def test_where_guesses_may_be_trees(
    name: str, mode: Mode, window: int, trees: bool, tmp_path: Path, resident_kernels: Maker
) -> None:
    save_family(name, tmp_path, **(sizes_of(name) | ({"sliding_window": window} if window else {})))
    made = CudaExecutor.on(resident_kernels(0), config(tmp_path, mode=mode), torch.float16, Bytes())
    assert made.forward.decoder.trees is trees
