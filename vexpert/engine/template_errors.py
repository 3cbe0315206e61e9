"""What a chat template raises at variables of another kind, or deeper, than it expects."""

from jinja2 import TemplateError

TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
