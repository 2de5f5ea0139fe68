"""The model every declaration is made of: frozen, strict, open families, errors that name the stage."""

import copy
import inspect
import json
import math
import pickle
import pydoc
from functools import partial
from typing import ClassVar, Literal
from warnings import catch_warnings

import pytest
import torch
from pydantic import BaseModel, Field

import eigengraft
from eigengraft import RecipeError, Stage
from eigengraft.component import Component, components_in, families, validated
from eigengraft.experiments import Experiment, Study
from eigengraft.experiments.tasks import Task
from eigengraft.experiments.training.schedule import LearningRateSchedule
from eigengraft.optimizers.recipe.loading import parse_yaml
from eigengraft.optimizers.recipe.schema import json_schema
from eigengraft.optimizers.write.write import WeightDecay
from eigengraft.preconditioners import RMS, Cadence, Chain, Eigenbasis, Every, Gram, Momentum, RootSolver, Shampoo
from eigengraft.reference import example_of, first_sentence

from ..refusals import refused


def members() -> list[type[Component]]:
    """All members that the library defines, whatever tests have added."""
    found = [member for family in families().values() for member in family.members.values()]
    return [member for member in found if member.__module__.startswith("eigengraft.")]


REQUIRED = {
    "paths": ({"name": "a", "stages": "sign"},),
    "limits": ((10, 2.5),),
    "step": 10,
    "seeds": (3,),
    "means": ({"beta": 0.9, "weight": 1.0},),
    "weight": 0.5,
    "space": {"lr": {"low": 0.001, "high": 1.0}},
}
"""Values of required fields; all others are chains."""


def smallest(member: type[Component]) -> Component:
    """An instance with only the required fields."""
    required = {
        name: field.examples or [("sign",)] for name, field in member.model_fields.items() if field.is_required()
    }
    given = {name: REQUIRED.get(name, examples[0]) for name, examples in required.items()}
    return member.model_validate(copy.deepcopy(given))


def test_a_class_without_a_required_method_is_named() -> None:
    class Unfinished(Stage):
        kind: Literal["unfinished_for_test"] = "unfinished_for_test"

    try:
        with refused(RecipeError, "update", "Unfinished", "apply()"):
            eigengraft.load_recipe({"update": "unfinished_for_test"})
    finally:
        Stage.members.pop("unfinished_for_test")


def test_components_are_frozen() -> None:
    stage = RMS()
    with refused(RecipeError, "RMS.beta", "replace(beta=...)"):
        stage.beta = 0.5  # type: ignore[misc]
    with refused(RecipeError, "RMS.last", "slots", "state['last']"):
        stage.last = 0.5  # type: ignore[attr-defined]
    with refused(RecipeError, "RMS.kind") as caught:  # replace() keeps the class, so it cannot change the kind
        stage.kind = "sign"  # type: ignore[assignment, misc]
    assert "replace" not in str(caught.value)
    assert stage == RMS()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"betta": 0.9}, ("betta", "beta", 0.9)),
        ({"beta": True}, ("beta", "True")),
        ({"beta": "0.9"}, ("beta", "0.9")),
        ({"beta": None}, ("beta", "None")),
        ({"beta": 1.5}, ("beta", 1, 1.5)),
        ({"eps": float("inf")}, ("eps", "inf")),
        ({"eps": float("nan")}, ("eps", "nan")),
        ({"eps": 0}, ("eps", 0)),
        ({"bias_correction": 1}, ("bias_correction", 1)),
        ({"bias_correction": "no"}, ("bias_correction", "no")),
        ({"name": "a.b"}, ("name", "a.b")),
        ({"name": 3}, ("name", 3)),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, object], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        validated(RMS, fields)
    with refused(RecipeError, "RMS", *says):
        RMS(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, "10", 2.5, 10.0])
def test_whole_numbers_are_whole_numbers(value: object) -> None:
    with refused(RecipeError, "steps"):
        validated(Every, {"steps": value})


def test_a_whole_number_is_a_number() -> None:
    assert RMS(beta=1).beta == 1.0


@pytest.mark.parametrize(
    ("solver", "has", "lacks"),
    [
        ("coupled_newtn", "'coupled_newton'", "eigh"),
        ("power_qr", "(the kinds are ", "--import"),
        ("zzz", "eigh", "--import"),
    ],
)
def test_all_kinds_are_listed_only_if_none_is_near(solver: str, has: str, lacks: str) -> None:
    with refused(RecipeError, f"'{solver}'", has) as caught:
        Shampoo(solver=solver)
    assert lacks not in str(caught.value).replace(solver, "")


