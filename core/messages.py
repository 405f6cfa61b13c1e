"""The messages that actors exchange, and nothing else: no sockets, no behaviour.

Every message is one msgpack frame: a tagged, array-like msgspec struct. Whatever is per step and
per row is a column (a one-dimensional int32 array), carried as raw bytes; a struct per item is
allowed only for what happens once per request or once per residency.

    client ─Submit─▶ tokenizer ─Enqueue─▶ scheduler ─StepPlan─▶ KV-manager ─StepPlan+StepBind─▶ executor
           ◀─Deliver─           ◀─Deltas─           ◀─StepAck──
                                                    ◀──────────────── StepResult ───────────────┘

Words: a *request* has `n` *choices*; a (request, choice) pair is a *sequence*; a sequence that holds
a *slot* is resident, and each residency has a fresh *open_id*. Positions, lengths and capacities
are in tokens, times in nanoseconds of the host's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

PROTOCOL_VERSION = 1

Col: TypeAlias = npt.NDArray[np.int32]
"""A column of a step: shape [rows], dtype int32."""


def col(values: Any = ()) -> Col:
    """Build a column from any iterable of ints."""
    return np.asarray(values, dtype=np.int32)


EMPTY: Col = col()
EMPTY.flags.writeable = False


def cols(rows: Sequence[Sequence[int]], width: int) -> tuple[Col, ...]:
    """The `width` columns of some rows."""
    return (EMPTY,) * width if not rows else tuple(map(col, zip(*rows, strict=True)))


class Role(IntEnum):
    """Who sends. Only these roles have generations that fence links."""

    SUPERVISOR = 0
    GATEWAY = 1
    CLIENT = 2
    TOKENIZER = 3
    SCHEDULER = 4
    KV = 5
    EXECUTOR = 6


class Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """First frame of every message. A receiver drops frames whose two generations it does not hold."""

    version: int
    replica: int
    source: Role
    source_gen: int
    dest_gen: int
    seq: int
    sent_ns: int


class Message(msgspec.Struct, array_like=True, tag=True, eq=False):
    """Base of everything that travels in a body frame; the tag is the class's name."""


# ── what a request asks for ──────────────────────────────────────────────────────────────────────


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter, as it was when `name` stood for it. `digest` (16 bytes) is of its tensors and scales: the same
    wherever and under whatever name the same content lies. `path` is where an executor that does not hold it may read
    it again; what it finds there counts only if it has this digest."""

    name: str
    path: str
    digest: bytes


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What an answer must be: JSON of a schema, a text that a regular expression matches whole, one of a JSON list of
    texts, a text of a Lark grammar (its start symbol is `start`), or text with calls (JSON of `grammar.Calls`)."""

    kind: Literal["schema", "regex", "choice", "lark", "calls"]
    text: str


class Sampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the sampler needs, for every choice of a request.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1.0, `min_p` 0.0 and `typical_p` 1.0 are off. `repetition`
    (Keskar et al., CTRL) is over prompt and output, `presence` and `frequency` over output only.
    `seed` is always set: it is drawn once at submission when the user gave none. `logprobs` is how
    many alternatives to report beside the chosen token, -1 for no log-probabilities at all;
    `prompt_logprobs` the same for each token of the prompt but the first.

    What may be chosen: `bias` is added to the logits of single ids; `allowed`, when not empty, are the only ids;
    the last id of a `banned` sequence may not follow the rest of it; none of `ends` comes before there are
    `min_tokens` outputs. A ban that would leave no id at all is not applied. What `grammar` forbids never comes.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    bias: dict[int, float] = {}
    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    """Ids that end the choice: they may not come before `min_tokens`, and an executor need not go on after one. The
    tokenizer fills them in."""
    grammar: Grammar | None = None


