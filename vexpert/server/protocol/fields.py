"""Building blocks of request bodies: strict models, bounded integers, fields that only idle."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TopCount = Annotated[int, Field(ge=0, le=20)]  # OpenAI's limit; a whole vocabulary is no answer
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]

T = TypeVar("T")
# One finding is told; to find a million takes half a minute.
ListOf = Annotated[list[T], Field(fail_fast=True)]
MOST_UNKNOWN = 16  # fields that are looked at


class StrictModel(BaseModel):
    """A body or a part of one: an unknown field is an error, and so is a value of another type.

    An unknown field that is null asks for nothing, and is left out: clients send their defaults.
    Of very many unknown fields the first are found, which is enough to refuse them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    route: ClassVar[str | None] = None  # whose body it is; None: a part of bodies

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if None in given.values():
            given = {k: v for k, v in given.items() if v is not None or k in cls.model_fields}
        if len(given) > len(cls.model_fields) + MOST_UNKNOWN:
            known = cls.model_fields.keys() | {each.alias for each in cls.model_fields.values()}
            unknown = [key for key in given if key not in known]
            surplus = set(unknown[MOST_UNKNOWN:])
            given = {key: value for key, value in given.items() if key not in surplus}
        return given


def refusal(reason: str) -> PydanticCustomError:
    """A validation error in the server's own words."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason})


def at_most(count: int) -> BeforeValidator:
    """Refuse a list of more parts before each of them is looked at, which takes seconds."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > count:
            raise refusal(f"{len(value)} parts; send at most {count}")
        return value

    return BeforeValidator(check)


def is_small(value: Any, most_values: int, most_text: int, depth: int) -> bool:
    """Whether a JSON value holds no more values, and characters, and is no deeper."""
    level = [value]
    values = text = 0
    while level and depth >= 0:
        values += len(level)
        text += sum(len(each) for each in level if isinstance(each, str))
        named = [each for each in level if isinstance(each, dict)]
        text += sum(len(name) for each in named for name in each)
        inner = sum(len(each) for each in level if isinstance(each, dict | list))
        if values + inner > most_values or text > most_text:
            return False
        parts = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level, depth = [value for part in parts for value in part], depth - 1
    return not level


def first_wrong(*kinds: type) -> BeforeValidator:
    """Of an object with a value of another type, leave that one: pydantic would tell all."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        wrong = next((key for key, each in value.items() if type(each) not in kinds), None)
        return value if wrong is None else {wrong: value[wrong]}

    return BeforeValidator(check)


def only(reason: str, *neutral: object) -> AfterValidator:
    """Accept null and the values in `neutral`, which change nothing; refuse others for `reason`."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(v) and value == v for v in neutral):
            return value
        raise refusal(reason)

    return AfterValidator(check)


def known_models() -> list[type[StrictModel]]:
    """All bodies and parts of bodies."""
    models: list[type[StrictModel]] = []
    pending: list[type[StrictModel]] = [StrictModel]
    while pending:
        model = pending.pop()
        models.append(model)
        pending += model.__subclasses__()
    return models


def routes_with(field: str) -> list[str]:
    """The routes whose bodies have this field."""
    return sorted(
        m.route for m in known_models() if m.route is not None and field in m.model_fields
    )


def known_fields() -> set[str]:
    """Names of all fields of all bodies, for hints."""
    return {name for model in known_models() for name in model.model_fields}
