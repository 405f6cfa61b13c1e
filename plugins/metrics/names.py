"""vLLM's names for our numbers, so that dashboards and endpoint pickers made for it work here.

Only what means the same is named; their label `model_name` is left to the scrape's own labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.plugins.metrics.families import Family, Sample

if TYPE_CHECKING:
    from octavo.plugins.metrics.meter import Numbers
    from octavo.plugins.metrics.service import Service

FINISHED = ("stop", "length", "cancelled", "error")
REASONS = {"cancelled": "abort"}


class _Renamed(Family):
    """Another family under a new name: of its labels one, or all under a new label."""

    def __init__(self, name: str, of: Family, *, only: str = "", label: str = "") -> None:
        super().__init__(name, of.text, label)
        self.kind = of.kind
        self._of = of
        self._only = only

    def samples(self) -> Iterator[Sample]:
        for sample in self._of.samples():
            value = sample.labels.get(self._of.label, "")
            if self._only:
                if value == self._only:
                    yield sample._replace(labels={})
            elif not self.label:
                yield sample
            elif value in FINISHED:
                yield sample._replace(labels={self.label: REASONS.get(value, value)})


class _Usage(Family):
    """Share of the pool that is in use, 0 to 1."""

    kind = "gauge"

    def __init__(self, name: str, service: Service) -> None:
        super().__init__(name, "Share of the KV blocks that running sequences use.")
        self._service = service

    def samples(self) -> Iterator[Sample]:
        total = next(self._service.total.samples()).value
        used = next(s.value for s in self._service.blocks.samples() if s.labels["state"] == "used")
        yield Sample("", {}, used / total if total else 0.0)


class _CacheConfig(Family):
    """1, with the size of the pool in its labels."""

    kind = "gauge"

    def __init__(self, name: str, service: Service) -> None:
        super().__init__(name, "The KV pool: tokens in a block, and how many blocks there are.")
        self._service = service

    def samples(self) -> Iterator[Sample]:
        size, total = (next(gauge.samples()).value for gauge in (self._service.block_size, self._service.total))
        yield Sample("", {"block_size": f"{size:.0f}", "num_gpu_blocks": f"{total:.0f}"}, 1)


def vllm(numbers: Numbers, service: Service) -> list[Family]:
    """Everything that has a name there."""
    return [
        _Renamed("vllm:num_requests_running", service.sequences, only="running"),
        _Renamed("vllm:num_requests_waiting", service.sequences, only="waiting"),
        _Usage("vllm:kv_cache_usage_perc", service),
        _Renamed("vllm:num_preemptions_total", service.preemptions),
        _Renamed("vllm:prompt_tokens_total", numbers.prompt),
        _Renamed("vllm:generation_tokens_total", numbers.output),
        _Renamed("vllm:prefix_cache_queries_total", numbers.prompt),
        _Renamed("vllm:prefix_cache_hits_total", numbers.cached),
        _Renamed("vllm:request_success_total", numbers.outcomes, label="finished_reason"),
        _Renamed("vllm:spec_decode_num_accepted_tokens_total", service.drafted, only="accepted"),
        _Renamed("vllm:time_to_first_token_seconds", numbers.ttft),
        _Renamed("vllm:inter_token_latency_seconds", numbers.itl),
        _Renamed("vllm:e2e_request_latency_seconds", numbers.e2e),
        _Renamed("vllm:request_time_per_output_token_seconds", numbers.tpot),
        _Renamed("vllm:request_queue_time_seconds", numbers.queue),
        _Renamed("vllm:request_prefill_time_seconds", numbers.prefill),
        _Renamed("vllm:request_decode_time_seconds", numbers.decode),
        _Renamed("vllm:request_inference_time_seconds", numbers.inference),
        _Renamed("vllm:request_prompt_tokens", numbers.prompts),
        _Renamed("vllm:request_generation_tokens", numbers.outputs),
        _Renamed("vllm:request_params_n", numbers.asked_n),
        _Renamed("vllm:request_params_max_tokens", numbers.asked_tokens),
        _Renamed("vllm:request_num_preemptions", numbers.sent_back),
        _Renamed("vllm:prompt_tokens_cached_total", numbers.cached),
        _Renamed("vllm:admission_rejections_total", numbers.outcomes, only="refused"),
        _Renamed("vllm:iteration_tokens_total", service.step_tokens),
        _CacheConfig("vllm:cache_config_info", service),
    ]
