"""The requests that both servers get, and the differences that are meant."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.peers.prepare import NAME
from tests.peers.shapes import Allowed

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PROMPT = "The lighthouse keeper climbed the stairs and"
IDS = [504, 10734, 282, 4649, 314]
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    """`body` None is a GET. `values`: also texts, finishes, counts and log-probabilities are equal."""

    name: str
    path: str
    body: Any = None
    values: bool = False

    @property
    def grammar(self) -> bool:
        """The answer must keep to one."""
        fields = self.body if isinstance(self.body, dict) else {}
        return bool(fields.keys() & {"response_format", "structured_outputs"}) or fields.get("tool_choice") is not None


def chat(name: str, *, values: bool = True, **fields: Any) -> Case:
    body = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": 16}
    return Case(f"chat: {name}", CHAT, {key: v for key, v in (body | fields).items() if v is not ...}, values)


def completion(name: str, *, values: bool = True, **fields: Any) -> Case:
    body = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 16}
    return Case(
        f"completion: {name}", COMPLETION, {key: v for key, v in (body | fields).items() if v is not ...}, values
    )


def wrong(name: str, path: str = CHAT, **fields: Any) -> Case:
    base: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": PROMPT}
    body = {"model": NAME, "max_tokens": 4, **base, **fields}
    return Case(f"error: {name}", path, {key: v for key, v in body.items() if v is not ...})


CASES = [
    Case("models", "/v1/models"),
    Case("health", "/health"),
    Case("ping", "/ping"),
    Case("version", "/version"),
    Case("load", "/load"),
    Case("tokenize: prompt", "/tokenize", {"model": NAME, "prompt": PROMPT}),
    Case("tokenize: messages", "/tokenize", {"model": NAME, "messages": USER}),
    Case("tokenize: with token texts", "/tokenize", {"model": NAME, "prompt": PROMPT, "return_token_strs": True}),
    Case("detokenize", "/detokenize", {"model": NAME, "tokens": IDS}),
    chat("plain"),
    chat("to its end", max_tokens=64),
    chat("stream", stream=True),
    chat("stream with usage", **USAGE),
    chat(
        "stream with usage all along",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("log-probabilities", logprobs=True, top_logprobs=3),
    chat("log-probabilities without alternatives", logprobs=True),
    chat("log-probabilities in a stream", logprobs=True, top_logprobs=2, **USAGE),
    chat("two choices", n=2, values=True),
    chat("two choices in a stream", n=2, stream=True),
    chat("max_completion_tokens", max_tokens=..., max_completion_tokens=5),
    chat("a stop string", stop=["Paris"], max_tokens=40),
    chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]),
    chat("ignoring the end", ignore_eos=True, max_tokens=40),
    chat("min_tokens", min_tokens=12),
    chat("seeded", temperature=0.8, seed=5, values=False),
    chat("a tool that may be called", tools=TOOLS, values=False),
    chat("a tool that must be called", tools=TOOLS, tool_choice="required", max_tokens=60, values=False),
    chat("a named tool", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, values=False),
    chat(
        "a schema",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        values=False,
    ),
    chat(
        "an earlier answer goes on",
        messages=[*USER, {"role": "assistant", "content": "The capital is"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    chat("beam search", use_beam_search=True, n=2, values=False),
    completion("plain"),
    completion("without a limit", max_tokens=...),
    completion("stream", stream=True),
    completion("stream with usage", **USAGE),
    completion("ids", prompt=IDS),
    completion("two prompts", prompt=[PROMPT, "def fibonacci(n):"]),
    completion("two prompts of ids", prompt=[IDS, IDS[:3]]),
    completion("two prompts and choices in a stream", prompt=[PROMPT, "def f():"], n=2, stream=True),
    completion("log-probabilities", logprobs=2),
    completion("log-probabilities of the chosen", logprobs=0),
    completion("log-probabilities in a stream", logprobs=2, stream=True),
    completion("echo", echo=True),
    completion("echo with log-probabilities", echo=True, logprobs=1, max_tokens=1),
    completion("echo in a stream", echo=True, stream=True),
    completion("a stop string", stop="the", max_tokens=40),
    completion("stop token ids", stop_token_ids=[253], max_tokens=40),
    completion("a penalty", repetition_penalty=1.3),
    completion("presence and frequency", presence_penalty=0.7, frequency_penalty=0.3),
    completion("a bias", logit_bias={"253": -100}),
    completion("allowed ids", allowed_token_ids=[253, 260, 282, 284]),
    completion("a regex", structured_outputs={"regex": "[0-9]{3}"}),
    completion("beam search", use_beam_search=True, n=2, values=False),
    Case("responses", "/v1/responses", {"model": NAME, "input": "Say hi.", "temperature": 0, "max_output_tokens": 16}),
    wrong("unknown model", model="gpt-5"),
    wrong("no messages", messages=...),
    wrong("empty messages", messages=[]),
    wrong("a temperature that is text", temperature="warm"),
    wrong("a negative temperature", temperature=-1),
    wrong("top_p of 2", top_p=2),
    wrong("max_tokens of -1", max_tokens=-1),
    wrong("n of 0", n=0),
    wrong("too many alternatives", logprobs=True, top_logprobs=50),
    wrong("alternatives without log-probabilities", top_logprobs=2),
    wrong("a prompt that is too long", COMPLETION, prompt=[253] * 9000),
    wrong("no prompt", COMPLETION, prompt=...),
    wrong("an empty list of prompts", COMPLETION, prompt=[]),
    wrong("an unknown token id", COMPLETION, prompt=[999999]),
    wrong("stream_options without stream", stream_options={"include_usage": True}),
    wrong(
        "a bad schema",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "objekt"}}},
    ),
    wrong("a bad regex", COMPLETION, structured_outputs={"regex": "("}),
    wrong("an unknown tool choice", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nobody"}}),
    Case("error: no JSON", CHAT, "{"),
    Case("error: unknown route", "/v1/nothing", {}),
    Case("error: wrong method", CHAT),
]

OWN_ADDITION = "vLLM's own additions to OpenAI's objects, mostly null"


def own(*paths: str) -> list[Allowed]:
    """Fields that only vLLM has, in any answer."""
    return [Allowed("*", f"*{path}", OWN_ADDITION) for path in paths]


ALLOWED: list[Allowed] = [
    *own("stop_reason", "token_ids", "prompt_text", "prompt_token_ids", "routed_experts", "ec_transfer_params"),
    *[
        Allowed("chat*", f"*message.{name}", "OpenAI's optional fields about what is not served here are absent")
        for name in ("annotations", "audio", "function_call")
    ],
    *own("kv_transfer_params", "metrics", "prompt_logprobs", ".permission", ".root", ".parent", ".reasoning"),
    Allowed(
        "*",
        "*service_tier",
        "OpenAI's optional fields about what is not served here are absent",
    ),
    Allowed("tokenize*", "token_strs", "the texts of single tokens are not served; the field is named as ignored"),
    Allowed("health", "*", "health says what it knows as JSON; vLLM's answer is empty"),
    Allowed("*", "*usage.prompt_tokens_details*", "cached tokens are always told; vLLM tells them only if started so"),
    Allowed(
        "*", "*usage.completion_tokens_details*", "what was guessed ahead is told in OpenAI's fields; vLLM's are null"
    ),
    Allowed(
        "*stream*", "[].usage", "where usage is asked for, all other chunks have null, as OpenAI's specification says"
    ),
    Allowed("*", "*logprobs.refusal", "OpenAI's specification has it"),
    Allowed("*two*choices*", "*", "vLLM refuses several greedy choices; they are served here"),
    Allowed(
        "responses", "*", "the parts of OpenAI's response object that each sets differ; both have the required ones"
    ),
    Allowed("error*", "error.code", "codes are words, as OpenAI's specification has them; vLLM repeats the status"),
    Allowed("error*", "error.param", "the field that is wrong is named wherever it is known"),
    Allowed("error: unknown route", "*", "every error has OpenAI's shape; vLLM's framework answers these itself"),
    Allowed("error: wrong method", "*", "every error has OpenAI's shape; vLLM's framework answers these itself"),
    Allowed("metrics", "*_created", "when a series began is not told: nobody reads it"),
    Allowed("metrics", "*per_gpu*", "there is no GPU"),
    Allowed("metrics", "*mm_cache*", "only text is served"),
    Allowed("metrics", "*external_prefix_cache*", "there is no cache outside of the engine"),
    Allowed("metrics", "*engine_sleep_state", "the engine does not sleep"),
    Allowed("metrics", "*spec_decode*", "names are the same in every mode; vLLM's come with speculation"),
    *[
        Allowed("metrics", f"vllm:{name}", "not counted here")
        for name in (
            "*_by_source_total",
            "num_requests_waiting_by_reason",
            "request_max_num_generation_tokens",
            "request_prefill_kv_computed_tokens",
            "tool_call_parser_invocations_total",
        )
    ],
]
"""The first that covers a difference says why."""
