"""The section `expert_parallel`: experts divided among ranks, in the words of DeepSpeed's AutoEP."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from zero.config.unavailable import Idle, Unavailable
from zero.config.values import Bool, Count, NotNegative, Positive, PositiveOrAuto, Section, choice

_ONE = (None, 1)
_STRUCTURE = Idle("experts are found by the model's ep_plan, by their structure or by zero.experts")
_THEIRS = Idle("experts compute as the model says, and its experts_implementation")
_OF_MODEL = "is for the model to say, whose own router runs; leave it out"
_ROUTER = Unavailable(_OF_MODEL, on=lambda value: value not in (None, "auto"))
_SAID = Unavailable(_OF_MODEL, on=lambda value: value is not None)
_SCALE = Unavailable(_OF_MODEL, on=lambda value: value not in _ONE)
_WHOLE = Unavailable(
    "is not available: each expert is whole on its ranks; leave it out", on=lambda value: value not in _ONE
)
_COMM = Idle("tokens travel over the ranks' own backend")


class ExpertParallel(Section):
    """Experts divided among ranks, which send each other tokens."""

    ALIASES: ClassVar[Mapping[str, str]] = {"ep_size": "autoep_size"}

    enabled: Bool = False
    """Divide experts among ranks."""
    autoep_size: Positive = 1
    """Ranks that experts are divided among, which are consecutive; it divides the experts, and the product of the ranks
    along dp_shard, cp and tp. Also `ep_size`."""
    moe_layer_pattern: str | None = None
    """A regular expression: only experts in modules whose whole names are such are divided; by default all."""
    num_experts_attr: str | None = None
    """The name in the model's config of the number of experts, which is compared with what is found."""

    expert_tensor_parallel_size: Annotated[Positive, _WHOLE] = 1
    load_balance_coeff: Annotated[
        NotNegative | None, Unavailable("would change biases of routers; leave it out, or let the model do it")
    ] = None
    preset_model: Annotated[str | None, _STRUCTURE] = None
    expert_pattern: Annotated[str | None, _STRUCTURE] = None
    router_pattern: Annotated[str | None, _STRUCTURE] = None
    expert_w1: Annotated[str | None, _STRUCTURE] = None
    expert_w2: Annotated[str | None, _STRUCTURE] = None
    expert_w3: Annotated[str | None, _STRUCTURE] = None
    top_k_attr: Annotated[str | None, _STRUCTURE] = None
    has_shared_experts: Annotated[Bool | None, _STRUCTURE] = None
    shared_experts_pattern: Annotated[str | None, _STRUCTURE] = None
    shared_experts_gate_pattern: Annotated[str | None, _STRUCTURE] = None
    expert_activation: Annotated[str | None, _THEIRS] = None
    use_grouped_mm: Annotated[Bool, _THEIRS] = True
    disable_triton_grouped_mm: Annotated[Bool, _THEIRS] = False
    gate_up_impl: Annotated[str, _THEIRS] = "separate"
    combine_impl: Annotated[str, _THEIRS] = "auto"
    row_weighting_impl: Annotated[str, _THEIRS] = "auto"
    route_norm: Annotated[Bool | None, _SAID] = None
    num_expert_groups: Annotated[Positive | None, _SAID] = None
    num_limited_groups: Annotated[Positive | None, _SAID] = None
    route_scale: Annotated[NotNegative, _SCALE] = 1.0
    score_apply: Annotated[choice("auto", "pre", "post"), _ROUTER] = "auto"
    score_func: Annotated[choice("auto", "softmax", "sigmoid"), _ROUTER] = "auto"
    top_k: Annotated[PositiveOrAuto, _ROUTER] = "auto"
    routed_scaling_factor: Annotated[PositiveOrAuto, _ROUTER] = "auto"
    comm_backend: Annotated[str, _COMM] = "comm"
    comm_num_sm: Annotated[Positive, _COMM] = 12
    comm_qp_margin: Annotated[Count, _COMM] = 4
    comm_max_tokens_per_rank: Annotated[Count, _COMM] = 0
    async_split_plan: Annotated[Bool, _COMM] = False
    validate_folding_routing: Annotated[Bool, Idle("routes are compared where it costs nothing")] = False
