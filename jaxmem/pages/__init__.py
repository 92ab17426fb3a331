"""Results as files: self-contained HTML pages, text, JSON and pictures."""

from jaxmem.pages.saving import SavedResult as SavedResult
from jaxmem.pages.saving import body_of as body_of
