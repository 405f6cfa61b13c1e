"""The configuration document as types: every key, its default, and what it means.

Knows nothing of where values come from (see `load`). Sizes are in tokens unless the name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: immutable, and an unknown key is an error."""


class ModelConfig(Section, frozen=True):
    path: str = "default"
    """A folder, a GGUF file, a hub id, `default` (SmolLM2-135M-Instruct) or `ghost` (no model: tests, simulation)."""
    name: str | None = None
    """The id under which the API serves the model; None takes it from the path."""
    context: Positive | None = None
    """Longest sequence served; None means the model's own limit."""


class KvConfig(Section, frozen=True):
    block_size: Positive = 16
    tokens: Positive = 32768
    """Size of the pool, rounded down to whole blocks."""
    fit: bool = False
    """Have as many tokens as the GPU's memory leaves, in place of `tokens`. Only the executor `cuda` measures that."""
    prefix_cache: bool = True
    host_tokens: Annotated[int, Meta(ge=0)] = 0
    """KV of so many tokens is kept in host memory when it is evicted from the pool, and copied back when it is asked
    for again: by a preempted sequence, or a prompt with the same prefix."""


class SchedulerConfig(Section, frozen=True):
    max_sequences: Positive = 64
    """Slots: sequences that are resident at a time."""
    chunk_budget: Positive = 256
    """Most tokens computed in one step, prefill chunks and decodes together."""
    depth: Annotated[int, Meta(ge=1, le=4)] = 2
    """Steps planned ahead of their results; 1 is for debugging."""
    tell_every_ms: Annotated[float, Meta(ge=0)] | None = None
    """While nobody waits, as many steps of decodes are computed in a row and told together as keep a stream's tokens
    within about so many milliseconds of each other (8 at most), on `native` and `ghost`. A request that comes
    then waits for the one that is begun, and for one of each plan behind it (`depth` - 1). 0: each step is told by
    itself. None: 50 on `native`, 0 on `ghost`."""
    waiting_window: Positive = 256
    """How many waiting sequences a batching policy is shown: of more, the oldest and the most urgent."""
    max_waiting: Positive = 4096
    """Waiting sequences beyond this are refused (`overloaded`)."""


AUTO = "auto"
"""What is decided at the start, by what there is then."""
POLICY_GROUPS = ("batching", "chunking", "preemption", "eviction", "speculation")


class PolicyConfig(Section, frozen=True):
    """Name of the entry point in each `octavo.*` policy group."""

    batching: str = "fcfs"
    chunking: str = "decode-first"
    preemption: str = "lifo"
    eviction: str = "lru"
    speculation: str = AUTO
    """`auto`: `adaptive` where somebody guesses (`speculation.drafter`), else `off`."""
    call_budget_us: Positive = 300
    """Longest that a policy may take for an answer; one that is slower half of the time is replaced (`tripped`)."""
    weights: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """Shares by tenant name, for every policy that has an option `weights` (`fair`, `tenant-quota`) which is not set;
    who is not named has weight 1."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per group, what the chosen policy's `Options` takes: `policies.options.chunking.x = 1`."""


class ExecutorConfig(Section, frozen=True):
    kind: str = AUTO
    """Entry point in `octavo.executor`. `auto`: `ghost` for the ghost model, else the first of `native`, `cpu` and
    `transformers` that is to be had here and serves the model; decided at the first start of a run."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Compute threads; 0 means one for each core that the executor may use, and no more than its CPU quota pays for."""
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Numbers of the cores that the executor runs on; empty: all that its process may use."""
    grammar: str = "llguidance"
    """Entry point in `octavo.grammar`: what keeps answers to a schema or a grammar; the other one is `xgrammar`."""
    mode: Literal["fast", "exact"] = "fast"
    """What `native` computes in: `exact` is fp32 throughout; `fast` has int8 activations for quantised weights and
    keeps KV in bf16. `cpu` is always exact."""
    prompts: Literal["apart", "same"] = "apart"
    """`apart`: where the processor has a quicker way for prompts (AMX: bf16), `native` has it in fast mode. Their KV
    then is not that of generated tokens, and an answer that comes back in another request's prompt is computed once
    more, as a prompt. `same`: as generated tokens, everywhere."""
    weights: Literal["file", "w8", "w4"] = "file"
    """What `native` makes of weights that are floats: nothing, or groups of 32 numbers of 8 or 4 bits. Weights that are
    quantised stay as they are."""
    kv: Literal["auto", "fp32", "bf16", "int8", "fp8"] = "auto"
    """How keys and values are kept. `native`: fp32, bf16 or int8; `auto` is bf16 in fast mode, and fp32 in exact mode,
    which has no other. `cuda`: bf16, which is `auto`, or fp8 (e4m3, 448 at most; of latents, all but what is rotated).
    The others: fp32."""


class SpeculationConfig(Section, frozen=True):
    """Who guesses tokens ahead; how many are guessed is `policies.speculation`'s word."""

    drafter: str | None = AUTO
    """Entry point in `octavo.drafter`; None: nobody guesses. `auto`: `ngram` on the executor `native`, unless
    `policies.speculation` is `off` from the start; nobody on others."""
    verification: Literal["coupled", "rejection"] = "coupled"
    """`coupled`: the same tokens as without guesses. `rejection`: only the same distribution of them."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the drafter's `Options` takes: `speculation.options.model = "…"`."""


class ServerConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    enabled: bool = True
    max_body_bytes: Positive = 8 * 1024 * 1024
    slow_reader_s: Seconds = 30.0
    """A client that leaves its connection full for this long, taking less than 48 KiB, is dropped."""
    stream_buffer_bytes: Positive = 4 * 1024 * 1024
    """Output that may wait for one client beside its full connection; the request of one with more is cancelled."""
    keys_file: str | None = None
    """Who may use the API, and what they have used: see `octavo keys`. None lets everyone who reaches the address."""
    open: bool = False
    """Listen on an address that others reach although there is no keys file."""
    hosts: str = ""
    """Names by which browsers reach this server, with commas between them. Without keys, requests to any other name
    than these, `host`, localhost and addresses are refused (unless `open`): see `origins`."""
    origins: str = ""
    """Web pages from elsewhere that may use the API, as https://chat.example, with commas between them. Without keys,
    those that are not listed are refused; those that are may read the answers (CORS), with keys or without."""
    tls_certificate: str | None = None
    """A file with the certificate (and those up to its root), in PEM; with it and its key the gateway speaks HTTPS."""
    tls_key: str | None = None
    """Its private key, in PEM, without a passphrase."""
    tool_parser: str = "hermes"
    """Entry point in `octavo.tool_parser`: how the model writes its tool calls."""
    reasoning_parser: str | None = None
    """Entry point in `octavo.reasoning_parser`; None leaves reasoning in the text."""
    adapter_routes: bool = False
    """Let adapters be loaded and unloaded over HTTP. Whoever may do that has files of this machine read, by path."""


class SupervisorConfig(Section, frozen=True):
    max_restarts: Annotated[int, Meta(ge=0)] = 5
    """Restarts of one actor within `restart_window_s` before the service gives up."""
    restart_window_s: Seconds = 60.0
    ready_timeout_s: Seconds = 300.0
    heartbeat_timeout_s: Seconds = 10.0
    """An actor that is silent for this long, or in one call of a policy, is restarted (without that policy)."""
    stall_timeout_s: Seconds = 60.0
    """A busy actor without progress for this long is restarted."""
    drain_timeout_s: Seconds = 30.0
    client_timeout_s: Seconds = 10.0
    """A client that is silent for this long is taken as gone, and its requests are cancelled."""


class TraceConfig(Section, frozen=True):
    enabled: bool = True
    steps: bool = True
    """Also the events of every step (`step.*`), not only those of requests and actors."""
    record: bool = False
    """Also all that the scheduler and the KV-manager are told, prompts included: for `octavo replay`."""
    record_bytes: Positive = 1024 * 1024 * 1024
    """Longest recording of each of the two; it ends there, with the event `record.ended`, and the run goes on."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line of the ordinary log on standard error."""


class Config(Section, frozen=True):
    """The whole document. In the daemon every actor gets the same one."""

    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    policies: PolicyConfig = PolicyConfig()
    executor: ExecutorConfig = ExecutorConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    server: ServerConfig = ServerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    trace: TraceConfig = TraceConfig()
    lora: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that requests may name as their model: the PEFT folder of each, by name."""
    run_dir: str | None = None
    """Folder for this run's sockets, status and trace; None makes a fresh one."""