class Chat(msgspec.Struct, tag=True, frozen=True):
    """A conversation, rendered with the model's chat template. Message dicts as in OpenAI's API,
    content already flattened to text.

    `continues` leaves the last message open, so that the model goes on with it; without it, and with
    `add_generation_prompt`, the prompt ends where the assistant is to speak. `variables` are what else the
    template may know."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continues: bool = False
    variables: dict[str, Any] = {}


class Text(msgspec.Struct, tag=True, frozen=True):
    """Plain text, tokenised with the model's own special tokens added where it adds any."""

    text: str


class Ids(msgspec.Struct, tag=True, frozen=True):
    """Token ids, taken as they are."""

    ids: list[int]


Prompt: TypeAlias = Chat | Text | Ids


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """All that a client may say about how to continue a prompt.

    `max_tokens` None means up to the end of the context. `stop` are strings that end a choice and
    are not part of its text; `stop_ids` are token ids that end it. `ignore_eos` removes the model's
    own end tokens from that set. `bad_words` are texts that do not appear: the tokenizer adds them to
    `sampling.banned`. For `keep_s` seconds after its last use by such a request, what is cached of it is given up last
    (within the tenant's part of what may be kept so).
    """

    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    keep_s: float = 0.0
    adapter: str | Adapter = ""
    """The LoRA adapter that answers; "" is the model itself. The client library puts what a name stands for in its
    place, once: a resume means the same."""


class Delivered(msgspec.Struct, array_like=True, frozen=True):
    """One choice's journal: the ids that were delivered with their text, or that it has ended."""

    choice: int
    ids: list[int]
    finished: bool


# ── client ⇄ tokenizer ───────────────────────────────────────────────────────────────────────────


class Attach(Message):
    """client → tokenizer: where `client`'s mailbox is. Sent once per tokenizer generation."""

    client: str
    endpoint: str


class Submit(Message, kw_only=True):
    """client → tokenizer. `attempt` 0 is a new request; a higher one resumes it after a process was
    lost, with what was `delivered` of every choice so far. A resume fences all lower attempts."""

    client: str
    request_id: str
    attempt: int
    prompt: Prompt
    params: Params
    received_ns: int
    tenant: str = ""
    priority: int = 0
    deadline_ns: int | None = None
    trace_id: str = ""
    delivered: list[Delivered] = []


class Cancel(Message):
    """client → tokenizer → scheduler. Unknown requests are ignored: they have ended already."""

    request_id: str


class Taken(Message):
    """client → tokenizer: the consumer of this choice has taken its last row; only told, nothing follows from it.

    `times` are when rows were taken. A row lay ready for up to `held_ns` before the consumer took it, the last one for
    `last_held_ns`. `sent` are the times that came with the last row."""

    request_id: str
    choice: int
    tokens: int
    times: Times
    held_ns: int
    last_held_ns: int
    sent: Times | None


class Tokenize(Message):
    """client → tokenizer: answer with `Tokenized` under the same `ref`."""

    client: str
    ref: int
    prompt: Prompt
    add_special_tokens: bool = True


class Detokenize(Message):
    """client → tokenizer: answer with `Detokenized` under the same `ref`."""

    client: str
    ref: int
    ids: list[int]
    before: list[int] | None = None
    """The tokens that `ids` continue, if they do: the answer is the text that they add to it, as an output's is."""
    skip_special_tokens: bool = False
    """Special tokens give no text."""


class Describe(Message):
    """client → tokenizer: answer with `Described` under the same `ref`."""

    client: str
    ref: int


class Described(Message):
    """tokenizer → client: what its model's tokenizer_config.json says, chat template included, as JSON."""

    ref: int
    config: str


class Tokenized(Message):
    """tokenizer → client. `error` is set instead of `ids` when the prompt cannot be tokenised."""

    ref: int
    ids: list[int]
    error: str | None = None


