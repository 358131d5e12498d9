"""Grouping into units: every parameter in exactly one, and the names one expects for the usual models."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import (
    BIG,
    SMALL,
    Mod,
    Own,
    block,
    build,
    contents,
    gpt,
    leaf,
    llama,
    module,
    modules,
    names,
    nanogpt,
    plan,
    sequential,
    swin,
)

from zero.plan.layout import make_layout
from zero.plan.units import OWN_UNIT_NUMEL, ModuleNode, ParamSpec, UnitPlan, plan_units

# The usual models.

EXPERTS = module("Block", experts=modules(leaf("Expert", BIG), leaf("Expert", BIG)))
TIED = {"embed": leaf("Embedding", "shared.weight"), "block": modules(block(), block())}
USUAL = {
    "gpt": (gpt(), "wte <root> blocks.0 blocks.1 blocks.2 head"),
    "nanogpt": (nanogpt(), "transformer.wte transformer.wpe transformer.h.0 transformer.h.1 <root>"),
    "llama": (llama(), "model.embed_tokens model.layers.0 model.layers.1 <root> lm_head"),
    "tied llama": (llama(tied=True), "model.embed_tokens model.layers.0 model.layers.1 <root>"),
    "a unit per stage": (swin(), "<root> layers.0 layers.1 layers.2 head"),
    "torchvision's list of lists": (
        module(
            "SwinTransformer",
            features=sequential(
                sequential(leaf("Conv2d", SMALL), leaf("Permute"), leaf("LayerNorm", SMALL)),
                sequential(block(), block()),
                leaf("PatchMerging", BIG),
            ),
            norm=leaf("LayerNorm", SMALL),
            head=leaf("Linear", BIG),
        ),
        "features.0.0 features.0.2 features.1.0 features.1.1 features.2 <root> head",
    ),
    "a shared embedding": (
        module(
            "T5",
            shared=leaf("Embedding", BIG),
            encoder=module("T5Stack", **TIED),
            decoder=module("T5Stack", **TIED),
            lm_head=leaf("Linear", "shared.weight"),
        ),
        "shared encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.1",
    ),
    "sequential": (sequential(leaf("Linear", SMALL), leaf("ReLU"), leaf("Linear", SMALL)), "0 2"),
    "lists in lists, and in blocks": (
        module("Net", groups=modules(modules(EXPERTS, modules(EXPERTS)), modules(), modules(leaf("Dropout"), EXPERTS))),
        "groups.0.0 groups.0.1.0 groups.2.1",
    ),
    "no lists": (module("Net", tower=module("T", a=leaf("Linear", BIG)), head=leaf("Linear", 3)), "tower <root>"),
    "parameters of a list itself": (
        Mod("Net", {"token": BIG}, {"blocks": Mod("Stack", {"scale": BIG}, {"0": block()}, repeats=True)}),
        "<root> blocks.0",
    ),
    "no parameters": (module("Net", act=leaf("ReLU")), ""),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_models(name: str) -> None:
    model, wanted = USUAL[name]
    assert names(model) == wanted.split()


def test_what_is_no_block_is_the_root_s() -> None:
    assert contents(gpt())["<root>"] == ["wpe.weight", "norm.weight", "norm.bias"]
    inside = ("norm.weight", "norm.bias", "attn.weight", "mlp.weight")
    assert contents(gpt())["blocks.1"] == [f"blocks.1.{name}" for name in inside]
    assert contents(USUAL["parameters of a list itself"][0])["<root>"] == ["token", "blocks.scale"]


@pytest.mark.parametrize(("numel", "own"), [(OWN_UNIT_NUMEL - 1, False), (OWN_UNIT_NUMEL, True), (0, False)])
def test_a_leftover_gets_a_unit_from_the_threshold_on(numel: int, own: bool) -> None:
    halves = module("Net", blocks=modules(block()), head=leaf("Linear", numel // 2, numel - numel // 2))
    assert names(halves) == ["blocks.0", "head" if own else "<root>"]


# One dtype, one answer to requires_grad and one group per unit.


def test_what_must_not_mix_gets_units_of_its_own_with_names_that_say_why() -> None:
    mixed = leaf("Mixed", Own(), Own(group=1), Own(dtype="fp32"))
    frozen = leaf("Frozen", Own(requires_grad=False, group=-1), Own())
    model = module("Net", blocks=modules(mixed, frozen, leaf("Plain", Own(dtype="fp32", group=2))))
    assert contents(model) == {
        "blocks.0[bf16, group 0]": ["blocks.0.weight"],
        "blocks.0[bf16, group 1]": ["blocks.0.bias"],
        "blocks.0[fp32, group 0]": ["blocks.0.scale"],
        "blocks.1[bf16, frozen]": ["blocks.1.weight"],
        "blocks.1[bf16, group 0]": ["blocks.1.bias"],
        "blocks.2": ["blocks.2.weight"],
    }


# Patterns.


WHOLE = "model.embed_tokens model.layers.0 model.layers.1 <root> lm_head"
PATTERNS = {
    "model.layers.*": (llama, WHOLE),
    "LlamaDecoderLayer": (llama, WHOLE),
    "Linear LlamaDecoderLayer model.layers.0.mlp": (llama, WHOLE),  # the outermost
    "model.layers": (llama, "model.embed_tokens model.layers <root> lm_head"),
    "LlamaForCausalLM": (llama, "<root>"),
    "head": (gpt, "wte <root> blocks head"),  # instead of what is found alone
    "Block norm": (gpt, "wte <root> blocks.0 blocks.1 blocks.2 norm head"),
    "ReLU": (lambda: module("Net", act=leaf("ReLU"), up=leaf("Linear", SMALL)), "<root>"),  # nothing in it
}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_patterns_name_units(patterns: str) -> None:
    make, wanted = PATTERNS[patterns]
    assert names(make(), tuple(patterns.split())) == wanted.split()


def test_experts_by_pattern_leave_the_rest_of_their_block_to_others() -> None:
    layer = module(
        "Layer", attn=leaf("Linear", BIG), norm=leaf("Norm", SMALL), experts=modules(*[leaf("Expert", 9)] * 2)
    )
    model = module("MoE", layers=modules(layer))
    assert contents(model, ("Expert",)) == {
        "layers.0.attn": ["layers.0.attn.weight"],
        "<root>": ["layers.0.norm.weight"],
        "layers.0.experts.0": ["layers.0.experts.0.weight"],
        "layers.0.experts.1": ["layers.0.experts.1.weight"],
    }


CLASSES = "['Block', 'Embedding', 'GPT', 'LayerNorm', 'Linear', 'ModuleList']"


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("Blok",),
            f"zero.units: ['Blok'] match no module of the model; did you mean 'Block'? Its classes are {CLASSES}.",
        ),
        (("Z", "", "A*"), f"zero.units: ['', 'A*', 'Z'] match no module of the model. Its classes are {CLASSES}."),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan(gpt(), patterns)
    assert str(caught.value) == message


# Any model whatever.

KINDS = ("Block", "Linear", "Norm", "ModuleDict", "Stack")


@st.composite
def models(draw: st.DrawFn) -> Mod:
    """A tree with parameters of all sorts, some tied to ones registered before."""
    registered: list[str] = []

    def param(full: str) -> str | Own:
        if registered and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(registered))
        registered.append(full)
        numel = draw(st.sampled_from((0, 1, 17, OWN_UNIT_NUMEL - 1, OWN_UNIT_NUMEL, BIG)))
        dtype = draw(st.sampled_from(("bf16", "bf16", "fp32")))
        group, trained = draw(st.sampled_from(((0, True), (0, True), (1, True), (-1, False))))
        return Own(numel, dtype, trained, group)

    def any_module(path: str, depth: int) -> Mod:
        own = {f"w{i}": param(f"{path}.w{i}".lstrip(".")) for i in range(draw(st.integers(0, 2)))}
        width = draw(st.integers(0, 3)) if depth < 3 else 0
        children = {f"c{i}": any_module(f"{path}.c{i}".lstrip("."), depth + 1) for i in range(width)}
        return Mod(draw(st.sampled_from(KINDS)), own, children, draw(st.booleans()))

    return any_module("", 0)


@st.composite
def planned(draw: st.DrawFn) -> tuple[ModuleNode, list[ParamSpec], tuple[UnitPlan, ...], int, list[str]]:
    """A model and its units, found alone or by patterns that match something."""
    root, specs = build(draw(models()))
    nodes = list(root.walk())
    matching = sorted({node.kind for node in nodes} | {node.path for node in nodes if node.path})
    patterns = draw(st.lists(st.sampled_from(matching), max_size=2))
    world = draw(st.sampled_from((1, 2, 3, 8, 127, 4096)))
    return root, specs, plan_units(root, specs, world, patterns), world, patterns


@settings(deadline=None, max_examples=120)
@given(planned())
def test_any_model_is_cut_into_units(made: tuple) -> None:
    """Every parameter is in one unit, in the order of registration, and no unit mixes what must not mix."""
    root, specs, units, world, patterns = made
    assert Counter(spec for unit in units for spec in unit.params) == Counter(specs)
    assert len({unit.name for unit in units}) == len(units)
    position = {spec.name: index for index, spec in enumerate(specs)}
    inside = [[position[spec.name] for spec in unit.params] for unit in units]
    assert inside == sorted(map(sorted, inside)) and all(inside)
    first: dict[str, str] = {}
    for node in root.walk():
        for name in node.params:
            first.setdefault(name, node.path)
    for unit in units:
        assert {(spec.dtype, spec.requires_grad, spec.group) for spec in unit.params} == {
            (unit.dtype, unit.requires_grad, unit.group)
        }
        assert unit.layout == make_layout({spec.name: spec.numel for spec in unit.params}, world)
        assert unit.name.partition("[")[0] == (unit.anchor or "<root>")
        for spec in unit.params:
            assert f"{first[spec.name]}.".startswith(f"{unit.anchor}.".lstrip(".")), f"{spec.name} is in {unit.name}"
    other = plan_units(root, specs, 5, patterns)
    assert [(unit.name, unit.params) for unit in other] == [(unit.name, unit.params) for unit in units]
