"""The type checker that pytest puts round the public functions: an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