class Detokenized(Message):
    """tokenizer → client. `error` is set instead of `text` when an id is out of range."""

    ref: int
    text: str
    error: str | None = None


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probability of a chosen token, and of the most likely ones: ids and values, best first.

    Taken from the model's distribution before temperature and truncation; always finite
    (very unlikely is -9999.0)."""

    token: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TextLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A `TokenLogprob` with the text of its tokens. `data` holds the token's exact bytes, since a
    single token may be part of a character."""

    token: str
    data: bytes
    logprob: float
    top: list[tuple[str, bytes, float]]
    ids: list[int] = []
    """The token's id, then those of `top`."""


class Usage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Tokens of one choice. `cached` is the part of the prompt that came from the prefix tree. Of `drafted` guesses
    that were verified, `accepted` were right; those of an earlier attempt are not counted."""

    prompt: int
    completion: int
    cached: int
    drafted: int = 0
    accepted: int = 0


class Stages(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How long a choice was in each stage, in ns, as the scheduler saw it: until its first slot, until its first token,
    and until its last; a stage that it did not reach took nothing."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    preemptions: int


class Times(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """When a choice's rows went, as whoever handles them saw it; since the request was received, in ns. `rows` with
    ids, the first at `first_ns` and the last at `last_ns`, never more than `longest_ns` apart; the end at `end_ns`.
    All 0 where there was no row with ids."""

    rows: int
    first_ns: int
    last_ns: int
    longest_ns: int
    end_ns: int


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A piece of one choice: `ids` (and their exact text) that start at output `index`.

    Ids are delivered only together with all of their text: text held back (an unfinished character,
    what may become a stop string) holds back its ids too, so that a journal of rows can be resumed.
    `finish` is None until the choice's last row: stop, length, cancelled, or error. After `stop` on
    a stop string, ids go up to the token that completed it and text ends before it.

    `prompt_logprobs`, if asked for, come with a choice's first row: an entry per token of the prompt; the first one's
    log-probability means nothing."""

    request_id: str
    choice: int
    attempt: int
    index: int
    ids: list[int]
    text: str
    finish: str | None = None
    reason: str = ""
    usage: Usage | None = None
    logprobs: list[TextLogprob] | None = None
    prompt_logprobs: list[TextLogprob] | None = None
    times: Times | None = None
    """Of the whole choice, with its last row; None if an earlier attempt delivered some of it."""
    stages: Stages | None = None
    """With the last row; None where the tokenizer ended the choice, at a stop string or for a client that left."""


class Accepted(Message):
    """tokenizer → client: the request was tokenised, its prompt has this many tokens."""

    request_id: str
    attempt: int
    prompt_tokens: int
    ends: list[int] = []
    """The ids that end an answer."""


class Refused(Message):
    """tokenizer → client, scheduler → tokenizer: the request is not served. `field` names what was
    wrong in it ("messages", "max_tokens", …), `code` is a short machine-readable reason."""

    request_id: str
    attempt: int
    field: str
    reason: str
    code: str = "invalid_value"


class Deliver(Message):
    """tokenizer → client: rows of this client's requests."""

    rows: list[Row]


# ── tokenizer ⇄ scheduler ────────────────────────────────────────────────────────────────────────


class Enqueue(Message, kw_only=True):
    """tokenizer → scheduler: a tokenised request, new or resumed.

    `ids` is the prompt. `delivered` and `finished` hold, per choice, the output ids already journalled by the
    client and whether the choice has ended. `handle` is the tokenizer's own number for the request, used in `Deltas`
    and valid for this tokenizer generation. `max_tokens` bounds each choice's output; None means as many as fit.
    """

    handle: int
    request_id: str
    attempt: int
    ids: Col
    n: int
    sampling: Sampling
    max_tokens: int | None
    stop_ids: list[int]
    tenant: str
    priority: int
    deadline_ns: int | None
    namespace: bytes
    received_ns: int
    trace_id: str
    delivered: list[list[int]]
    finished: list[bool]
    keep_ns: int = 0
    """How long its blocks are kept in the prefix tree after use, if they can be (see `Params`)."""
    adapter: Adapter | None = None


