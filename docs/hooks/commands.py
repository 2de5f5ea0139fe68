"""The reference page of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from eigengraft.experiments.cli.main import app
from markup import inline, table


def page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(app)
    parts = ["# Command line", "`eigengraft COMMAND`, or `python -m eigengraft COMMAND`."]
    for name, command in sorted(root.commands.items()):
        parts += section(f"eigengraft {name}", command)
    return "\n\n".join(parts) + "\n"


def section(name: str, command: Any) -> list[str]:
    """Title, help and options of a command, and of its commands."""
    text = inspect.cleandoc(command.help or "")
    parts = [f"## {name} {{ #{name.replace(' ', '-')} }}", *(inline(p) for p in text.split("\n\n"))]
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    if shown:
        parts.append(table(["argument or option", "meaning", "default"], [row(parameter) for parameter in shown]))
    for inner, child in sorted(getattr(command, "commands", {}).items()):
        parts += section(f"{name} {inner}", child)
    return parts


def row(parameter: Any) -> list[str]:
    """One argument or option."""
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]
    default = "required" if parameter.required else inline(f"`{parameter.default}`") if parameter.default else ""
    return [", ".join(f"`{name}`" for name in names), inline(getattr(parameter, "help", None) or ""), default]
