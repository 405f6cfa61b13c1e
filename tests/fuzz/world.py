"""A whole replica in one thread: the production cores and the ghost executor, joined by queues instead of sockets.

Every link is a queue; which one moves next is drawn at random, so any interleaving can happen. Frames carry the two
generations of their link and are fenced as the shells fence them. A crash throws a core away with everything in it; its
peers hear of it one by one (`PeerDown`), then, after all have, the successor starts and everybody gets `PeerUp`.

The client keeps a journal per choice and resumes as `core.client` does. At the end each journal must hold exactly the
ghost's tokens, the pool must balance, and nobody may be left waiting.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from msgspec.structs import replace as replace_fields

from octavo.core.config.schema import PolicyConfig
from octavo.core.kv.core import KvCore
from octavo.core.kv.pool import KEY_BYTES, held_key
from octavo.core.kv.residency import Residency
from octavo.core.messages import (
    Adapter,
    Body,
    Cancel,
    Deltas,
    Enqueue,
    Facts,
    Flush,
    Hasten,
    Match,
    Matched,
    Message,
    PeerDown,
    PeerUp,
    PromptLogprobs,
    Refused,
    Role,
    Sampling,
    StepAck,
    StepBind,
    StepPlan,
    StepResult,
    Stop,
    Tick,
    col,
    decode,
    encode,
)
from octavo.core.plugins import installed
from octavo.core.policy import Policies, PolicyHost, load_policies
from octavo.core.policy.load import METHODS
from octavo.core.scheduler.core import SchedulerCore
from octavo.core.tokenizer.core import cache_namespace
from octavo.core.trace.catalogue import KvFlushed, KvLeak, KvOverdraft, PolicyRejected
from octavo.executors.ghost import EOS, GhostExecutor, next_token, prefix_hashes, prompt_logprob, start_of
from octavo.executors.residents import Run
from octavo.policies.contract import NEVER, Floats, Ints, Leaves, Running, Selection, Step, Waiting
from tests.fuzz.faulty import FaultyGhost

S, K, E, T = Role.SCHEDULER, Role.KV, Role.EXECUTOR, Role.TOKENIZER
LINKS = [(T, S), (S, K), (K, E), (E, S), (K, S), (S, T), (S, E)]
EOS_ONE_IN = 24
APART_NS = 8
"""How far apart tokens may be told; a round takes 1, 3 or 5 ns, so that plans are of 8, 2 or 1."""
GOES_ON = 0.9
"""How often another round is begun, in every other world; in the others always."""
TURNS = 20
"""Longest prompt of a conversation that goes on."""
FAILS = 0.03
"""Share of an executor's runs that fail, where some do."""
FAILS_RELEASED = 0.3
"""The same of those whose residency is released before they are over."""
ADAPTERS = (None, None, Adapter("a", "", b"a" * 16), Adapter("alias of a", "", b"a" * 16), Adapter("b", "", b"b" * 16))
"""What a request is computed with: what one leaves in the prefix tree may serve those of equal content, no others."""
POLICIES = {group: installed(f"octavo.{group}") for group in METHODS if group != "speculation"}