class Stop(Message):
    """tokenizer → scheduler: a stop string ended this choice with output token `index`. Final over
    any later reason: tokens after it are dropped, but counted as dropped."""

    request_id: str
    choice: int
    index: int


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A choice ended: reason is stop, length, cancelled or error."""

    handle: int
    choice: int
    attempt: int
    reason: str
    detail: str
    stages: Stages | None = None


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """The log-probabilities of a request's prompt: of its second token, its third, and so on to its last."""

    handle: int
    attempt: int
    entries: list[TokenLogprob]


class Deltas(Message):
    """scheduler → tokenizer: the new tokens of one step, a row per choice that got any.

    `handle`, `choice`, `attempt`, `index` (output index of the row's first token), `n` and `cached` (prompt tokens
    that came from the prefix tree) have a value per row; `tokens` holds the rows' ids one after another. `logprobs`,
    when any row asked for them, has an entry per token (None where not asked). `ends` are the choices for which
    nothing more comes. `prompts` come with the first row of a request that asked for them, or before it. `guesses`
    [choices whose drafts were verified in this step · 5] are each one's handle, choice, attempt, guesses verified, and
    guesses right."""

    step: int
    handle: Col
    choice: Col
    attempt: Col
    index: Col
    n: Col
    cached: Col
    tokens: Col
    ends: list[End]
    logprobs: list[TokenLogprob | None] | None = None
    prompts: list[PromptLogprobs] = []
    guesses: Col = EMPTY


def namespace_name(namespace: bytes) -> str:
    """A cache namespace as events and numbers name it."""
    return namespace[:4].hex()


# ── scheduler ⇄ KV-manager ⇄ executor ────────────────────────────────────────────────────────────


class Match(Message):
    """scheduler → KV-manager, on arrival: how much of `ids` is in the prefix tree? Holds nothing."""

    seq: int
    namespace: bytes
    ids: Col
    prompt_len: int


class Matched(Message):
    """KV-manager → scheduler: a hint, in tokens, a multiple of the block size. `miss`, `at` and `evicted_ns` tell why
    not more, as the event `request.matched` explains it."""

    seq: int
    cached: int
    miss: str = ""
    at: int = 0
    evicted_ns: int = 0
    swapped: int = 0
    """Of those cached, the ones that are in host memory."""


