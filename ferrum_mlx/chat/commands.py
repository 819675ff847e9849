"""The commands a prompt may be, as the screen and the linear mode share them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ferrum_mlx.catalog import cards
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.sampling_choice import NAMES as SAMPLING_NAMES
from ferrum_mlx.config import BASE, LOAD_ADAPTER, check_adapter
from ferrum_mlx.errors import UsageError, shown


@dataclass(frozen=True, slots=True)
class Command:
    """A command, without its slash.

    Attributes:
        arguments: as shown; in brackets if they may be left away.
        screen: the linear mode has no use for it.
    """

    name: str
    arguments: str
    help: str
    screen: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A command as it was typed: what is behind its name, stripped."""

    command: Command
    argument: str

    @property
    def name(self) -> str:
        return self.command.name


@dataclass(frozen=True, slots=True)
class Completion:
    """What the prompt becomes, and what a list shows of it."""

    text: str
    label: str
    help: str = ""


COMMANDS = (
    Command("new", "", "Begin a new conversation."),
    Command("regen", "", "Answer the last prompt again; the old answer stays as a branch."),
    Command("continue", "", "Go on with the last answer where it ends."),
    Command("edit", "[TEXT]", "Ask something else in place of the last prompt, which stays as a branch."),
    Command("branch", "next|prev|N", "Walk between answers or prompts that stand side by side."),
    Command("copy", "[code]", "Copy the last answer, or its last code block.", screen=True),
    Command("model", "[NAME]", "Show the model, or change it."),
    Command("adapter", "[NAME]", f"Show the LoRA adapters, or choose one; {BASE} is the model itself."),
    Command("compare", "[MODEL or name=value …]", "Answer with two models or two settings.", screen=True),
    Command("set", "[name=value …]", "Show or change the sampling."),
    Command("system", "[TEXT]", "Show or change the system message; none takes it away."),
    Command("think", "on|off|auto", "Whether a reasoning model thinks first."),
    Command("sessions", "[WORDS]", "List the sessions that have these words."),
    Command("resume", "[ID]", "Go on with a session; without its number, the last one."),
    Command("rename", "TITLE", "Give the session a title."),
    Command("delete", "[ID]", "Delete a session; without its number, this one."),
    Command("export", "[FILE]", "Write the conversation to FILE.md, or with all branches to FILE.json."),
    Command("engine", "", "Show what the engine does."),
    Command("theme", "[NAME]", "Show the themes, or change to one.", screen=True),
    Command("help", "", "Show the commands and keys."),
    Command("quit", "", "End the chat."),
)
BY_NAME = {command.name: command for command in COMMANDS}
# What an argument may begin with; other arguments are free.
_CHOICES = {
    "branch": ("next", "prev"),
    "adapter": (BASE,),
    "copy": ("code",),
    "think": ("on", "off", "auto"),
    "system": ("none",),
    "set": tuple(f"{name}=" for name in SAMPLING_NAMES),
}
_WORD = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


def parse(text: str) -> Call | None:
    """The command that a prompt is; None if it is a text to send.

    A slash with letters behind it up to the first blank, or the end, is a command. So "/usr/bin is",
    "/etc/fstab" and "/ 2" are texts, and "/tmp is full" is an unknown command; "//tmp is full" is a text.

    Raises:
        UsageError: no such command, an argument it needs, or one it does not take.
    """
    match = _WORD.fullmatch(text.strip())
    if match is None:
        return None
    name, argument = match[1].lower(), (match[2] or "").strip()
    command = BY_NAME.get(name)
    if command is None:
        near = get_close_matches(name, BY_NAME, 3, 0.5)
        allowed = f"did you mean {' or '.join(f'/{word}' for word in near)}?" if near else "see /help"
        raise UsageError(f"{shown('/' + name)} is no command", allowed, "// begins a text with a slash")
    usage = f"/{name} {command.arguments}".rstrip()
    if argument and not command.arguments:
        raise UsageError(f"/{name} takes no argument, and has {shown(argument)}", f"allowed: {usage}")
    if command.arguments and not argument and not command.arguments.startswith("["):
        raise UsageError(f"/{name} needs an argument", f"allowed: {usage}")
    return Call(command, argument)


