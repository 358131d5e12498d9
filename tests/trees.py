"""Module trees as plain values: a short notation for them, and the shapes of well-known models."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero.plan.units import OWN_UNIT_NUMEL, ModuleNode, ParamSpec, UnitPlan, plan_units

BIG = 2 * OWN_UNIT_NUMEL
SMALL = 7


@dataclass(frozen=True)
class Own:
    """A parameter that differs from the usual trained bf16 one of group 0."""

    numel: int = SMALL
    dtype: str = "bf16"
    requires_grad: bool = True
    group: int = 0


@dataclass(frozen=True)
class Mod:
    """A module to build. A parameter is its numel, an Own, or the full name of an earlier one that it is tied to."""

    kind: str
    params: dict[str, int | str | Own] = field(default_factory=dict)
    children: dict[str, Mod] = field(default_factory=dict)
    repeats: bool = False


def module(kind: str, /, **children: Mod) -> Mod:
    return Mod(kind, {}, children)


def leaf(kind: str, *numels: int | str | Own) -> Mod:
    return Mod(kind, dict(zip(("weight", "bias", "scale"), numels, strict=False)))


def modules(*items: Mod, kind: str = "ModuleList") -> Mod:
    return Mod(kind, {}, {str(index): item for index, item in enumerate(items)}, repeats=True)


def sequential(*items: Mod) -> Mod:
    return modules(*items, kind="Sequential")


def build(mod: Mod, path: str = "", specs: dict[str, ParamSpec] | None = None) -> tuple[ModuleNode, list[ParamSpec]]:
    """The tree and its parameters, each once, as `named_modules` and `named_parameters` would tell them."""
    specs = {} if specs is None else specs
    own = []
    for name, given_as in mod.params.items():
        full = given_as if isinstance(given_as, str) else f"{path}.{name}".lstrip(".")
        if not isinstance(given_as, str):
            told = given_as if isinstance(given_as, Own) else Own(given_as)
            specs[full] = ParamSpec(full, told.numel, told.dtype, told.requires_grad, told.group)
        own.append(full)
    children = [build(child, f"{path}.{name}".lstrip("."), specs)[0] for name, child in mod.children.items()]
    return ModuleNode(path, mod.kind, tuple(own), tuple(children), mod.repeats), list(specs.values())


def plan(mod: Mod, patterns: tuple[str, ...] = (), world: int = 4) -> tuple[UnitPlan, ...]:
    return plan_units(*build(mod), world, patterns)


def names(mod: Mod, patterns: tuple[str, ...] = ()) -> list[str]:
    return [unit.name for unit in plan(mod, patterns)]


def contents(mod: Mod, patterns: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {unit.name: [spec.name for spec in unit.params] for unit in plan(mod, patterns)}


def block(numel: int = BIG, kind: str = "Block") -> Mod:
    return module(kind, norm=leaf("LayerNorm", SMALL, SMALL), attn=leaf("Linear", numel), mlp=leaf("Linear", numel))


def gpt(blocks: int = 3, wte: int = BIG, wpe: int = SMALL) -> Mod:
    return module(
        "GPT",
        wte=leaf("Embedding", wte),
        wpe=leaf("Embedding", wpe),
        blocks=modules(*[block()] * blocks),
        norm=leaf("LayerNorm", SMALL, SMALL),
        head=leaf("Linear", BIG, SMALL),
    )


def nanogpt(blocks: int = 2) -> Mod:
    transformer = module(
        "ModuleDict",
        wte=leaf("Embedding", 50304 * 768),
        wpe=leaf("Embedding", 1024 * 768),
        drop=leaf("Dropout"),
        h=modules(*[block()] * blocks),
        ln_f=leaf("LayerNorm", 768),
    )
    return module("GPT", transformer=transformer, lm_head=leaf("Linear", "transformer.wte.weight"))


def llama(blocks: int = 2, tied: bool = False) -> Mod:
    decoder = module(
        "LlamaModel",
        embed_tokens=leaf("Embedding", BIG),
        layers=modules(*[block(kind="LlamaDecoderLayer")] * blocks),
        norm=leaf("LlamaRMSNorm", SMALL),
        rotary_emb=leaf("LlamaRotaryEmbedding"),
    )
    lm_head = leaf("Linear", "model.embed_tokens.weight" if tied else BIG)
    return module("LlamaForCausalLM", model=decoder, lm_head=lm_head)


def swin() -> Mod:
    def stage(depth: int, last: bool) -> Mod:
        parts = {"blocks": modules(*[block(kind="SwinBlock")] * depth)}
        return Mod("BasicLayer", {}, parts if last else {**parts, "downsample": leaf("PatchMerging", BIG)})

    return module(
        "Swin",
        patch_embed=module("PatchEmbed", proj=leaf("Conv2d", SMALL, SMALL)),
        layers=modules(stage(2, False), stage(6, False), stage(2, True)),
        norm=leaf("LayerNorm", SMALL),
        head=leaf("Linear", BIG),
    )