def test_a_family_takes_an_instance_a_mapping_or_a_bare_kind() -> None:
    expected = Shampoo(every=Every(steps=10))
    for refresh in (Every(steps=10), {"kind": "every", "steps": 10}, {"kind": "every"}, "every"):
        assert validated(Shampoo, {"refresh": refresh}) == expected
    assert validated(Stage, {"kind": "rms"}) == validated(Stage, "rms") == RMS()  # type: ignore[type-abstract]


def test_a_chain_takes_a_list_a_tuple_or_one_stage() -> None:
    expected = Eigenbasis(inner=(RMS(),))
    for inner in ("rms", ["rms"], ("rms",), {"kind": "rms"}, [{"kind": "rms"}], RMS(), [RMS()]):
        assert validated(Eigenbasis, {"inner": inner}) == expected


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"inner": "rmss"},
            ("inner.rmss", "rmss", "rms"),
        ),
        ({"inner": "zzzzzz"}, ("inner.zzzzzz", "zzzzzz")),
        ({"inner": ["momentum", {"kind": "rms", "beta": 2}]}, ("inner.rms.beta", 2)),
        ({"inner": {"kind": "rms", "name": "second", "beta": 2}}, ("inner.second.beta", 2)),
        ({"inner": {"kind": "chain", "stages": ["sign", {"kind": "rms", "eps": 0}]}}, ("inner.chain.stages.rms.eps",)),
        ({"inner": "chain"}, ("inner.chain.stages",)),
        (
            {"inner": {"beta": 0.5}},
            ("kind", "{'beta': 0.5}"),
        ),
        ({"inner": "rms", "refresh": {"kind": "evry"}}, ("refresh", "cadence", "evry", "every")),
        ({"inner": "rms", "refresh": {"kind": "every", "steps": 0}}, ("refresh.steps", 0)),
        ({"inner": "rms", "refresh": 10}, ("refresh", "cadence", 10)),
        ({"inner": "rms", "refresh": RMS()}, ("refresh", "cadence", "RMS")),
        ({"inner": ["rms", "rms"]}, ("inner", "rms", "name")),
        ({"inner": "shampoo"}, ("inner.shampoo",)),
        ({}, ("inner",)),
        ({"inner": {"kind": ["momentum", "rms"]}}, ("inner.kind", "['momentum', 'rms']")),
    ],
)
def test_errors_name_the_stage_and_the_remedy(data: dict[str, object], says: tuple[object, ...]) -> None:
    with refused(RecipeError, *says):
        validated(Eigenbasis, data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"inner": "rms", "refresh": 10}, "got 10; give"),
        ({"inner": {"kind": "rms", "betta": 0.9}}, "got 0.9; did you mean 'beta'?"),
        ({"inner": {"kind": "zzzzzz"}}, "'zzzzzz' (the kinds are"),
    ],
)
def test_the_value_stands_before_the_remedy(data: dict[str, object], says: str) -> None:
    with refused(RecipeError) as caught:
        validated(Eigenbasis, data)
    assert says in str(caught.value)
    assert str(caught.value).count("got ") == says.count("got ")


def test_a_fault_without_a_path_names_the_family() -> None:
    with refused(RecipeError, "stage: the class RMS is given"):
        validated(Stage, RMS)


def test_every_fault_gets_a_line_and_a_prefix() -> None:
    with pytest.raises(RecipeError) as caught:
        validated(Eigenbasis, {"inner": {"kind": "rms", "beta": 2, "epss": 1}, "timing": "later"}, "update.eigenbasis")
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "update.eigenbasis.inner.rms.beta",
        "update.eigenbasis.inner.rms.epss",
        "update.eigenbasis.timing",
    ]


def test_replace_validates() -> None:
    stage = Eigenbasis(inner=(RMS(),))
    assert stage.replace(timing="lagged") == Eigenbasis(inner=(RMS(),), timing="lagged")
    assert stage.replace(inner=["momentum", "rms"]).chain == (Momentum(), RMS())
    assert stage.timing == "current"
    for wrong, says in (
        ({"timing": "later"}, ("timing", "later")),
        ({"inner": "rmss"}, ("inner", "rmss", "rms")),
        ({"timming": "lagged"}, ("timming", "timing")),
    ):
        with refused(ValueError, *says):
            stage.replace(**wrong)


def test_replace_takes_the_name_that_the_recipe_uses() -> None:
    assert Shampoo().replace(refresh=Every(steps=3)) == Shampoo(every=Every(steps=3))


