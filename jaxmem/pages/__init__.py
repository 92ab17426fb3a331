"""Results as files: self-contained HTML pages, text, JSON and pictures."""

from jaxmem.pages.pictures import import_figure as import_figure
from jaxmem.pages.saving import PlainResult as PlainResult
from jaxmem.pages.saving import SavedResult as SavedResult
from jaxmem.pages.saving import body_of as body_of
from jaxmem.pages.tables import aligned as aligned
from jaxmem.pages.tables import rich_table as rich_table
