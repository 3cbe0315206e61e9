"""Building blocks of request bodies: strict models, bounded integers, fields that only idle."""

from typing import Annotated, Any, ClassVar

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


class StrictModel(BaseModel):
    """A body or a part of one: an unknown field is an error, and so is a value of another type.

    An unknown field that is null asks for nothing, and is left out: clients send their defaults.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    route: ClassVar[str | None] = None  # whose body it is; None: a part of bodies

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {k: v for k, v in given.items() if v is not None or k in cls.model_fields}


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
