"""pydantic's models and dataclasses: whether one can travel, and how it is made again without its validators. Pure.

Does not import pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pierhead.classes.shapes import CannotTravel, Validated


def is_pydantic(kind: Any) -> bool:
    """Whether it is a model or dataclass of pydantic's."""
    return "__pydantic_fields__" in vars(kind)


def validated(kind: Any, path: str, defaults: Mapping[str, Any]) -> Validated:
    """How such objects travel; `defaults`: of fields that have one. Raises CannotTravel where one holds more."""
    _check(kind, path)
    if hasattr(kind, "model_fields"):
        make = lambda **values: kind.model_validate(values, by_alias=False, by_name=True)  # noqa: E731
        if getattr(kind, "__pydantic_root_model__", False):
            make = lambda **values: kind.model_validate(values["root"]) if values else kind()  # noqa: E731
        return Validated(defaults, lambda model: model.model_fields_set, make, _model_restorer(kind))
    return Validated(defaults, lambda _: kind.__pydantic_fields__, *_of_dataclass(kind))


def _check(kind: Any, path: str) -> None:
    config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
    private = getattr(kind, "__private_attributes__", None)
    if config.get("extra") == "allow":
        words = 'has extra="allow": what it allows has no type; declare a field, such as a dict[str, str]'
    elif private:
        words = f"has private attributes ({', '.join(private)}), which would be lost; declare fields"
    elif any(each.init_var for each in kind.__pydantic_fields__.values()):
        words = "has an InitVar, which its objects do not keep; declare a field"
    else:
        return
    raise CannotTravel(f"{path}: {kind.__name__} {words}")


def _model_restorer(kind: Any) -> Any:
    set_it, fields = object.__setattr__, kind.__pydantic_fields__

    def restore(values: dict[str, Any], given: set[str]) -> Any:
        made = kind.__new__(kind)
        set_it(made, "__dict__", _with_defaults(values, fields))
        set_it(made, "__pydantic_fields_set__", given)
        set_it(made, "__pydantic_extra__", None)
        set_it(made, "__pydantic_private__", None)
        return made

    return restore


def _of_dataclass(kind: Any) -> tuple[Any, Any]:
    fields = kind.__pydantic_fields__

    def make(**values: Any) -> Any:
        return kind(**{name: value for name, value in values.items() if fields[name].init is not False})

    def restore(values: dict[str, Any], _: set[str]) -> Any:
        made = object.__new__(kind)
        for name, value in _with_defaults(values, fields).items():
            object.__setattr__(made, name, value)
        return made

    return make, restore


def _with_defaults(values: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and defaults of the fields that a caller of another version does not know."""
    if len(values) < len(fields):
        for name, field in fields.items():
            if name not in values:
                values[name] = field.get_default(call_default_factory=True, validated_data=values)
    return values