@pytest.mark.parametrize("member", members(), ids=lambda m: f"{m.family_name}.{m.__name__}")
def test_members_are_values(member: type[Component]) -> None:
    one, two = smallest(member), smallest(member)
    family = families()[str(member.family_name)]
    assert one == two and hash(one) == hash(two) and one.replace() == one
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert validated(family, one.model_dump()) == one
    assert validated(family, json.loads(one.model_dump_json())) == one


def test_a_dump_holds_the_fields_of_the_member_not_of_the_family() -> None:
    dump = Eigenbasis(inner=(RMS(beta=0.5),), statistic=Gram(beta=0.25)).model_dump()
    assert dump["inner"][0]["beta"] == 0.5 and dump["statistic"]["beta"] == 0.25 and "refresh" in dump


def test_every_field_is_described() -> None:
    bare = [
        f"{member.__name__}.{name}"
        for member in (*members(), eigengraft.Recipe, eigengraft.Route)
        for name, field in member.model_fields.items()
        if not field.description and name != "kind"
    ]
    assert bare == []


def test_an_outsider_registers_by_being_defined(registry: None) -> None:
    class Halve(Stage):
        kind: Literal["test_halve"] = "test_halve"
        factor: float | None = Field(0.5, gt=0, description="multiplies the direction; None: one")

        def apply(
            self,
            state: eigengraft.State,
            gradient: torch.Tensor,
            direction: torch.Tensor,
            context: eigengraft.StepContext,
        ) -> torch.Tensor:
            return direction * (self.factor or 1.0)

    assert validated(Chain, {"stages": "test_halve"}).stages == (Halve(),)
    with refused(RecipeError, "stages.test_halves", "test_halve"):
        validated(Chain, {"stages": "test_halves"})
    with refused(RecipeError, "stages.test_halve.factor", 0, -1):
        validated(Chain, {"stages": {"kind": "test_halve", "factor": -1}})
    definitions = json_schema(eigengraft.Recipe)["$defs"]
    assert definitions["stage.test_halve"]["properties"]["factor"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert {"$ref": "#/$defs/stage.test_halve"} in definitions["stage"]["anyOf"]
    recipe = eigengraft.load_recipe([Halve(factor=None)])
    assert eigengraft.load_recipe(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("family", "name", "default"),
    [
        (Stage, "inner", {"inner": 3}),
        (Stage, "refresh", {}),
        (LearningRateSchedule, "factor", {}),
        (Task, "loss", {}),
        (Task, "loss", {"loss": 0.5}),
        (Cadence, "state_meaning", {}),
    ],
)
def test_a_field_does_not_hide_a_method_of_its_family(
    family: type[Component], name: str, default: dict[str, float], registry: None
) -> None:
    fields = {"kind": "test_own", "__annotations__": {"kind": Literal["test_own"], name: float}, **default}
    with catch_warnings(action="error"), refused(TypeError, "Own", name, str(family.family_name)):
        type("Own", (family,), fields)
    assert "test_own" not in family.members


def test_a_family_of_an_outsider(registry: None) -> None:
    class Taste(Component, family="test_taste"):
        """Abstract."""

    class Sweet(Taste):
        kind: Literal["sweet"] = "sweet"

    class Cake(Component):
        taste: Taste = Sweet()

    assert validated(Cake, {"taste": "sweet"}) == Cake()
    with refused(RecipeError, "taste", "test_taste", "sweat", "sweet"):
        validated(Cake, {"taste": "sweat"})


def test_members_are_final(registry: None) -> None:
    with refused(TypeError, "RMS"):

        class MyRMS(RMS):
            kind: Literal["test_rms"] = "test_rms"  # type: ignore[assignment]

    assert "test_rms" not in Stage.members


def test_a_method_with_other_arguments_is_refused_when_its_class_is_defined(registry: None) -> None:
    with refused(TypeError, "slots(self, block)", "slots(self)"):

        class Fewer(Stage):
            kind: Literal["test_fewer"] = "test_fewer"

            def slots(self):  # type: ignore[no-untyped-def, override]
                return {}

    with refused(TypeError, "slots(self, block)", "slots(self, block, size)"):

        class More(Stage):
            kind: Literal["test_more"] = "test_more"

            def slots(self, block, size):  # type: ignore[no-untyped-def, override]
                return {}

    class Further(Stage):
        kind: Literal["test_further"] = "test_further"

        def slots(self, block, size=1):  # type: ignore[no-untyped-def]
            return {}

        def apply(self, *values):  # type: ignore[no-untyped-def]
            return values[2]

    assert Further().slots((3,)) == {} and {"test_fewer", "test_more"}.isdisjoint(Stage.members)


def test_a_kind_has_one_owner(registry: None) -> None:
    with refused(TypeError, "every", "cadence"):

        class Other(Cadence):
            kind: Literal["every"] = "every"

    assert Cadence.members["every"] is Every


def test_the_same_kind_in_two_families_is_fine() -> None:
    assert families()["root_solver"].members["eigh"] is not families()["basis_solver"].members["eigh"]


def test_a_kind_needs_its_own_name_as_default(registry: None) -> None:
    with refused(TypeError, "kind"):

        class Nameless(WeightDecay):
            kind: Literal["test_nameless"]


def test_a_kind_has_one_word_in_annotation_and_default(registry: None) -> None:
    with refused(TypeError, "Misspelled", "test_winez", "test_wine"):

        class Misspelled(WeightDecay):
            kind: Literal["test_winez"] = "test_wine"  # type: ignore[assignment]

    assert not {"test_winez", "test_wine"} & WeightDecay.members.keys()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0.9, ("own: float = 0.9", "own: ClassVar[float] = 0.9")),
        (None, ("own: float | None = None",)),
        (Field(0.9), ("own: float = Field(...)",)),
        (Field(ge=0), ("own: float = Field(...)",)),
        (Every(), ("own: Every = Every()", "own: ClassVar[Every]")),
        (Every, ("own: type[Every] = Every",)),
    ],
)
@pytest.mark.parametrize("name", ["", "kind"])
def test_a_field_without_a_type_is_told_the_class_and_the_type(
    name: str, value: object, says: tuple[str, ...], registry: None
) -> None:
    fields = {"__module__": __name__, "kind": "test_own", "__annotations__": {"kind": Literal["test_own"]}}
    if name:
        del fields["__annotations__"]
        says = ("kind: Literal['test_own'] = 'test_own'",)
    else:
        fields["own"] = value
    with catch_warnings(action="error"), refused(TypeError, f"Own.{name or 'own'}", *says):
        type("Own", (Stage,), fields)
    assert "test_own" not in Stage.members


