"""The OpenAI-compatible HTTP gateway: an actor that turns HTTP into requests of the client library and back.

    app        the process: binds, serves, stops with the daemon
    auth       who may do what      keys  at rest, `octavo keys`      limits  per minute
    routes     which path does what                                   spec    /openapi.json
    types      request bodies as types          body       JSON → its type, or a 400
    asked      what all generation shares       chat, completion, items, tokens: each route's body → what is asked
    structure  what shape an answer must have   speech     text → content, reasoning and tool calls
    answer     one answer, whole or streamed    responses  pieces of output → response objects
    batch/     `octavo batch`: a file of requests answered by this same application, without a socket

What the API does where OpenAI's leaves it open:

- `model` may be absent: the one that is served is meant. Any other name is a 404 (`model_not_found`).
- `max_completion_tokens` holds over `max_tokens`. A limit beyond the context is the rest of the context; without
  one, a chat goes on up to it, a completion for 16 tokens. `max_tokens: 0` (completions) only counts the prompt, and
  with `echo` and `logprobs` scores it.
- Up to 16 stop strings; none begins within the first `min_tokens`. `top_p: 0` takes the likeliest token. The role
  developer is system to the chat template.
- Penalties: repetition over prompt and output (a positive logit is divided, a negative one multiplied), presence and
  frequency over the output only; `logit_bias` is added after them. Log-probabilities are the model's own, before all
  of these.
- Beside OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `min_tokens`, `stop_token_ids`,
  `allowed_token_ids`, `bad_words` (as they are spelled at the start of a text and after a space),
  `skip_special_tokens`, `priority`, `deadline_ms`, `cache_keep_s`, `continue_final_message`,
  `add_generation_prompt`, `chat_template_kwargs`, `structured_outputs` and `guided_*`,
  `stream_options.continuous_usage_stats`.
- `best_of` chooses by the mean log-probability of the output tokens; all that were generated are counted.
- Tool calls are read as `server.tool_parser` says, each told when it is complete: one that is cut off is text, and
  the finish is `length`. `tool_choice` required or named holds the answer to a schema; `strict` alone does not.
  Reasoning (`server.reasoning_parser`) comes as `reasoning_content`.
- JSON for a schema has at most 20 characters of white space between two tokens. `ignore_eos` does not hold where a
  grammar is complete. A grammar that cannot be served is a 400 (`invalid_grammar`) with the pointer of what it is.
- Fields that are not known are ignored and named in the header `x-octavo-ignored-fields`; known ones that are not
  served (`suffix`, `use_beam_search`, …), or not by the executor that runs, are refused unless they ask for nothing.
- With `server.keys_file`, every route but /health, /ping, /version and /openapi.json wants a key, /metrics and
  /server_info one with admin. A key's tenant has a prefix cache of its own. What is posted counts: requests at once,
  tokens when the answer has ended. An address that others reach is refused without keys (`server.open` forces it).
- Several prompts are several requests of the engine, `<id>-<number>`; if one is refused, the call is, with its
  number. The engine's request id is the answer's id without `chatcmpl-` or `cmpl-`.
- `x-request-id` is echoed (made up if absent) and is the trace id. A silent stream sends a comment every 15 s.
- A request that comes while an actor restarts waits up to 10 s, then gets 503; while the daemon starts or drains,
  it gets 503 at once.
"""
