"""Runs a command in this process."""

from typer.testing import CliRunner

from jaxmem.cli import app


def invoke(*args, **how):
    return CliRunner().invoke(app, [str(a) for a in args], **how)
