"""Results as files: self-contained HTML pages, text, JSON and pictures."""

from jaxmem.pages.aligned import aligned as aligned
from jaxmem.pages.pictures import import_figure as import_figure
from jaxmem.pages.saving import PlainResult as PlainResult
from jaxmem.pages.saving import SavedResult as SavedResult
from jaxmem.pages.saving import body_of as body_of
