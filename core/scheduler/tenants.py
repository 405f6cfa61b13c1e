"""Tenants by number: columns hold the number, policies are told the names."""

from __future__ import annotations


class Tenants:
    """Numbers are given in order of first appearance and stay."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names = (*self.names, name)
        return number