def as_text(text: str) -> str:
    """The text to send of a prompt that is no command: of two slashes at its beginning, one."""
    return text.replace("//", "/", 1) if text.lstrip().startswith("//") else text


def complete(text: str) -> list[Completion]:
    """What a prompt that begins a command may become; [] for any other."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    head, blank, argument = text[1:].partition(" ")
    if not blank:
        return [
            Completion(
                f"/{command.name}{' ' * bool(command.arguments)}",
                f"/{command.name} {command.arguments}".rstrip(),
                command.help,
            )
            for command in COMMANDS
            if command.name.startswith(head.lower())
        ]
    before, _, last = argument.rpartition(" ")
    name = head.lower()
    choices = tuple(cards()) if name in ("model", "compare") else _CHOICES.get(name, ())
    if before and name != "set":
        return []
    start = f"/{head} {before} " if before else f"/{head} "
    return [
        Completion(start + choice, choice) for choice in choices if choice.startswith(last) and choice != last
    ]


def words(argument: str) -> list[str]:
    """The words of an argument; quotes hold blanks together.

    Raises:
        UsageError: a quote that is not closed.
    """
    try:
        return shlex.split(argument)
    except ValueError:
        raise UsageError(f"{shown(argument)} has an open quote", next_step="close it") from None


def whole(argument: str) -> str:
    """An argument that is one name or path, with or without quotes around it."""
    in_quotes = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'"
    return argument[1:-1] if in_quotes else argument


def system(argument: str) -> str:
    """The message that /system sets; "" is none."""
    return "" if argument.lower() == "none" else argument


def thinking(argument: str) -> bool | None:
    """What /think asks for; None is the model's own choice."""
    switches = {"on": True, "off": False, "auto": None}
    if argument.lower() not in switches:
        raise UsageError(f"/think has {shown(argument)}", "allowed: on, off, auto")
    return switches[argument.lower()]


def adapter(argument: str, loaded: Sequence[str]) -> str:
    """What /adapter asks for; "" is the model itself."""
    return "" if argument == BASE else check_adapter(argument, loaded)


def adapters(chosen: str, loaded: Sequence[str]) -> str:
    """What /adapter says without a name."""
    if not loaded:
        return f"no adapter is loaded; {LOAD_ADAPTER}"
    return f"the adapter is {chosen or BASE}; allowed: {', '.join(loaded)}, {BASE}"


def session_id(argument: str) -> int:
    """A session's number, as /sessions shows it."""
    if not (argument.isascii() and argument.isdigit()) or len(argument) > 18:
        raise UsageError(f"{shown(argument)} is no session", "allowed: a number that /sessions shows")
    return int(argument)


def walk(conversation: Conversation, leaf: int | None, argument: str) -> int:
    """The leaf that /branch leads to, from the last place on the path where messages stand side by side.

    Raises:
        UsageError: there are no branches, or none of that number or on that side.
    """
    forks = [m for m in conversation.path(leaf) if len(conversation.siblings(m.id)) > 1]
    if not forks:
        raise UsageError("there are no branches yet", next_step="/regen and /edit make them")
    ids = [message.id for message in conversation.siblings(forks[-1].id)]
    at = ids.index(forks[-1].id)
    places = {"next": at + 1, "prev": at - 1}
    place = int(argument) - 1 if re.fullmatch(r"[0-9]{1,9}", argument) else places.get(argument.lower(), -1)
    if not 0 <= place < len(ids):
        raise UsageError(
            f"/branch has {shown(argument)} at branch {at + 1} of {len(ids)}",
            f"allowed: next, prev, 1 to {len(ids)}; there is nothing beyond either end",
        )
    return conversation.end_below(ids[place])
