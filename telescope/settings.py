"""The base of every settings class: frozen, strict, and closed to names it does not know.

Owns how settings behave; refuses to know what any of them mean. A settings class keeps its defaults in its own fields and
its checks in its own validators, each of which raises `ValueError` with a whole sentence that names the remedy.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr


class FreeText:
    """Marks a setting, `Annotated[tuple[str, ...], FreeText]`, in which references to environment variables stay references
    until the process that needs them reads them, where its type does not say so (config/free_text.py)."""


class Settings(BaseModel):
    """Frozen, strict (`"3"` is not an int), `extra=forbid` (a typo is an error), defaults checked like values."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        hide_input_in_errors=True,  # a section that is refused may hold a key
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A secret's default is taken as it is: strict JSON has texts, and would refuse the wrapped one that stands there."""
        super().__pydantic_init_subclass__(**options)
        secrets = [field for field in cls.model_fields.values() if isinstance(field.default, SecretStr | SecretBytes)]
        for field in secrets:
            field.validate_default = False
        if secrets:
            cls.model_rebuild(force=True, raise_errors=False)
