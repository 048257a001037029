"""The contract of a service's class: values through its messages, its .proto, its errors, and two versions of it."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import decimal
import enum
import inspect
import typing
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, NamedTuple, NewType, Optional, Union, cast

import hypothesis
import numpy as np
import numpy.typing as npt
import pydantic
import pydantic.dataclasses
import pytest
import typing_extensions
from google.protobuf import message_factory
from hypothesis import given
from hypothesis import strategies as st
from pierhead import BadRequest, Ended, PierheadError, Service, batch
from pierhead.classes.compare import compare
from pierhead.classes.contract import ClassMethod, Contract
from pierhead.classes.proto_text import proto_text
from pierhead.classes.shapes import CannotTravel
from pierhead.echo.v1.echo_pb2 import EchoReply, EchoRequest
from pierhead.request import CURRENT, InsideRequest
from pierhead.serve_block import ServeBlock, XServe, keys_of


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclasses.dataclass
class Point:
    x: float
    label: str = "here"
    tags: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    odd: int | None = 5


@dataclasses.dataclass
class Node:
    name: str
    children: list[Node] = dataclasses.field(default_factory=list)
    best: Node | None = None


class Span(NamedTuple):
    start: datetime.date
    days: int = 1


class Model(pydantic.BaseModel):
    size: int = pydantic.Field(gt=0)
    colour: Colour = Colour.RED
    by_name: dict[str, Point] = {}


class TypeAliasType:
    """As Python 3.12 makes one of `type Json = list[Json]`."""

    @property
    def __value__(self) -> Any:
        return list[self]  # type: ignore[valid-type]


MaybeInt = typing_extensions.TypeAliasType("MaybeInt", int | None)
Json: Any = TypeAliasType()


def fixed_offset(moment: datetime.datetime) -> datetime.datetime:
    """A time zone's name does not travel."""
    offset = moment.utcoffset()
    return moment if offset is None else moment.replace(tzinfo=datetime.timezone(offset))


def contract_of(**methods: Any) -> Contract:
    """The contract of a class with these methods: functions, or (hint of `x`, hint of the reply)."""
    made = {name: each if callable(each) else taking(each[1], x=each[0]) for name, each in methods.items()}
    cls: Any = type("Tried", (Service,), {**made, "__module__": "tried"})
    contract: Contract = cls.__contract__
    return contract


def taking(returned: Any = int, **parameters: Any) -> Any:
    """A method with these parameters: each a hint, or (hint, default)."""

    async def method(self: Any) -> Any: ...

    hints = {name: each[0] if isinstance(each, tuple) else each for name, each in parameters.items()}
    defaults = {name: each[1] for name, each in parameters.items() if isinstance(each, tuple)}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made: Any = method
    made.__annotations__ = {**hints, "return": returned}
    made.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, kind, default=defaults.get(name, inspect.Parameter.empty))
            for name in ("self", *hints)
        ]
    )
    return made


