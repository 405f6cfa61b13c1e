"""OpenTelemetry's names for what we know of a request: the `gen_ai` conventions (still in development, as of 1.37), and
`octavo.` for what they have no name for. Change them here when they change there.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
CHOICES = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
FINISH = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_TOKEN = "gen_ai.server.time_to_first_token"
"""Seconds, as their metric of that name."""
PER_TOKEN = "gen_ai.server.time_per_output_token"

TENANT = "octavo.tenant"
CHOICE = "octavo.choice"
CAUSE = "octavo.cause"
"""What most of a phase's time went on."""
CAUSE_SECONDS = "octavo.cause.seconds"
NOTE = "octavo.note"
PREEMPTIONS = "octavo.preemptions"
MISS = "octavo.cache.miss"
LOST = "octavo.preemption.lost_tokens"
BY = "octavo.preemption.by"

TEXT_COMPLETION = "text_completion"
"""The engine's side of any endpoint: a prompt in tokens, an answer in tokens."""
