"""The OpenAI-compatible HTTP gateway: an actor that turns HTTP into requests of the client library and back.

    app        the process: binds, serves, stops with the daemon
    auth       who may do what      tenants/   keys, their limits, what they have used; `octavo keys`, `octavo usage`
    routes     which path does what                                   spec    /openapi.json
    types      request bodies as types          body       JSON → its type, or a 400
    asked      what all generation shares       chat, completion, items, tokens: each route's body → what is asked
    structure  what shape an answer must have   speech     text → content, reasoning and tool calls
    beams      beam search, pure                search     the same over the engine
    answer     one answer, whole or streamed    responses  pieces of output → response objects
    connection when a slow reader is dropped    page.html  the chat page at /
    batch/     `octavo batch`: a file of requests answered by this same application, without a socket

What is served and refused, and which of two fields holds, is in README.md beside this.
"""