def test_values_that_are_no_fields_need_no_type_and_annotations_name_local_classes(registry: None) -> None:
    class Local(Component):
        size: int = 3

    class Own(Stage):
        kind: Literal["test_own"] = "test_own"
        local: "Local" = Local()
        table: "ClassVar[tuple[int, ...]]" = (1, 2)
        number = ("test_own", "size")
        _hidden = 2

        class Inside:
            """No field."""

        half = partial(math.pow, 0.5)

        def apply(self, *values):  # type: ignore[no-untyped-def]
            return values[2]

    assert set(Own.model_fields) == {"kind", "name", "local"} and Own().local == Local() and Own.table == (1, 2)


def test_the_annotation_of_a_kind_is_a_literal(registry: None) -> None:
    with refused(TypeError, "Wide", "str", "Literal['test_wide']"):

        class Wide(WeightDecay):
            kind: str = "test_wide"

    assert "test_wide" not in WeightDecay.members


def test_a_property_stays_a_property_and_a_method_a_method(registry: None) -> None:
    with refused(TypeError, "Method", "interval", "@property", "Cadence"):

        class Method(Cadence):
            kind: Literal["test_method"] = "test_method"

            def interval(self) -> float:  # type: ignore[override]
                return 2.0

    with refused(TypeError, "Property", "apply", "no decorator", "Stage", "@property"):

        class Property(Stage):
            kind: Literal["test_property"] = "test_property"

            @property
            def apply(self) -> float:  # type: ignore[override]
                return 2.0

    with refused(TypeError, "Plain", "equal_to", "@classmethod", "MatrixSolver"):

        class Plain(RootSolver):
            kind: Literal["test_plain"] = "test_plain"

            def equal_to(self, other, dtype):  # type: ignore[no-untyped-def, override]
                return None

    class Static(Task):
        kind: Literal["test_static"] = "test_static"

        @staticmethod
        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return outputs

    assert "test_static" in Task.members


def use_a_member_without_a_kind() -> None:
    class Forgotten(Stage):
        def apply(
            self,
            state: eigengraft.State,
            gradient: torch.Tensor,
            direction: torch.Tensor,
            context: eigengraft.StepContext,
        ) -> torch.Tensor:
            return direction

    eigengraft.Optimizer([torch.nn.Parameter(torch.ones(2, 2))], [Forgotten()])


def test_a_member_without_a_kind_is_told_so(registry: None) -> None:
    with refused((TypeError, ValueError), "kind"):
        use_a_member_without_a_kind()


def test_a_family_itself_cannot_be_made() -> None:
    for family in families().values():
        with pytest.raises((TypeError, RecipeError)):
            family()


