"""Auditing a compiled step: whether its module does what the step says."""

from jaxmem.auditing._audit import audit as audit
from jaxmem.auditing._audit import audit_texts as audit_texts
from jaxmem.auditing._audit import findings_of as findings_of
from jaxmem.auditing._report import AuditFinding as AuditFinding
from jaxmem.auditing._report import AuditReport as AuditReport

__all__ = [
    "audit",
]
