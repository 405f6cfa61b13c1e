"""The bodies of requests as types: every field that has an effect here, and its range.

Fields that are known but not served, and unknown ones, are the business of `body`. Where a field is null it is
as if it were absent, as in OpenAI's API. Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=128)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
MOST_BEAMS = 16
Beams: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_BEAMS)]
Stops: TypeAlias = str | Annotated[list[str], Meta(max_length=16)]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk; only together with `include_usage`."""


class Message(Struct, kw_only=True):
    """One turn. `content` is a string, null, or a list of parts, whatever the role."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class JsonSchema(Struct, kw_only=True):
    name: str
    schema: dict[str, Any] | bool = True
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(Struct, kw_only=True):
    """What vLLM's clients send: one of them."""

    json: Any = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Struct, kw_only=True):
    """What both ways to generate have in common."""

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: int | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Fraction | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31) + 1, lt=1 << 31)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1)] | None = None
    """By when it should be done, from its arrival on: the scheduler's policies see it."""
    cache_keep_s: Annotated[float, Meta(ge=0, le=86400 * 30)] | None = None
    """For how long after use its cached prefix is given up last."""
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=128)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    use_beam_search: bool | None = None
    beam_width: Beams | None = None
    """How many beams there are, of which the `n` best are shown; absent: as many as are shown."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None


class Function(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class ChatBody(Generation, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's."""
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ResponsesBody(Struct, kw_only=True):
    """What a response may be asked for; its parts become those of a chat (see `items`)."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    """Nothing is stored, whatever this says: the answer tells so."""


class CompletionBody(Generation, kw_only=True):
    prompt: str | list[Any]
    """A string, a list of strings, a list of ids, or a list of lists of ids: told apart by `completion`."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class TokenizeBody(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True


class LoadAdapterBody(Struct, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Let a name that is taken stand for this one from now on."""


class UnloadAdapterBody(Struct, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
