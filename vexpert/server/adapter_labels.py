"""Which adapters have metrics of their own: a server of thousands must not flood Prometheus."""

from collections.abc import Collection

MAX_LABELS = 100
OTHERS = "(others)"  # all adapters beyond


class AdapterLabels:
    """The first adapters to be used get a label each; the rest share one.

    The place of an adapter that is unloaded is free again. "" is the base model, always its own.
    """

    def __init__(self, most: int = MAX_LABELS) -> None:
        self._most = most
        self._own: dict[str, None] = {}

    def of(self, adapter: str | None) -> str:
        """The label under which `adapter` is counted from now on."""
        if not adapter or adapter in self._own:
            return adapter or ""
        if len(self._own) < self._most:
            self._own[adapter] = None
            return adapter
        return OTHERS

    def own(self) -> frozenset[str]:
        """Adapters with a label of their own."""
        return frozenset(self._own)

    def forget(self, known: Collection[str]) -> list[str]:
        """Free the places of adapters that are not `known` any more; their labels."""
        gone = [name for name in self._own if name not in known]
        for name in gone:
            del self._own[name]
        return gone
