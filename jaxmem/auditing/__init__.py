"""Auditing a compiled step: whether its module does what the step says."""

from jaxmem.auditing._audit import audit as audit
from jaxmem.auditing._audit import audit_texts as audit_texts
from jaxmem.auditing._report import AuditReport as AuditReport
from jaxmem.auditing._report import Finding as Finding

__all__ = [
    "audit",
]
