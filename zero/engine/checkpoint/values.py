"""What a checkpoint holds beside the model's tensors, as values again."""

from __future__ import annotations

from typing import Any, NamedTuple

from zero.checkpoint.plain import decode
from zero.checkpoint.reader import Reader
from zero.engine.checkpoint.collective_read import LoadPlan
from zero.engine.checkpoint.random_state import for_world


class Values(NamedTuple):
    """Of one rank.

    shared, own: for `restore`; shared is None in a checkpoint that another program has written, own where no random
    numbers were saved. extra: what modules gave by `get_extra_state`, by name in a state_dict. steps: of
    the optimizer.
    """

    shared: dict[str, Any] | None
    own: dict[str, Any] | None
    client: dict[str, Any]
    extra: dict[str, Any]
    steps: int


def saved_values(plan: LoadPlan, rank: int, world_size: int) -> Values:
    """Read them; at another world size than the saved one, new ranks get random numbers of their own."""
    index = plan.index
    with Reader(plan.place, index) as reader:

        def value(what: str, plain: Any) -> Any:
            names = [name for name in index.tensors if name.startswith(f"{what}/")]
            return decode(plain, {name: reader.whole(index.tensors[name], f"tensor '{name}'") for name in names})

        def state(number: int) -> Any:
            plain = (index.ranks[number] or {}).get("state")
            return None if plain is None else value(f"rank_state/{number}", plain)

        fields = index.shared if isinstance(index.shared, dict) else {}
        shared, extra = fields.get("state"), fields.get("extra_state")
        own, step = None, int(fields.get("global_steps", 0))
        if index.world_size == world_size:
            own = state(rank)
        elif index.ranks and state(0) is not None:
            wanted = {0, 1, rank}
            saved = [state(number) if number in wanted else None for number in range(index.world_size)]
            own = {"random": for_world([each and each["random"] for each in saved], rank, world_size, step)}
        return Values(
            shared=None if shared is None else value("engine_state", shared),
            own=own,
            client={} if index.client is None else value("client_state", index.client),
            extra={} if extra is None else value("extra_state", extra),
            steps=step,
        )