def test_the_first_sentence_of_a_docstring_does_not_end_at_et_al() -> None:
    text = "8 bits for a number\n(Dettmers et al. 2022, section 2). It is small.\n\nMore."
    assert first_sentence(text) == "8 bits for a number (Dettmers et al. 2022, section 2)"


@pytest.mark.parametrize("member", members(), ids=lambda m: f"{m.family_name}.{m.__name__}")
def test_the_example_of_a_docstring_runs(member: type[Component]) -> None:
    """The call in Python and the line of YAML are the same component."""
    text = example_of(member)
    names: dict[str, type[Component]] = {}
    imported, call, in_yaml = text.splitlines()
    exec(imported, names)
    found = eval(call, names)
    assert isinstance(found, member)
    assert validated(families()[str(member.family_name)], parse_yaml(in_yaml)) == found


@pytest.mark.slow
def test_the_examples_of_components_without_a_family_run() -> None:
    """`help` shows none if a required field has none."""
    import eigengraft.experiments.benches  # noqa: F401  with the components that it uses

    found, every = [], list(Component.__subclasses__())
    for cls in every:
        every += cls.__subclasses__()
        _, shown, text = (cls.__doc__ or "").partition("Example:\n")
        if shown and cls.family_name is None and cls.__module__.startswith("eigengraft."):
            exec(inspect.cleandoc(text), {})
            found.append(cls.__name__)
    assert {"Route", "Path", Experiment.__name__, Study.__name__} <= set(found)


@pytest.mark.parametrize("cls", [Shampoo, Chain, Every, eigengraft.Recipe, Stage])
def test_help_has_formula_fields_and_example_and_nothing_of_pydantic(cls: type[Component]) -> None:
    page = pydoc.plain(pydoc.render_doc(cls))
    assert all(line in page for line in inspect.cleandoc(vars(cls)["__doc__"]).splitlines())
    described = " ".join(page.replace("|", " ").split())
    for kind in cls.members if cls.is_family() else ():
        assert kind in described
    for field in cls.model_fields.values() if not cls.is_family() else ():
        assert " ".join(str(field.description).split()).replace("|", "") in described or field.alias is None
    inherited = set(dir(BaseModel)) - {"__init__", "__doc__", "__hash__"}
    shown = {line.split("(")[0].removeprefix(" |  ").strip() for line in page.splitlines() if line.startswith(" |  ")}
    assert not shown & inherited and not inherited & set(dir(cls)) and "pydantic_" not in page
    assert ("Example:" in page) is not inspect.isabstract(cls)


def test_a_signature_has_types_and_defaults_that_one_could_write() -> None:
    text = str(inspect.signature(Shampoo))
    assert "refresh: Cadence = Every()" in text and "Annotated" not in text and "kind" not in text


def test_the_text_of_a_component_has_what_differs_from_the_defaults() -> None:
    assert repr(Shampoo(every=Every(steps=3), solver="eigh")) == "Shampoo(refresh=Every(steps=3))"
    assert eval(repr(Shampoo(every=Every(steps=3)))) == Shampoo(every=Every(steps=3))


def test_the_components_in_a_component_have_the_paths_of_overrides() -> None:
    recipe = eigengraft.load_recipe("soap_int8")
    found = dict(components_in(recipe))
    assert found.pop("") is recipe
    assert isinstance(found["update.eigenbasis.refresh"], Every)  # the field has another name in Python
    assert isinstance(found["update.eigenbasis.inner.rms"], RMS)
    assert {path.count(".") for path in found if path.startswith("storage.")} >= {1}
    for path, part in found.items():
        if hasattr(part, "kind"):
            changed = eigengraft.load_recipe(recipe, overrides=[f"{path}={json.dumps(part.declaration())}"])
            assert dict(components_in(changed))[path] == part, path


def test_components_are_entered_by_the_named_fields_alone() -> None:
    stage = Shampoo(every=Every(steps=3), solver="eigh")
    found = components_in(stage, "update.shampoo", walked=lambda own: {"every"})
    assert list(found) == [("update.shampoo", stage), ("update.shampoo.refresh", stage.every)]


def test_a_class_in_place_of_an_instance_is_named() -> None:
    for wrong in (lambda: eigengraft.Recipe(update=[Shampoo]), lambda: Shampoo(statistic=Gram)):  # type: ignore[list-item, arg-type]
        with refused(RecipeError, "class"):
            wrong()
    with refused(RecipeError, "Recipe()"):
        eigengraft.load_recipe(eigengraft.Recipe)  # type: ignore[arg-type]


def test_descriptions_in_a_schema_are_short() -> None:
    assert Shampoo.model_json_schema()["description"] == inspect.cleandoc(vars(Shampoo)["__doc__"])
