"""Attention of sequences that share their first blocks: the shared keys once for all of them, its own rest for each.

Which sequences share is seen from the block tables alone. A group's query tokens, one sequence after another, are rows
against the shared keys, as those of one long prompt would be; what comes of it are parts that each row's merge takes
before those of the rest. Knows lengths and tables, no tensors of the model and no device.

With shared keys that end at a multiple of `split`, and works of the same kernel, a row has the very parts that it would
have alone, summed in the same order: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.kernels.cuda.plan import TILE, Ints, Plan, Query, fitting, ranges, structs

_WHOLE = 1 << 30
"""More keys than any context has."""


class Group(NamedTuple):
    """Queries by number, and how many first keys they all share: none of a query's own tokens is among them."""

    members: list[int]
    keys: int


def groups(queries: list[Query], tables: Ints, block_size: int, *, step: int, least: int) -> list[Group]:
    """Those with which the most keys need not be read again. What is shared is a multiple of `step` keys (of 16), and
    at least `least`; a query is in one group at most."""
    limits = [(query.length - query.tokens) // block_size for query in queries]

    def split(members: list[int], column: int) -> dict[int, list[int]]:
        """By the block that they have there."""
        found: dict[int, list[int]] = {}
        for i in members:
            if limits[i] > column and queries[i].tokens:
                found.setdefault(int(tables[queries[i].table, column]), []).append(i)
        return {block: mine for block, mine in found.items() if len(mine) > 1}

    # Those who share, then within each such group who share more: a parent is before its parts.
    nodes: list[tuple[int, Group]] = []
    ahead = [(members, 0, -1) for members in split(list(range(len(queries))), 0).values()]
    for members, begin, parent in ahead:
        end = min(limits[i] for i in members)
        mine = tables[[queries[i].table for i in members], begin:end]
        differ = np.flatnonzero((mine != mine[0]).any(0))
        column = begin + int(differ[0]) if len(differ) else end
        ahead += [(part, column, len(nodes)) for part in split(members, column).values()]
        nodes.append((parent, Group(members, column * block_size // step * step)))
    apart = [0] * (len(nodes) + 1)  # keys that a node's parts save; the last is the parent of all
    smaller: list[list[Group]] = [[] for _ in apart]
    for i, (parent, group) in reversed([*enumerate(nodes)]):
        whole = group.keys * (len(group.members) - 1) if group.keys >= least else 0
        saved, found = (whole, [group]) if whole and whole >= apart[i] else (apart[i], smaller[i])
        apart[parent] += saved
        smaller[parent] = found + smaller[parent]
    return smaller[-1]


def fitting_cascade(
    queries: list[Query], shared: list[Group], group: int, rows: int, shared_rows: int, blocks: int
) -> Plan:
    """With the least power of two from 128 on for `split` that gives at most `blocks` works, or no context is split."""
    whole = cascade(queries, shared, group, rows, shared_rows, _WHOLE)
    works = whole.works if whole.shared is None else np.concatenate((whole.works, whole.shared.works))
    return cascade(queries, shared, group, rows, shared_rows, fitting(works, blocks))


def cascade(queries: list[Query], shared: list[Group], group: int, rows: int, shared_rows: int, split: int) -> Plan:
    """What `plan` makes of the queries, but that the groups' keys are works of their own, of `shared_rows` rows."""
    if split % TILE:
        raise ValueError(f"split is {split}; it must be a multiple of {TILE}")
    common = _common(queries, shared, group, rows, shared_rows, split)
    begins = {i: keys for members, keys in shared for i in members}
    works: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    parts = 0
    for i, query in enumerate(queries):
        for row in range(0, query.tokens * group, rows):
            row_end = min(row + rows, query.tokens * group)
            cuts = ranges(begins.get(i, 0), query.length - query.tokens + (row_end - 1) // group + 1, split)
            place = common.places.get((i, row), (0, 0, 0))
            alone = len(cuts) == 1 and not place[1]
            works += _works(query.table, query.first, row, row_end, cuts, -1 if alone else parts)
            if not alone:
                merges.append((query.first, row, row_end, parts, len(cuts), *place))
                parts += len(cuts)
    order = np.concatenate(common.order)
    first = Plan(structs(common.works), structs([]), common.parts, shared_rows, order)
    return Plan(structs(works), structs(merges), parts, rows, order, first if shared else None)


@dataclass(slots=True)
class _Common:
    """The groups' works, and what they speak of: `order` in pieces."""

    order: list[Ints]
    works: list[tuple[int, ...]] = field(default_factory=list)
    parts: int = 0
    places: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """Of a query, from one of its rows on: the first part, how many there are, and how much further its rows begin."""

    def take(self, works: list[tuple[int, ...]]) -> None:
        self.works += works
        self.parts += len(works)


def _common(queries: list[Query], shared: list[Group], group: int, rows: int, shared_rows: int, split: int) -> _Common:
    """A work takes the rows of whole row tiles, so that a merge is about one."""
    made = _Common([np.arange(max((query.first + query.tokens for query in queries), default=0), dtype=np.int32)])
    at = len(made.order[0])
    for members, keys in shared:
        cuts = ranges(0, keys, split)
        begin = end = base = 0
        table = queries[members[0]].table
        for i in members:
            query = queries[i]
            made.order.append(np.arange(query.first, query.first + query.tokens, dtype=np.int32))
            for row in range(0, query.tokens * group, rows):
                if base + min(row + rows, query.tokens * group) - begin > shared_rows:
                    made.take(_works(table, at, begin, end, cuts, made.parts))
                    begin = base + row
                end = base + min(row + rows, query.tokens * group)
                made.places[i, row] = (made.parts, len(cuts), base + row - begin)
            base = end
        made.take(_works(table, at, begin, end, cuts, made.parts))
        at += base // group
    return made


def _works(
    table: int, tokens: int, row: int, row_end: int, cuts: list[tuple[int, int]], part: int
) -> list[tuple[int, ...]]:
    return [
        (table, tokens, row, row_end, key, end, part + i if part >= 0 else -1, 0) for i, (key, end) in enumerate(cuts)
    ]