def passed(method: ClassMethod, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments as the replica gets them."""
    return received(method, method.request(*args, **kwargs).SerializeToString())


def received(method: ClassMethod, sent: bytes) -> dict[str, Any]:
    """The arguments of a request, with the defaults of those that were left out."""
    found: dict[str, Any] = method.begin(dict, method.request_class.FromString(sent))
    return found


def returned(method: ClassMethod, value: Any) -> Any:
    """The result as the caller gets it."""
    return method.result(method.reply_class.FromString(method.reply(value).SerializeToString()))


SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(st.characters(exclude_categories=["Cs"])),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(),
    Colour: st.sampled_from(Colour),
    Point: st.builds(
        Point, st.floats(allow_nan=False), st.just("there"), st.lists(st.just("b")), st.none() | st.just(1)
    ),
    Node: st.recursive(
        st.builds(Node, st.text("ab")), lambda inner: st.builds(Node, st.just("c"), st.lists(inner), st.none() | inner)
    ),
    Model: st.builds(
        Model,
        size=st.integers(1, 9),
        colour=st.sampled_from(Colour),
        by_name=st.dictionaries(st.text("ab"), st.builds(Point, st.just(1.5))),
    ),
}

CONVERTED: dict[Any, st.SearchStrategy[Any]] = {
    datetime.datetime: st.datetimes(timezones=st.none() | st.timezones()).map(fixed_offset),
    datetime.date: st.dates(),
    datetime.time: st.times(),
    datetime.timedelta: st.timedeltas(datetime.timedelta(days=-36500), datetime.timedelta(days=36500)),
    decimal.Decimal: st.decimals(allow_nan=False),
    uuid.UUID: st.uuids(),
    Literal["small", "large"]: st.sampled_from(["small", "large"]),
    Literal[1, 2]: st.sampled_from([1, 2]),
    NewType("UserId", int): st.integers(0, 9),
    Span: st.builds(Span, st.dates(), st.integers(0, 9)),
}

MOMENT = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)

Typed = tuple[Any, "st.SearchStrategy[Any]"]
"""A hint, and the values that it allows."""


def of(generic: Any, *hints: Any) -> Any:
    """`list[...]`, of hints that are variables."""
    return generic[hints if len(hints) > 1 else hints[0]]


def around(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    keys = st.sampled_from([str, int, bool])
    return (
        inner.map(lambda typed: (of(list, typed[0]), st.lists(typed[1], max_size=3)))
        | inner.map(lambda typed: (of(tuple, typed[0], ...), st.lists(typed[1], max_size=3).map(tuple)))
        | st.tuples(inner, inner).map(lambda two: (of(tuple, two[0][0], two[1][0]), st.tuples(two[0][1], two[1][1])))
        | st.tuples(inner, inner).map(lambda two: (of(Union, two[0][0], two[1][0]), two[0][1] | two[1][1]))
        | st.sampled_from([set, frozenset]).map(lambda held: (of(held, int), st.sets(st.integers(0, 9)).map(held)))
        | inner.map(lambda typed: (of(Optional, typed[0]), st.none() | typed[1]))
        | st.tuples(keys, inner).map(
            lambda both: (of(dict, both[0], both[1][0]), st.dictionaries(SCALARS[both[0]], both[1][1], max_size=3))
        )
    )


TYPED = st.recursive(st.sampled_from([*SCALARS.items(), *CONVERTED.items()]), around, max_leaves=4)


def in_order(value: Any) -> Any:
    """The value, with its dicts as lists of their items: `==` of dicts does not see their order."""
    if isinstance(value, dict):
        return [(key, in_order(each)) for key, each in value.items()]
    if isinstance(value, pydantic.BaseModel):
        return in_order(vars(value))
    return [in_order(each) for each in value] if isinstance(value, list | tuple) else value


class TestValues:
    @pytest.mark.parametrize(
        ("hint", "value"),
        [
            (dict[str, float], {"cat": 0.7, "dog": 0.2, "zebra": 0.1, "": 0.0}),
            (dict[int, dict[bool, str]], {3: {True: "", False: "b"}, -1: {}, 0: {False: "c", True: "d"}}),
            (dict[str, Colour], {"z": Colour.RED, "a": Colour.BLUE}),
            (dict[str, list[Point]], {"z": [Point(1.0)], "a": []}),
            (list[dict[str, bytes | None]], [{"z": None, "a": b""}]),
        ],
    )
    def test_a_dict_keeps_its_order(self, hint: Any, value: Any) -> None:
        method = contract_of(go=(hint, hint)).methods["go"]
        for found in (passed(method, value)["x"], returned(method, value)):
            assert in_order(found) == in_order(value)

    @given(TYPED, st.data())
    def test_every_value_of_every_type_travels_both_ways(self, typed: Typed, data: st.DataObject) -> None:
        hint, values = typed
        value, default = data.draw(values), data.draw(values)
        contract = contract_of(plain=(hint, hint), given=taking(None, x=(hint, default)))
        assert passed(contract.methods["plain"], value) == {"x": value}
        assert returned(contract.methods["plain"], value) == value
        assert in_order(passed(contract.methods["plain"], value)["x"]) == in_order(value)
        assert in_order(returned(contract.methods["plain"], value)) == in_order(value)
        # What is given is passed on, also where it is not the default and looks like none.
        assert passed(contract.methods["given"], x=value) == {"x": value}
        assert passed(contract.methods["given"]) == {"x": default}, "Python's default holds"

    @pytest.mark.parametrize(
        ("hint", "values"),
        [
            (Union[int, str, Point, None], [1, "1", Point(1.0), None]),  # noqa: UP007
            (int | float | bool, [1, 1.0, True]),
            (list[int] | list[str] | tuple[int, str], [[1], ["a"], (1, "a")]),
            (datetime.datetime | datetime.date | str, [MOMENT, datetime.date(2026, 1, 2), "x"]),
            (list[Colour | Model], [[Colour.RED, Model(size=1)], []]),
            (Point | npt.NDArray[np.float32], [Point(1.0)]),
            (Literal["a", "b"] | int, ["a", 3]),
            (Literal["a", None], ["a", None]),
            (MaybeInt | str, [1, "a", None]),
            (Sequence[str] | tuple[int, int] | str, [["a"], (1, 2), "a"]),
        ],
    )
    def test_a_union_travels_as_the_type_that_it_is(self, hint: Any, values: list[Any]) -> None:
        method = contract_of(go=(hint, hint)).methods["go"]
        for value in values:
            for found in (passed(method, value)["x"], returned(method, value)):
                assert found == value
                assert type(found) is type(value)
        with pytest.raises(TypeError, match=r"tried.Tried/go: x(\[\])?: expected .*, found <object"):
            method.request(object())

    def test_a_sequence_among_other_types_may_be_a_tuple(self) -> None:
        assert passed(contract_of(go=(Sequence[str] | str, int)).methods["go"], ("a",)) == {"x": ["a"]}

    def test_items_that_no_set_can_hold(self) -> None:
        method = contract_of(go=(set[Point], int)).methods["go"]
        with pytest.raises(BadRequest, match="go: x: unhashable type: 'Point'"):
            passed(method, [Point(1.0)])

    def test_a_value_that_is_not_one_of_the_literals(self) -> None:
        method = contract_of(go=(Literal["small", "large"], datetime.date)).methods["go"]
        with pytest.raises(TypeError, match=r"go: x: expected Literal\['small', 'large'\], found 'huge'"):
            method.request("huge")
        with pytest.raises(BadRequest, match=r"go: x: expected Literal\['small', 'large'\], found 'huge'"):
            method.begin(dict, method.request_class(x="huge"))
        with pytest.raises(PierheadError, match="value: expected a date, found 'today'"):
            method.result(method.reply_class(value="today"))
        with pytest.raises(TypeError, match=r"value: expected date, found datetime.datetime\("):
            method.reply(MOMENT)

    @pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?", "u1", "f2"])
    def test_arrays(self, dtype: str) -> None:
        element = of(npt.NDArray, np.dtype(dtype).type)
        method, other = contract_of(add=(np.ndarray, element), other=(npt.NDArray[Any], element)).methods.values()
        array = np.arange(6).reshape(2, 3).astype(dtype)[:, ::2]
        found = passed(method, array)["x"]
        assert np.array_equal(passed(other, array)["x"], array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        assert np.array_equal(returned(method, array), array)
        with pytest.raises(TypeError, match="found complex128"):
            method.request(np.zeros(3, complex))
        with pytest.raises(TypeError, match=r"x: expected an array, found \[1, 2\]"):
            method.request([1, 2])
        with pytest.raises(TypeError, match=r"value: expected an array of \w+, found"):
            method.reply(array.astype("u1" if dtype == "f4" else "f4"))

    def test_torch_tensors(self) -> None:
        torch = pytest.importorskip("torch")
        method = contract_of(add=(torch.Tensor, torch.Tensor)).methods["add"]
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
            tensor = torch.arange(6).reshape(2, 3).to(dtype).T
            assert torch.equal(passed(method, tensor)["x"], tensor)
            assert returned(method, tensor).dtype is dtype

    def test_a_protobuf_message_is_the_rpc_s_own_or_travels_in_another(self) -> None:
        mixed = taking(list[EchoReply], request=EchoRequest, n=(int, 1))
        contract = contract_of(whole=(EchoRequest, EchoReply), mixed=mixed)
        whole = contract.methods["whole"]
        message = EchoRequest(message="hi")
        assert whole.request(message) is message
        assert (whole.request_class, whole.reply_class) == (EchoRequest, EchoReply)
        assert passed(contract.methods["mixed"], message, 2) == {"request": message, "n": 2}
        assert returned(contract.methods["mixed"], [EchoReply(response="x")]) == [EchoReply(response="x")]
        with pytest.raises(TypeError, match="expected a EchoRequest, found 'hi'"):
            whole.request("hi")

    def test_a_parameter_may_have_any_name(self) -> None:
        names = ("args", "function", "kwargs", "made", "message", "method", "read", "request", "value", "values")
        method = contract_of(go=taking(int, **dict.fromkeys(names, int))).methods["go"]
        values = {name: number for number, name in enumerate(names)}
        assert passed(method, **values) == values
        with pytest.raises(TypeError, match="method: expected int, found 'x'"):
            method.request(**{**values, "method": "x"})


class EitherOr(pydantic.BaseModel):
    """One of two; its validator sees what was given."""

    path: str | None = None
    url: str | None = None
    tags: list[str] = []
    key: uuid.UUID = pydantic.Field(default_factory=uuid.uuid4)

    @pydantic.model_validator(mode="before")
    @classmethod
    def one_of_two(cls, values: dict[str, Any]) -> dict[str, Any]:
        if ("path" in values) is ("url" in values):
            raise ValueError("give path or url")
        return values


def cents(price: float) -> float:
    """No result of it is valid again."""
    if price > 10:
        raise ValueError("too much")
    return price * 100


class Priced(pydantic.BaseModel):
    price: typing.Annotated[float, pydantic.AfterValidator(cents)]


@pydantic.dataclasses.dataclass
class PricedToo:
    price: typing.Annotated[float, pydantic.AfterValidator(cents)]
    note: str = pydantic.Field(default="")
    shown: str = pydantic.Field(default="", init=False)


class Names(pydantic.RootModel[dict[str, list[int]]]):
    pass


class Animal(pydantic.BaseModel):
    name: str = "rex"


class Dog(Animal):
    bark: str = "wuff"


@dataclasses.dataclass
class Place(Point):
    city: str = ""


class Booking(Span):
    pass


def sent_inside(method: ClassMethod, /, *args: Any) -> Any:
    """The argument `x` as a replica gets it over a lane, and as the caller gets it back."""

    def run() -> Any:
        CURRENT.set(InsideRequest("r", float("inf")))
        return passed(method, *args)["x"]

    return returned(method, contextvars.copy_context().run(run))


@st.composite
def models(draw: st.DrawFn) -> pydantic.BaseModel:
    """A model of generated fields, some of them given, one of the others changed in its place."""
    drawn = draw(st.lists(TYPED, min_size=1, max_size=4))
    names = [f"f{number}" for number in range(len(drawn))]
    fields: dict[str, Any] = {}
    for (hint, values), name, alias in zip(drawn, names, reversed(names), strict=True):
        default = draw(st.just(...) | values)
        factory = {"default_factory": lambda default=default: default} if draw(st.booleans()) else {"default": default}
        fields[name] = (hint, pydantic.Field(alias=alias, **({} if default is ... else factory)))
    kind: Any = pydantic.create_model("Made", **fields)
    given = {
        name: draw(values)
        for (_, values), name in zip(drawn, names, strict=True)
        if kind.model_fields[name].is_required() or draw(st.booleans())
    }
    try:
        made = kind.model_validate(given, by_name=True, by_alias=False)
    except pydantic.ValidationError:  # infinite decimals
        hypothesis.reject()
    left_out = sorted(set(names) - set(given))
    if left_out:
        name = draw(st.sampled_from(left_out))
        vars(made)[name] = draw(drawn[names.index(name)][1])
    return cast("pydantic.BaseModel", made)


class TestModels:
    @given(models())
    def test_a_model_arrives_as_it_was(self, model: pydantic.BaseModel) -> None:
        method = contract_of(go=(type(model), type(model))).methods["go"]
        found = sent_inside(method, model)
        assert found == model
        assert found.model_fields_set == model.model_fields_set
        assert in_order(found) == in_order(model)
        assert type(found) is type(model)

    @pytest.mark.parametrize("value", [EitherOr(path="a"), EitherOr(url="b", tags=["c"]), EitherOr(path="a", tags=[])])
    def test_a_validator_sees_what_was_given_also_from_outside(self, value: EitherOr) -> None:
        method = contract_of(go=(EitherOr, EitherOr)).methods["go"]
        for found in (sent_inside(method, value), passed(method, value)["x"]):
            assert found == value
            assert found.model_fields_set == value.model_fields_set

    def test_another_client_gives_what_its_message_has(self) -> None:
        contract = contract_of(go=(EitherOr, EitherOr))
        method = contract.methods["go"]
        printed = contract.pool.FindMessageTypeByName("tried.TriedTypes.go_request")
        other: Any = message_factory.GetMessageClass(printed)(x={"url": "b"})
        found = received(method, other.SerializeToString())["x"]
        assert (found.url, found.path, found.model_fields_set) == ("b", None, {"url"})
        other.x.path = "a"
        with pytest.raises(BadRequest, match=r"(?s)go: x: .*give path or url"):
            received(method, other.SerializeToString())

    @pytest.mark.parametrize("kind", [Priced, PricedToo])
    def test_what_was_validated_is_not_validated_again_inside(self, kind: Any) -> None:
        method, value = contract_of(go=(kind, kind)).methods["go"], kind(price=5)
        assert sent_inside(method, value) == value
        with pytest.raises(BadRequest, match=r"(?s)go: x: .*too much"):
            passed(method, value)  # from anybody

    def test_a_root_model(self) -> None:
        method = contract_of(go=(Names, Names)).methods["go"]
        for value in (Names({"z": [1], "a": []}), Names({})):
            assert sent_inside(method, value) == value == passed(method, value)["x"]

    @pytest.mark.parametrize(
        ("hint", "value", "words"),
        [
            (
                Animal,
                Dog(),
                r"x: expected Animal, found Dog\(name='rex', bark='wuff'\) \(a Dog would arrive as a Animal",
            ),
            (
                list[Point],
                [Place(1.0)],
                r"x: expected a list of Point, found \[Place.* write Point \| Place as the type",
            ),
            (Span, Booking(MOMENT.date()), "x: expected Span, found Booking.*a Booking would arrive as a Span"),
        ],
    )
    def test_a_subclass_in_the_place_of_its_base(self, hint: Any, value: Any, words: str) -> None:
        method = contract_of(go=(hint, hint)).methods["go"]
        with pytest.raises(TypeError, match=words):
            method.request(value)
        with pytest.raises(TypeError, match=words.replace("x:", "value:")):
            method.reply(value)

    def test_a_subclass_that_the_hint_names(self) -> None:
        method = contract_of(go=(Animal | Dog, Animal | Dog)).methods["go"]
        assert [type(sent_inside(method, each)) for each in (Animal(), Dog())] == [Animal, Dog]


class TestMisfits:
    @pytest.mark.parametrize(
        ("args", "kwargs", "words"),
        [
            ((), {}, r"tried.Tried/go\(\) missing 1 required positional argument: 'x'"),
            ((1, 2), {}, r"tried.Tried/go\(\) takes 1 positional argument but 2 were given"),
            ((1,), {"x": 2}, "multiple values for argument 'x'"),
            ((), {"y": 2}, "got an unexpected keyword argument 'y'"),
            (
                (Model(size=1, by_name={"a": Point(cast("float", "no"))}),),
                {},
                "tried.Tried/go: x.by_name.x: expected float, found 'no'",
            ),
            ((Point(1.0),), {}, r"tried.Tried/go: x: expected Model, found Point\("),
            ((None,), {}, "tried.Tried/go: x: expected Model, found None"),
        ],
    )
    def test_the_caller_gets_a_type_error(self, args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
        method = contract_of(go=(Model, int)).methods["go"]
        with pytest.raises(TypeError, match=words):
            method.request(*args, **kwargs)

    def test_the_replica_refuses_what_does_not_fit(self) -> None:
        method = contract_of(go=(Model, int)).methods["go"]
        with pytest.raises(BadRequest, match=r"tried.Tried/go: x: missing; expected Model"):
            method.begin(dict, method.request_class())
        request = method.request(Model(size=1))
        request.x.size = 0
        with pytest.raises(BadRequest, match=r"(?s)tried.Tried/go: x: .*greater than 0"):
            method.begin(dict, request)
        request.x.size = 1
        request.x.colour = 7
        with pytest.raises(BadRequest, match=r"x.colour: expected a member of Colour from 1 to 2, found 7"):
            method.begin(dict, request)
        with pytest.raises(TypeError, match=r"tried.Tried/go returned .*: value: expected int, found 'text'"):
            method.reply("text")
        with pytest.raises(PierheadError, match=r"tried.Tried/go has sent a reply that does not fit.*: value: missing"):
            method.result(method.reply_class())


def batched(items: Any, results: Any) -> Any:
    async def go(self: Any, users: Any) -> Any:
        return users

    go.__annotations__ = {"users": items, "return": results}
    return batch()(cast("Any", go))


async def untyped(self: Any, x) -> None: ...  # type: ignore[no-untyped-def]
async def no_reply(self: Any, x: int): ...  # type: ignore[no-untyped-def]
async def many(self: Any, *x: int) -> None: ...
async def not_yielding(self: Any) -> AsyncIterator[int]:
    raise NotImplementedError


async def unknown(self: Any, x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass
class Basket:
    lines: list[Line]


@dataclasses.dataclass
class Line:
    tags: dict[str, complex]


class Open(pydantic.BaseModel, extra="allow"):
    pass


class Private(pydantic.BaseModel):
    _seen: int = 0


@dataclasses.dataclass
class Scaled:
    size: int
    by: dataclasses.InitVar[int]


@pydantic.dataclasses.dataclass
class ScaledToo:
    by: dataclasses.InitVar[int]


class TestErrorsAtImport:
    @pytest.mark.parametrize(
        ("method", "words"),
        [
            ((Basket, int), r"tried.Tried.go(x).lines[].tags[]: complex cannot travel; str, int, float, bool, bytes"),
            ((int, Any), "tried.Tried.go ->: Any cannot travel"),
            ((int | complex, int), "tried.Tried.go(x): complex cannot travel"),
            ((tuple[int, complex], int), "tried.Tried.go(x)[1]: complex cannot travel"),
            ((Literal[1, "a"], int), "tried.Tried.go(x): Literal[1, 'a'] cannot travel"),
            (([int], int), "tried.Tried.go(x): [<class 'int'>] cannot travel"),
            ((list[Json], int), "tried.Tried.go: a hint is an alias that holds itself; only a dataclass"),
            (
                (dict[float, int], int),
                "tried.Tried.go(x): expected a dict with keys of type str, int or bool, found float",
            ),
            ((list, int), "tried.Tried.go(x): list does not say of what: write list[int], dict[str, float]"),
            ((npt.NDArray[np.complex64], int), "tried.Tried.go(x): no Tensor holds complex64"),
            ((enum.Flag("Flags", "A B"), int), "tried.Tried.go(x): Flags combines flags"),
            ((Open, int), 'tried.Tried.go(x): Open has extra="allow": what it allows has no type; declare a field'),
            ((list[Private], int), "tried.Tried.go(x)[]: Private has private attributes (_seen), which would be lost"),
            ((Scaled, int), "tried.Tried.go(x): Scaled is not made of its fields: missing a required argument: 'by'"),
            ((ScaledToo, int), "tried.Tried.go(x): ScaledToo has an InitVar, which its objects do not keep"),
            (untyped, "tried.Tried.go(x): expected a type hint, found none"),
            (no_reply, "tried.Tried.go ->: expected a type hint, found none; write `-> None`"),
            (many, "tried.Tried.go(x): expected a parameter with a name, found *x"),
            (not_yielding, "tried.Tried.go ->: a stream is an `async def` that yields"),
            (unknown, "tried.Tried.go: the hint names 'Missing', which is not defined here; define or import it above"),
            (batched(int, list[int]), "tried.Tried.go: expected one parameter of a type like list[int] below @batch"),
            (batched(list[int], int), "tried.Tried.go ->: expected a type like list[int] below @batch"),
        ],
    )
    def test_the_message_has_the_path_to_what_cannot_travel(self, method: Any, words: str) -> None:
        with pytest.raises(CannotTravel) as caught:
            contract_of(go=method)
        assert str(caught.value).startswith(words)

    def test_two_types_of_one_name(self) -> None:
        other = dataclasses.make_dataclass("Point", [("y", int)])
        with pytest.raises(CannotTravel, match=r"tried.Tried: two types of its contract are called Point; rename one"):
            contract_of(go=(Point, other))

    def test_an_unknown_keyword(self) -> None:
        with pytest.raises(TypeError, match='class Scorer: replics is no key of x-serve; did you mean "replicas"'):
            type("Scorer", (Service,), {}, replics=2)

    def test_the_keywords_are_those_of_the_compose_file(self) -> None:
        assert list(XServe.__annotations__) == [key.name for key in keys_of(ServeBlock)]


class Scorer(Service):
    async def check_health(self) -> None: ...

    def _private(self, x: object) -> object: ...

    @batch()
    async def score(self, users: list[int]) -> list[float]:
        return []

    @batch()
    async def generate(self, prompts: list[str]) -> AsyncIterator[list[bytes | Ended]]:
        yield []

    async def explain(self, point: Point, matrix: npt.NDArray[np.float32], deep: list[list[int]]) -> AsyncIterator[str]:
        yield ""

    def rank(self, by: dict[int, Colour], limit: int = 10) -> None: ...

    async def find(self, at: datetime.datetime, of: Point | str, near: tuple[float, float]) -> set[str]:
        return set()


PROTO = """\
syntax = "proto3";

package tests.unit.runtime.test_class_contracts;

import "pierhead/tensor/v1/tensor.proto";

service Scorer {
  rpc score(ScorerTypes.score_request) returns (ScorerTypes.score_reply);
  rpc generate(ScorerTypes.generate_request) returns (stream ScorerTypes.generate_reply);
  rpc explain(ScorerTypes.explain_request) returns (stream ScorerTypes.explain_reply);
  rpc rank(ScorerTypes.rank_request) returns (ScorerTypes.rank_reply);
  rpc find(ScorerTypes.find_request) returns (ScorerTypes.find_reply);
}

message ScorerTypes {
  message score_request {
    optional int64 item = 1; // required
  }
  message score_reply {
    optional double value = 1; // required
  }
  message generate_request {
    optional string item = 1; // required
  }
  message generate_reply {
    optional bytes value = 1; // required
  }
  message ListOfStr {
    repeated string value = 1;
  }
  message MaybeInt {
    optional int64 value = 1;
  }
  message Point {
    optional double x = 1; // required
    optional string label = 2;
    ListOfStr tags = 3;
    MaybeInt odd = 4;
  }
  message ListOfInt {
    repeated int64 value = 1;
  }
  message explain_request {
    Point point = 1; // required
    .pierhead.tensor.v1.Tensor matrix = 2; // required
    repeated ListOfInt deep = 3;
  }
  message explain_reply {
    optional string value = 1; // required
  }
  message rank_request {
    map<int64, Colour> by = 1;
    optional int64 limit = 2;
  }
  message rank_reply {
  }
  message PointOrStr {
    oneof value {
      Point point_value = 1;
      string str_value = 2;
    }
  }
  message TupleOfFloatFloat {
    optional double item_1 = 1; // required
    optional double item_2 = 2; // required
  }
  message find_request {
    optional string at = 1; // required
    PointOrStr of = 2; // required
    TupleOfFloatFloat near = 3; // required
  }
  message find_reply {
    repeated string value = 1;
  }
  enum Colour {
    COLOUR_UNSPECIFIED = 0;
    COLOUR_RED = 1;
    COLOUR_BLUE = 2;
  }
}
"""


def test_the_proto_of_a_class() -> None:
    assert proto_text(Scorer.__contract__.file.proto) == PROTO


def test_a_class_can_be_loaded_twice() -> None:
    before, after = contract_of(go=(Point, Point)), contract_of(go=(Point, Point))
    assert before.pool is not after.pool
    assert compare(before.descriptor_set, after.descriptor_set) == ()


def fields(*members: Any) -> Any:
    return dataclasses.make_dataclass("Item", members)


def colour(members: str) -> Any:
    made: Any = enum.Enum("Colour", members)  # type: ignore[misc]
    return made


class TestTwoVersions:
    @pytest.mark.parametrize(
        ("old", "new", "changes"),
        [
            (taking(a=int), taking(a=int, b=(int, 1)), {"go(b): was added": True}),
            (taking(a=int), taking(a=int, b=(Union[str, None], None)), {"go(b): was added": True}),  # noqa: UP007
            (taking(a=int), taking(a=int, b=int), {"go(b): was added without a default": False}),
            (taking(a=int, b=int), taking(a=int), {"go(b): was removed": False}),
            (
                taking(a=int, b=int),
                taking(b=int),
                {"go(a): was removed": False, "go(b): moved from place 2 to 1": False},
            ),
            (taking(a=int), taking(z=int), {"go(a): was removed, or renamed to z": False}),
            (taking(a=int, b=int), taking(b=int, a=int), {"go(a): moved": False, "go(b): moved": False}),
            (taking(a=int), taking(a=str), {"go(a): was int64, is string": False}),
            (taking(a=int), taking(a=list[int]), {"go(a): was int64, is repeated int64": False}),
            (taking(a=int), taking(a=(int, 1)), {"go(a): can be left out now": False}),
            (taking(a=(int, 1)), taking(a=int), {"go(a): is required now": False}),
            (
                (int, of(list, fields(("p", int)))),
                (int, of(list, fields(("q", int)))),
                {"go -> value.p: was removed, or renamed to q": False},
            ),
            ((Colour, int), (colour("RED BLUE GREEN"), int), {"go(x): the member COLOUR_GREEN was added": False}),
            ((Colour, int), (colour("RED BLEU"), int), {"go(x): the member COLOUR_BLUE is COLOUR_BLEU now": False}),
            ((Node, Node), (Node, Node), {}),
            ((int | str, int), (int | str | float, int), {"go(x).float_value: is one of the types now": False}),
            ((int | str, int), (int | float, int), {"go(x).str_value: was removed, or renamed to float_value": False}),
            ((tuple[int, int], int), (tuple[int, str], int), {"go(x).item_2: was int64, is string": False}),
            ((list[int], int), (set[int], int), {}),
            ((Literal["a"], int), (Literal["a", "b"], int), {}),
        ],
    )
    def test_what_changed_is_named(self, old: Any, new: Any, changes: dict[str, bool]) -> None:
        found = compare(contract_of(go=old).descriptor_set, contract_of(go=new).descriptor_set)
        assert [change.compatible for change in found] == list(changes.values())
        for change, words in zip(found, changes, strict=True):
            assert str(change).removeprefix("tried.Tried.").startswith(words)

    def test_methods_come_and_go(self) -> None:
        old = contract_of(one=(int, int), two=(int, int), three=(int, int))
        new = contract_of(one=(int, int), two=Scorer.generate, four=(int, int))
        found = {str(change): change.compatible for change in compare(old.descriptor_set, new.descriptor_set)}
        assert found == {
            "tried.Tried.four: the method was added": True,
            "tried.Tried.three: the method was removed, or renamed": False,
            "tried.Tried.two: was a single reply, is a stream": False,
        }

    @given(st.lists(st.sampled_from([(int, 3), (str, "d"), (list[int], [4]), (Optional[int], None)]), max_size=3))  # noqa: UP045
    def test_additions_at_the_end_with_defaults_travel_both_ways(self, added: list[tuple[Any, Any]]) -> None:
        more: dict[str, Any] = {f"f{n}": each for n, each in enumerate(added)}
        old, new = contract_of(go=taking(a=int)), contract_of(go=taking(a=int, **more))
        assert all(change.compatible for change in compare(old.descriptor_set, new.descriptor_set))
        before, after = old.methods["go"], new.methods["go"]
        got = received(after, before.request(a=1).SerializeToString())
        assert got == {"a": 1} | {name: default for name, (_, default) in more.items()}
        sent = after.request(a=1, **{name: default for name, (_, default) in more.items()})
        assert received(before, sent.SerializeToString()) == {"a": 1}
