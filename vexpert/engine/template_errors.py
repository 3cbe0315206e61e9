"""What a chat template raises at variables of another kind, or deeper, than it expects.

Also what Python says of the program that jinja2 makes of a template: SyntaxError, NameError.
"""

from jinja2 import TemplateError

TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RuntimeError, SyntaxError, NameError, AssertionError,
)  # fmt: skip
