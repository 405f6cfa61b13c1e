"""The OpenAI-compatible HTTP gateway: an actor that turns HTTP into requests of the client library and back.

    app        the process: binds, serves, stops with the daemon
    routes     which path does what
    types      request bodies as types          decode     bodies → prompts and parameters, or a 400
    answer     one answer, whole or streamed     responses  pieces of output → response objects

What the API does where OpenAI's leaves it open:

- `model` may be absent: the one that is served is meant. Any other name is a 404 (`model_not_found`).
- `max_completion_tokens` holds over `max_tokens`. A limit beyond the context is the rest of the context; without
  one, a chat goes on up to it, a completion for 16 tokens. `max_tokens: 0` (completions) only counts the prompt.
- Up to 16 stop strings. `top_p: 0` takes the likeliest token. The role developer is system to the chat template.
- Beside OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `stop_token_ids`, `skip_special_tokens`,
  `priority`.
- Fields that are not known are ignored and named in the header `x-octavo-ignored-fields`; known ones that are not
  served (tools, response_format, logit_bias, echo, …) are refused unless they ask for nothing.
- Several prompts are several requests of the engine, `<id>-<number>`; if one is refused, the call is, with its
  number. The engine's request id is the answer's id without `chatcmpl-` or `cmpl-`.
- `x-request-id` is echoed (made up if absent) and is the trace id. A silent stream sends a comment every 15 s.
- A request that comes while an actor restarts waits up to 10 s, then gets 503; while the daemon starts or drains,
  it gets 503 at once.
"""