class Open(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a slot: once per residency.

    `ids` are all its known tokens, `cached` how many the scheduler hopes to find in the prefix tree (the
    KV-manager binds at most that many and answers a rebase if it has fewer)."""

    slot: int
    open_id: int
    ids: Col
    prompt_len: int
    cached: int
    choice: int
    sampling: Sampling
    namespace: bytes
    tenant: str = ""
    keep_ns: int = 0
    adapter: Adapter | None = None
    """What is computed with, beside the model; a fork has its parent's."""


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """A sequence takes a slot by sharing the first `n` tokens of a resident parent.

    Full blocks are shared, the partial tail is copied. `ids` are the child's known tokens from position `n` on;
    the first n are the parent's. Only after the parent's chunk that computed position n-1 was planned in
    an earlier step."""

    slot: int
    open_id: int
    parent_slot: int
    parent_open_id: int
    n: int
    ids: Col
    prompt_len: int
    choice: int
    sampling: Sampling


class Kind(IntEnum):
    """What an item asks: compute a chunk of known tokens, or decode from the executor's own last token."""

    CHUNK = 0
    DECODE = 1


class StepPlan(Message):
    """scheduler → KV-manager, forwarded untouched to the executors.

    Applied in the order of the fields: commits, releases, opens, forks, items.

    - commits: `commit_n` new tokens (in `commit_tokens`, row after row) are final for the residency, and its first
      `commit_kv_len` tokens have their KV computed by steps before this one: full blocks may enter the tree.
    - items, a row each: CHUNK computes tokens [start_or_cap, start_or_cap + n); it samples when that reaches the last
      known token. DECODE needs capacity for start_or_cap tokens and yields 1 to n tokens (n - 1 of them drafts).
    - With `rounds` above 1 all items are decodes with n = `rounds`: each is computed so many times in a row, without
      drafts, and yields fewer tokens only if the sequence ends before, or all do (`Hasten`). For executors that serve
      `rounds`.
    - `taken` is the last step whose result the scheduler had. Only what was computed by then is shared, but for
      residencies in `failed` (open_ids): their chunks never enter the tree.
    - `needs_ack` is off where the plan debits and releases nothing, as most steps that only decode: then it is acked
      only if there is something to say all the same.
    """

    scheduler_gen: int
    step: int
    now_ns: int
    commit_slot: Col
    commit_open_id: Col
    commit_kv_len: Col
    commit_n: Col
    commit_tokens: Col
    release_slot: Col
    release_open_id: Col
    opens: list[Open]
    forks: list[Fork]
    slot: Col
    open_id: Col
    kind: Col
    start_or_cap: Col
    n: Col
    taken: int
    failed: list[int]
    needs_ack: bool = True
    rounds: int = 1


class Hasten(Message):
    """scheduler → executor: somebody waits for the end of `step`, of the sender's generation; of it and of those before
    it no further round is begun."""

    step: int


class StepBind(Message):
    """KV-manager → executors, beside the plan: where the plan's tokens live.

    Applied in the order: releases (the plan's), copies, opened tables, deltas, then the items but for `skipped`.

    - opened: residency `opened_slot` starts with `opened_len` tokens in the next `opened_n` blocks of
      `opened_blocks`. `opened_group` is the KV group of the row (0: full attention).
    - deltas: entry `delta_index` of (slot, group)'s table is `delta_block` from now on (append or replace).
    - copies: block `copy_src` to `copy_dst`, before anything of this step is written, and as if all were read before
      any is written. Ids from `Facts.total_blocks` on are places in host memory: so a block is swapped out and in.
    - skipped: indices into the plan's items that could not be bound (a rebase went to the scheduler).
    """

    kv_gen: int
    step: int
    opened_slot: Col
    opened_open_id: Col
    opened_group: Col
    opened_len: Col
    opened_n: Col
    opened_blocks: Col
    delta_slot: Col
    delta_group: Col
    delta_index: Col
    delta_block: Col
    copy_src: Col
    copy_dst: Col
    skipped: Col


class StepAck(Message):
    """KV-manager → scheduler: the step is bound. `free + evictable` is what the next steps may take.

    rebases: residency (slot, open_id) is bound only up to `rebase_end` tokens; -1 refuses it (a fork whose
    parent is not there, a slot that is not open)."""

    step: int
    free: int
    evictable: int
    rebase_slot: Col
    rebase_open_id: Col
    rebase_end: Col


class KvState(Message):
    """KV-manager → scheduler, when their link comes up: nothing is resident, the pool has this much."""

    total: int
    free: int
    evictable: int


class Failed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A residency that the executor could not compute; its neighbours are not affected."""

    slot: int
    open_id: int
    reason: str


class ChunkLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of prompt tokens from position `start` on, whose predecessors a chunk of this residency computed."""

    open_id: int
    start: int
    entries: list[TokenLogprob]


class StepResult(Message):
    """executor → scheduler, one per step, also when it has no rows.

    `n_new` tokens (in `tokens`, row after row) were sampled for (slot, open_id), whose KV now holds `kv_len`
    tokens. `logprobs`, when any row asked for them, has an entry per token. `prompts` has an entry per chunk of a
    sequence that asked for its prompt's. `drafted`, empty when nobody drafted, are the guesses verified for each row:
    all but the last of its new tokens were guessed right. `depth` are the places that they were for, fewer in trees;
    empty where all are chains. `rounds` were computed: fewer than planned if all had ended before, or
    after `Hasten`."""

    step: int
    slot: Col
    open_id: Col
    n_new: Col
    tokens: Col
    kv_len: Col
    started_ns: int
    finished_ns: int
    failed: list[Failed] = []
    logprobs: list[TokenLogprob | None] | None = None
    prompts: list[ChunkLogprobs] = []
    drafted: Col = EMPTY
    depth: Col = EMPTY
    rounds: int = 1


# ── what the shell tells a core about the world ──────────────────────────────────────────────────


class PeerUp(Message):
    """The link to `role` works; its state has this generation. For CLIENT, `name` says which client."""

    role: Role
    generation: int
    name: str = ""


class PeerDown(Message):
    """The process or state behind `role` is lost; frames of its old generation no longer arrive."""

    role: Role
    name: str = ""


class Tick(Message):
    """The time that a core asked to be woken at has come."""


class SwapPolicy(Message):
    """control plane → scheduler or KV-manager: from the next step on, `group` is answered by the policy `name`; or, if
    `disabled` says why that one must not be asked, by the kernel's own rule."""

    group: str
    name: str
    options: dict[str, Any]
    disabled: str = ""


class Weigh(Message):
    """control plane → scheduler or KV-manager: tenants' shares by name, for policies that want to know them."""

    weights: dict[str, float]


class Flush(Message):
    """control plane → KV-manager: take out of the prefix tree what belongs to this tenant (None: to anybody) and begins
    with `ids`."""

    tenant: str | None
    ids: Col


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor knows of its model once it is loaded; everyone gets it with the topology."""

    model_id: str
    context: int
    """Longest sequence, prompt and output together, in tokens."""
    vocab_size: int
    block_size: int
    total_blocks: int
    host_blocks: int = 0
    """Places for evicted blocks in host memory, beside the pool; their ids follow those of the pool."""
    block_bytes: int
    cache_seed: bytes
    """Digest of weights, KV dtype and mode: part of every cache namespace."""
    prompts_apart: bool = False
    """A prompt's tokens get another KV than the same tokens generated: the prefix tree keeps the two apart."""
    drafter: str = ""
    """Who guesses tokens ahead (`speculation.drafter`); "" where nobody does."""
    weights_bytes: int = 0
    """Of the weights as the executor holds them, 0 if it does not say; its pool is `total_blocks` of `block_bytes`."""
    workspace_bytes: int = 0
    """The most that a step of `scheduler.chunk_budget` tokens takes beside them, 0 if it does not say."""
    executor: str = ""
    """Which executor it is and how it computes, in words."""
    note: str = ""
    """What whoever runs the service should know of that choice: what is lost, and how to get it."""
    serves: tuple[str, ...] = ()
    """What the executor can do beyond every executor's duty: `prompt_logprobs`, `grammar`, `restrictions` (bias,
    bans and allowed ids), `adapters`, `rounds` (see `StepPlan`). What it does not serve is not asked of it."""
    tell_every_ms: float = 0.0
    """`scheduler.tell_every_ms` where the configuration leaves it to the executor."""

    @property
    def places(self) -> int:
        """Blocks of the pool and places in host memory: all that a bind's copies may name."""
        return self.total_blocks + self.host_blocks


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────


def _encode_column(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value if value.dtype == np.int32 else value.astype(np.int32)).tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_column(kind: Any, value: Any) -> Any:
    return np.frombuffer(value, dtype=np.int32) if value != b"" else EMPTY


Body: TypeAlias = (
    Attach | Submit | Cancel | Taken | Tokenize | Detokenize | Describe | Tokenized | Detokenized | Described
    | Accepted | Refused | Deliver
    | Enqueue | Stop | Deltas | Match | Matched | StepPlan | Hasten | StepBind | StepAck | KvState | StepResult
    | PeerUp | PeerDown | Tick | SwapPolicy | Weigh | Flush
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_decoder = msgspec.msgpack.Decoder(Body, dec_hook=_decode_column)


def encode(message: Message) -> bytes:
    """One body frame."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Body:
    """The message in a body frame; `msgspec.DecodeError` or `ValidationError` if it is none."""
    message: Body = _decoder.decode(frame)
    return message
