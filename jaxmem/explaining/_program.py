"""Which program a log is about."""

import re

_FORMS = (
    r"'([^'\n]+)' does not fit on ",  # jaxmem.memory.DoesNotFit
    r"executable_name='([^']+)'",
    r"HLO module: ([\w.<>-]+?)\.?\s",
    r"(?:module|Module|program|executable) '?(jit_[\w.<>-]+)",
    r'op_name="p?jit\(([^)]+)\)',
)


def program_of(text: str) -> str:
    """The function that was compiled, as its `jit` has named it; "" if none is told."""
    for form in _FORMS:
        if found := re.findall(form, text):
            return re.sub(r"^p?jit_+|\.\d+$", "", found[-1])
    return ""
