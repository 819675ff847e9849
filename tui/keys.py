"""The keys of the chat screen; those of the prompt and of a message stand with them."""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("escape", "stop", "Stop", id="chat.stop"),
    Binding("escape", "to_prompt", "To the prompt", id="chat.prompt"),
    Binding("f1", "help", "Help", id="chat.help"),
    Binding("ctrl+c", "interrupt", "Copy, stop or quit", show=False, priority=True, id="chat.interrupt"),
    Binding("ctrl+r", "regenerate", "Regenerate", priority=True, id="chat.regenerate"),
    Binding("ctrl+n", "new_chat", "New chat", priority=True, id="chat.new"),
    Binding("ctrl+o", "models", "Model", priority=True, id="chat.model"),
    Binding("ctrl+s", "sessions", "Sessions", priority=True, id="chat.sessions"),
    Binding("ctrl+b", "engine", "Engine", priority=True, id="chat.engine"),
    Binding("f2", "settings", "Settings", show=False, id="chat.settings"),
    Binding("pageup", "scroll(-1)", "Scroll up", show=False, priority=True, id="chat.up"),
    Binding("pagedown", "scroll(1)", "Scroll down", show=False, priority=True, id="chat.down"),
    Binding("ctrl+end", "follow", "Follow", show=False, priority=True, id="chat.follow"),
]
OF_TRANSCRIPT = (  # actions
    *("new_chat", "scroll", "follow", "regenerate"),
    *("models", "sessions", "settings", "engine"),
)