@dataclass(frozen=True)
class Setup:
    """One run: everything that is drawn from the seed follows from it."""

    seed: int
    depth: int = 2
    block_size: int = 4
    blocks: int = 20
    slots: int = 4
    budget: int = 8
    requests: int = 14
    drafts: int = 0
    crashes: tuple[Role, ...] = ()
    forks: bool = True
    cancels: bool = True
    stops: bool = True
    flushes: bool = True
    odd_policies: bool = False
    host_blocks: int = 0
    failures: bool = False
    """Some runs of the executor fail."""
    policies: tuple[tuple[str, str], ...] = ()
    """(group, name) of built-in policies beside the default ones."""
    apart: bool = False
    """Prompts are computed otherwise than generated tokens."""
    rounds: bool = False
    """Plans of decodes alone may be of several rounds."""
    ends_known: bool = False
    """The executor knows what ends an answer."""

    @staticmethod
    def draw(seed: int) -> Setup:
        r = random.Random(seed)
        size = r.choice([1, 2, 4, 4])
        return Setup(
            seed=seed,
            depth=r.choice([1, 2, 2, 3]),
            block_size=size,
            blocks=r.choice([40, 44, 52, 80]) // size + r.choice([0, 1, 3]),
            slots=r.choice([2, 3, 5]),
            budget=r.choice([3, 8, 16]),
            requests=r.choice([8, 14]),
            drafts=r.choice([0, 0, 2]),
            crashes=r.choice([(), (), (S,), (K,), (E,), (T,), (S, K, E, T)]),
            odd_policies=r.random() < 0.3,
            policies=tuple((group, r.choice(names)) for group, names in POLICIES.items() if r.random() < 0.4),
            host_blocks=r.choice([0, 0, 1, 6, 40]),
            apart=r.random() < 0.5,
            failures=r.random() < 0.3,
            rounds=r.random() < 0.7,
            ends_known=r.random() < 0.7,
        )


