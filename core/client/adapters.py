"""Which adapters have a name, as the supervisor last said, and what a client waits to hear of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import msgspec

from octavo.core.client.stream import RequestRefused
from octavo.core.control import AdapterSet, SetAdapter
from octavo.core.messages import Adapter, Params


class KnownAdapters:
    def __init__(self) -> None:
        self.named: Mapping[str, Adapter] = {}
        self._refs = count(1)
        self._answers: dict[int, AdapterSet | None] = {}

    def pinned(self, params: Params) -> Params:
        """With what their adapter's name stands for now, for the whole request. Raises `RequestRefused`."""
        name = params.adapter
        if not name or isinstance(name, Adapter):
            return params
        if (adapter := self.named.get(name)) is None:
            known = ", ".join(self.named) or "none"
            raise RequestRefused("model", f"there is no adapter {name[:200]!r}; loaded: {known}", "model_not_found")
        return msgspec.structs.replace(params, adapter=adapter)

    def wish(self, name: str, path: str, *, replace: bool) -> SetAdapter:
        """To be sent, and then waited for."""
        ref = next(self._refs)
        self._answers[ref] = None
        return SetAdapter(ref=ref, name=name, path=path, replace=replace)

    def answered(self, answer: AdapterSet) -> None:
        if answer.ref in self._answers:
            self._answers[answer.ref] = answer

    def answer(self, wish: SetAdapter) -> AdapterSet | None:
        """None as long as there is none."""
        return self._answers[wish.ref]

    def forget(self, wish: SetAdapter) -> None:
        del self._answers[wish.ref]