@dataclass
class Asked:
    """A request as its client knows it: what was asked, and the journal of each choice."""

    request_id: str
    ids: list[int]
    n: int
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    stop_at: int | None
    """Output index at which the stand-in for a stop string ends choice 0."""
    adapter: Adapter | None = None
    deadline_ns: int | None = None
    cancelled: bool = False
    prompt_known: int = -1
    """The attempt for which the log-probabilities of its prompt have come."""
    refused: str = ""
    attempt: int = 0
    journals: list[list[int]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.cancelled or bool(self.refused) or all(self.ended)

    def expected(self, choice: int, *, apart: bool) -> tuple[list[int], str]:
        hashes = prefix_hashes(self.ids, start_of(self.adapter))
        prefix, out = hashes[-1], list[int]()
        while True:
            token = next_token(prefix, self.sampling, choice, EOS_ONE_IN)
            out.append(token)
            if choice == 0 and self.stop_at is not None and len(out) == self.stop_at + 1:
                return out, "stop"
            if token in self.stop_ids:
                return out, "stop"
            if len(out) == self.max_tokens:
                return out, "length"
            prefix = prefix_hashes([~token if apart else token], prefix)[0]


class OddPolicies:
    """Valid answers that no sensible policy gives: any order, any share, any victim, any score."""

    def __init__(self, rng: random.Random, drafts: int) -> None:
        self._rng = rng
        self._drafts = drafts

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        order = list(range(len(waiting)))
        self._rng.shuffle(order)
        admit = col(order[: self._rng.randint(0, len(order))])
        mask = np.asarray([self._rng.random() < 0.8 for _ in range(len(running))], dtype=np.bool_)
        rest = order[len(admit) :]
        return Selection(
            admit,
            self._rng.choice(["stop", "skip"]),
            mask,
            preempt=col(self._rng.sample(range(len(running)), self._rng.randint(0, len(running)))),
            refuse=col(rest[: self._rng.randint(0, len(rest))]),
            wake_ns=self._rng.choice([None, None, step.now_ns + 5_000, NEVER]),
        )

    def split(self, step: Step, remaining: Ints, decode_tokens: int) -> Ints:
        room = max(0, step.chunk_budget - decode_tokens)
        out = []
        for left in remaining.tolist():
            n = self._rng.randint(0, min(left, room))
            out.append(n)
            room -= n
        return col(out)

    def victims(self, step: Step, need: int, candidates: Running) -> Ints:
        order = list(range(len(candidates)))
        self._rng.shuffle(order)
        return col(order[:1])

    def rank(self, need: int, leaves: Leaves) -> Floats:
        return np.asarray([self._rng.random() for _ in range(len(leaves))])

    def draft_lengths(self, step: Step, running: Running) -> Ints:
        return col([self._rng.randint(0, self._drafts) for _ in range(len(running))])


class World:
    """One replica and its client, driven by a seed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = random.Random(setup.seed * 7919 + 1)
        self.seen: Counter[str] = Counter()
        self.now = 1_000
        self.wakeup_ns: int | None = None
        self.gens = {S: 1, K: 1, E: 1, T: 1}
        """Generation of each state, as of the last topology that all have acknowledged."""
        self.queues: dict[tuple[Role, Role], deque[tuple[int, int, tuple[bytes, ...]]]] = {
            link: deque() for link in LINKS
        }
        self.control: dict[Role, deque[Body]] = {role: deque() for role in (S, K, E, T)}
        self.deaf: dict[Role, set[Role]] = {role: set() for role in (S, K, E, T)}
        """Peers whose frames are fenced for want of a generation, between PeerDown and the new topology."""
        self.dead: list[Role] = []
        self.asked: dict[str, Asked] = {}
        self.handles: dict[int, str] = {}
        """What the tokenizer knows; a crash of it loses them."""
        self.handle_count = 0
        self.submitted = 0
        self.crashes_left = 4 if setup.crashes else 0
        self.reads_checked = 0
        self.uncached: list[Residency] = []
        """Residencies that were there when all was flushed: nothing of theirs is cached ever after."""
        self.facts = Facts(
            model_id="ghost",
            context=10_000,
            vocab_size=260,
            block_size=setup.block_size,
            total_blocks=setup.blocks,
            host_blocks=setup.host_blocks,
            block_bytes=8,
            cache_seed=b"",
            prompts_apart=setup.apart,
        )
        odd = OddPolicies(self.rng, setup.drafts)
        built_in = load_policies(replace_fields(PolicyConfig(), **dict(setup.policies)))
        self.policies = (
            Policies(odd, odd, odd, odd, odd, built_in.names)
            if setup.odd_policies
            else replace(built_in, speculation=odd)
            if setup.drafts
            else built_in
        )
        self.scheduler = self._new_scheduler()
        self.kv = self._new_kv()
        self.luck = random.Random(setup.seed)
        self.haste = random.Random(setup.seed + 1)
        self.arriving = self.haste.choice([1, 8]) if setup.rounds else 8
        """How soon requests come: rounds are for times in which none waits."""
        self.failed_prefixes: list[tuple[bytes, list[int]]] = []
        """Namespace and tokens, in whole blocks, of what nobody may find in the prefix tree on account of a run."""
        self.executor = self._new_executor()
        # Slow links make rare interleavings common: each run starves some of them.
        self.weights = {link: self.rng.choice([0.2, 1, 3, 10]) for link in LINKS}
        for role, peers in ((S, (T, K, E)), (K, (S, E))):
            self.control[role].extend(PeerUp(peer, 1) for peer in peers)

    def _new_scheduler(self) -> SchedulerCore:
        return SchedulerCore(
            host=PolicyHost(self.policies),
            generation=self.gens[S],
            slots=self.setup.slots,
            block_size=self.setup.block_size,
            total_blocks=self.setup.blocks,
            context=self.facts.context,
            chunk_budget=self.setup.budget,
            depth=self.setup.depth,
            tell_every_ns=APART_NS if self.setup.rounds else 0,
        )

    def _new_kv(self) -> KvCore:
        return KvCore(
            total_blocks=self.setup.blocks,
            block_size=self.setup.block_size,
            slots=self.setup.slots,
            eviction=PolicyHost(self.policies),
            generation=self.gens[K],
            host_blocks=self.setup.host_blocks,
            prompts_apart=self.setup.apart,
        )

    def _new_executor(self) -> GhostExecutor:
        executor = FaultyGhost(self.facts, self._fails, eos_one_in=EOS_ONE_IN)
        if self.setup.seed % 2:
            executor.go_on = lambda: self.haste.random() < GOES_ON
        return executor

    def _fails(self, run: Run) -> bool:
        """Drawn beside everything else, so that nothing else changes with it."""
        released = int(self.scheduler._slots.open_id[run.slot]) != run.resident.open_id
        if not self.setup.failures or self.luck.random() >= (FAILS_RELEASED if released else FAILS):
            return False
        self.seen["a run failed"] += 1
        self.seen["a run failed whose residency was released"] += released
        end = run.end // self.setup.block_size * self.setup.block_size
        if end:
            self.failed_prefixes.append((run.resident.namespace, run.resident.tokens[:end]))
        return True

    # ── links ────────────────────────────────────────────────────────────────────────────────────

    def send(self, source: Role, dest: Role, *messages: Message, dest_gen: int | None = None) -> None:
        if source in self.dead or dest in self.deaf[source]:
            return
        stamp = (self.gens[source], self.gens[dest] if dest_gen is None else dest_gen)
        self.queues[source, dest].append((*stamp, tuple(encode(m) for m in messages)))

    def deliver(self, link: tuple[Role, Role]) -> None:
        source, dest = link
        source_gen, dest_gen, frames = self.queues[link].popleft()
        if source in self.deaf[dest] or source_gen != self.gens[source] or dest_gen != self.gens[dest]:
            self.fence(link, frames)
            return
        self.handle(dest, [decode(frame) for frame in frames])

    def fence(self, link: tuple[Role, Role], frames: tuple[bytes, ...]) -> None:
        """The frame is of the past."""
        self.seen["frame fenced"] += 1
        if link in ((E, S), (S, T)):
            self.seen["crash between result and delivery"] += 1
        if link == (E, S):
            (result,) = map(decode, frames)
            assert isinstance(result, StepResult)
            self.seen["a failure lost with the scheduler"] += bool(result.failed)

    def handle(self, role: Role, messages: list[Body]) -> None:
        self.now += self.rng.randint(1, 1_000)
        if role is E and isinstance(messages[0], Hasten):
            self.seen["the executor was asked to hasten"] += 1
        elif role is E:
            plan, bind = messages
            assert isinstance(plan, StepPlan)
            assert isinstance(bind, StepBind)
            result = self.executor.execute(plan, bind)
            if plan.rounds > 1:
                self.check_rounds(plan, result)
            elif not self.setup.drafts:  # capacity is enough for what runs: nobody's turn is for nothing
                computed = len(result.slot) + len(result.failed)
                assert computed == len(plan.slot) - len(bind.skipped), "a decode ran into its capacity"
            took = result.rounds * self.haste.choice([1, 1, 3, 5])
            self.send(E, S, replace_fields(result, started_ns=0, finished_ns=took), dest_gen=plan.scheduler_gen)
        elif role is T:
            self.on_answer(messages[0])
        else:
            core: SchedulerCore | KvCore = self.scheduler if role is S else self.kv
            (message,) = messages
            self.observe(role, message)
            outputs = core.apply(self.now, message)
            assert not any(isinstance(e, KvLeak | KvOverdraft | PolicyRejected) for e in outputs.events), outputs.events
            for event in outputs.events:
                self.seen[type(event).__name__] += 1
            if role is S:
                self.wakeup_ns = outputs.wakeup_ns
            for out in outputs.messages:
                parts = (message, out.message) if isinstance(out.message, StepBind) else (out.message,)
                self.send(role, out.role, *parts)
                if isinstance(message, StepPlan):
                    self.observe_bound(message, out.message)
            if role is K and isinstance(message, StepPlan):
                wrong = self.kv.pool.audit(self.kv.tables())
                assert not wrong, wrong
                self.check_held()
                self.check_uncached()

    def check_rounds(self, plan: StepPlan, result: StepResult) -> None:
        """Each has said a token a round, but for what ended or failed."""
        self.seen["plan of several rounds"] += 1
        self.seen["a plan of several rounds was cut short"] += result.rounds < plan.rounds
        failed = {one.open_id for one in result.failed}
        ends = np.cumsum(result.n_new) - 1
        for open_id, n, last in zip(result.open_id.tolist(), result.n_new.tolist(), ends.tolist(), strict=True):
            ended = self.setup.ends_known and int(result.tokens[last]) == EOS
            self.seen["a sequence ended before the last round"] += ended and n < result.rounds
            self.seen["a run failed after some rounds"] += open_id in failed
            assert n == result.rounds or ended or open_id in failed, "a decode ran into its capacity"

    def observe(self, role: Role, message: Body) -> None:
        """Count the rare things about to happen; reads the core's columns, changes nothing."""
        if isinstance(message, StepPlan):
            for opening in message.opens:
                ids = opening.ids.tolist()
                after = ((opening.namespace, ids[: len(failed)]) for _, failed in self.failed_prefixes)
                self.seen["opened where a run had failed"] += any(one in self.failed_prefixes for one in after)
        if role is not S:
            return
        slots = self.scheduler._slots
        if isinstance(message, StepResult):
            reused = slots.active[message.slot] & (slots.open_id[message.slot] != message.open_id)
            self.seen["slot reused while its former owner's result is in flight"] += int(reused.sum())
        elif isinstance(message, StepAck):
            current = slots.open_id[message.rebase_slot]
            reused = slots.active[message.rebase_slot] & (current != message.rebase_open_id)
            self.seen["slot reused while its former owner's ack is in flight"] += int(reused.sum())

    def observe_bound(self, plan: StepPlan, answer: Message) -> None:
        if isinstance(answer, StepBind):
            places = (
                int((answer.copy_src >= self.setup.blocks).sum()),
                int((answer.copy_dst >= self.setup.blocks).sum()),
            )
            self.seen["block swapped in"] += places[0]
            self.seen["block swapped out"] += places[1]
            self.seen["partial block copied for a fork"] += len(plan.forks) and len(answer.copy_src) - sum(places)
            for slot, index in zip(answer.delta_slot.tolist(), answer.delta_index.tolist(), strict=True):
                residency = self.kv._residencies[slot]
                if residency is not None and index < len(residency.keys):
                    self.seen["duplicate block re-pointed"] += 1
        elif isinstance(answer, StepAck):
            opened = {o.open_id for o in plan.opens}
            parents = {f.open_id: f for f in plan.forks}
            for open_id, end in zip(answer.rebase_open_id.tolist(), answer.rebase_end.tolist(), strict=True):
                if open_id in opened and end >= 0:
                    self.seen["evicted between hint and open"] += 1
                elif open_id in parents and end < 0:
                    self.seen["fork of a parent that was rebased"] += 1

    # ── the client and its tokenizer ─────────────────────────────────────────────────────────────

    def submit_new(self) -> None:
        r, setup = self.rng, self.setup
        shared = [1, 2, 1, 2, 2, 1, 1, 2, 1, 1]
        head = (
            shared[: r.choice([4, 8, 10])] if r.random() < 0.6 else [r.randint(1, 2) for _ in range(r.choice([0, 4]))]
        )
        ids = head + [r.randint(1, 3) for _ in range(r.randint(1, 6))]
        asks_prompt = 0 if random.Random(self.submitted + setup.seed).random() < 0.25 else -1
        sampling = Sampling(temperature=r.choice([0.0, 1.0]), seed=r.randint(0, 3), prompt_logprobs=asks_prompt)
        if setup.ends_known:
            sampling = replace_fields(sampling, ends=(EOS,))
        max_tokens = r.choice([1, 2, 5, 12, 24] if self.arriving > 1 else [12, 24, 30])
        n = r.choice([1, 1, 1, 3]) if setup.forks else 1
        stop_at = r.randint(0, 6) if setup.stops and r.random() < 0.2 else None
        if r.random() < 0.03:
            max_tokens = setup.blocks * setup.block_size + 1
        request_id = f"r{self.submitted}"
        self.submitted += 1
        asked = Asked(request_id, ids, n, sampling, max_tokens, [EOS], stop_at)
        other = random.Random(setup.seed * 1000 + self.submitted)
        asked.adapter = other.choice(ADAPTERS)
        self.go_on(asked, other)
        asked.deadline_ns = self.now + r.choice([1, 10_000]) if r.random() < 0.2 else None
        asked.journals = [[] for _ in range(n)]
        asked.ended = [""] * n
        self.asked[request_id] = asked
        self.send_request(asked)

    def go_on(self, asked: Asked, r: random.Random) -> None:
        """Perhaps it is the next turn of somebody's conversation: an answer comes back in its prompt."""
        said = [one for one in self.asked.values() if one.journals[0] and len(one.ids) < TURNS]
        if said and r.random() < 0.3:
            before = r.choice(said)
            asked.ids = [*before.ids, *before.journals[0], *asked.ids[-2:]][:TURNS]
            asked.adapter = before.adapter
            self.seen["an answer comes back in a prompt"] += 1

    def send_request(self, asked: Asked) -> None:
        self.handle_count += 1
        handle = self.handle_count
        self.handles[handle] = asked.request_id
        message = Enqueue(
            handle=handle,
            request_id=asked.request_id,
            attempt=asked.attempt,
            ids=col(asked.ids),
            n=asked.n,
            sampling=asked.sampling,
            max_tokens=asked.max_tokens,
            stop_ids=asked.stop_ids,
            tenant="",
            priority=self.rng.choice([0, 0, 1]),
            deadline_ns=asked.deadline_ns,
            namespace=cache_namespace("", b"n", asked.adapter),
            adapter=asked.adapter,
            received_ns=self.now,
            trace_id="",
            delivered=[list(j) for j in asked.journals],
            finished=[bool(e) for e in asked.ended],
        )
        self.send(T, S, message)

    def resume_all(self) -> None:
        for asked in self.asked.values():
            if not asked.done:
                asked.attempt += 1
                self.send_request(asked)

    def on_answer(self, message: Body) -> None:
        if isinstance(message, Refused):
            asked = self.asked[message.request_id]
            if message.attempt == asked.attempt:
                asked.refused = message.code
            return
        assert isinstance(message, Deltas)
        for prompt in message.prompts:
            if prompt.handle in self.handles:
                self.check_prompt(self.asked[self.handles[prompt.handle]], prompt)
        at = 0
        columns = (message.handle, message.choice, message.attempt, message.index, message.n)
        for handle, choice, attempt, index, n in zip(*(c.tolist() for c in columns), strict=True):
            tokens = message.tokens[at : at + n].tolist()
            at += n
            if handle not in self.handles:
                continue
            asked = self.asked[self.handles[handle]]
            if attempt != asked.attempt or asked.done or asked.ended[choice]:
                continue
            journal = asked.journals[choice]
            assert index == len(journal), f"{asked.request_id}: row at {index}, journal has {len(journal)}"
            if index == 0 and asked.sampling.prompt_logprobs >= 0 and len(asked.ids) > 1:
                assert asked.prompt_known == attempt, (
                    f"{asked.request_id}: output before its prompt's log-probabilities"
                )
            journal += tokens
            if choice == 0 and asked.stop_at is not None and len(journal) > asked.stop_at:
                del journal[asked.stop_at + 1 :]
                asked.ended[0] = "stop"
                self.send(T, S, Stop(asked.request_id, 0, asked.stop_at))
        for end in message.ends:
            if end.handle not in self.handles:
                continue
            asked = self.asked[self.handles[end.handle]]
            if end.attempt == asked.attempt and not asked.done and not asked.ended[end.choice]:
                asked.ended[end.choice] = end.reason

    def check_prompt(self, asked: Asked, prompt: PromptLogprobs) -> None:
        """Every token of the prompt but the first, each once, whatever was cached, cut, preempted or lost."""
        hashes = prefix_hashes(asked.ids, start_of(asked.adapter))
        expected = [prompt_logprob(h, token) for h, token in zip(hashes, asked.ids[1:], strict=False)]
        assert prompt.entries == expected, f"{asked.request_id}: wrong log-probabilities of its prompt"
        self.seen["prompt with log-probabilities"] += 1
        asked.prompt_known = prompt.attempt

    def cancel_one(self) -> None:
        live = [a for a in self.asked.values() if not a.done]
        if live:
            asked = self.rng.choice(live)
            asked.cancelled = True
            self.seen["cancel"] += 1
            self.send(T, S, Cancel(asked.request_id))

    def flush(self) -> None:
        """Somebody empties the prefix tree, or the part of it that begins with what many have asked."""
        r = self.rng
        ids = r.choice([[], [1], [1, 2, 1], [1, 2, 1, 2, 2, 1], [r.randint(1, 3) for _ in range(r.randint(1, 9))]])
        tenant = r.choice([None, None, "", "nobody"])
        before = {slot: list(one.table) for slot, one in enumerate(self.kv._residencies) if one is not None}
        outputs = self.kv.apply(self.now, Flush(tenant, col(ids)))
        (flushed,) = outputs.events
        assert isinstance(flushed, KvFlushed)
        self.seen["flush of what is in use"] += bool(flushed.in_use)
        self.seen["flush of what nobody uses"] += bool(flushed.freed)
        after = {slot: list(one.table) for slot, one in enumerate(self.kv._residencies) if one is not None}
        assert before == after, "a residency has lost a block"
        assert not (wrong := self.kv.pool.audit(self.kv.tables())), wrong
        if tenant != "nobody":
            matched = self.kv.apply(
                self.now, Match(0, b"n", col(asked := [*ids, *[0] * self.setup.block_size]), len(asked))
            ).messages
            (answer,) = (out.message for out in matched)
            assert isinstance(answer, Matched)
            assert answer.cached <= max(0, len(ids) - 1), "all of the prefix is still there"
            if not ids:
                assert not self.kv.pool.cached
                self.uncached = [one for one in self.kv._residencies if one is not None]

    def check_held(self) -> None:
        """Whatever is in the tree and cannot be found waits for a step that is under way."""
        waiting = {held_key(held.key, held.open_id) for held in self.kv.under_way.held}
        assert {key for key in self.kv.pool._by_key if len(key) > KEY_BYTES} <= waiting

    def check_uncached(self) -> None:
        there = set(map(id, self.kv._residencies))
        self.uncached = [one for one in self.uncached if id(one) in there]
        for one in self.uncached:
            assert not any(map(self.kv.pool.is_cached, one.table)), "what was flushed is cached again"

    # ── crashes ──────────────────────────────────────────────────────────────────────────────────

    def crash(self, role: Role) -> None:
        """The process is gone; state that cannot outlive it goes with it. Peers hear of it one by one."""
        self.seen[f"crash of {role.name}"] += 1
        self.crashes_left -= 1
        lost = [E, K] if role is E else [role]
        self.dead = [role]
        for peer in (S, K, E, T):
            if peer is not role:
                self.control[peer].extend(PeerDown(gone) for gone in lost if gone is not peer)
        self.control[role].clear()

    def recover(self) -> None:
        """Everybody knows: the successor starts, the new topology is acknowledged by all, then Go."""
        (role,) = self.dead
        lost = [E, K] if role is E else [role]
        for gone in lost:
            self.gens[gone] += 1
        if role is S:
            self.scheduler = self._new_scheduler()
        if K in lost:
            self.kv = self._new_kv()
        if role is T:
            self.handles.clear()
        if role is E:
            self.reads_checked += self.executor.reads_checked
            self.executor = self._new_executor()
        self.dead = []
        for peer in self.deaf:
            self.deaf[peer].clear()
        everyone = (S, K, E, T)
        for peer in everyone:
            fresh = everyone if peer in lost else lost
            self.control[peer].extend(PeerUp(other, self.gens[other]) for other in fresh if other is not peer)

    def take_control(self, role: Role) -> None:
        message = self.control[role].popleft()
        if isinstance(message, PeerDown):
            self.deaf[role].add(message.role)
        if role in (S, K):
            self.handle(role, [message])
        elif role is T and isinstance(message, PeerUp) and message.role is S:
            self.resume_all()

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> bool:
        """One random move; False if nothing can move."""
        r, setup = self.rng, self.setup
        moves: list[tuple[float, Callable[[], None]]] = []
        for link, queue in self.queues.items():
            if queue and link[1] not in self.dead:
                moves.append((self.weights[link] * 10, partial(self.deliver, link)))
        for role, told in self.control.items():
            if told and role not in self.dead:
                moves.append((30, partial(self.take_control, role)))
        settled = not any(self.control.values())
        if self.dead and settled:
            moves.append((30, self.recover))
        if self.submitted < setup.requests and not self.dead:
            moves.append((self.arriving, self.submit_new))
        if not moves:
            return False
        live = any(not a.done for a in self.asked.values())
        if live and setup.cancels:
            moves.append((1, self.cancel_one) if r.random() < 0.03 else (0, self.cancel_one))
        if setup.flushes and K not in self.dead and r.random() < 0.01:
            moves.append((20, self.flush))
        if live and self.crashes_left and settled and not self.dead and r.random() < 0.02:
            moves.append((100, partial(self.crash, r.choice(setup.crashes))))
        weights = [w for w, _ in moves]
        r.choices(moves, weights)[0][1]()
        return True

    def run(self, most: int = 60_000) -> None:
        """To the end of all requests, then check that everything is as if nothing had gone wrong."""
        for _ in range(most):
            if not self.tick() and not self._wake():
                break
        else:
            raise AssertionError(f"not done after {most} moves: {self.scheduler.stats}")
        self.reads_checked += self.executor.reads_checked
        stuck = [a.request_id for a in self.asked.values() if not a.done]
        assert not stuck, f"nothing moves, yet {stuck} wait: {self.scheduler.stats}"
        for asked in self.asked.values():
            self.check_answer(asked)
        stats = self.scheduler.stats
        assert stats["running"] == stats["waiting"] == stats["requests"] == 0, stats
        assert not self.kv.tables(), "somebody is still resident in the KV-manager"
        pool = self.kv.pool
        assert pool.free + pool.cached == pool.total == stats["blocks_available"], (pool.free, pool.cached, stats)
        assert not pool.audit(()), pool.audit(())
        self.seen["evictions"] += pool.evicted

    def _wake(self) -> bool:
        """Nothing moves: let the time pass until the scheduler wants to be woken, if it does."""
        if self.wakeup_ns is None:
            return False
        self.now = max(self.now, self.wakeup_ns)
        self.seen["wake-up"] += 1
        self.handle(S, [Tick()])
        return True

    def check_answer(self, asked: Asked) -> None:
        if asked.refused == "deadline":
            assert asked.deadline_ns is not None
            assert not any(asked.journals), f"{asked.request_id} was refused after it had begun"
            self.seen["refused for its deadline"] += 1
            return
        if asked.refused:
            pool = self.setup.blocks * self.setup.block_size
            assert asked.refused == "never_fits", asked.refused
            assert len(asked.ids) + asked.max_tokens > pool
            return
        for choice in range(asked.n):
            tokens, finish = asked.expected(choice, apart=self.setup.apart)
            journal, ended = asked.journals[choice], asked.ended[choice]
            if asked.cancelled:
                assert journal == tokens[: len(journal)], f"{asked.request_id} choice {choice}: a wrong token"
            elif ended == "error":
                failing = self.setup.failures
                assert failing or E in self.setup.crashes, f"{asked.request_id} failed without a crash"
                assert journal == tokens[: len(journal)]
                self.seen["a choice that failed"] += failing
                self.seen["poison"] += not failing
            else:
                assert (journal, ended) == (tokens, finish), (
                    f"{asked.request_id} choice {choice}: {journal} {ended!r}, not {tokens} {finish!r}"
                )
